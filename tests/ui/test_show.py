"""A race is measured at full speed and shown at a pace: the clock, the guesses, the figures of each lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from specdemo.decoding.events import engine_seconds
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.stats import Stats
from specdemo.ui.engine import Pauses
from specdemo.ui.race import run as race_run

from ..fakes import engine as scripted
from ..fakes.engine import Script
from ..sentences import tells
from .browser import fill, headline, run, sentence, tokens_of, tokens_shown
from .conftest import Visit
from .test_page import serious
from .test_playable import GREEDY

Open = Callable[..., Page]
PROMPT = "one two three four five six seven"
# The clock of the show is the test's: `tick` moves it by that many seconds, however busy the machine is.
CLOCK = """
  let now = performance.now();
  performance.now = () => now;
  window.pass = (seconds) => (now += 1000 * seconds);
  window.tick = (seconds) => { pass(seconds); window.specdemo.race.show.tick(); };
  window.frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
"""
SHIFTS = """
  window.shifts = [];
  new PerformanceObserver((list) => window.shifts.push(...list.getEntries().flatMap((entry) =>
    entry.sources.map(({ node, previousRect: a, currentRect: b }) => [node?.className, a.x, a.y, b.x, b.y]))))
    .observe({ type: "layout-shift", buffered: false });
