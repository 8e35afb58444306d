"""The Race tab: the recorded race that it opens with, and a race from Run to the summary, with chains and trees."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from gradio_client import Client
from playwright.sync_api import APIResponse, Browser, Locator, Page, Request, Route, expect

from specdemo.decoding.events import Round
from specdemo.errors import BadInput
from specdemo.models.presets import DEFAULT_PRESET, Defaults, load_presets, load_prompts
from specdemo.racing.figures import ReaderFigures, expected_tokens, speed_up, speed_up_in_all
from specdemo.racing.lanes import LaneText
from specdemo.racing.request import DraftedLane
from specdemo.racing.summary import CAUSES
from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, read_trace
from specdemo.racing.verdict import LaneVerdict
from specdemo.settings import AUTO
from specdemo.studies.theory import Costs
from specdemo.studies.theory import speed_up as theory_speed_up
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
from specdemo.ui.engine import Backend
from specdemo.ui.race import run as race_run
from specdemo.ui.race.colours import CODES
from specdemo.ui.race.run import RaceRun
from specdemo.ui.replay.playable import playable
from specdemo.ui.replay.routes import OPENING
from specdemo.ui.serving import stream
from specdemo.ui.serving.joined import script as joined
from tests.harness.classes import LaneFigures
from tests.harness.ui_classes import Engine, Runs

from ..fakes import engine as scripted
from ..fakes.engine import MARGIN, MEMORY_RATE, PLACEMENT, PRESETS, PROMPTS, Script, asked_by_form
from ..fakes.traces import CORPUS, GREEDY, lines_of
from ..sentences import gist, refuses, telling, tells
from .browser import (
    SHIFTS,
    choose_preset,
    discarded,
    fill,
    granted,
    headline,
    more_settings,
    run,
    sentence,
    serious,
    served_engine,
    settings,
    shared,
    show_recordings,
    tokens_of,
    tokens_shown,
    wait_until,
)
from .conftest import Tabs, Used, Visit, listening, reused, visits

Raced = tuple[Page, list[Entry]]


def test_a_page_on_this_machine_is_known(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    local: list[bool] = []
    play = RaceRun.play
    monkeypatch.setattr(RaceRun, "play", lambda run, engine: local.append(run.local) or play(run, engine))  # type: ignore[func-returns-value]
    run(page, "one two three")
    monkeypatch.setattr("specdemo.ui.runs.is_local", lambda client: client.host != "127.0.0.1")
    run(page)
    wait_until(lambda: local == [True, False])


@pytest.fixture(scope="module")
def ended(tabs: Tabs, used: list[Used], server: tuple[str, Script]) -> Iterator[Raced]:
    url, script = server
    with reused(tabs, used, url) as page:
        run(page, "one two three four five six seven")
        yield page, script.entries


@pytest.fixture
def raced(ended: Raced) -> Raced:
    """A page whose race is over, for tests that only look at it, and the events of the race."""
    page, _ = ended
    page.set_viewport_size({"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    return ended


def test_the_tokens_in_the_page_are_those_of_the_engine(raced: Raced) -> None:
    page, entries = raced
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(entries, lane)
    stats = LaneFigures.of(entry.event for entry in entries if entry.lane == SPECULATIVE)
    legend = dict(zip("arbx", page.locator(".sd-legend li b").all_inner_texts(), strict=True))
    kinds = [code for _, code in tokens_of(entries, SPECULATIVE)]
    assert {code: int(count) for code, count in legend.items()} == {code: kinds.count(code) for code in "arbx"}
    figures = page.locator(".sd-figures dd").all_text_contents()
    assert figures[0] == f"{100 * (stats.acceptance_rate or 0):.0f}%"
    assert figures[1] == f"{100 * (stats.draft_efficiency or 0):.0f}%"
    assert figures[2] == f"{stats.tokens_per_round:.2f}"
    counts = page.locator(".sd-column b").all_text_contents()
    assert [int(count or 0) for count in counts] == [stats.accepted_lengths.get(n, 0) for n in range(5)]
    assert tells(page.locator(".sd-badge").inner_text(), "Same word")
    assert page.locator("[data-lane=speculative] .sd-rate b").inner_text() == f"{stats.tokens_per_second:.1f}"
    assert page.locator(".sd-ratio").inner_text().endswith("×")
    assert tells(sentence(page), "2.6 tokens")


def test_the_numbers_behind_the_verdict_are_there_for_those_who_ask(raced: Raced) -> None:
    page, entries = raced
    behind = page.locator("#race .sd-behind")
    numbers = behind.locator("[data-part=numbers]")
    place = (
        "['.sd-board', '.sd-lanes'].map((part) => document.querySelector(`#race ${part}`).getBoundingClientRect().top)"
    )
    behind.locator("summary").scroll_into_view_if_needed()
    before = page.evaluate(place)
    behind.locator("summary").click()
    assert page.evaluate(place) == before  # it opens below what one reads
    shown = dict(zip(numbers.locator("dt").all_inner_texts(), numbers.locator("dd").all_inner_texts(), strict=True))
    plain, drafted = (LaneFigures.of(e.event for e in entries if e.lane == lane) for lane in (PLAIN, SPECULATIVE))
    environment = {"placement": PLACEMENT, "memory_rate": MEMORY_RATE}
    found = LaneVerdict(plain, drafted, DraftedLane("prompt-lookup", 4), environment=environment)
    assert shown == dict(found.as_dict()["numbers"])
    assert tells(sentence(page), f"{found.tokens:.1f} tokens target")


def test_what_the_sliders_compute_is_the_formula_of_the_theory(raced: Raced) -> None:
    page, _ = raced
    grid = [
        {"k": k, "acceptance": alpha, "draft": draft, "row": row, "at_once": at_once}
        for k in (1, 2, 4, 16)
        for alpha in (0.0, 0.3, 0.77, 1.0)
        for draft in (0.0, 0.08, 1.0)
        for row in (0.0, 0.05, 0.4)
        for at_once in (False, True)
    ]
    formula = f"{joined('race/why.js')} return grid.map(modules['race/why.js'].computed);"
    kept = "const kept = window.specdemo; try {"  # the script makes one of its own
    computed = page.evaluate(f"grid => {{ {kept} {formula} }} finally {{ window.specdemo = kept; }} }}", grid)
    for values, found in zip(grid, computed, strict=True):
        k, alpha, row = int(values["k"]), values["acceptance"], values["row"]
        costs = Costs(values["draft"], [1 + row * i for i in range(k + 1)], bool(values["at_once"]))
        expected = expected_tokens(alpha, k), costs.round(k), theory_speed_up(alpha, k, costs)
        assert [found[name] for name in ("tokens", "round", "speedUp")] == pytest.approx(expected)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_sliders_start_from_the_race_and_change_the_sentence_at_once(raced: Raced, width: int) -> None:
    page, entries = raced
    page.set_viewport_size({"width": width, "height": 900})
    plain, drafted = (LaneFigures.of(e.event for e in entries if e.lane == lane) for lane in (PLAIN, SPECULATIVE))
    formula = LaneVerdict(plain, drafted, DraftedLane("prompt-lookup", 4)).formula
    assert formula is not None
    why = page.locator("#race .sd-why-pass")
    above = (
        "[...document.querySelectorAll('#race :is(.sd-board, .sd-lanes, .sd-why-pass)')].map((part) => part.offsetTop)"
    )
    before = page.evaluate(above)
    why.locator("summary").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(above) == before  # it opens below what one reads
    sliders = [why.locator(f"[data-part={name}]") for name in ("k", "acceptance", "draft")]
    shown = [float(slider.input_value()) for slider in sliders]
    assert shown == pytest.approx([formula[name] for name in ("k", "acceptance", "draft")], abs=0.005)
    claim = why.locator("[data-part=claim]")
    assert tells(claim.inner_text(), f"{formula['k']}, Computed not measured")
    assert tells(
        why.locator("[data-part=whose]").inner_text(), f"{page.locator('#race .sd-ratio').inner_text()} writing"
    )
    sliders[0].focus()
    for key, k in (("End", 16), ("ArrowLeft", 15), ("Home", 1)):
        page.keyboard.press(key)
        tokens = expected_tokens(shown[1], k)
        speed = tokens / (1 + k * (shown[2] + formula["row"]))
        assert tells(claim.inner_text(), f"{k}, {tokens:.2f} {speed:.2f} Computed not measured")
        assert why.locator("[data-part=computed]").inner_text() == f"{speed:.2f}×"
        bars = [bar["width"] for bar in map(Locator.bounding_box, why.locator("[data-part=lines] i").all()) if bar]
        assert bars[0] / bars[1] == pytest.approx(speed, rel=0.02)  # to scale
    for slider in sliders:
        slider.press("End")
    assert tells(claim.inner_text(), "slower") == (17 / (1 + 16 * (1 + formula["row"])) < 1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for dark in (False, True):
        if dark:
            page.click(".sd-dark")
        assert serious(page, "#race .sd-why-pass") == []
    page.click(".sd-dark")
    why.locator("summary").click()
    page.evaluate("specdemo.race.charts.onePass.start(specdemo.race.show.end)")


def test_three_figures_each_have_a_sentence(raced: Raced) -> None:
    page, entries = raced
    plain, drafted = (LaneFigures.of(e.event for e in entries if e.lane == lane) for lane in (PLAIN, SPECULATIVE))
    found = LaneVerdict(plain, drafted, DraftedLane("prompt-lookup", 4))
    assert found.draft_cost is not None
    assert found.check_cost is not None
    speeds = page.locator("#race .sd-speed").inner_text().replace("\n", " ")
    assert speeds.startswith(f"{found.speed_up:.2f}× writing, {found.in_all:.2f}× in all")
    assert tells(headline(page), f"gives {found.tokens:.1f} tokens takes {found.tokens / found.speed_up:.2f} times")
    page.evaluate("specdemo.race.parts.behind.open = true")
    chips, tip = page.locator("#race .sd-fact"), page.locator(".sd-tip.open")
    longer = max(found.check_cost - 1, 0)
    for chip, value, name, words in zip(
        chips.all(),
        (f"{found.tokens:.1f}", f"+{found.draft_cost:.0%}", f"+{longer:.0%}"),
        ("tokens pass", "pass draft", "pass check"),
        ("drafter, 1", "time alone", "Checking draft"),
        strict=True,
    ):
        assert chip.inner_text().startswith(f"{value} ")
        assert tells(chip.inner_text(), name)
        chip.focus()
        assert value.removeprefix("+") in tip.inner_text()
        assert tells(tip.inner_text(), words)
    page.keyboard.press("Escape")


@pytest.mark.slow
def test_what_is_measured_before_a_race_is_told(page: Page, script: Script) -> None:
    run(page, "one two three")
    script.says = "measuring 7"
    script.gate.clear()
    try:
        run(page, "one two three", until="loading")
        expect(page.locator(".sd-sentence")).to_contain_text(telling("Measuring 7"))
        assert tells(page.locator(".sd-model").inner_text(), "Measuring 7")
    finally:
        script.gate.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert page.locator(".sd-model").inner_text() == "Scripted 135M"


PAINTED = """([lane, stacks]) => {  // the passes of a lane's strip, and how many squares stand above each
    const { passes, scale, canvas, height: whole } = specdemo.race.lanes[lane].strip, base = whole - 8;
    const dots = window.devicePixelRatio, brush = canvas.getContext("2d");
    const { data, width } = brush.getImageData(0, 0, canvas.width, canvas.height);
    const opaque = (x, y) => data[4 * (Math.floor(y * dots) * width + Math.floor(x * dots)) + 3] > 0;
    return passes.map(({ reads, to }, at) => {
        const x = reads * scale + 0.5, height = Math.min(4, base / stacks[at]);
        const squares = Array.from({ length: stacks[at] + 1 }, (_, i) => opaque(x, base - (i + 0.5) * height));
        return [to - reads, opaque(x, base + 4), squares.lastIndexOf(true) + 1];
    });
}"""


def test_the_strip_shows_every_pass_to_scale_with_its_tokens_and_opens_its_round(page: Page, script: Script) -> None:
    settings(page)
    page.check("#auto input")
    fill(page, max_new_tokens=40)
    run(page, "one two three four five six seven")
    scales = set()
    for lane in (PLAIN, SPECULATIVE):
        rounds = [e.event for e in script.entries if e.lane == lane and isinstance(e.event, Round)]
        discarded = [[t for t in e.drafted if t.outcome is not DraftOutcome.ACCEPTED] for e in rounds]
        stacks = [len(left) + len(e.emitted) for left, e in zip(discarded, rounds, strict=True)]
        painted = page.evaluate(PAINTED, [lane, stacks])
        assert [stack for _, _, stack in painted] == stacks
        assert all(block for _, block, _ in painted)
        widths = [event.seconds - (event.draft_seconds or 0) for event in rounds]
        assert [width for width, _, _ in painted] == pytest.approx(widths, abs=1e-4)
        scales.add(page.evaluate("lane => specdemo.race.lanes[lane].strip.scale", lane))
    assert len(scales) == 1
    third = page.evaluate(
        "(({ passes, scale }) => (passes[2].to - 1e-4) * scale)(specdemo.race.lanes.speculative.strip)"
    )
    page.locator("[data-lane=speculative] .sd-strip").click(position={"x": third, "y": 42})
    page.locator(".sd-replay .sd-step:not([hidden])").wait_for()
    assert page.evaluate("specdemo.replay.step.at") == 2


def test_a_difference_is_shown_with_its_place_and_gap(page: Page, script: Script) -> None:
    script.differ_at = 5
    run(page, "one two three four five six seven")
    assert tells(page.locator(".sd-badge").inner_text(), "First 6 difference")
    assert "near-tie" in page.locator(".sd-why-exact").inner_text()
    parted = page.locator("#race .parted").evaluate_all(
        """tokens => tokens.map((token) => {
            const [pane, text] = [".sd-pane", ".sd-text"].map((part) => token.closest(part));
            const [seen, box] = [pane, token].map((part) => part.getBoundingClientRect());
            const place = [...text.querySelectorAll(".tok:not(.x, .u)")].indexOf(token);
            const margin = getComputedStyle(token, "::after").content;
            return [place, margin, seen.top <= box.top && box.bottom <= seen.bottom];
        })"""
    )
    assert parted == [[5, f'"{MARGIN:.2g} apart"', True]] * 2
    ticks = [lane["ticks"] for lane in page.evaluate(ALIGNED)]
    assert ticks[0] == ticks[1] < page.evaluate(ALIGNED)[0]["lines"]


def test_above_temperature_zero_the_badge_follows_the_rule(page: Page, script: Script) -> None:
    fill(page, temperature=0.8)
    for same_draws, differ_at, words in (
        (True, None, "Same word"),
        (True, 1, "difference 2"),
        (False, 1, "Different distribution"),
        (False, None, "Same distribution"),
    ):
        page.locator("#match input").set_checked(same_draws)
        script.differ_at = differ_at
        run(page, "one two")
        assert tells(page.locator(".sd-badge").inner_text(), words)
        assert page.locator("#race [data-proof]").count() == same_draws


def test_same_draws_can_be_chosen_above_temperature_0_only(page: Page, script: Script) -> None:
    settings(page)
    expect(page.locator("#match")).to_be_hidden()
    page.locator("#temperature input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#match")).to_be_visible()
    page.locator("#match input").uncheck()
    run(page, "one")
    assert script.settings[-1].rule == "rejection"
    page.locator("#match input").check()
    page.locator("#temperature input[type=range]").focus()
    page.keyboard.press("Home")
    expect(page.locator("#match")).to_be_hidden()


def test_whatever_is_typed_or_generated_is_shown_literally(page: Page, script: Script) -> None:
    prompt = " ".join(CORPUS)
    settings(page)
    page.fill("#max-new-tokens input", str(len(prompt)))
    run(page, prompt)
    shown = "".join(text for text, code in tokens_shown(page, PLAIN) if code not in "xu")
    assert all(text in shown for text in CORPUS)
    assert tokens_shown(page, SPECULATIVE) == tokens_of(script.entries, SPECULATIVE)
    assert page.evaluate("window.pwned === undefined")
    assert page.locator(".sd-text img, .sd-text script").count() == 0
    page.locator("[data-lane=plain] .tok").first.hover()
    assert page.locator(".sd-tip img").count() == 0
    assert page.evaluate("window.pwned === undefined")


def test_the_tooltip_tells_a_tokens_test(page: Page, script: Script) -> None:
    fill(page, temperature=0.5)
    page.uncheck("#match input")
    run(page, "one two three four five six seven")
    discarded(page, "x", 1).hover()
    tip = page.locator(".sd-tip")
    assert tip.locator(".sd-tip-head").inner_text().split("\n") == ["rejected", '" wrong"']
    place, *chances, draw = tip.locator("dd").all_inner_texts()
    assert re.findall(r"\d+", place) == ["2", "2", "4"]
    assert chances == ["0.125p", "0.500q", "0.250min(1, p/q)"]
    assert re.fullmatch(r"0\.750not\b.*rejected", draw)
    discarded(page, "u").click()
    assert tip.locator("dd").all_inner_texts()[-1] == "not used"
    page.locator("[data-lane=speculative] .tok.b").first.hover()
    assert tells(tip.inner_text().lower(), "guess accepted")


def test_under_the_match_rule_the_tooltip_tells_what_the_target_drew(raced: Raced) -> None:
    page, _ = raced
    tip = page.locator(".sd-tip")
    discarded(page, "x", 1).hover()
    drawn = page.locator("[data-lane=speculative] .tok.r").nth(1).inner_text()
    facts = tip.locator("dd").all_inner_texts()
    assert facts[:3] == ["2guess 2 of 4", "0.125p", "0.500q"]
    assert facts[3].startswith(json.dumps(drawn))
    assert tells(facts[3], "another rejected")
    page.locator("[data-lane=speculative] .tok.a").first.hover()
    assert tells(tip.locator("dd").all_inner_texts()[-1], "same accepted")
    assert not {"min(1", "Draw"} & set(tip.inner_text().split())
    for height in (900, 560):  # it never lies over the line of its token
        page.set_viewport_size({"width": 1280, "height": height})
        for token in page.locator("[data-lane=speculative] .sd-rd > .tok").all()[::5]:
            token.scroll_into_view_if_needed()
            lines, top, bottom = token.evaluate(
                """async (token) => {
                    await new Promise((done) => setTimeout(done, 60));  // scrolling, which may go on here, hides it
                    token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
                    const { top, bottom } = document.querySelector(".sd-tip.open").getBoundingClientRect();
                    return [[...token.getClientRects()].map((box) => [box.top, box.bottom]), top, bottom];
                }"""
            )
            assert 0 <= top < bottom <= height
            assert all(bottom <= line_top or top >= line_bottom for line_top, line_bottom in lines)


def test_the_tooltip_fits_a_phone(raced: Raced) -> None:
    page, _ = raced
    page.set_viewport_size({"width": 390, "height": 900})
    left, right = discarded(page, "x").evaluate(
        """token => {  // at once, because scrolling, which may go on here, hides it
            token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            const { left, right } = document.querySelector(".sd-tip.open").getBoundingClientRect();
            return [left, right];
        }"""
    )
    assert 0 <= left < right <= 390


def test_tokens_can_be_read_with_the_arrow_keys(raced: Raced) -> None:
    page, _ = raced
    page.locator("[data-lane=speculative] .sd-pane").focus()
    for key in ("h", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.textContent") == WRONG_TOKEN
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "sd-tooltip"
    assert page.locator(".sd-tip.open .sd-tip-head span").inner_text() == "rejected"
    page.keyboard.press("Escape")
    assert page.locator(".sd-tip.open").count() == 0
    page.keyboard.press("h")


def test_stop_stops_and_the_next_run_works(page: Page, script: Script) -> None:
    script.pace = 0.01
    fill(page, max_new_tokens=2000)
    run(page, "one two three", until="running")
    page.locator("[data-lane=speculative] .tok").nth(5).wait_for()
    began = time.monotonic()
    page.click("#stop")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert time.monotonic() - began < 5
    assert headline(page).startswith("Stopped.")
    assert tells(page.locator(".sd-badge").inner_text(), "Same text")
    assert script.open_races == 0
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)
    script.pace = 0
    fill(page, max_new_tokens=8)
    run(page)
    assert len(tokens_shown(page, PLAIN)) == 8


def test_a_failure_is_told_and_the_next_run_works(page: Page, script: Script) -> None:
    for failure, words in (
        (MemoryError("Too little for 7."), "Too 7."),
        (KeyError("<b>x</b>"), "Something engine: KeyError."),
    ):
        script.fail_at, script.failure = 9, failure
        run(page, "one two three", until="failed")
        assert tells(sentence(page), words)
        assert "<b>" not in sentence(page)
        assert script.open_races == 0
        script.fail_at = None
        run(page)
        assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


def test_what_a_lost_connection_missed_is_asked_for(
    page: Page, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.pace = 0.01
    whole, connections = stream._events, []

    async def broken(run: RaceRun, first: int) -> AsyncIterator[str]:
        """Each connection is lost after three messages."""
        connections.append(first)
        yield "retry: 10\n\n"
        async for message in whole(run, first):
            yield message
            if message.startswith(f"id: {first + 2}\n"):
                return

    monkeypatch.setattr(stream, "_events", broken)
    fill(page, max_new_tokens=60)
    page.evaluate("specdemo.LOST_MS = 500")  # which is for one loss, not for all of them together
    run(page, "one two three")
    page.evaluate("specdemo.LOST_MS = 15_000")
    assert connections[:3] == [0, 3, 6]
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)


@pytest.mark.slow
@pytest.mark.parametrize("forgive", ["ERR_FAILED"])
@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_is_lost_during_a_race_is_told(
    page: Page, script: Script, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    script.pace = 0.01
    whole, forgotten = stream._events, list[str]()

    async def broken(run: RaceRun, first: int) -> AsyncIterator[str]:
        yield "retry: 10\n\n"
        async for message in whole(run, first):
            yield message
            if '"lanes"' in message:
                forgotten.append(run.id)
                return

    fill(page, max_new_tokens=2000)
    page.evaluate("specdemo.LOST_MS = 500")
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_events", broken)
        if answers:  # as one that was started anew does: it knows nothing of this run
            find = Runs.find
            patch.setattr(Runs, "find", lambda runs, kind, run: None if run in forgotten else find(runs, kind, run))
        else:
            page.route("**/races/*", lambda route: route.abort() if asked(route.request.url) else route.continue_())
        addresses: list[str] = []

        def asked(address: str) -> bool:
            addresses.append(address)
            return addresses.count(address) > 1

        run(page, "one two three", until="failed")
    assert tells(sentence(page), "The Try reached")
    assert page.locator(".sd-ratio").inner_text() == "–"
    page.unroute_all()
    wait_until(lambda: script.open_races == 0)  # nobody shows it any more
    page.evaluate("specdemo.LOST_MS = 15_000")
    fill(page, max_new_tokens=5)
    run(page)
    assert len(tokens_shown(page, PLAIN)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("forgive", ["ERR_FAILED"])
def test_giving_a_race_up_does_not_stop_the_next_one(page: Page, script: Script) -> None:
    """What the page sends to give the first race up arrives during the second."""
    fill(page, max_new_tokens=5)
    page.evaluate("specdemo.LOST_MS = 100")
    late: list[Route] = []

    def is_late(request: Request) -> bool:
        return request.method == "POST" and not {"join", "run"} & {*urlsplit(request.url).path.split("/")}

    script.gate.clear()
    page.route("**/races/*", lambda route: route.abort())
    page.route("**/gradio_api/**", lambda route: late.append(route) if is_late(route.request) else route.fallback())
    with page.expect_request(is_late):
        run(page, "one two three", until="failed")
    page.unroute("**/races/*")
    page.evaluate("specdemo.LOST_MS = 15_000")
    script.gate.set()
    wait_until(lambda: script.ended_races == 1)
    script.gate.clear()
    while script.open_races == 0:  # Gradio does not take it before it knows that the first has ended
        page.click("#run")
        page.wait_for_timeout(50)
    for route in late:
        with page.expect_response(route.request.url):
            route.continue_()
    script.gate.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert not headline(page).startswith("Stopped.")
    assert len(tokens_shown(page, PLAIN)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("forgive", ["500"])
def test_a_race_that_gradio_cannot_run_is_told(page: Page, script: Script) -> None:
    fill(page, max_new_tokens=5)
    page.route("**/queue/join*", lambda route: route.fulfill(status=500, json={"detail": "no room"}))
    run(page, "one two three")
    assert tells(sentence(page), "The race could")
    page.unroute_all()
    page.click("#run")
    expect(page.locator("#race .sd-tokens").first).to_have_text("5 of 5 tokens")


def test_the_trace_can_be_downloaded_and_read_back(page: Page, script: Script) -> None:
    more_settings(page)
    page.fill("#seed input", "7")
    run(page, 'say "../../etc" </b>')
    with page.expect_download() as download:
        shared(page, "trace")
    assert download.value.suggested_filename == "specdemo-trace.jsonl"
    header, entries = read_trace(download.value.path().read_text(encoding="utf-8").splitlines())
    assert entries == script.entries
    assert header["prompt"] == 'say "../../etc" </b>'
    assert (header["preset"], header["drafter"], header["settings"]["seed"]) == ("scripted", "prompt-lookup", 7)
    assert header["isolated"] is False
    assert {"weights", "environment", "raw"} <= set(header)


@pytest.mark.slow
@pytest.mark.parametrize("forgive", ["Failed to"])  # fetch, or load, what is asked for without a connection
def test_a_trace_that_is_gone_leaves_the_result(page: Page, script: Script) -> None:
    run(page, "one two")
    found = sentence(page)
    page.evaluate("specdemo.race.traceRun = 'another'")
    page.click(".sd-share-open")
    page.click(".sd-trace")
    gone = page.locator(".sd-share [role=alert]")  # below the buttons
    expect(gone).to_contain_text(telling("longer kept"))
    page.context.set_offline(True)
    page.click(".sd-trace")
    expect(gone).to_contain_text(telling("server reached"))
    expect(gone).to_be_in_viewport()
    page.keyboard.press("Escape")
    assert sentence(page) == found
    assert tells(page.locator(".sd-badge").inner_text(), "Same word")


def test_what_was_thrown_away_is_not_copied(raced: Raced) -> None:
    page, entries = raced
    kept = [text for text, code in tokens_of(entries, SPECULATIVE) if code not in "xu"]
    copied = page.evaluate(
        "() => { const s = getSelection(); s.selectAllChildren(document.querySelector"
        "('#race [data-lane=speculative] .sd-text')); return s.toString(); }"
    )
    assert copied.split() == "".join(kept).split()


# Each emitted token of a lane: where its first line begins in its text; how many lines it has, and how many ticks.
ALIGNED = """() => [...document.querySelectorAll('#race .sd-lane')].map((lane) => {
    const text = lane.querySelector('.sd-text');
    const box = text.getBoundingClientRect();
    const places = [...text.querySelectorAll('.tok:not(.x, .u)')].map((token) => {
        const [first] = token.getClientRects();
        return [token.textContent, Math.round(first.left - box.left), Math.round(first.top - box.top)];
    });
    const ticks = getComputedStyle(text, '::after').content.split('✓').length - 1;
    return { places, lines: new Set(places.map(([, , top]) => top)).size, ticks };
})"""


@pytest.mark.parametrize("width", [1280, 390])
def test_at_the_finish_both_texts_break_their_lines_alike_and_each_has_a_tick(raced: Raced, width: int) -> None:
    page, entries = raced
    page.set_viewport_size({"width": width, "height": 900})
    plain, drafted = page.evaluate(ALIGNED)
    assert len(plain["places"]) == len([code for _, code in tokens_of(entries, PLAIN)])
    assert plain["places"] == drafted["places"]
    assert plain["lines"] > 1
    assert {lane[name] for lane in (plain, drafted) for name in ("lines", "ticks")} == {plain["lines"]}
    assert page.locator("#race [data-lane=speculative] .tok.x:visible").count() == 0
    page.keyboard.press("h")
    assert page.evaluate(ALIGNED)[1]["places"] != drafted["places"]
    page.keyboard.press("h")


def test_at_the_finish_the_panes_scroll_together(raced: Raced) -> None:
    page, _ = raced
    page.set_viewport_size({"width": 390, "height": 700})
    tops = "[...document.querySelectorAll('#race .sd-pane')].map((pane) => pane.scrollTop)"
    for lane, top in ((SPECULATIVE, 30), (PLAIN, 12), (SPECULATIVE, 30), (SPECULATIVE, 0)):
        page.locator(f"#race [data-lane={lane}] .sd-pane").evaluate("(pane, top) => { pane.scrollTop = top; }", top)
        page.wait_for_function(f"{tops}.join() === '{top},{top}'")


def test_guesses_are_hidden_at_the_finish_and_shown_where_one_points_or_by_a_key(raced: Raced) -> None:
    page, _ = raced
    rejected, untested = (page.locator(f"[data-lane=speculative] .tok.{code}").first for code in "xu")
    assert (rejected.is_visible(), untested.is_visible()) == (False, False)
    for code, token in (("x", rejected), ("u", untested)):
        before = page.evaluate(ALIGNED)
        discarded(page, code)
        assert token.is_visible()
        assert page.evaluate(ALIGNED) == before  # it moves nothing
    page.mouse.move(0, 0)
    page.keyboard.press("h")
    assert (rejected.is_visible(), untested.is_visible()) == (True, False)
    page.keyboard.press("h")
    assert rejected.is_visible() is False


def test_several_readers_are_a_wall_of_lanes_with_and_without_the_drafter(page: Page, script: Script) -> None:
    script.pace = 0.005
    fill(page, max_new_tokens=24)
    more_settings(page)
    page.locator("#readers input[value='4']").check()
    boxes = "[...document.querySelectorAll('#race :is(.sd-board, .sd-wall)')].map(b => b.offsetTop)"
    run(page, "one two three four five six seven", until="running")
    before = page.evaluate(boxes)
    page.locator("#race .sd-arena[data-state=ended]").wait_for()
    assert page.evaluate(boxes) == before
    blocks = page.locator("#race .sd-block")
    groups = [[f"{who} {reader}" for reader in (1, 2, 3, 4)] for who in ("alone", "prompt-lookup")]
    for block, names in zip(blocks.all(), groups, strict=True):
        lanes = block.locator(".sd-lane")
        assert lanes.evaluate_all("lanes => lanes.map(lane => lane.dataset.lane)") == names
        for name in names:
            assert tokens_shown(page, f"'{name}'") == tokens_of(script.entries, name)
        each = ReaderFigures.of_lanes(names, ((entry.lane, entry.event) for entry in script.entries))
        rate = each.tokens_per_second or 0.0
        shown = [float(number) for number in block.locator("header b").all_inner_texts()[:2]]
        assert shown == [round(4 * rate, 1 if 4 * rate < 100 else 0), round(rate, 1)]
        rounds = [entry.event for entry in script.entries if entry.lane in names and isinstance(entry.event, Round)]
        place = groups.index(names)
        passes = page.evaluate(
            f"specdemo.race.wall.blocks[{place}].strip.passes.map(({{ codes, lanes }}) => [codes, lanes.length])"
        )
        assert max(readers for _, readers in passes) == 4  # one block for a pass that all of them share
        assert sum(readers for _, readers in passes) == len(rounds)
        kept = [code for codes, _ in passes for code in codes if code != "-"]
        assert len(kept) == sum(len(event.emitted) for event in rounds)
        assert all(codes == sorted(codes, key="-".__eq__) for codes, _ in passes)
        assert block.locator("> .sd-strip canvas").evaluate("canvas => canvas.width") > 0
    assert lanes.first.locator("h2").inner_text() == "1. one two three four five six seven"
    assert tells(sentence(page), "4 prompt-lookup")
    assert tells(sentence(page), "4 instead")
    assert tells(page.locator(".sd-why-exact").inner_text(), "4 exactly")
    badge = page.locator("#race .sd-badge").inner_text()
    assert tells(badge, "Same word")
    spoken = page.locator(".sd-spoken").text_content() or ""
    assert spoken.endswith(f". {headline(page)} {badge}. {sentence(page)}")
    lanes.first.locator(".sd-pane").focus()
    expect(lanes.first.locator(".sd-pane")).to_be_focused()
    for width, columns in ((1280, 4), (390, 2)):
        page.set_viewport_size({"width": width, "height": 900})
        tops = page.locator("#race .sd-wall .sd-lane").evaluate_all(
            "lanes => lanes.map(lane => lane.getBoundingClientRect().top)"
        )
        assert tops.count(tops[0]) == columns
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator("#readers input[value='1']").check()
    run(page, "one two")
    assert page.locator("#race .sd-lane").evaluate_all("lanes => lanes.map(lane => lane.dataset.lane)") == [
        PLAIN,
        SPECULATIVE,
    ]


@pytest.mark.slow
def test_a_wall_that_was_stopped_can_be_replayed(page: Page, script: Script) -> None:
    script.pace = 0.01
    fill(page, max_new_tokens=500)
    more_settings(page)
    page.locator("#readers input[value='2']").check()
    run(page, "one two three", until="running")
    page.locator("[data-lane='prompt-lookup 2'] .tok.a").nth(9).wait_for()
    figures, counts = page.locator("#race .sd-figures dd"), page.locator("#race .sd-column b")
    times = page.locator("#race .sd-time b")
    page.click("#race .sd-behind summary")
    expect(figures.first).to_have_text(re.compile(r"^\d+%$"))
    shown = [*counts.all_inner_texts(), *times.all_inner_texts()]
    assert any(text.isdigit() for text in shown)
    assert not any(text in ("–", "0.00 s") for text in shown)
    rounds = sum(int(text or 0) for text in counts.all_inner_texts())
    columns = "[...document.querySelectorAll('#race .sd-column b')]"
    page.wait_for_function(f"before => {columns}.reduce((sum, b) => sum + +b.textContent, 0) > before", arg=rounds)
    expect(page.locator("#race .sd-arena")).to_have_attribute("data-state", "running")
    page.click("#stop")
    page.locator("#race .sd-arena[data-state=ended]").wait_for()
    assert headline(page).startswith("Stopped.")
    page.click("#race .sd-again")
    replay = page.locator("#replay")
    expect(replay.locator(".sd-play")).to_be_enabled()
    page.keyboard.press("Escape")  # closes the round that it opens with
    replay.locator(".sd-play").focus()
    page.keyboard.press("End")
    expect(replay).to_contain_text(telling("both readers"))
    assert replay.locator(".sd-lane").evaluate_all("lanes => lanes.map(lane => lane.dataset.lane)") == [
        *("alone 1", "alone 2", "prompt-lookup 1", "prompt-lookup 2")
    ]


@pytest.mark.slow
def test_one_lane_after_the_other(visit: Visit, script: Script) -> None:
    script.pace = 0.01
    page = visit("?order=isolated&max_new_tokens=2000")
    run(page, "one two three", until="running")
    page.locator("[data-lane=plain] .tok").nth(5).wait_for()
    page.click("#stop")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    first = page.locator("#race .sd-figures")
    expect(first).to_contain_text(re.compile(r"alone\s*30 ms\D*drafted\s*–"))
    script.pace = 0
    fill(page, max_new_tokens=24)
    run(page)
    lanes = [entry.lane for entry in script.entries]
    assert lanes == sorted(lanes)
    assert {*lanes} == {PLAIN, SPECULATIVE}
    assert tokens_shown(page, SPECULATIVE) == tokens_of(script.entries, SPECULATIVE)


def test_a_load_is_not_waited_for_once_stop_was_pressed(page: Page, script: Script) -> None:
    script.forget()
    script.loading.clear()
    script.begin()
    run(page, "one two three", until="loading")
    page.click("#stop")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert tells(sentence(page), "Stopped before began")
    script.loading.set()
    run(page)
    assert len(tokens_shown(page, PLAIN)) == 24


@pytest.mark.slow
def test_two_visitors_do_not_mix(page: Page, other: Page, script: Script) -> None:
    script.gate.clear()
    first, second = page, other
    fill(first, max_new_tokens=40)
    fill(second, max_new_tokens=30)
    first.fill("#prompt textarea", "alpha beta gamma")
    first.click("#run")
    wait_until(lambda: script.open_races == 1)
    run(second, "delta epsilon", until="waiting")
    assert sentence(second).startswith("Waiting")
    script.gate.set()
    first.locator(".sd-arena[data-state=ended]").wait_for()
    second.locator(".sd-arena[data-state=ended]").wait_for()
    assert len(tokens_shown(first, PLAIN)) == 40
    assert len(tokens_shown(second, PLAIN)) == 30
    assert "".join(text for text, _ in tokens_shown(first, PLAIN)).startswith("alpha beta gammaalpha")
    assert "".join(text for text, _ in tokens_shown(second, PLAIN)).startswith("delta epsilondelta")
    assert tokens_shown(first, SPECULATIVE) == tokens_of(script.races[0], SPECULATIVE)
    assert tokens_shown(second, SPECULATIVE) == tokens_of(script.races[1], SPECULATIVE)
    assert first.evaluate("specdemo.race.run") != second.evaluate("specdemo.race.run")


def test_stop_also_takes_back_a_run_that_is_still_waiting(page: Page, other: Page, script: Script) -> None:
    script.gate.clear()
    first, second = page, other
    for visitor in (first, second):
        fill(visitor, max_new_tokens=6)
    first.fill("#prompt textarea", "alpha beta")
    first.click("#run")
    wait_until(lambda: script.open_races == 1)
    run(second, "gamma delta", until="waiting")
    second.click("#stop")
    second.locator(".sd-arena[data-state=ended]").wait_for()
    assert sentence(second) == "Stopped."
    script.gate.set()
    first.locator(".sd-arena[data-state=ended]").wait_for()
    assert len(tokens_shown(first, PLAIN)) == 6
    assert len(script.races) == 1
    assert "gamma" not in "".join(text for text, _ in tokens_shown(second, PLAIN))
    run(second)
    assert len(tokens_shown(second, PLAIN)) == 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", ["run/predict", "queue/join"])
def test_stop_takes_back_a_run_before_the_page_hears_that_it_is_in_the_line(
    page: Page, script: Script, asked: str
) -> None:
    """The first answer says that the form is in order, the second that the run is in the line."""
    fill(page, max_new_tokens=200)
    late: list[tuple[Route, APIResponse]] = []
    page.route(f"**/{asked}*", lambda route: late.append((route, route.fetch())))
    script.gate.clear()
    page.fill("#prompt textarea", "gamma delta")
    with page.expect_request(f"**/{asked}*"):
        run(page, until="waiting")
    while not late:  # which Playwright fills while it waits
        page.wait_for_timeout(20)
    if asked == "queue/join":
        wait_until(lambda: script.open_races == 1)
    page.click("#stop")
    assert sentence(page) in ("Stopped.", "Stopping.")
    for route, answer in late:
        route.fulfill(response=answer)
    page.wait_for_timeout(300)
    page.unroute_all()
    script.gate.set()
    wait_until(lambda: script.open_races == 0)
    assert all(len(tokens_of(race, PLAIN)) < 200 for race in script.races)
    fill(page, max_new_tokens=5)
    run(page, "alpha beta")
    assert len(tokens_shown(page, PLAIN)) == 5
    assert "gamma" not in "".join(text for text, _ in tokens_shown(page, PLAIN))


WRONG_TOKEN = " wrong"


@pytest.mark.slow
def test_what_is_sent_for_an_event_is_small(page: Page, script: Script) -> None:
    script.pace = 1 / 400
    fill(page, max_new_tokens=200)
    page.evaluate(
        "() => { const r = specdemo.race, f = r.apply.bind(r); window.sizes = []; "
        "r.apply = m => { window.sizes.push(JSON.stringify(m).length); f(m); }; }"
    )
    run(page, "one two three")
    sizes = page.evaluate("window.sizes")
    page.evaluate("delete specdemo.race.apply")
    events = len(script.entries)
    assert len(sizes) < events, json.dumps([len(sizes), events])
    assert sum(sizes) / events < 250  # of a message there may be many, on a busy machine


# A race is measured at full speed and shown at a pace: the clock, the guesses, the figures of each lane -----

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
MOVED = """
  window.shifts = [];
  new PerformanceObserver((list) => window.shifts.push(...list.getEntries().flatMap((entry) =>
    entry.sources.filter(({ node }) => !(node?.closest ? node : node?.parentElement)?.closest(".sd-text")).map(
      ({ node, previousRect: a, currentRect: b }) => [node?.className, a.x, a.y, b.x, b.y]))))
    .observe({ type: "layout-shift", buffered: false });
