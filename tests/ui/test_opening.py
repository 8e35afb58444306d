"""What the page opens with: a recorded race that explains itself; and the lanes that a visitor adds to a race."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from specdemo.decoding.events import Round
from specdemo.models.presets import DEFAULT_PRESET, load_presets, load_prompts
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.stats import Stats, speed_up
from specdemo.racing.trace import read_trace
from specdemo.types import BadInput
from specdemo.ui.replay.playable import playable
from specdemo.ui.replay.routes import OPENING

from ..fakes.engine import PROMPTS, Script, asked_by_form
from ..sentences import refuses, tells
from .browser import run, sentence, settings, tokens_of, tokens_shown
from .conftest import Tabs, Visit, listening, visits
from .test_page import SHIFTS as ALL_SHIFTS
from .test_page import serious
from .test_playable import lines_of
from .test_show import SHIFTS

HEADER, ENTRIES = read_trace(lines_of(OPENING))
PASSES = {
    lane: Stats.of(entry.event for entry in ENTRIES if entry.lane == lane).rounds + 1 for lane in (PLAIN, SPECULATIVE)
}
PASS = (
    "One pass of the target, a run of the whole language model, checks them all. "
    "It takes little longer than for one token."
)
WRONG, RIGHT = "wrong", "right"
SCENES = [  # the round in front of the lanes, its phase, and the caption
    (WRONG, "guess", "A drafter, a small, fast helper, guesses the next tokens: words or parts of words."),
    (WRONG, "read", PASS),
    (WRONG, "keep", "It keeps each guess it would have written: accepted."),
    (
        WRONG,
        "replace",
        "The first wrong guess is rejected; the target's own token replaces it: corrected. "
        "Later guesses are dropped: untested.",
    ),
    (RIGHT, "read", "Another round: the drafter guesses, and one pass checks it all."),
    (RIGHT, "add", "If all are right, the same pass gives one more token: bonus."),
    (None, None, "Now the race. Alone, the target needs a pass for every token; with the drafter, fewer passes do."),
    (None, None, "Every word is checked by the target, so the text stays the same. Only the time gets less."),
]
CAPTIONS = [words for _, _, words in SCENES]
EXPLAINED = [  # what stands there at the end
    "The drafter guesses the next tokens.",
    "One pass of the target checks them all.",
    "Right guesses are accepted.",
    "The first wrong one is rejected; the target's own token takes its place: corrected. Later ones are untested.",
    "If all are right, there is one more token: bonus.",
]
RESULT = f"The target wrote the same text in {PASSES[SPECULATIVE]} passes instead of {PASSES[PLAIN]}."
# The clock of the opening is the test's, however busy the machine is.
CLOCK = """() => {
  let now = performance.now();
  performance.now = () => now;
  window.frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  window.tick = (seconds) => { now += 1000 * seconds; window.specdemo.race.opening.tick(); return frame(); };
}"""


@pytest.fixture(scope="module")
def shared(chromium: Browser, tabs: Tabs, server: tuple[str, Script]) -> Iterator[Page]:
    with visits(chromium, tabs, server[0]) as visit:
        page = visit(motion=True, until="#race .sd-arena[data-state=opening]")
        page.evaluate(CLOCK)
        yield page


@pytest.fixture
def opening(shared: Page, script: Script) -> Page:
    """A page that tests share, on which the opening begins again, on a clock that only `tick` moves."""
    shared.set_viewport_size({"width": 1280, "height": 900})
    shared.evaluate("specdemo.race.opening.play(), frame()")
    shared.evaluate(SHIFTS)
    return shared


def caption(page: Page) -> str:
    return page.locator("#race .sd-sentence").inner_text()


def kinds(page: Page, lane: str = SPECULATIVE) -> str:
    return "".join(code for _, code in tokens_shown(page, lane))


def test_the_recording_is_a_race_of_what_the_form_begins_with() -> None:
    prompts = load_prompts()
    assert HEADER["prompt"] == next(iter(prompts.values()))[0]
    defaults = load_presets()[0][DEFAULT_PRESET].defaults
    assert (HEADER["preset"], HEADER["drafter"]) == (DEFAULT_PRESET, defaults.drafter)
    assert (HEADER["settings"]["k"], HEADER["settings"]["rule"]) == (defaults.k, "match")
    assert playable(HEADER, ENTRIES)["end"]["exactness"]["mark"] == "same"


def test_something_real_moves_before_gradio_has_made_the_page_and_before_any_model_is_loaded(
    tabs: Tabs, url: str, unloaded: Script
) -> None:
    page, held, troubles = tabs.take(motion=True), list[Route](), list[str]()

    def hold(route: Route) -> None:
        held.append(route)

    page.set_viewport_size({"width": 1280, "height": 900})
    page.route("**/assets/core-*.js", hold)  # of Gradio
    with listening(page, troubles):
        page.goto(url, wait_until="commit")
        arena = page.locator(".sd-ahead .sd-arena[data-state=opening]")
        arena.wait_for()
        page.evaluate(CLOCK)
        page.evaluate(ALL_SHIFTS)
        page.evaluate("tick(1)")
        expect(page.locator(".sd-ahead .sd-figure .sd-chip-of").first).to_be_visible()
        assert serious(page, ".sd-ahead") == []
        place = arena.bounding_box()
        page.get_by_role("button", name="Skip").focus()
        for route in held:
            route.continue_()
        page.locator("#race .sd-arena[data-state=opening]").wait_for()
        assert page.locator(".sd-ahead").count() == 0
        assert page.locator("#race .sd-arena").bounding_box() == place
        expect(page.get_by_role("button", name="Skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#race .sd-captions li")).to_have_count(5)
        assert page.evaluate("window.shifts") == []
    assert unloaded.loads == troubles == []
    tabs.give_back(page)


@pytest.mark.slow
def test_the_page_does_without_a_recording(tabs: Tabs, url: str, script: Script) -> None:
    page = tabs.take(motion=True)
    page.route("**/recordings/*", lambda route: route.abort())
    page.goto(url)
    run(page, until="showing")
    tabs.give_back(page)


def rounds_explained() -> dict[str, list[tuple[str, str]]]:
    """The tokens, and what became of them, of a round with several right guesses, a wrong one and some after it, and of
    one with right ones only."""
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in ENTRIES:
        if entry.lane == SPECULATIVE and isinstance(entry.event, Round):
            tokens = [(text, code) for text, code in tokens_of([entry], SPECULATIVE)]
            written = "".join(code for _, code in tokens)
            if all(text.strip() and "\n" not in text for text, _ in tokens):
                if re.match("aa+xu", written):
                    found.setdefault(WRONG, tokens)
                if re.fullmatch("aa+b", written):
                    found[RIGHT] = tokens
    return found


def tiles(page: Page) -> list[tuple[str, str]]:
    shown = page.locator("#race .sd-figure:not([hidden]) .sd-chip-of").evaluate_all(
        "tiles => tiles.map((tile) => [tile.textContent, tile.classList[2] ?? ''])"
    )
    return [(text, code if code != "on" else "") for text, code in shown]


def test_two_real_rounds_are_shown_large_and_then_the_race(opening: Page) -> None:
    page, rounds = opening, rounds_explained()
    for at, (name, phase, words) in enumerate(SCENES):
        seconds = page.evaluate(f"specdemo.race.opening.scenes[{at}][2]")
        page.evaluate("seconds => tick(seconds)", seconds / 2)
        assert caption(page) == words
        if name:
            known = {"keep": "a", "replace": "axur", "add": "ab"}.get(phase or "", "")
            last = "" if known in ("", "a") else "rb"
            expected = [(text.strip(), code if code in known else "") for text, code in rounds[name]]
            *drafted, drawn = expected
            wrong = [token for token in drafted if token[1] != "r"]
            assert tiles(page) == [*wrong, *([drawn] if last else [])]
            assert kinds(page) == "t"
        else:
            assert tiles(page) == []
            assert len(tokens_shown(page, PLAIN)) < len(tokens_shown(page, SPECULATIVE))
        page.evaluate("seconds => tick(seconds)", seconds)
    assert caption(page) == RESULT
    expect(page.locator("#race .sd-badge")).to_have_text("Same text, word for word")
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(ENTRIES, lane)


def test_it_is_held_and_goes_on(opening: Page) -> None:
    page = opening
    for hold in (lambda: page.keyboard.press("Space"), lambda: page.get_by_role("button", name="Pause").click()):
        page.evaluate("document.activeElement.blur(), specdemo.race.opening.play(), frame()")
        page.evaluate("tick(1)")
        hold()
        expect(page.locator("#race .sd-hold")).to_have_text("Go on")
        states = page.locator("#race .sd-figure").evaluate(
            "figure => figure.getAnimations({subtree: true}).map((animation) => animation.playState)"
        )
        assert "running" not in states
        page.evaluate("tick(60)")
        assert caption(page) == CAPTIONS[0]
        page.locator("#race .sd-hold").click()
        page.evaluate("tick(1)")
        assert caption(page) == CAPTIONS[0]
        page.evaluate("tick(1)")
        assert caption(page) == CAPTIONS[1]


def test_it_is_skipped_by_a_button_and_by_a_key_and_shown_again(opening: Page) -> None:
    page = opening
    page.locator("#prompt textarea").focus()
    for skip in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Skip").click()):
        skip()
        expect(page.locator("#race .sd-captions li")).to_have_count(5)
        assert caption(page) == RESULT
        tokens = tokens_of(ENTRIES, SPECULATIVE)
        expect(page.locator("#race [data-lane=speculative] .sd-text .tok")).to_have_count(len(tokens))  # once drawn
        assert tokens_shown(page, SPECULATIVE) == tokens
        page.get_by_role("button", name="Again").click()
        expect(page.locator("#race .sd-sentence")).to_have_text(CAPTIONS[0])
        assert kinds(page) == "t"


def test_run_ends_it(visit: Visit, script: Script) -> None:
    script.gate.clear()
    page = visit(motion=True, until="#race .sd-arena[data-state=opening]")
    page.evaluate(CLOCK)
    page.evaluate("specdemo.race.opening.play(), frame()")
    page.evaluate("tick(2)")
    expect(page.locator("#prompt textarea")).to_have_value(PROMPTS["facts"][0])  # so that there is something to run
    page.click("#run")
    page.locator("#race .sd-arena[data-state=waiting]").wait_for()
    assert tokens_shown(page, PLAIN) == tokens_shown(page, SPECULATIVE) == []
    assert {*page.locator("#race .sd-legend b").all_inner_texts()} == {"0"}
    shown = page.locator("#race .sd-arena").inner_text()
    assert caption(page).startswith("Waiting")
    assert not any(words in shown for words in ("recording", "lookup-eagle", "K auto", "of 128 tokens", "GB/s"))
    expect(page.locator("#race .sd-skip")).to_be_disabled()
    script.gate.set()
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    page.get_by_role("button", name="Skip").click()
    expect(page.locator("#race .sd-arena")).to_have_attribute("data-state", "ended")
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)
    page.evaluate("specdemo.race.opening.timer = null")
    assert tells(sentence(page), "tokens target")


def test_whoever_wants_no_motion_sees_the_end_and_all_captions(visit: Visit, script: Script) -> None:
    page = visit()
    page.locator("#race .sd-arena[data-state=opened]").wait_for()
    shown = page.locator("#race .sd-captions").inner_text()
    places = [shown.index(words) for words in EXPLAINED]
    assert places == sorted(places)
    assert tokens_shown(page, SPECULATIVE) == tokens_of(ENTRIES, SPECULATIVE)
    assert page.evaluate("specdemo.race.opening.timer === undefined")
    page.get_by_role("button", name="Again").click()  # as stills
    expect(page.locator("#race .sd-sentence")).to_have_text(CAPTIONS[0])
    assert len(tiles(page)) == len(rounds_explained()[WRONG]) - 1
    assert page.evaluate("document.querySelector('#race .sd-figure').getAnimations({subtree: true}).length") == 0
    run(page)
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


def test_a_link_is_not_opened_with_a_recording(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two")
    expect(page.locator("#race .sd-sentence")).to_have_text("The form was filled in from a link.")
    assert page.evaluate("specdemo.race.opening === undefined")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), pytest.param(390, True, marks=pytest.mark.slow)])
def test_nothing_moves_and_axe_finds_nothing_serious(opening: Page, width: int, dark: bool) -> None:
    page = opening
    page.set_viewport_size({"width": width, "height": 900})
    if dark:
        page.click(".sd-dark")
    page.evaluate("specdemo.race.opening.play(), frame()")
    page.evaluate(SHIFTS)  # from here on
    tops = page.locator("#race .sd-lane").evaluate_all("lanes => lanes.map((lane) => lane.getBoundingClientRect().top)")
    assert max(tops) < 750  # on a phone, too: the form is below it
    for _, _, seconds, *_ in page.evaluate("specdemo.race.opening.scenes")[:-1]:
        page.evaluate("seconds => tick(seconds)", seconds)
    assert serious(page, "#race") == []
    page.keyboard.press("Escape")
    expect(page.locator("#race .sd-captions li")).to_have_count(5)
    page.evaluate("frame()")
    assert page.evaluate("window.shifts") == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page, "#race") == []
    if dark:
        page.click(".sd-dark")  # as it was


# More lanes -------------------------------------------------------------------------------------------------

LANES = ["prompt-lookup:4", "ngram:2", "lookup-ngram:auto"]
LINK = "?prompt=one+two+three+four+five+six+seven&max_new_tokens=60&k=4&lane2=ngram&k2=2&lane3=lookup-ngram&k3=auto"


@pytest.mark.slow
def test_three_drafters_race_the_target_alone(visit: Visit, script: Script) -> None:
    page = visit(f"{LINK}&__theme=light")
    run(page)
    names = [PLAIN, *LANES]
    assert page.locator("#race .sd-lane").evaluate_all("lanes => lanes.map((lane) => lane.dataset.lane)") == names
    titles = ["Target alone", "prompt-lookup, K 4", "ngram, K 2", "lookup-ngram, K auto"]
    expect(page.locator("#race .sd-lane h2")).to_have_text(titles)
    stats = {lane: Stats.of(entry.event for entry in script.entries if entry.lane == lane) for lane in names}
    rows = page.locator("#race .sd-table tbody tr").evaluate_all(
        "rows => rows.map((row) => row.innerText.split(/\\s*\\t/))"
    )
    assert [row[0].strip() for row in rows] == titles
    for row, (lane, found) in zip(rows, stats.items(), strict=True):
        shown = page.locator(f'#race [data-lane="{lane}"] .sd-text .tok').evaluate_all(
            "tokens => tokens.map((token) => [token.textContent, token.classList[1]])"
        )
        assert shown == tokens_of(script.entries, lane)
        ratio = speed_up(stats[PLAIN], found)
        assert row[1:4] == [f"{ratio:.2f}×" if ratio else "–", str(found.rounds + 1), f"{found.tokens_per_second:.1f}"]
    best = max(speed_up(stats[PLAIN], stats[lane]) or 0 for lane in LANES)
    expect(page.locator("#race .sd-ratio")).to_have_text(f"{best:.2f}×")
    colours = [
        page.locator(f"#race {part}").evaluate_all(
            "parts => parts.map((part) => getComputedStyle(part).getPropertyValue('--sd-lane'))"
        )
        for part in (".sd-lane .sd-track i", ".sd-table tbody th", ".sd-time span")
    ]
    assert colours[0] == colours[1] == colours[2]
    assert len({*colours[0]}) == 4
    expect(page.locator("#race .sd-whose")).to_have_text("Counted in all 3 lanes with a drafter together.")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        card = page.locator("#race .sd-drafted").bounding_box()
        assert card
        cells = [
            cell.bounding_box() for cell in page.locator("#race .sd-table :is(td, thead th:not(:first-child))").all()
        ]
        for cell in cells:  # 5 figures of 4 lanes, and their headings
            assert cell
            assert card["x"] < cell["x"]
            assert cell["x"] + cell["width"] < card["x"] + card["width"]
        assert len(cells) == 25
        columns = {round(cell["x"] + cell["width"]) for cell in cells if cell}
        assert len(columns) == 5  # below their headings
        for part in page.locator("#race :is(.sd-lane, .sd-table, .sd-time)").all():
            box = part.bounding_box()
            assert box
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
        assert serious(page, "#race") == []
        page.click(".sd-dark")  # for the second


@pytest.mark.slow
def test_lanes_are_added_in_the_form_and_taken_away(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two+three+four+five")
    settings(page)
    page.click("#lanes button")
    page.click("#lane2 input")
    page.get_by_role("option", name=re.compile("· ngram$")).click()
    page.click("#k2 input")
    page.get_by_role("option", name="3", exact=True).click()
    run(page)
    expect(page.locator("#race .sd-lane h2")).to_have_text(["Target alone", "prompt-lookup, K 4", "ngram, K 3"])
    page.click("#lane2 input")
    page.get_by_role("option", name="No lane").click()
    run(page)
    expect(page.locator("#race .sd-lane h2")).to_have_text(["Target alone", "With prompt-lookup"])
    expect(page.locator("#race .sd-table")).not_to_be_visible()
    expect(page.locator("#race .sd-figures")).to_be_visible()


def test_lanes_that_cannot_race_are_refused_in_words() -> None:
    with refuses(BadInput, "prompt-lookup:4"):
        asked_by_form(drafter="prompt-lookup", k=4, lane2="prompt-lookup", k2="4")


@pytest.mark.slow
def test_a_race_of_four_lanes_is_replayed(visit: Visit, script: Script) -> None:
    page = visit(LINK)
    run(page)
    page.click("#race .sd-again")
    page.locator("#replay .sd-play:enabled").wait_for()
    expect(page.locator("#replay .sd-lane h2")).to_have_text(["Target alone", *LANES])
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("End")
    page.locator("#replay .sd-arena[data-state=ended], #replay [data-state=ended]").first.wait_for()
    for side, lane in zip(("speculative", "drafted-2", "drafted-3"), LANES, strict=True):
        shown = page.locator(f"#replay [data-lane={side}] .sd-text .tok").evaluate_all(
            "tokens => tokens.map((token) => [token.textContent, token.classList[1]])"
        )
        assert shown == tokens_of(script.entries, lane)
