"""A race on the page, from Run to the summary."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import APIResponse, Page, Request, Route, expect

from specdemo.decoding.events import Round
from specdemo.racing.asked import DraftedLane
from specdemo.racing.figures import Figures
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.stats import Stats
from specdemo.racing.trace import Entry, read_trace
from specdemo.racing.verdict import numbers
from specdemo.types import DraftOutcome
from specdemo.ui.race.run import Run
from specdemo.ui.runs import Runs
from specdemo.ui.serving import stream

from ..fakes.engine import MEMORY_RATE, PLACEMENT, Script
from ..sentences import tells
from .browser import discarded, fill, headline, run, sentence, settings, shared, tokens_of, tokens_shown, wait_until
from .conftest import Tabs, Used, Visit, reused

Raced = tuple[Page, list[Entry]]
CORPUS = [
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "${window.pwned=1}",
    "{{window.pwned=1}}",
    "`${(()=>{window.pwned=1})()}`",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc\N{POP DIRECTIONAL FORMATTING}",
    "שלום",
    "👨\N{ZERO WIDTH JOINER}👩\N{ZERO WIDTH JOINER}👧",
    "<|im_end|>",
    "&lt;b&gt;",
    "line\nbreak",
]


def test_a_page_on_this_machine_is_known(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    play = Run.play
    monkeypatch.setattr(Run, "play", lambda run, engine: told.append(run.local) or play(run, engine))  # type: ignore[func-returns-value]
    run(page, "one two three")
    monkeypatch.setattr("specdemo.ui.runs.is_local", lambda client: client.host != "127.0.0.1")
    run(page)
    wait_until(lambda: told == [True, False])


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
    return ended


def test_the_tokens_in_the_page_are_those_of_the_engine(raced: Raced) -> None:
    page, entries = raced
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(page, lane) == tokens_of(entries, lane)
    stats = Stats.of(entry.event for entry in entries if entry.lane == SPECULATIVE)
    legend = dict(zip(["a", "r", "b", "t", "x", "u"], page.locator(".sd-legend li b").all_inner_texts(), strict=True))
    kinds = [code for _, code in tokens_of(entries, SPECULATIVE)]
    assert {code: int(count) for code, count in legend.items()} == {code: kinds.count(code) for code in "arbtxu"}
    figures = page.locator(".sd-figures dd").all_inner_texts()
    assert figures[0] == f"{100 * (stats.acceptance_rate or 0):.0f}%"
    assert figures[1] == f"{100 * (stats.draft_efficiency or 0):.0f}%"
    assert figures[2] == f"{stats.tokens_per_round:.2f}"
    counts = page.locator(".sd-column b").all_inner_texts()
    assert [int(count or 0) for count in counts] == [stats.accepted_lengths.get(n, 0) for n in range(5)]
    assert tells(page.locator(".sd-badge").inner_text(), "Same text word")
    assert page.locator("[data-lane=speculative] .sd-rate b").inner_text() == f"{stats.tokens_per_second:.1f}"
    assert page.locator(".sd-ratio").inner_text().endswith("×")
    assert tells(sentence(page), "2.6 tokens")


def test_the_numbers_behind_the_verdict_are_there_for_those_who_ask(raced: Raced) -> None:
    page, entries = raced
    behind = page.locator("#race .sd-behind")
    place = (
        "['.sd-board', '.sd-lanes'].map((part) => document.querySelector(`#race ${part}`).getBoundingClientRect().top)"
    )
    behind.locator("summary").scroll_into_view_if_needed()
    before = page.evaluate(place)
    behind.locator("summary").click()
    assert page.evaluate(place) == before  # it opens below what one reads
    shown = dict(zip(behind.locator("dt").all_inner_texts(), behind.locator("dd").all_inner_texts(), strict=True))
    plain, drafted = (Stats.of(e.event for e in entries if e.lane == lane) for lane in (PLAIN, SPECULATIVE))
    found = Figures.of(plain, drafted, DraftedLane("prompt-lookup", 4))
    assert found is not None
    assert shown == dict(numbers(found, PLACEMENT["cpu"], MEMORY_RATE))
    assert f"{found.tokens:.1f} tokens per target pass" in sentence(page)


def test_three_figures_each_have_a_sentence(raced: Raced) -> None:
    page, entries = raced
    plain, drafted = (Stats.of(e.event for e in entries if e.lane == lane) for lane in (PLAIN, SPECULATIVE))
    found = Figures.of(plain, drafted, DraftedLane("prompt-lookup", 4))
    assert found is not None
    assert found.draft_cost is not None
    assert found.check_cost is not None
    assert page.locator("#race .sd-sentence").inner_text() == f"{found.speed_up:.2f} times as fast."
    chips, tip = page.locator("#race .sd-fact"), page.locator(".sd-tip.open")
    longer = max(found.check_cost - 1, 0)
    for chip, value, name, words in zip(
        chips.all(),
        (f"{found.tokens:.1f}", f"+{found.draft_cost:.0%}", f"+{longer:.0%}"),
        ("tokens per pass", "of a pass to draft", "of a pass to check"),
        (
            "with the drafter, 1 without it",
            "of the time of a pass of the target alone",
            "Checking a draft makes a pass",
        ),
        strict=True,
    ):
        assert chip.inner_text() == f"{value} {name}"
        chip.focus()
        assert value.removeprefix("+") in tip.inner_text()
        assert words in tip.inner_text()
    page.keyboard.press("Escape")


@pytest.mark.slow
def test_what_is_measured_before_a_race_is_told(page: Page, script: Script) -> None:
    run(page, "one two three")
    script.says = "measuring the cost of a pass"
    script.gate.clear()
    try:
        run(page, "one two three", until="loading")
        expect(page.locator(".sd-sentence")).to_have_text("Measuring the cost of a pass.")
        assert tells(page.locator(".sd-model").inner_text(), "Measuring cost pass")
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


def test_a_draft_made_ahead_is_drawn_in_the_pass_before_it(page: Page, script: Script) -> None:
    fill(page, max_new_tokens=40)
    run(page, "one two three four five six seven")
    passes = page.evaluate(
        """() => {
            const lane = specdemo.race.lanes.speculative;
            const { strip } = lane;
            for (const used of [true, false]) {
                const [at, row] = [strip.passes.at(-1).at + 1, [0, 1, [["a", "r", 1]]]];
                strip.take({ row, at, seconds: [0.2, 0.8, 1], ahead: [used, 2] }, lane);
            }
            strip.draw(strip.scale);
            return [strip.passes.slice(-3).map(({ ahead }) => ahead ?? null), strip.drawn - strip.passes.length];
        }"""
    )
    assert passes == [[True, False, None], 0]


def test_a_difference_is_shown_with_its_place_and_gap(page: Page, script: Script) -> None:
    script.differ_at = 5
    run(page, "one two three four five six seven")
    assert tells(page.locator(".sd-badge").inner_text(), "First 6 difference")
    assert "near-tie" in page.locator(".sd-why-exact").inner_text()


def test_above_temperature_zero_the_badge_follows_the_rule(page: Page, script: Script) -> None:
    fill(page, temperature=0.8)
    for same_draws, differ_at, title in (
        (True, None, "Same text, word for word"),
        (True, 1, "First difference at token 2"),
        (False, 1, "Different text, same distribution"),
        (False, None, "Same text, same distribution"),
    ):
        page.locator("#match input").set_checked(same_draws)
        script.differ_at = differ_at
        run(page, "one two")
        assert page.locator(".sd-badge").inner_text() == title


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
    assert tip.locator("dd").all_inner_texts() == [
        "2drafted token 2 of 4", "0.125p", "0.500q", "0.250min(1, p/q)", "0.750not below the chance: failed"
    ]  # fmt: skip
    discarded(page, "u").click()
    assert tip.locator("dd").all_inner_texts()[-1] == "not used"
    page.locator("[data-lane=speculative] .tok.b").first.hover()
    assert tells(tip.inner_text().lower(), "drafted passed")


def test_under_the_match_rule_the_tooltip_tells_what_the_target_drew(raced: Raced) -> None:
    page, _ = raced
    tip = page.locator(".sd-tip")
    discarded(page, "x", 1).hover()
    drawn = page.locator("[data-lane=speculative] .tok.r").nth(1).inner_text()
    facts = tip.locator("dd").all_inner_texts()
    assert facts[:3] == ["2drafted token 2 of 4", "0.125p", "0.500q"]
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
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.textContent") == WRONG_TOKEN
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "sd-tooltip"
    assert page.locator(".sd-tip.open .sd-tip-head span").inner_text() == "rejected"
    page.keyboard.press("Escape")
    assert page.locator(".sd-tip.open").count() == 0


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
    few = MemoryError("The GPU has too little free memory: lower max new tokens.")
    for failure, words in (
        (few, str(few)),
        (KeyError("<b>x</b>"), "Something went wrong in the engine: KeyError."),
    ):
        script.fail_at, script.failure = 9, failure
        run(page, "one two three", until="failed")
        assert words in sentence(page)
        assert script.open_races == 0
        script.fail_at = None
        run(page)
        assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


def test_what_a_lost_connection_missed_is_asked_for(
    page: Page, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.pace = 0.01
    whole, connections = stream._events, []

    async def broken(run: Run, first: int) -> AsyncIterator[str]:
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
    whole = stream._events

    async def broken(run: Run, first: int) -> AsyncIterator[str]:
        yield "retry: 10\n\n"
        async for message in whole(run, first):
            yield message
            if '"lanes"' in message:
                return

    fill(page, max_new_tokens=2000)
    page.evaluate("specdemo.LOST_MS = 500")
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_events", broken)
        if answers:  # as one that was started anew does: it knows nothing of this run
            find = Runs.find
            patch.setattr(Runs, "find", lambda runs, kind, run: find(runs, kind, run) if not asked(run) else None)
        else:
            page.route("**/races/*", lambda route: route.abort() if asked(route.request.url) else route.continue_())
        times: dict[str, int] = {}

        def asked(what: str) -> bool:
            times[what] = times.get(what, 0) + 1
            return times[what] > 1

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
    while script.open_races == 0:  # Gradio does not take it before it is told that the first has ended
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


def test_a_result_says_what_it_was_run_with(page: Page, script: Script) -> None:
    fill(page, k=3, temperature=0.5)
    how = page.locator("#race .sd-how")
    run(page, "one two")
    fill(page, temperature=0)  # for the next race
    assert how.inner_text() == "at K 3, temperature 0.5"
    page.check("#auto input")
    run(page)
    assert how.inner_text() == "at K auto, temperature 0"
    how.focus()
    expect(page.locator(".sd-tip.open")).to_contain_text("auto chooses it for every round")
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile("none$")).click()
    run(page)
    assert tells(how.inner_text(), "at 0 temperature")
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile("· ngram$")).click()
    page.check("#tree input")
    fill(page, k=63, temperature=0.75)
    run(page)
    assert how.inner_text() == "by trees of 63, temperature 0.75"
    page.uncheck("#tree input")
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile("· prompt-lookup$")).click()


def test_the_trace_can_be_downloaded_and_read_back(page: Page, script: Script) -> None:
    settings(page)
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
    expect(gone).to_contain_text("This race is no longer kept.")
    page.context.set_offline(True)
    page.click(".sd-trace")
    expect(gone).to_contain_text("The server cannot be reached.")
    expect(gone).to_be_in_viewport()
    page.keyboard.press("Escape")
    assert sentence(page) == found
    assert tells(page.locator(".sd-badge").inner_text(), "Same text word")


def test_what_was_thrown_away_is_not_copied(raced: Raced) -> None:
    page, entries = raced
    kept = [text for text, code in tokens_of(entries, SPECULATIVE) if code not in "xu"]
    copied = page.evaluate(
        "() => { const s = getSelection(); s.selectAllChildren(document.querySelector"
        "('#race [data-lane=speculative] .sd-text')); return s.toString(); }"
    )
    assert copied.split() == "".join(kept).split()


def test_guesses_can_be_hidden(raced: Raced) -> None:
    page, _ = raced
    rejected, untested = discarded(page, "x"), discarded(page, "u")
    assert (rejected.is_visible(), untested.is_visible()) == (True, True)
    page.keyboard.press("h")
    assert (rejected.is_visible(), untested.is_visible()) == (False, False)
    page.keyboard.press("h")
    assert rejected.is_visible()


def test_several_readers_are_a_wall_of_lanes_with_and_without_the_drafter(page: Page, script: Script) -> None:
    script.pace = 0.005
    fill(page, max_new_tokens=24)
    page.locator("#readers input[value='4']").check()
    boxes = "[...document.querySelectorAll('#race :is(.sd-board, .sd-wall, .sd-results)')].map(b => b.offsetTop)"
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
        each = Stats.at_once(((entry.lane, entry.event) for entry in script.entries if entry.lane in names), 4)
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
    assert page.locator(".sd-spoken").text_content() == (
        f"The race is over. {headline(page)} Same text, word for word. {sentence(page)}"
    )
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
    page.locator("#readers input[value='2']").check()
    run(page, "one two three", until="running")
    page.locator("[data-lane='prompt-lookup 2'] .tok.a").nth(9).wait_for()
    figures, counts = page.locator("#race .sd-figures dd"), page.locator("#race .sd-column b")
    times = page.locator("#race .sd-time b")
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
    replay.locator(".sd-play").focus()
    page.keyboard.press("End")
    expect(replay).to_contain_text("With 2 readers at once")
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
    expect(first).to_contain_text(re.compile(r"First token, alone\s*30 ms\s*First token, drafted\s*–"))
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
    """The first answer says that the form is in order, the second names the event to cancel."""
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
    assert sentence(page) == "Stopped."
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
