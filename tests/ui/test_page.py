"""The page around a race: the form, links, keys, the line for the model, and how it looks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import axe_playwright_python
import pytest
from playwright.sync_api import Page, expect

from specdemo.racing.race import PLAIN
from specdemo.ui.serving.head import modules
from specdemo.ui.serving.line import MAX_WAITING

from ..fakes.engine import PRESETS, Script
from ..sentences import gist, tells
from .browser import Caller, fill, headline, run, sentence, settings, shared, tokens_shown, wait_until
from .conftest import Tabs, Visit

FADED = "document.getAnimations().forEach((animation) => animation.finish())"
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
# Every layout shift from the first paint on, but for Gradio's own spinner, which is there before the page is.
SHIFTS = """
  window.shifts = [];
  const element = node => (node?.closest ? node : node?.parentElement);
  const own = ({ node }) => node && !element(node)?.closest('[data-testid=status-tracker]');
  new PerformanceObserver(list => list.getEntries().filter(entry => entry.sources.some(own)).forEach(entry =>
    window.shifts.push([entry.value, ...entry.sources.map(({ node }) => (node?.parentElement || node)?.outerHTML)])))
    .observe({ type: 'layout-shift', buffered: true });
"""


def serious(page: Page, inside: str = "html") -> list[object]:
    """What axe finds in a part of a page, unless it is a trifle."""
    page.evaluate(FADED)  # or it meets colours that are half faded, on a machine that is slow enough
    if page.evaluate("window.axe === undefined"):
        page.evaluate(AXE)
    found = page.evaluate("part => axe.run(part, { resultTypes: ['violations'] })", inside)["violations"]
    return [
        (v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_nothing_moves_while_the_page_opens_and_a_race_runs(visit: Visit, script: Script, width: int) -> None:
    script.pace = 0.001
    page = visit("?max_new_tokens=400&k=8&prompt=one+two+three+four+five+six+seven", width=width, before=SHIFTS)
    expect(page.locator("#prompt textarea")).not_to_be_empty()
    run(page)
    page.wait_for_timeout(300)
    assert page.evaluate("window.shifts") == []


@pytest.mark.slow
def test_a_page_whose_script_fails_shows_its_form(tabs: Tabs, url: str, script: Script) -> None:
    page = tabs.take()
    page.route("**/main.js", lambda route: route.fulfill(body="throw 0;", content_type="text/javascript"))
    page.goto(url)
    expect(page.locator("#prompt textarea")).to_be_visible()
    page.fill("#prompt textarea", "one two")
    assert page.evaluate("window.specdemo === undefined")
    tabs.give_back(page)


def test_browsers_keep_the_scripts_and_styles(page: Page) -> None:
    loaded = page.evaluate("performance.getEntriesByType('resource').map(({ name }) => name)")
    name, files = modules()
    ours = [address for address in loaded if "/modules/" in address]
    assert {address.partition(f"/modules/{name}/")[2] for address in ours} == files.keys()
    gradios = [address for address in loaded if "/assets/" in address]
    assert len(gradios) > 20
    for address in (*ours, *gradios[:2]):
        with urlopen(address) as answer:
            assert answer.headers["cache-control"].endswith("max-age=31536000, immutable")
            assert answer.headers["content-type"].partition(";")[0] in ("text/javascript", "text/css")
    assert "/modules/" in page.content()
    with pytest.raises(HTTPError, match="404"):
        urlopen(ours[0].replace(name, "0" * len(name)))  # of another version


@pytest.mark.slow
def test_a_page_that_is_only_open_draws_next_to_nothing(page: Page) -> None:
    page.evaluate(
        """() => {
          const next = window.requestAnimationFrame;
          window.asked = 0;
          window.requestAnimationFrame = (draw) => { window.asked += 1; return next.call(window, draw); };
        }"""
    )
    page.wait_for_timeout(2000)
    for _ in range(5):
        before = page.evaluate("window.asked")
        page.wait_for_timeout(1000)
        if (asked := page.evaluate("window.asked") - before) < 20:
            break
    assert asked < 20  # Gradio's own loading sign asks for 60 a second


LONGEST = (
    "Stopped. No faster and no slower, within timing noise.",
    "Try K = 2 (1.23× by these rounds), or a nearly free drafter such as prompt-lookup or ngram. "
    "At temperature 0.75 each lane draws its own tokens from the same distribution, so the texts could differ, though "
    "these do not. What the target would say, and how often, is unchanged.",
)


@pytest.mark.slow
def test_there_is_room_for_the_longest_result(visit: Visit, script: Script) -> None:
    page = visit("?temperature=0.75&k=auto&prompt=one+two")

    def places() -> list[list[int]]:
        """Where parts of the page begin, in windows of several widths."""
        found = []
        for width in (390, 1024, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            parts = "['.sd-exact', '.sd-legend', '.sd-lanes'].map(part => document.querySelector(part).offsetTop)"
            found.append(page.evaluate(parts))
        return found

    before = places()
    run(page)
    assert places() == before
    page.evaluate(
        """(words) => {
            const { race } = specdemo;
            const names = ["tokens per pass", "of a pass to draft", "of a pass to check"];
            race.words(...words);
            race.inShort(names.map((name) => ({ name, value: "100%", sentence: "" })), "");
        }""",
        LONGEST,
    )
    page.evaluate("Object.assign(specdemo.race.parts.badge, { textContent: 'Different text, same distribution' })")
    assert places() == before


FOCUSED = (
    *("#prompt textarea", "#drafter .wrap:has(> .wrap-inner)", "#k input[type=range]", "#k input[type=number]"),
    *("#auto input", "#run", "#stop", ".sd-hide input", ".sd-chip", ".sd-help", "#race .sd-pane"),
    *("#temperature input[type=range]", "#max-new-tokens input", "#seed input", "#preset .wrap:has(> .wrap-inner)"),
    *("#more button", "#tabs button[role=tab]:visible"),
)


@pytest.mark.slow
def test_it_can_be_seen_where_the_keyboard_is(visit: Visit, script: Script) -> None:
    page = visit("?__theme=light")
    settings(page)
    page.add_style_tag(content="* { transition: none !important; }")
    for colour in ("rgb(0, 114, 178)", "rgb(86, 180, 233)"):
        page.keyboard.press("Tab")
        for part in FOCUSED:
            page.locator(f"{part} input" if ".wrap" in part else part).first.focus()
            outline = page.locator(part).first.evaluate(
                "part => { const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(part);"
                " return [outlineStyle, outlineWidth, outlineColor]; }"
            )
            assert outline == ["solid", "3px", colour], part
        page.click(".sd-dark")


def test_axe_finds_nothing_serious(page: Page) -> None:
    run(page, "one two three four five six seven")
    settings(page)
    page.click("#more button")
    page.locator("#stop-strings").wait_for()
    for dark in (False, True):
        if dark:
            page.click(".sd-dark")
        assert is_dark(page) == dark
        assert serious(page) == []


def test_the_page_fits_its_window_and_both_lanes_are_in_sight_on_a_phone(page: Page) -> None:
    run(page, "one two three four five six seven " + "x" * 300)
    for width, height in ((1920, 1080), (1280, 900), (853, 480), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for part in ("#run", "#stop", ".sd-ratio", "[data-lane=plain]", "[data-lane=speculative]", ".sd-histogram"):
            box = page.locator(part).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
    page.evaluate("specdemo.race.parts.next.hidden = false")  # as round by round
    skip = page.locator("#race .sd-skip")
    assert skip.evaluate("skip => skip.clientHeight < 2 * parseFloat(getComputedStyle(skip).lineHeight)")  # on one line
    page.evaluate("specdemo.race.parts.next.hidden = true")
    top, bottom = (
        page.locator(f".sd-arena {part}").evaluate(f"part => part.getBoundingClientRect().{side}")
        for part, side in ((".sd-ratio", "top"), (".sd-lanes", "bottom"))
    )
    assert 0 < bottom - top < 844


def test_the_pane_stays_at_the_bottom_unless_the_reader_scrolled_up(page: Page, script: Script) -> None:
    script.pace = 0.002
    fill(page, max_new_tokens=400)
    run(page, "one two three four five six seven", until="running")
    pane = page.locator("[data-lane=plain] .sd-pane")
    page.wait_for_function("document.querySelector('[data-lane=plain] .sd-pane').scrollTop > 50")
    pane.evaluate("pane => pane.scrollTop = 10")
    before = page.locator("[data-lane=plain] .tok").count()
    page.wait_for_function(f"document.querySelectorAll('[data-lane=plain] .tok').length > {before + 20}")
    assert pane.evaluate("pane => pane.scrollTop") == 10
    pane.evaluate("pane => pane.scrollTop = pane.scrollHeight")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.wait_for_timeout(100)
    assert pane.evaluate("pane => pane.scrollHeight - pane.scrollTop - pane.clientHeight") < 5


def test_a_draft_that_is_read_before_the_browser_tells_of_the_scrolling_moves_no_pane(page: Page) -> None:
    """The event of a scroll comes a frame later, and the guesses that it made room for may be gone by then."""
    assert page.evaluate("""async () => {
        const lane = specdemo.race.lanes.speculative;
        const tokens = (count) => Array(count).fill(["some words ", "a", 1, 0]);
        const row = (round, count) => ({ row: [round, 16, tokens(count)], at: 1, seconds: 1 });
        lane.clear({ max_new_tokens: 400 });
        for (const round of [1, 2, 3]) {
            lane.take(row(round, 60));
            lane.guess(row(round + 1, 30));
            lane.draw(true);
            lane.scroll();
            lane.guess(null);
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        }
        lane.draw(true);
        lane.scroll();
        return lane.parts.pane.scrollTop > 100 && lane.atBottom();
    }""")


def test_bad_input_is_refused_in_words_and_nothing_is_lost(visit: Visit, script: Script) -> None:
    page = visit("?prompt=a&k=17&drafter=draft-model")
    expect(page.locator(".sd-sentence")).to_have_text("The form was filled in from a link.")
    run(page, until="failed")
    assert tells(sentence(page), "0 16 17")
    fill(page, k=16)
    page.click("#run")
    missing = "The drafter draft-model cannot be used here: this preset has no draft model."
    expect(page.locator(".sd-sentence")).to_contain_text(missing)
    assert script.open_races == 0
    page.fill("#prompt textarea", "one two")
    assert page.locator("#prompt textarea").input_value() == "one two"


def test_refused_input_leaves_the_last_race_on_the_page(page: Page) -> None:
    run(page, "one two three")
    before = tokens_shown(page, PLAIN)
    expect(page.locator(".sd-behind")).to_be_visible()
    run(page, "   ", until="failed")
    assert tokens_shown(page, PLAIN) == before
    expect(page.locator(".sd-behind")).to_be_hidden()
    expect(page.locator(".sd-ratio")).to_have_text("–")  # it would stand beside the refusal
    run(page, "one two three")
    settings(page)
    page.fill("#max-new-tokens input", "")
    run(page, until="failed")
    assert gist(sentence(page)) == "max 1 2,000"
    expect(page.locator("#max-new-tokens")).to_contain_text("1 to 2,000.")


def test_a_link_fills_the_form_and_does_not_run(visit: Visit, script: Script) -> None:
    page = visit(
        "?prompt=%3Cb%3Ehi%3C%2Fb%3E&drafter=ngram&k=7&temperature=0.5&max_new_tokens=9&seed=3&top_k=5&top_p=0.9"
        "&stop=x%0Ay&mode=raw&order=isolated&preset=other&rule=rejection&readers=2"
    )
    expect(page.locator("#prompt textarea")).to_have_value("<b>hi</b>")
    settings(page)
    expect(page.locator("#drafter input")).to_have_value(re.compile("· ngram$"))
    expect(page.locator("#k input[type=number]")).to_have_value("7")
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.5")
    expect(page.locator("#max-new-tokens input")).to_have_value("9")
    expect(page.locator("#preset input")).to_have_value("Other 1.7B")
    assert script.races == []
    assert granted(page)
    link = page.evaluate("navigator.clipboard.readText()")
    run(page)
    with page.expect_download() as download:
        shared(page, "trace")
    header = json.loads(download.value.path().read_text(encoding="utf-8").partition("\n")[0])
    assert header["settings"] == {
        **{"k": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "max_new_tokens": 9, "seed": 3, "stop": ["x", "y"]},
        **{"rule": "rejection", "tree": False, "ahead": 0, "grammar": "", "saguaro": 1},
    }
    assert (header["raw"], header["isolated"], header["preset"], header["readers"]) == (True, True, "other", 2)
    query = parse_qs(urlsplit(link).query)
    assert query["prompt"] == ["<b>hi</b>"]
    assert (query["drafter"], query["k"], query["stop"], query["mode"]) == (["ngram"], ["7"], ["x\ny"], ["raw"])
    assert (query["rule"], query["readers"]) == (["rejection"], ["2"])


def test_auto_is_carried_by_links_and_ended_by_the_slider(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two&k=auto")
    settings(page)
    box = page.locator("#auto input")
    expect(box).to_be_checked()
    assert granted(page)
    assert parse_qs(urlsplit(page.evaluate("navigator.clipboard.readText()")).query)["k"] == ["auto"]
    run(page)
    with page.expect_download() as download:
        shared(page, "trace")
    header = json.loads(download.value.path().read_text(encoding="utf-8").partition("\n")[0])
    assert header["settings"]["k"] == "auto"
    page.locator("#k input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(box).not_to_be_checked()


@pytest.mark.slow
def test_a_link_to_a_preset_begins_with_what_it_does_and_knows_its_drafters_later(visit: Visit, script: Script) -> None:
    page = visit("?preset=other&temperature=0.3")
    settings(page)
    expect(page.locator("#preset input")).to_have_value("Other 1.7B")
    other = PRESETS["other"].defaults
    expect(page.locator("#drafter input")).to_have_value(re.compile(f"· {other.drafter}$"))
    expect(page.locator("#k input[type=number]")).to_have_value(str(other.k))
    expect(page.locator("#max-new-tokens input")).to_have_value(str(other.max_new_tokens))
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.3")
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")
    page.click("#drafter input")
    expect(page.get_by_role("option", name=re.compile("· draft-model$"))).to_be_visible()
    run(page, "one two three")
    page.click("#drafter input")
    expect(page.get_by_role("option", name="· draft-model (this preset has no draft model)")).to_be_visible()


@pytest.mark.slow
def test_a_newcomer_is_told_nothing_of_the_failures_of_others(visit: Visit, unloaded: Script) -> None:
    unloaded.load_failure = MemoryError("Too large.")
    unloaded.begin()
    first = visit()
    expect(first.locator(".sd-model")).to_have_text("Too large.")
    second = visit("?preset=other")
    expect(second.locator(".sd-model")).to_have_text("No model is loaded yet")
    settings(second)
    expect(second.locator("#preset")).to_contain_text(PRESETS["other"].description)
    unloaded.load_failure = None
    run(second, "one two three")
    expect(second.locator(".sd-model")).to_have_text("Other 1.7B")


def test_what_a_link_has_wrong_is_left_out_and_named(visit: Visit, script: Script) -> None:
    page = visit(f"?k={'many' * 500}&drafter=%3Cimg+src=x+onerror=window.pwned=1%3E&seed=5")
    expect(page.locator(".sd-sentence")).to_have_text("Part of the link cannot be used and was left out.")
    named = f"drafter=<img src=x onerror=window.pwned=1>, k={'many' * 15}…"
    assert page.locator(".sd-why-exact").inner_text() == named
    assert page.evaluate("window.pwned === undefined")
    settings(page)
    expect(page.locator("#seed input")).to_have_value("5")
    expect(page.locator("#k input[type=number]")).to_have_value("4")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.fill("#prompt textarea", "雨" * 2000)  # of which no link can be made
    shared(page, "link")
    expect(page.locator(".sd-link")).to_have_text("Too long for a link")


def granted(page: Page) -> bool:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shared(page, "link")
    expect(page.locator(".sd-link")).to_have_text("Copied")
    return True


def test_an_example_fills_the_prompt(page: Page) -> None:
    page.get_by_role("button", name="code", exact=True).click()
    page.get_by_role("button", name="for x in range(3): print(x)").click()
    expect(page.locator("#prompt textarea")).to_have_value("for x in range(3): print(x)")


def test_the_keys_work_except_while_typing(page: Page, script: Script) -> None:
    script.pace = 0.01
    fill(page, max_new_tokens=2000)
    dark = is_dark(page)
    page.fill("#prompt textarea", "")
    page.locator("#prompt textarea").press_sequentially("rsdh? ")
    assert page.locator("#prompt textarea").input_value() == "rsdh? "
    assert not script.races
    assert is_dark(page) == dark
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.locator(".sd-brand").click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Control+d")
    assert not page.evaluate("document.body.classList.contains('dark')")
    page.keyboard.press("d")
    assert is_dark(page)
    page.keyboard.press("?")
    page.get_by_role("heading", name="What you see").wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.keyboard.press("r")
    page.locator(".sd-arena[data-state=running]").wait_for()
    page.keyboard.press("s")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert headline(page).startswith("Stopped.")


def test_ctrl_enter_runs_the_prompt_from_inside_it_and_from_elsewhere(page: Page, script: Script) -> None:
    page.fill("#prompt textarea", "")
    page.locator("#prompt textarea").press_sequentially("one two")
    page.keyboard.press("Enter")
    assert not script.races
    page.keyboard.press("Control+Enter")
    wait_until(lambda: len(script.races) == 1)
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.locator("#prompt textarea").press_sequentially("three")
    page.locator("#prompt textarea").blur()
    page.keyboard.press("Meta+Enter")
    wait_until(lambda: len(script.races) == 2)
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.keyboard.press("?")
    page.keyboard.press("Control+Enter")  # behind the help
    page.wait_for_timeout(300)
    assert page.locator(".sd-arena").get_attribute("data-state") == "ended"
    assert len(script.races) == 2
    assert page.locator("#prompt textarea").input_value() == "one two\nthree"


def test_help_opens_at_its_top(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    for _ in range(2):
        page.click(".sd-help")
        heading = page.get_by_role("heading", name="What you see")
        box = heading.bounding_box()
        assert box is not None
        assert 0 < box["y"] < 100
        close = page.locator(".sd-dialog[open]").get_by_role("button", name="Close")
        for top in (0, 1e9):  # wherever it is scrolled to
            page.locator(".sd-dialog[open]").evaluate("(dialog, top) => dialog.scrollTop = top", top)
            expect(close).to_be_in_viewport(ratio=1)
        page.keyboard.press("Escape")
        expect(close).to_be_hidden()
    page.keyboard.press("?")
    close.click()
    expect(close).to_be_hidden()


def is_dark(page: Page) -> bool:
    return bool(page.evaluate("document.body.classList.contains('dark')"))


@pytest.mark.slow
def test_dark_or_light_is_kept_once_it_was_chosen(page: Page, url: str) -> None:
    assert page.evaluate("localStorage.length") == 0

    def again(query: str = "") -> bool:
        page.goto(url + query)
        page.locator("#race .sd-board").wait_for()
        return is_dark(page)

    page.click(".sd-dark")
    assert not again("?__theme=light")  # the address wins
    assert again()
    page.click(".sd-dark")
    assert not again()


def test_stop_looks_as_if_it_could_be_pressed_only_while_there_is_a_race(page: Page, script: Script) -> None:
    script.gate.clear()
    look = "getComputedStyle(document.querySelector('#stop')).backgroundColor"
    idle = page.evaluate(look)
    run(page, "one two", until="waiting")
    expect(page.locator("#stop")).not_to_have_css("background-color", idle)
    expect(page.locator("#stop")).to_be_enabled()
    script.gate.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    expect(page.locator("#stop")).to_have_css("background-color", idle)
    expect(page.locator("#stop")).to_be_enabled()


@pytest.mark.slow
def test_a_full_line_is_told_politely(visit: Visit, script: Script, url: str) -> None:
    page = visit(forgive="429")
    script.gate.clear()
    page.fill("#prompt textarea", "one two")
    for number in range(MAX_WAITING + 1):
        with Caller(url, 2 + number) as caller:
            assert caller.join("a").status_code == 200
        if number == 0:
            wait_until(lambda: script.open_races == 1)
    run(page, until="failed")
    assert re.fullmatch(r"16 requests are waiting. Try again (later|in about .*)\.", sentence(page))
    expect(visit().locator(".sd-model")).to_have_text("Scripted 135M")  # for that there is room
    script.gate.set()
    wait_until(lambda: script.ended_races == MAX_WAITING + 1)
    run(page)
    assert len(tokens_shown(page, PLAIN)) == 24
