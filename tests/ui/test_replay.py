"""The Replay tab: recordings, files and races that were run, played and stepped through with no model."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from specdemo.decoding.events import Prefilled, Round
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.stats import Stats
from specdemo.racing.trace import read_trace
from specdemo.types import DraftOutcome
from specdemo.ui.replay.opening import MAX_TRACE

from ..fakes.engine import Script
from ..sentences import tells
from .browser import discarded, tokens_of
from .conftest import Tabs, Used, Visit, reused
from .test_page import serious
from .test_playable import GREEDY, NAMES, REAL, SHIPPED, three_lanes, traced
from .test_race import CORPUS

REPLAY = "#replay"


@pytest.fixture
def page(tabs: Tabs, used: list[Used], url: str, script: Script) -> Iterator[Page]:
    with reused(tabs, used, url, replayed=True) as page:
        yield page


def open_replay(page: Page, trace: str | None = None) -> Page:
    page.get_by_role("tab", name="Replay").click()
    page.locator(".sd-play:enabled").wait_for()
    if trace is not None:
        page.locator(".sd-facts-of").evaluate("facts => { facts.textContent = ''; }")  # those of an earlier file
        upload(page, trace)
        expect(page.locator(".sd-facts-of")).to_contain_text("From your file")
    return page


def upload(page: Page, trace: str | bytes, name: str = "trace.jsonl") -> None:
    content = trace.encode() if isinstance(trace, str) else trace
    page.locator(".sd-file").set_input_files({"name": name, "mimeType": "text/plain", "buffer": content})


def told(page: Page) -> str:
    return page.locator(f"{REPLAY} .sd-sentence").inner_text()


def words(page: Page) -> str:
    return page.locator(".sd-step-words").inner_text()


@pytest.mark.slow
def test_a_recording_plays_at_its_own_pace_while_no_model_is_loaded(visit: Visit, unloaded: Script) -> None:
    text, entries = traced()
    end = max(Stats.of(e.event for e in entries if e.lane == lane).seconds for lane in (PLAIN, SPECULATIVE))
    page = open_replay(visit())
    expect(page.locator(".sd-facts-of")).to_contain_text("A recording that ships with this page, not measured here.")
    upload(page, text)
    expect(page.locator(".sd-facts-of")).to_contain_text("From your file")
    for speed, pace in (("1×", 1), ("4×", 4)):
        page.get_by_role("button", name=speed, exact=True).click()
        began = time.monotonic()
        page.get_by_role("button", name="Play", exact=True).click()
        page.locator(f"{REPLAY} [data-state=ended]").wait_for()
        assert end / pace <= time.monotonic() - began < end / pace + 2
        for lane in (PLAIN, SPECULATIVE):
            assert replayed(page, lane) == tokens_of(entries, lane)
    assert tells(page.locator(f"{REPLAY} [data-part=told]").text_content() or "", "tokens target")
    assert page.locator(f"{REPLAY} .sd-speed").inner_text().endswith("speed-up, recorded\nat K 4, temperature 0")
    assert unloaded.loads == []


def test_the_figures_of_a_paused_replay_are_those_of_its_text(page: Page) -> None:
    open_replay(page, traced()[0])
    page.get_by_role("button", name="0.25×", exact=True).click()
    assert told(page) == "A recording."
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.locator(f"{REPLAY} .sd-sentence")).to_have_text("Playing a recording.")
    expect(page.locator(f"{REPLAY} .sd-why-exact")).not_to_contain_text("Press Play")
    ninth = page.locator(f"{REPLAY} [data-lane=speculative] .sd-text .tok").nth(8)
    ninth.wait_for(state="attached")  # it may be a guess that has faded
    page.get_by_role("button", name="Pause", exact=True).click()
    assert tells(told(page), "A recording paused")
    for lane in (PLAIN, SPECULATIVE):
        count = sum(code not in "xug" for _, code in replayed(page, lane))
        assert 0 < count < 24
        expect(page.locator(f"{REPLAY} [data-lane={lane}] .sd-tokens")).to_have_text(f"{count} of 24 tokens")


def test_space_plays_wherever_it_does_nothing_else(page: Page) -> None:
    open_replay(page, traced(max_new_tokens=400)[0])
    play = page.locator(".sd-play")
    page.get_by_role("tab", name="Replay").focus()  # where a click on it leaves the keyboard
    for click in (None, f"{REPLAY} [data-lane=plain] .sd-text", ".sd-scrub"):
        if click:
            page.click(click)
        page.keyboard.press(" ")
        expect(play).to_have_text("Pause")
        page.keyboard.press(" ")
        expect(play).to_have_text("Play")
    page.locator(f"{REPLAY} .sd-hide input").focus()
    page.keyboard.press(" ")
    assert page.locator(f"{REPLAY} .sd-hide input").is_checked()
    page.locator(".sd-through").focus()
    page.keyboard.press(" ")
    expect(page.locator(".sd-step")).to_be_visible()
    page.get_by_role("tab", name="Race").focus()
    page.keyboard.press(" ")
    expect(page.locator("#run")).to_be_visible()


def replayed(page: Page, lane: str) -> list[list[str]]:
    """[text, code] of every token that the lane of the replay shows."""
    return page.evaluate(
        """lane => [...document.querySelectorAll(`#replay [data-lane=${lane}] .sd-text .tok`)]
           .map(t => [t.textContent, t.classList[1]])""",
        lane,
    )


def test_rounds_and_times_are_gone_to_forwards_and_backwards(page: Page) -> None:
    text, entries = traced()
    open_replay(page, text)
    rounds = [entry for entry in entries if entry.lane == SPECULATIVE]
    page.keyboard.press("ArrowRight")
    expect_tokens(page, tokens_of(rounds[:2], SPECULATIVE))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect_tokens(page, tokens_of(rounds[:4], SPECULATIVE))
    page.keyboard.press("ArrowLeft")
    expect_tokens(page, tokens_of(rounds[:3], SPECULATIVE))
    page.keyboard.press("End")
    page.locator(f"{REPLAY} [data-state=ended]").wait_for()
    expect_tokens(page, tokens_of(rounds, SPECULATIVE))
    page.keyboard.press("Home")
    expect_tokens(page, [])
    seconds = Stats.of(entry.event for entry in rounds[:3]).seconds
    page.locator(".sd-scrub").fill(str(seconds + 0.001))
    expect_tokens(page, tokens_of(rounds[:3], SPECULATIVE))
    hide = page.locator(f"{REPLAY} .sd-hide input")
    page.keyboard.press("h")  # not while the scrubber has the keys
    expect(hide).not_to_be_checked()
    page.locator(".sd-asked").click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("h")
    expect(hide).to_be_checked()
    page.keyboard.press("+")
    expect(page.locator(".sd-speeds [aria-pressed=true]")).to_have_text("2×")


def expect_tokens(page: Page, tokens: list[list[str]]) -> None:
    expect(page.locator(f"{REPLAY} [data-lane=speculative] .sd-text .tok")).to_have_count(len(tokens))
    assert replayed(page, SPECULATIVE) == tokens


def test_a_sampled_round_is_stepped_through_with_its_distributions(page: Page) -> None:
    open_replay(page, "\n".join(REAL))
    entries = read_trace(REAL)[1]
    rounds = [(e.event, e.probabilities) for e in entries if e.lane == SPECULATIVE and isinstance(e.event, Round)]
    failed = [any(token.outcome is DraftOutcome.REJECTED for token in event.drafted) for event, _ in rounds]
    at = failed.index(True)
    event, places = rounds[at]
    page.keyboard.press("t")
    page.keyboard.press("Home")
    for _ in range(at):
        page.keyboard.press("ArrowDown")
    expect(page.locator(".sd-step h3")).to_have_text(f"Round {at + 1} of {len(rounds)}")
    steps = page.locator(".sd-steps li").all_inner_texts()
    tested = len(event.emitted)
    assert steps == ["draft", *(f"test {n + 1}" for n in range(tested)), "residual", "cache"]
    assert f"proposes {len(event.drafted)} token" in words(page)
    for token, place in zip(event.drafted, places, strict=False):
        page.keyboard.press("ArrowRight")
        passed = token.outcome is DraftOutcome.ACCEPTED
        assert ("below that: it passes" if passed else "not below that: it fails") in words(page)
        assert (page.locator(".sd-passes").count(), page.locator(".sd-fails").count()) == (passed, not passed)
        assert token.p is not None
        assert token.q is not None
        assert token.draw is not None
        chance = page.locator(".sd-gauge-track").get_attribute("aria-label") or ""
        assert chance.startswith(f"Chance to pass {shares(min(1, token.p / token.q))}, draw {shares(token.draw)}")
        guess = next(c for c in place.candidates if c.id == token.id)
        row = page.locator(".sd-dist-row.sd-mark-g")
        assert row.locator("code").inner_text().startswith(json.dumps(guess.text, ensure_ascii=False))
        assert row.locator("b").all_inner_texts() == [shares(guess.p), shares(guess.q)]
    page.keyboard.press("ArrowRight")
    assert tells(words(page), "drawn residual")
    place, drawn = places[-1], event.emitted[-1]
    picked = next(c for c in place.candidates if c.id == drawn.id)
    row = page.locator(".sd-dist-row.sd-mark-d")
    assert row.locator("b").inner_text() == shares((picked.p - picked.q) / (place.residual or 0.0))
    page.keyboard.press("ArrowRight")
    kept, trimmed = page.locator(".sd-kept").count(), page.locator(".sd-trimmed").count()
    assert (kept, trimmed) == (tested, 1 + len(event.drafted) - tested)
    first = entries[0].event
    assert isinstance(first, Prefilled)
    before = first.prompt_tokens + sum(len(event.emitted) for event, _ in rounds[:at])
    assert f"grew from {before} to {before + kept + trimmed} entries" in words(page)
    assert f"which leaves {before + kept}." in words(page)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".sd-step h3")).to_have_text(f"Round {at + 2} of {len(rounds)}")
    page.keyboard.press("ArrowLeft")
    assert "grew from" in words(page)
    page.keyboard.press("ArrowUp" if at else "Home")
    page.keyboard.press("Escape")
    expect(page.locator(".sd-step")).to_be_hidden()
    assert page.evaluate("document.activeElement.className").endswith("sd-through")


def shares(value: float) -> str:
    return str(int(value)) if value in (0, 1) else "<0.001" if value < 0.0005 else f"{value:.3f}"


def test_a_greedy_round_is_stepped_through_by_buttons(page: Page) -> None:
    open_replay(page)
    page.select_option(".sd-which", GREEDY[0])
    page.locator(".sd-play:enabled").wait_for()
    page.get_by_role("button", name="Step through").click()
    steps = page.locator(".sd-steps li").all_inner_texts()
    assert steps[:2] == ["draft", "test 1"]
    page.get_by_role("button", name="Next step").click()
    assert tells(words(page), "finds likeliest")
    assert page.locator(".sd-dist-row").count() in (1, 2)
    assert page.locator(".sd-gauge").count() == 0
    for _ in steps[2:]:
        page.get_by_role("button", name="Next step").click()
    assert tells(words(page), "keeps cache")
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".sd-step")).to_be_hidden()


def test_a_draft_that_was_made_ahead_stands_under_the_pass_that_it_was_made_in(page: Page) -> None:
    """To scale: of the pass before, of this draft and of this pass."""
    text, _ = traced()
    lines = [json.loads(line) for line in text.splitlines()]
    rounds = [line for line in lines if line.get("lane") == SPECULATIVE and line["type"] == "round"]
    for line, hit in zip(rounds, (False, True, False), strict=False):
        line |= {"draft_seconds": 0.1, "verify_seconds": 0.3, "seconds": 0.4}
        line["ahead"] = {"hit": hit, "prepared": 3, "seconds": 0.15}
    open_replay(page, "".join(json.dumps(line) + "\n" for line in lines))
    page.get_by_role("button", name="Step through").click()
    figure = page.locator(".sd-spans")
    for at, told in ((1, "prepares 3, one used"), (2, "prepares 3, none used")):
        page.evaluate("at => specdemo.replay.step.to(at)", at)
        name = f"verifies, 300 ms; verifies, 300 ms; {told}, 150 ms; drafts, 100 ms"
        expect(figure).to_have_attribute("aria-label", name)
        left, right = (figure.locator("i").nth(bar).bounding_box() for bar in (0, 2))
        assert left
        assert right
        assert right["width"] == pytest.approx(left["width"] / 2, abs=1)
    page.evaluate("specdemo.replay.step.to(0)")
    expect(figure).to_have_count(0)


@pytest.mark.slow
def test_what_a_trace_lacks_is_said(page: Page) -> None:
    open_replay(page, traced(temperature=0.8, rule="rejection")[0])
    page.keyboard.press("t")
    page.keyboard.press("ArrowRight")
    assert "p = 0.125, q = 0.500" in words(page)
    assert page.locator(".sd-dist-row").count() == 2
    page.keyboard.press("ArrowRight")
    assert tells(words(page), "recording hold")


@pytest.mark.slow
def test_a_trace_of_three_lanes_with_unknown_probabilities_is_played(page: Page) -> None:
    for temperature in (0.0, 0.8):
        open_replay(page, three_lanes(temperature=temperature))
        expect(page.locator(f"{REPLAY} .sd-lane h2")).to_have_text([NAMES[1], NAMES[0], NAMES[2]])
        page.keyboard.press("End")
        page.locator(f"{REPLAY} .sd-arena[data-state=ended]").wait_for()
        tokens = traced(temperature=temperature)[1]
        for lane in (SPECULATIVE, "drafted-2"):
            assert replayed(page, lane) == tokens_of(tokens, SPECULATIVE)
        shown = page.locator(REPLAY).inner_text()
        for kind in "arxu":
            token = page.locator(f"{REPLAY} [data-lane=speculative] .tok.{kind}").first
            (discarded(page, kind, inside=REPLAY) if kind in "xu" else token).hover()
            tip = page.locator(".sd-tip.open").inner_text()
            assert "unknown" in tip
            shown += tip
        page.keyboard.press("t")
        page.keyboard.press("Home")
        steps = 0
        while page.locator(".sd-step h3").inner_text().startswith("Round 1 ") and steps < 12:
            shown += page.locator(".sd-step").inner_text()
            page.keyboard.press("ArrowRight")
            steps += 1
        assert 2 < steps < 12
        assert not re.search("NaN|undefined|null|Infinity", shown)
        page.keyboard.press("Escape")


def test_whatever_a_file_holds_is_shown_literally(page: Page) -> None:
    prompt = " ".join(CORPUS)
    text, entries = traced(prompt, max_new_tokens=len(CORPUS) * 4, temperature=0.5)
    open_replay(page, text)
    page.keyboard.press("End")
    page.locator(f"{REPLAY} [data-state=ended]").wait_for()
    for lane in (PLAIN, SPECULATIVE):
        assert replayed(page, lane) == tokens_of(entries, lane)
    page.keyboard.press("t")
    for _ in range(12):
        page.keyboard.press("ArrowLeft")
    assert page.locator(".sd-asked").inner_text().startswith("<img src=x")
    assert page.locator(f"{REPLAY} :is(.sd-text, .sd-step, .sd-recorded) :is(img, script)").count() == 0
    assert page.evaluate("window.pwned === undefined")


def test_a_file_that_is_no_trace_is_refused_and_what_was_there_stays(page: Page) -> None:
    text, _ = traced()
    open_replay(page, text)
    page.keyboard.press("End")
    verdict = told(page)
    upload(page, "<img src=x onerror=window.pwned=1>")
    refused = page.locator(".sd-choose [role=alert]")
    expect(refused).to_have_text("This is not a trace of specdemo.")
    expect(refused).to_be_in_viewport()
    assert told(page) == verdict
    page.select_option(".sd-which", SHIPPED[0])
    expect(page.locator(".sd-facts-of")).to_contain_text("A recording that ships")
    expect(refused).to_be_empty()
    upload(page, "nothing")
    expect(refused).to_have_text("This is not a trace of specdemo.")
    expect(page.locator(".sd-which")).to_have_value(SHIPPED[0])  # which is what would be played
    upload(page, text)
    expect(page.locator(".sd-facts-of")).to_contain_text("From your file")


@pytest.mark.slow
def test_a_file_that_is_too_large_or_not_packed_is_refused(page: Page, tmp_path: Path) -> None:
    text, entries = traced()
    open_replay(page, text)
    refused = page.locator(".sd-choose [role=alert]")
    page.keyboard.press("End")
    files = {"large.jsonl": b"x" * (MAX_TRACE + 1), "bomb.jsonl.gz": gzip.compress(b"x" * 3 * MAX_TRACE, 1)}
    for name, content in files.items():  # as files, for what is sent to a browser takes seconds
        (tmp_path / name).write_bytes(content)
    page.locator(".sd-file").set_input_files(tmp_path / "large.jsonl")
    expect(refused).to_have_text("This file is too large: a trace has at most 32 MB.")
    upload(page, b"not packed", "trace.jsonl.gz")
    expect(refused).to_have_text("This file cannot be unpacked.")
    page.evaluate(
        """() => {
          const { read } = ReadableStreamDefaultReader.prototype;
          window.put_back = () => { ReadableStreamDefaultReader.prototype.read = read; };
          window.unpacked = 0;
          ReadableStreamDefaultReader.prototype.read = async function () {
            const part = await read.call(this);
            window.unpacked += part.value?.length ?? 0;
            return part;
          };
        }"""
    )
    page.locator(".sd-file").set_input_files(tmp_path / "bomb.jsonl.gz")
    expect(refused).to_have_text("This file is too large: a trace has at most 32 MB.")
    assert MAX_TRACE < page.evaluate("window.unpacked") < 2 * MAX_TRACE  # and then it stops
    page.evaluate("put_back()")
    assert replayed(page, SPECULATIVE) == tokens_of(entries, SPECULATIVE)


def test_a_packed_trace_of_one_lane_is_played(page: Page) -> None:
    open_replay(page, traced()[0])
    upload(page, gzip.compress(traced(only=PLAIN)[0].encode()), "trace.jsonl.gz")
    expect(page.locator(f"{REPLAY} [data-lane=speculative]")).to_be_hidden()
    page.keyboard.press("End")
    expect(page.locator(f"{REPLAY} .sd-sentence")).to_have_text("This trace holds one lane only.")
    page.keyboard.press("t")
    assert tells(words(page), "drafted round")


@pytest.mark.slow
def test_the_race_just_run_is_replayed(visit: Visit, script: Script) -> None:
    page = open_replay(visit())
    page.select_option(".sd-which", ":race")
    expect(page.locator(".sd-choose [role=alert]")).to_contain_text("No race has been run on this page yet.")
    expect(page.locator(".sd-which")).to_have_value(SHIPPED[0])
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt textarea", "one two three four")
    page.click("#run")
    page.locator("#race[data-state=ended], #race [data-state=ended]").wait_for()
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.locator(".sd-facts-of")).to_contain_text("The last race on this page.")
    page.keyboard.press("End")
    page.locator(f"{REPLAY} [data-state=ended]").wait_for()
    for lane in (PLAIN, SPECULATIVE):
        assert replayed(page, lane) == tokens_of(script.entries, lane)
    page.keyboard.press("r")  # the keys of the race are the race's
    assert len(script.races) == 1


def test_it_fits_its_window_and_axe_finds_nothing_serious(page: Page) -> None:
    open_replay(page, "\n".join(REAL))
    page.get_by_role("button", name="Step through").click()
    page.keyboard.press("ArrowRight")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert serious(page, REPLAY) == []
        page.keyboard.press("d")  # dark for the second