"""


def choose_pace(page: Page, pace: str) -> None:
    """As a visitor does who has raced before: until then there is no such choice."""
    page.locator("#race .sd-pace").evaluate(
        "(list, pace) => { list.value = pace; list.dispatchEvent(new Event('change')); }", pace
    )


@pytest.fixture
def first(visit: Visit) -> Open:
    """Opens the page as a new visitor, on a clock that only `tick` moves, unless it is not to be `frozen`."""

    def open_page(query: str = "", pace: str | None = None, frozen: bool = True, **options: Any) -> Page:
        query = f"?prompt={PROMPT.replace(' ', '+')}{query}"
        page = visit(query, motion=True, until="[data-stage=ready]", **options)
        if pace:
            choose_pace(page, pace)
        if frozen:
            page.evaluate(f"() => {{ {CLOCK} }}")
        return page

    return open_page


@pytest.fixture
def moving(page: Page) -> Iterator[Open]:
    """Has a page that tests share show its races on such a clock."""

    def prepare(max_new_tokens: int, pace: str = "slow") -> Page:
        page.emulate_media(reduced_motion="no-preference")
        choose_pace(page, pace)
        page.fill("#prompt textarea", PROMPT)
        fill(page, max_new_tokens=max_new_tokens)
        page.evaluate(f"() => {{ {CLOCK} }}")
        return page

    yield prepare
    page.evaluate("delete performance.now")
    skip = page.locator("#race .sd-skip")
    if skip.is_visible():
        skip.click()
    page.emulate_media(reduced_motion="reduce")


def tick(page: Page, seconds: float) -> None:
    page.evaluate("async (seconds) => { tick(seconds); await frame(); }", seconds)


def shown(page: Page, lane: str) -> int:
    return sum(code not in "xug" for _, code in tokens_shown(page, lane))


def stats_of(script: Script) -> dict[str, LaneFigures]:
    return {
        lane: LaneFigures.of(entry.event for entry in script.entries if entry.lane == lane)
        for lane in (PLAIN, SPECULATIVE)
    }


def large(page: Page, lane: str) -> list[str]:
    return page.locator(f"#race [data-lane={lane}] .sd-large b").all_inner_texts()


def test_the_first_race_is_slow_and_its_figures_are_those_of_the_engine(first: Open, script: Script) -> None:
    page = first("&max_new_tokens=60")
    run(page, until="showing")
    stats = stats_of(script)
    alone, drafted = stats[PLAIN].seconds, stats[SPECULATIVE].seconds
    shown_so_far = page.locator("#race .sd-arena").inner_text()
    assert not any(f"{seconds:.2f}" in shown_so_far for seconds in (alone, drafted))  # its end is not known here
    assert script.open_races == 0  # the engine is free, whatever is still to be shown
    assert tells(page.locator(".sd-scale").inner_text(), f"Slowed {12 / alone:.1f}×. measured")
    tick(page, 6 - page.evaluate("specdemo.race.show.time") * 12 / alone)
    assert page.locator("#race [data-lane=plain] .sd-clock").inner_text() == f"{alone / 2:.2f} s in all"
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
    assert clocks == [f"{lane.seconds:.2f} s in all" for lane in stats.values()]


@pytest.mark.slow
def test_the_chosen_pace_is_remembered_and_real_time_is_the_engines(first: Open, script: Script) -> None:
    page = first("&max_new_tokens=24")
    choose_pace(page, "real")
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
        monkeypatch.setattr("specdemo.ui.engine.pauses", lambda *_: (seconds, 0.0))

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
    assert begins <= begin.seconds
    tick(page, 0.1)
    assert page.evaluate("specdemo.race.show.time") == pytest.approx(begins + 0.1)
    tick(page, stats_of(script)[PLAIN].seconds)
    assert page.locator("#race .sd-arena").get_attribute("data-state") == "ended"
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)


@pytest.mark.slow
def test_there_a_long_race_moves_a_bar_and_can_be_stopped(
    page: Page, script: Script, crowded: Callable[[float], None]
) -> None:
    crowded(0.2)
    script.pace = 0.01
    fill(page, max_new_tokens=2000)
    run(page, "one two three", until="running")
    page.wait_for_function("specdemo.race.parts.measured.value > 0")
    assert tells(sentence(page), "Measuring race")
    assert tokens_shown(page, SPECULATIVE) == []
    page.click("#stop")
    page.locator("#race .sd-arena[data-state=ended]").wait_for()
    assert headline(page).startswith("Stopped. ")
    assert script.open_races == 0
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)


MEASURED = """() => {
    window.seen = [];
    const { race } = specdemo;
    const look = () => race.is("running") && window.seen.push({
        bar: race.parts.measured.hidden ? null : race.parts.measured.value,
        clocks: [...race.root.querySelectorAll(".sd-clock span")].map((clock) => clock.textContent),
        large: race.parts.ratio.textContent,
        tokens: race.root.querySelectorAll(".sd-text .tok").length,
        filled: [...race.root.querySelectorAll(".sd-track i")].map((bar) => bar.style.transform),
    });
    const all = { subtree: true, childList: true, attributes: true, characterData: true };
    new MutationObserver(look).observe(race.root, all);
}"""


def test_while_a_race_is_measured_only_a_bar_moves_and_then_all_tell_the_same_two_figures(
    visit: Visit, script: Script, crowded: Callable[[float], None]
) -> None:
    crowded(0.05)
    script.pace = 0.01
    page = visit(LINK)
    page.evaluate(MEASURED)
    run(page)
    seen = page.evaluate("window.seen")
    bars = [one["bar"] for one in seen if one["bar"]]
    assert bars == sorted(bars)
    assert 0 < bars[0] < bars[-1] <= 4 * 60
    assert {
        (*one["clocks"], one["large"], one["tokens"], *one["filled"]) for one in seen if one["bar"] is not None
    } == {(*"––––", "–", 0, *["scaleX(0)"] * 4)}
    expect(page.locator("#race progress")).to_be_hidden()
    stats = {lane: LaneFigures.of(e.event for e in script.entries if e.lane == lane) for lane in (PLAIN, *LANES)}
    writing, lane = max((speed_up(stats[PLAIN], stats[lane]) or 0, lane) for lane in LANES)
    figures = f"{writing:.2f}× writing, {speed_up_in_all(stats[PLAIN], stats[lane]):.2f}× in all"
    assert page.locator("#race .sd-speed").inner_text().replace("\n", " ").startswith(figures)
    page.evaluate("specdemo.race.parts.behind.open = true")
    heads = page.locator("#race .sd-table thead th").all_inner_texts()
    cells = page.locator("#race .sd-table tbody tr").nth(1 + LANES.index(lane)).locator("td").all_inner_texts()
    table = dict(zip(heads[1:], cells, strict=True))
    assert f"{table['Writing']} writing, {table['In all']} in all" == figures
    clocks = page.locator("#race .sd-clock").all_inner_texts()
    assert clocks == [f"{lane.seconds:.2f} s in all" for lane in stats.values()]
    page.click(".sd-share-open")
    assert (page.locator(".sd-picture").get_attribute("aria-label") or "").startswith(f"{figures}. ")


@pytest.mark.parametrize(("width", "dark"), [pytest.param(1280, False, marks=pytest.mark.slow), (390, True)])
def test_rejected_guesses_stay_beside_their_correction_and_nothing_moves(
    moving: Open, script: Script, width: int, dark: bool
) -> None:
    page = moving(120)
    page.evaluate("Object.assign(specdemo.race.proof, { hidden: false }).hide(false)")  # as on a new page
    page.set_viewport_size({"width": width, "height": 900})
    if dark:
        page.click(".sd-dark")
    page.locator("#race .sd-pane").first.scroll_into_view_if_needed()
    run(page, until="showing")
    tick(page, 1.5)
    page.evaluate(MOVED)
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
            const boxes = (code) => [...pair.querySelector(`:scope > .${code}, .sd-cut > .${code}`).getClientRects()];
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
    show_recordings(page)
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
    assert 0 <= late < 1000
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(script.entries, lane)


# Drafts that branch, on the page: chosen in the form, shown where they were tried, and stepped through ------

TREE = "?drafter=ngram&k=40&tree=true&prompt=one+two+three+four+five&max_new_tokens=24"
LANE = "#race [data-lane=speculative]"


def rounds_of(script: Script) -> list[Round]:
    return [e.event for e in script.entries if e.lane == SPECULATIVE and isinstance(e.event, Round)]


def test_a_tokens_text_is_read_behind_the_one_it_follows() -> None:
    """The bytes of one character on two branches: the text of a token must not depend on the branch before it."""

    class Bytes:
        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", "replace")

    snow, ice = "é".encode(), "è".encode()
    text = LaneText(Bytes(), [*b"one "])
    tree = [(snow[0], -1), (snow[1], 0), (ice[1], 0), (ord("x"), -1)]
    drafted = tuple(DraftedToken(token, DraftOutcome.REJECTED, parent=parent) for token, parent in tree)
    read: Any = text.read(Round(0, drafted, (Token(ord("a"), TokenKind.RESAMPLED),), 0.0, 0.0, 0.0))
    assert [token.text for token in read.drafted] == ["", "é", "è", "x"]


@pytest.mark.slow
def test_a_tree_is_chosen_by_a_link_or_a_box_and_carried_on(visit: Visit, script: Script) -> None:
    page = visit(TREE + "&lane2=prompt-lookup&k2=tree-8&lane3=ngram&k3=2")
    more_settings(page)
    box, k = page.locator("#tree input"), page.locator("#k input[type=number]")
    expect(box).to_be_checked()
    expect(k).to_have_value("40")
    assert granted(page)
    query = parse_qs(urlsplit(page.evaluate("navigator.clipboard.readText()")).query)
    assert (query["tree"], query["k"], query["k2"]) == (["true"], ["40"], ["tree-8"])
    run(page)
    assert (script.settings[-1].tree, script.settings[-1].k) == (True, 40)
    titles = ["Target", "ngram 40", "prompt-lookup 8", "ngram K 2"]
    assert [gist(title) for title in page.locator("#race .sd-lane h2").all_inner_texts()] == titles
    with page.expect_download() as download:
        shared(page, "trace")
    header = json.loads(download.value.path().read_text(encoding="utf-8").partition("\n")[0])
    assert [(lane.get("tree"), lane.get("k")) for lane in header["lanes"][1:]] == [(True, 40), (True, 8), (False, 2)]
    box.uncheck()
    expect(k).to_have_value("16")  # the longest chain
    page.locator("#k input[type=range]").evaluate("range => range.max === '16'")
    box.check()
    page.check("#all-drafters input")
    page.locator("#drafter input").fill("none")
    page.locator("#drafter input").press("Enter")
    expect(box).to_be_disabled()
    expect(box).not_to_be_checked()


@pytest.fixture(scope="module")
def ended_trees(chromium: Browser, tabs: Tabs, server: tuple[str, Script]) -> Iterator[tuple[Page, list[Round]]]:
    url, script = server
    script.reset()
    with visits(chromium, tabs, url) as visit:
        page = visit(TREE + "&temperature=0.5")
        run(page)
        yield page, rounds_of(script)


@pytest.fixture
def raced_trees(ended_trees: tuple[Page, list[Round]], script: Script) -> tuple[Page, list[Round]]:
    """A page whose race of trees is over, and the rounds of the drafted lane."""
    ended_trees[0].get_by_role("tab", name="Race").click()
    return ended_trees


@pytest.mark.slow
def test_what_was_tried_at_a_token_is_shown_where_the_reader_points(raced_trees: tuple[Page, list[Round]]) -> None:
    page, rounds = raced_trees
    assert tells(page.locator(f"{LANE} h2").inner_text(), "ngram, trees 40")
    emitted = page.locator(f"{LANE} .sd-text .tok:is(.a, .r, .b, .t)")
    assert "".join(emitted.all_inner_texts()).startswith("one two three four five")

    page.keyboard.press("h")
    fork = page.locator(f"{LANE} .sd-rd").nth(1).locator(".sd-fork").nth(1)  # one token passed, two failed after it
    ghost, tip = fork.locator(".sd-ghost"), page.locator(".sd-tip.open")
    expect(fork.locator(".sd-cut > .x")).to_be_visible()  # the likelier one
    expect(ghost).to_be_hidden()
    fork.locator(".sd-pair > .r").hover()
    expect(ghost).to_be_visible()
    assert ghost.locator(".tok").count() == 1
    expect(page.locator(f"{LANE} .sd-ghost:visible")).to_have_count(1)  # none of another place
    assert tells(tip.inner_text(), "draft branches")
    last = [token for token in rounds[1].drafted if token.parent == 2]  # after the accepted token
    assert tip.locator(".sd-tree li").count() == len(last) == 2
    assert tip.locator(".sd-tree li").first.locator(".tok").evaluate_all("all => all.map(t => t.classList[1])") == [
        "x",
        "u",
    ]
    assert "min(1, p/q)" not in tip.inner_text()
    page.keyboard.press("Escape")
    page.locator(f"{LANE} .sd-pane").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")  # the first token, then the two of the first round's place
    expect(tip).to_be_visible()
    assert page.evaluate("document.activeElement.closest('.sd-fork') !== null")


def test_a_round_is_stepped_through_as_a_tree(raced_trees: tuple[Page, list[Round]]) -> None:
    page, rounds = raced_trees
    event = rounds[1]  # one token passes, then two fail
    page.locator("#race .sd-again").click()
    page.locator(".sd-step").wait_for()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".sd-steps li")).to_have_text(["draft", "test 1", "test 2", "cache"])
    nodes = page.locator(".sd-step .sd-node")
    assert nodes.count() == len(event.drafted)
    assert codes(page) == [""] * len(event.drafted)
    assert tells(page.locator(".sd-step-words").inner_text(), f"tree {len(event.drafted)} tokens")
    assert "q 0.25" in nodes.first.inner_text()
    page.keyboard.press("ArrowRight")
    assert tells(page.locator(".sd-step-words").inner_text(), "2 accepted")
    assert sorted(codes(page)) == sorted(["a", "x", "u", "", "", "", ""])
    assert "p 0.125" in nodes.first.inner_text()
    page.keyboard.press("ArrowRight")
    assert tells(page.locator(".sd-step-words").inner_text(), "2 drafted")
    assert sorted(codes(page)) == sorted([*(CODES[token.outcome] for token in event.drafted), "r"])
    page.keyboard.press("ArrowRight")
    kept, trimmed = page.locator(".sd-kept").count(), page.locator(".sd-trimmed").count()
    assert (kept, trimmed) == (2, len(event.drafted) - 1)  # the pending token and the one that passed


def codes(page: Page) -> list[str]:
    """What the tree says of each of its nodes."""
    return page.locator(".sd-step .sd-node .sd-chip-of").evaluate_all("all => all.map(chip => chip.classList[2] ?? '')")


@pytest.mark.slow
def test_a_tree_moves_nothing_and_reads_well_on_a_phone(visit: Visit, script: Script) -> None:
    page = visit(TREE, width=390, before=SHIFTS)
    run(page)
    left, right = page.locator(f"{LANE} .sd-fork .tok.r").first.evaluate(
        """token => {  // at once, because scrolling, which may go on here, hides it
            token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            const { left, right } = document.querySelector(".sd-tip.open:has(.sd-tree)").getBoundingClientRect();
            return [left, right];
        }"""
    )
    assert 0 <= left < right <= 390
    page.wait_for_timeout(300)
    assert page.evaluate("window.shifts") == []
    page.locator("#race .sd-again").click()
    page.locator(".sd-play:enabled").wait_for()
    for _ in range(3):
        page.get_by_role("button", name="Next step").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert serious(page) == []


@pytest.mark.slow
def test_a_preset_begins_with_trees_and_goes_on_with_chains_where_there_can_be_none(
    visit: Visit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = replace(PRESETS["other"], defaults=Defaults("prompt-lookup", AUTO, max_new_tokens=24, tree=True))
    monkeypatch.setitem(PRESETS, "other", begun)
    page = visit()
    settings(page)
    more_settings(page)
    box = page.locator("#tree input")
    expect(box).not_to_be_checked()
    choose_preset(page, begun.title)
    expect(box).to_be_checked()
    run(page, "one two three")
    assert (script.settings[-1].tree, script.settings[-1].k) == (True, AUTO)
    assert page.locator(f"{LANE} h2").inner_text() == "With prompt-lookup, trees, K auto"
    script.loads[-1].chains_only = "it is too old"
    run(page, "one two three")
    assert script.settings[-1].tree is False
    assert page.locator(f"{LANE} h2").inner_text() == "With prompt-lookup"
    assert tells(sentence(page), "chains trees")
    call = {"prompt": "one two", "preset": "other", "api_name": "/compare"}
    client = Client(page.url, verbose=False, analytics_enabled=False)
    assert client.predict(**call)["sentence"].endswith("it is too old.")
    script.loads[-1].chains_only = None
    for given, tree in ({}, True), ({"tree": False}, False):
        client.predict(**call, **given)
        assert script.settings[-1].tree is tree
    client.close()


@pytest.mark.slow
def test_a_head_that_is_always_wrong_is_doubted_on_the_page_with_the_causes_in_order(
    visit: Visit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = script.loads[-1]
    monkeypatch.setattr(loaded, "head_formats", {"eagle": "EAGLE-3"})
    monkeypatch.setattr(loaded, "parts", replace(loaded.parts, head_files={"eagle": Path("a head")}))
    page = visit("?drafter=eagle&tree=true&prompt=one+two+three&max_new_tokens=60")
    run(page)
    shown = sentence(page)
    assert tells(shown, "0% EAGLE-3 65% 85%")
    assert shown.endswith(f": {', '.join(CAUSES)}.")


# What the page opens with: a recorded race that explains itself; and the lanes that a visitor adds to a race

HEADER, ENTRIES = read_trace(lines_of(OPENING))
PASSES = {
    lane: LaneFigures.of(entry.event for entry in ENTRIES if entry.lane == lane).rounds + 1
    for lane in (PLAIN, SPECULATIVE)
}
WRONG, RIGHT = "wrong", "right"
SCENES = [  # the round in front of the lanes, its phase, and words of the caption
    (WRONG, "guess", "small, drafter guesses tokens:"),
    (WRONG, "read", "target, whole model, pass. token."),
    (WRONG, "keep", "guess accepted."),
    (WRONG, "replace", "rejected; corrected. untested."),
    (RIGHT, "read", "Another round: drafter pass"),
    (RIGHT, "add", "pass token: bonus."),
    (None, None, "Now race. Alone, fewer."),
    (None, None, "every word, text time"),
]
CAPTIONS = [words for _, _, words in SCENES]
RESULT = f"The {PASSES[SPECULATIVE]} {PASSES[PLAIN]}"
# The clock of the opening is the test's, however busy the machine is.
FRAMES = """() => {
  let now = performance.now();
  performance.now = () => now;
  window.frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  window.tick = (seconds) => { now += 1000 * seconds; window.specdemo.race.opening.tick(); return frame(); };
}"""


@pytest.fixture(scope="module")
def page_of_the_opening(chromium: Browser, tabs: Tabs, server: tuple[str, Script]) -> Iterator[Page]:
    with visits(chromium, tabs, server[0]) as visit:
        page = visit(motion=True, until="#race .sd-arena[data-state=opening]")
        page.evaluate(FRAMES)
        yield page


@pytest.fixture
def opening(page_of_the_opening: Page, script: Script) -> Page:
    """A page that tests share, on which the opening begins again, on a clock that only `tick` moves."""
    page_of_the_opening.set_viewport_size({"width": 1280, "height": 900})
    page_of_the_opening.evaluate("specdemo.race.opening.play(), frame()")
    page_of_the_opening.evaluate(MOVED)
    return page_of_the_opening


def caption(page: Page) -> str:
    return page.locator("#race .sd-sentence").inner_text()


def kinds(page: Page, lane: str = SPECULATIVE) -> str:
    return "".join(code for _, code in tokens_shown(page, lane))


def test_the_recording_is_a_race_of_what_the_form_begins_with() -> None:
    prompts = load_prompts()
    assert HEADER["prompt"] == next(iter(prompts.values()))[0]
    defaults = load_presets()[0][DEFAULT_PRESET].defaults
    assert (HEADER["preset"], HEADER["drafter"]) == (DEFAULT_PRESET, defaults.drafter)
    assert (HEADER["settings"]["k"], HEADER["settings"].get("rule", "match")) == (defaults.k, "match")
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
        page.evaluate(FRAMES)
        page.evaluate(SHIFTS)
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
        page.locator("#race .sd-arena[data-state=opened]").wait_for()
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
    """The tokens, and what became of them, of a round with right guesses, a wrong one and some after it, and of
    one with right ones only."""
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in ENTRIES:
        if entry.lane == SPECULATIVE and isinstance(entry.event, Round):
            tokens = [(text, code) for text, code in tokens_of([entry], SPECULATIVE)]
            written = "".join(code for _, code in tokens)
            if all(text.strip() and "\n" not in text for text, _ in tokens):
                if re.match("a+xu", written):
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
        assert [others for others in CAPTIONS if tells(caption(page), others)] == [words]
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
    assert gist(caption(page)) == RESULT
    expect(page.locator("#race .sd-badge")).to_contain_text(telling("Same word"))
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
        assert tells(caption(page), CAPTIONS[0])
        page.locator("#race .sd-hold").click()
        page.evaluate("tick(1)")
        assert tells(caption(page), CAPTIONS[0])
        page.evaluate("tick(1)")
        assert tells(caption(page), CAPTIONS[1])


def test_it_is_skipped_by_a_button_and_by_a_key_and_shown_again(opening: Page) -> None:
    page = opening
    page.locator("#prompt textarea").focus()
    for skip in (lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Skip").click()):
        skip()
        page.locator("#race .sd-arena[data-state=opened]").wait_for()
        assert gist(caption(page)) == RESULT
        tokens = tokens_of(ENTRIES, SPECULATIVE)
        expect(page.locator("#race [data-lane=speculative] .sd-text .tok")).to_have_count(len(tokens))  # once drawn
        assert tokens_shown(page, SPECULATIVE) == tokens
        page.get_by_role("button", name="Again").click()
        expect(page.locator("#race .sd-sentence")).to_have_text(telling(CAPTIONS[0]))
        assert kinds(page) == "t"


def test_run_ends_it(visit: Visit, script: Script) -> None:
    script.gate.clear()
    page = visit(motion=True, until="#race .sd-arena[data-state=opening]")
    page.evaluate(FRAMES)
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
    expect(page.locator("#race .sd-skip")).to_be_hidden()
    script.gate.set()
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    page.get_by_role("button", name="Skip").click()
    expect(page.locator("#race .sd-arena")).to_have_attribute("data-state", "ended")
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)
    page.evaluate("specdemo.race.opening.timer = null")
    assert tells(sentence(page), "tokens target")


def test_whoever_wants_no_motion_sees_the_end(visit: Visit, script: Script) -> None:
    page = visit()
    page.locator("#race .sd-arena[data-state=opened]").wait_for()
    assert tokens_shown(page, SPECULATIVE) == tokens_of(ENTRIES, SPECULATIVE)
    assert page.evaluate("specdemo.race.opening.timer === undefined")
    page.get_by_role("button", name="Again").click()  # as stills
    expect(page.locator("#race .sd-sentence")).to_have_text(telling(CAPTIONS[0]))
    assert len(tiles(page)) == len(rounds_explained()[WRONG]) - 1
    assert page.evaluate("document.querySelector('#race .sd-figure').getAnimations({subtree: true}).length") == 0
    run(page)
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


def test_a_link_is_not_opened_with_a_recording(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two")
    expect(page.locator("#race .sd-sentence")).to_contain_text(telling("form link."))
    assert page.evaluate("specdemo.race.opening === undefined")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), pytest.param(390, True, marks=pytest.mark.slow)])
def test_nothing_moves_and_axe_finds_nothing_serious(opening: Page, width: int, dark: bool) -> None:
    page = opening
    page.set_viewport_size({"width": width, "height": 900})
    if dark:
        page.click(".sd-dark")
    page.evaluate("specdemo.race.opening.play(), frame()")
    page.evaluate(MOVED)  # from here on
    tops = page.locator("#race .sd-lane").evaluate_all("lanes => lanes.map((lane) => lane.getBoundingClientRect().top)")
    assert max(tops) < 750  # on a phone, too: the form is below it
    for _, _, seconds, *_ in page.evaluate("specdemo.race.opening.scenes")[:-1]:
        page.evaluate("seconds => tick(seconds)", seconds)
    assert serious(page, "#race") == []
    page.keyboard.press("Escape")
    page.locator("#race .sd-arena[data-state=opened]").wait_for()
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
    stats = {lane: LaneFigures.of(entry.event for entry in script.entries if entry.lane == lane) for lane in names}
    page.evaluate("specdemo.race.parts.behind.open = true")
    rows = page.locator("#race .sd-table tbody tr").evaluate_all(
        "rows => rows.map((row) => row.innerText.split(/\\s*\\t/))"
    )
    assert [row[0].strip() for row in rows] == titles
    for row, (lane, found) in zip(rows, stats.items(), strict=True):
        shown = page.locator(f'#race [data-lane="{lane}"] .sd-text .tok').evaluate_all(
            "tokens => tokens.map((token) => [token.textContent, token.classList[1]])"
        )
        assert shown == tokens_of(script.entries, lane)
        ratios = speed_up(stats[PLAIN], found), speed_up_in_all(stats[PLAIN], found)
        assert row[1:3] == [f"{ratio:.2f}×" if ratio else "–" for ratio in ratios]
        assert row[3:5] == [str(found.rounds + 1), f"{found.tokens_per_second:.1f}"]
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
    expect(page.locator("#race .sd-whose")).to_contain_text(telling("Counted 3 together"))
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        card = page.locator("#race .sd-drafted").bounding_box()
        assert card
        cells = [
            cell.bounding_box() for cell in page.locator("#race .sd-table :is(td, thead th:not(:first-child))").all()
        ]
        for cell in cells:  # 6 figures of 4 lanes, and their headings
            assert cell
            assert card["x"] < cell["x"]
            assert cell["x"] + cell["width"] < card["x"] + card["width"]
        assert len(cells) == 30
        columns = {round(cell["x"] + cell["width"]) for cell in cells if cell}
        assert len(columns) == 6  # below their headings
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
    more_settings(page)
    page.click("#lane2 input")
    page.get_by_role("option", name=re.compile(r"\(ngram\)")).click()
    page.click("#k2 input")
    page.get_by_role("option", name="3", exact=True).click()
    run(page)
    expect(page.locator("#race .sd-lane h2")).to_have_text(["Target alone", "prompt-lookup, K 4", "ngram, K 3"])
    page.click("#lane2 input")
    page.get_by_role("option", name="No lane").click()
    run(page)
    expect(page.locator("#race .sd-lane h2")).to_have_text(["Target alone", "With prompt-lookup"])
    expect(page.locator("#race .sd-table")).not_to_be_visible()
    page.click("#race .sd-behind summary")
    expect(page.locator("#race .sd-figures")).to_be_visible()


def test_lanes_that_cannot_race_are_refused_in_words() -> None:
    with refuses(BadInput, "prompt-lookup:4"):
        asked_by_form(drafter="prompt-lookup", k=4, lane2="prompt-lookup", k2="4")


@pytest.mark.slow
def test_a_race_of_four_lanes_is_replayed(visit: Visit, script: Script) -> None:
    page = visit(LINK)
    run(page)
    page.click("#race .sd-again")
    page.locator("#replay .sd-step").wait_for()
    expect(page.locator("#replay .sd-lane h2")).to_have_text(["Target alone", *LANES])
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("End")
    page.locator("#replay .sd-arena[data-state=ended], #replay [data-state=ended]").first.wait_for()
    for side, lane in zip(("speculative", "drafted-2", "drafted-3"), LANES, strict=True):
        shown = page.locator(f"#replay [data-lane={side}] .sd-text .tok").evaluate_all(
            "tokens => tokens.map((token) => [token.textContent, token.classList[1]])"
        )
        assert shown == tokens_of(script.entries, lane)


# One race of the real default model on the page -------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_race_is_shown_as_it_was(visit: Visit) -> None:
    engine = Engine(load_presets()[0], Backend())
    *_, status = engine.follow(DEFAULT_PRESET)
    assert status.stage == "ready", status.words
    prompts = load_prompts()
    try:
        with served_engine(engine, prompts) as url:
            page = visit("?max_new_tokens=32&drafter=prompt-lookup", at=url)
            page.get_by_role("button", name="Quoting", exact=True).click()
            page.set_default_timeout(180_000)
            run(page)
            with page.expect_download() as download:
                shared(page, "trace")
            lines = download.value.path().read_text(encoding="utf-8").splitlines()
            shown = {lane: tokens_shown(page, lane) for lane in (PLAIN, SPECULATIVE)}
            facts = page.locator(".sd-status").get_attribute("title") or ""
    finally:
        list(engine.stream(DEFAULT_PRESET, lambda loaded: (loaded.release() for _ in "1")))
    header, entries = read_trace(lines)
    assert header["prompt"] == prompts["quoting"][0]
    assert header["weights"]["target"]
    assert facts.startswith(header["environment"]["dtype"])
    for lane in (PLAIN, SPECULATIVE):
        assert shown[lane] == tokens_of(entries, lane)
        assert shown[lane]