"""


@pytest.fixture
def first(visit: Visit) -> Open:
    """Opens the page as a new visitor, on a clock that only `tick` moves, unless it is not to be `frozen`."""

    def open_page(query: str = "", pace: str | None = None, frozen: bool = True, **options: Any) -> Page:
        query = f"?prompt={PROMPT.replace(' ', '+')}{query}"
        page = visit(query, motion=True, until="[data-stage=ready]", **options)
        if pace:
            page.select_option("#race .sd-pace", pace)
        if frozen:
            page.evaluate(f"() => {{ {CLOCK} }}")
        return page

    return open_page


@pytest.fixture
def moving(page: Page) -> Iterator[Open]:
    """Has a page that tests share show its races on such a clock."""

    def prepare(max_new_tokens: int, pace: str = "slow") -> Page:
        page.emulate_media(reduced_motion="no-preference")
        page.select_option("#race .sd-pace", pace)
        page.fill("#prompt textarea", PROMPT)
        fill(page, max_new_tokens=max_new_tokens)
        page.evaluate(f"() => {{ {CLOCK} }}")
        return page

    yield prepare
    page.evaluate("delete performance.now")
    skip = page.locator("#race .sd-skip")
    if skip.is_enabled():
        skip.click()
    page.emulate_media(reduced_motion="reduce")


def tick(page: Page, seconds: float) -> None:
    page.evaluate("async (seconds) => { tick(seconds); await frame(); }", seconds)


def shown(page: Page, lane: str) -> int:
    return sum(code not in "xug" for _, code in tokens_shown(page, lane))


def stats_of(script: Script) -> dict[str, Stats]:
    return {
        lane: Stats.of(entry.event for entry in script.entries if entry.lane == lane) for lane in (PLAIN, SPECULATIVE)
    }


def large(page: Page, lane: str) -> list[str]:
    return page.locator(f"#race [data-lane={lane}] .sd-large b").all_inner_texts()


def test_the_first_race_is_slow_and_its_figures_are_those_of_the_engine(first: Open, script: Script) -> None:
    page = first("&max_new_tokens=60")
    run(page, until="showing")
    stats = stats_of(script)
    alone, drafted = stats[PLAIN].seconds, stats[SPECULATIVE].seconds
    assert sentence(page) == f"Measured: alone in {alone:.2f} s, with prompt-lookup in {drafted:.2f} s."
    assert script.open_races == 0  # the engine is free, whatever is still to be shown
    scale = f"Slowed down {12 / alone:.1f}×. The clocks show the measured time."
    assert page.locator(".sd-scale").inner_text() == scale
    tick(page, 6 - page.evaluate("specdemo.race.show.time") * 12 / alone)
    assert page.locator("#race [data-lane=plain] .sd-clock").inner_text() == f"{alone / 2:.2f} s"
    assert 0.4 * 60 < shown(page, PLAIN) < 0.6 * 60
    tick(page, 5.9)
    assert page.locator("#race .sd-arena").get_attribute("data-state") == "showing"
    tick(page, 0.11)
    assert page.locator("#race .sd-arena").get_attribute("data-state") == "ended"
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)
        assert large(page, lane) == [str(stats[lane].rounds + 1), "60", f"{stats[lane].tokens_per_second:.1f}"]
    assert tells(sentence(page), "tokens target")


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["rounds", pytest.param("once", marks=pytest.mark.slow)])
def test_the_figures_do_not_depend_on_the_pace(moving: Open, script: Script, pace: str) -> None:
    page = moving(12, pace=pace)
    run(page, until="ended" if pace == "once" else "showing")
    tick(page, 0.01)
    if pace != "once":
        page.click(".sd-skip")
    expect(page.locator("#race .sd-arena")).to_have_attribute("data-state", "ended")
    stats = stats_of(script)
    assert [large(page, lane)[0] for lane in stats] == [str(lane.rounds + 1) for lane in stats.values()]
    clocks = page.locator("#race .sd-clock").all_inner_texts()
    assert clocks == [f"{lane.seconds:.2f} s" for lane in stats.values()]


@pytest.mark.slow
def test_the_chosen_pace_is_remembered_and_real_time_is_the_engines(first: Open, script: Script) -> None:
    page = first("&max_new_tokens=24")
    page.select_option("#race .sd-pace", "real")
    page.reload()
    page.locator("[data-stage=ready]").wait_for()
    page.evaluate(f"() => {{ {CLOCK} }}")
    expect(page.locator("#race .sd-pace")).to_have_value("real")
    run(page, until="showing")
    assert tells(page.locator(".sd-scale").inner_text(), "Shown real measured")
    before = page.evaluate("specdemo.race.show.time")
    tick(page, 0.1)
    assert page.evaluate("specdemo.race.show.time") == pytest.approx(before + 0.1)
    tick(page, stats_of(script)[PLAIN].seconds)
    assert page.locator("#race .sd-arena").get_attribute("data-state") == "ended"


def test_it_goes_on_round_by_round(moving: Open, script: Script) -> None:
    page = moving(24, pace="rounds")
    run(page, until="showing")
    rounds = [entry for entry in script.entries if entry.lane == SPECULATIVE]
    tick(page, 5)
    assert tokens_shown(page, SPECULATIVE) == tokens_of(rounds[:1], SPECULATIVE)
    page.keyboard.press("n")
    tick(page, 0.5)  # the draft stands, and the target reads it
    guesses = [text for text, code in tokens_shown(page, SPECULATIVE) if code == "g"]
    assert len(guesses) == 4
    expect(page.locator("#race .sd-next")).to_be_disabled()
    tick(page, 5)
    assert tokens_shown(page, SPECULATIVE) == tokens_of(rounds[:2], SPECULATIVE)
    page.click("#race .sd-next")
    tick(page, 5)
    assert tokens_shown(page, SPECULATIVE) == tokens_of(rounds[:3], SPECULATIVE)
    alone, drafted = page.evaluate("Object.values(specdemo.race.lanes).map(({ tokens }) => tokens)")
    assert drafted > alone
    assert page.locator("#race .sd-speed").inner_text().startswith(f"+{drafted - alone}\ntokens ahead")
    for _ in rounds:
        tick(page, 5)
        page.keyboard.press("n")
    tick(page, 20)
    assert page.locator("#race .sd-arena").get_attribute("data-state") == "ended"


def test_stop_ends_the_show(moving: Open, script: Script) -> None:
    page = moving(24)
    run(page, until="showing")
    page.click("#stop")
    expect(page.locator("#race .sd-arena")).to_have_attribute("data-state", "ended")
    assert not headline(page).startswith("Stopped")
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


@pytest.mark.slow
def test_another_race_ends_the_show(moving: Open, script: Script) -> None:
    page = moving(24)
    run(page, until="showing")
    page.fill("#prompt textarea", "alpha beta")
    page.click("#run")
    expect(page.locator("#race [data-lane=plain] .sd-text")).to_have_text("")  # what was shown was cleared away
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    tick(page, 13)
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)
    assert len(script.races) == 2


@pytest.mark.slow
def test_what_is_not_measured_yet_is_waited_for(first: Open, script: Script) -> None:
    page = first("&max_new_tokens=24", pace="real")
    script.gate.clear()
    page.click("#run")
    page.locator("#race .sd-arena[data-state=waiting]").wait_for()
    assert shown(page, PLAIN) == 0
    script.gate.set()
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    tick(page, 9)
    assert shown(page, PLAIN) == shown(page, SPECULATIVE) == 24


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, script: Script) -> Callable[[float], None]:
    """Has the engine share its cores with the page, which then hears of a race at that interval."""

    def crowd(seconds: float) -> None:
        monkeypatch.setattr(race_run, "has_every_core", lambda loaded: True)
        monkeypatch.setattr(script.used, "_pauses", Pauses(local=seconds))

    return crowd


@pytest.mark.slow
def test_on_the_engines_own_cores_a_race_is_measured_first_and_then_shown(
    moving: Open, script: Script, crowded: Callable[[float], None]
) -> None:
    crowded(60)
    script.pace = 0.02
    page = moving(24, pace="real")
    run(page, until="running")
    assert tells(sentence(page), "Measuring race")
    assert tokens_shown(page, PLAIN) == []
    page.evaluate("pass(5)")  # which the engine takes
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    begin, *_ = (entry.event for entry in script.entries if entry.lane == PLAIN)
    begins = page.evaluate("specdemo.race.show.time")
    assert begins <= engine_seconds(begin)
    tick(page, 0.1)
    assert page.evaluate("specdemo.race.show.time") == pytest.approx(begins + 0.1)
    tick(page, stats_of(script)[PLAIN].seconds)
    assert page.locator("#race .sd-arena").get_attribute("data-state") == "ended"
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)


@pytest.mark.slow
def test_there_a_long_race_is_seen_now_and_then_and_can_be_stopped(
    page: Page, script: Script, crowded: Callable[[float], None]
) -> None:
    crowded(0.2)
    script.pace = 0.01
    fill(page, max_new_tokens=2000)
    run(page, "one two three", until="running")
    page.locator("[data-lane=speculative] .tok").nth(5).wait_for()
    assert tells(sentence(page), "Measuring race")
    page.click("#stop")
    page.locator("#race .sd-arena[data-state=ended]").wait_for()
    assert headline(page).startswith("Stopped. ")
    assert script.open_races == 0
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)


@pytest.mark.parametrize(("width", "dark"), [pytest.param(1280, False, marks=pytest.mark.slow), (390, True)])
def test_rejected_guesses_stay_beside_their_correction_and_nothing_moves(
    moving: Open, script: Script, width: int, dark: bool
) -> None:
    page = moving(120)
    page.set_viewport_size({"width": width, "height": 900})
    if dark:
        page.click(".sd-dark")
    page.locator("#race .sd-pane").first.scroll_into_view_if_needed()
    run(page, until="showing")
    tick(page, 1.5)
    page.evaluate(SHIFTS)
    kept = page.locator("#race [data-lane=speculative] .tok.r").first
    pane = page.locator("#race [data-lane=speculative] .sd-pane")

    def place() -> list[float]:
        """Where it stands in its text, and how large it is."""
        return kept.evaluate(
            """(token, pane) => {  // a narrow page scrolls to the arena meanwhile
                const { x, y, width, height } = token.getBoundingClientRect();
                return [x, y - pane.getBoundingClientRect().y + pane.scrollTop, width, height];
            }""",
            pane.element_handle(),
        )

    before = place()
    seen = set()
    for _ in range(5):
        tick(page, 0.5)
        seen |= {code for _, code in tokens_shown(page, SPECULATIVE)}
        assert place() == pytest.approx(before, abs=1)
    assert seen >= {"a", "r", "x", "g"}
    assert page.evaluate("window.shifts") == []
    page.mouse.move(0, 0)
    page.keyboard.press("Escape")
    pairs = page.locator("#race [data-lane=speculative] .sd-pair:has(.r)")
    lines = pairs.evaluate_all(
        """pairs => pairs.map((pair) => {
            const boxes = (code) => [...pair.querySelector(`:scope > .${code}`).getClientRects()];
            const [wrong, right] = [boxes("x"), boxes("r")];
            const [before, after] = [wrong.at(-1), right[0]];
            return [wrong.length, before.left < after.left && before.top < after.bottom && after.top < before.bottom];
        })"""
    )
    assert len(lines) > 3
    assert {tuple(line) for line in lines} == {(1, True)}  # on one line
    rejected = pairs.first.locator(".x")
    expect(rejected).to_be_visible()
    page.keyboard.press("h")
    expect(rejected).to_be_hidden()
    page.keyboard.press("h")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page, "#race") == []


def test_the_end_of_text_token_is_a_mark_and_text_that_looks_like_it_is_not(page: Page) -> None:
    fill(page, max_new_tokens=6)
    run(page, "say <|im_end|> now")
    assert "<|im_end|>" in page.locator("#race [data-lane=plain] .sd-text").inner_text()
    assert page.locator("#race .tok.end").count() == 0
    page.get_by_role("tab", name="Replay").click()
    page.locator(".sd-play:enabled").wait_for()
    page.select_option(".sd-which", next(name for name in GREEDY if name.startswith("code-")))
    page.locator(".sd-play:enabled").wait_for()
    page.evaluate("document.activeElement.blur()")
    ends = page.locator("#replay .tok.end")
    page.keyboard.press("End")
    expect(ends).to_have_count(2)
    assert (
        ends.evaluate_all("ends => ends.map((end) => [end.textContent, getComputedStyle(end).fontSize])")
        == [["<|im_end|>", "0px"]] * 2
    )


@pytest.mark.slow  # it is about real time, which is scarce where tests run side by side
def test_two_thousand_tokens_in_real_time_end_when_they_are_measured(
    first: Open, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("PASS", 0.0025), ("DEARER_PASS", 0.0023), ("DRAFT", 0.0002)):  # 400 tokens in a second
        monkeypatch.setattr(scripted, f"{name}_SECONDS", seconds)
    script.real = True
    page = first("&max_new_tokens=1000", pace="real", frozen=False)
    page.evaluate("""() => {
        window.at = {};
        const look = () => (window.at[specdemo.race.root.dataset.state] ??= performance.now());
        new MutationObserver(look).observe(specdemo.race.root, { attributes: true });
        const { measured } = specdemo.race;
        specdemo.race.measured = function (end) { window.measured = performance.now(); measured.call(this, end); };
    }""")
    run(page)
    late = page.evaluate("window.at.ended - window.measured")
    print(f"{2000 / (script.ended_at - script.began_at):.0f} tokens/s, late by {late:.0f} ms")
    assert script.ended_at - script.began_at < 6
    assert 0 <= late < 300
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)
