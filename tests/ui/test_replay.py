"""The player: recordings, files and races that were run, played and stepped through with no model."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request as WebRequest
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Page, expect
from starlette.requests import Request as Asked

from specdemo.decoding.events import Prefilled, Round
from specdemo.models.presets import DEFAULT_PRESET, load_prompts
from specdemo.racing.figures import ReaderFigures
from specdemo.racing.trace import (
    PLAIN,
    SPECULATIVE,
    Candidate,
    Entry,
    Request,
    TokenProbabilities,
    read_trace,
    write_trace,
)
from specdemo.settings import REJECTION, Settings
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
from specdemo.ui.race.colours import row_of
from specdemo.ui.race.run import RaceRun
from specdemo.ui.replay import opening, routes
from specdemo.ui.replay.opening import MAX_TRACE
from specdemo.ui.replay.playable import playable, uploaded
from specdemo.ui.replay.routes import RECORDINGS, SUFFIX, recordings
from tests.harness.classes import LaneFigures
from tests.harness.texts import with_text

from ..fakes.engine import PRESETS, Script, ScriptedLoaded
from ..fakes.traces import CORPUS, GREEDY, NAMES, ON_A_GPU, REAL, SHIPPED, header_of, lines_of, three_lanes, traced
from ..sentences import gist, telling, tells
from .browser import discarded, in_a_loop_of_its_own, replayed, serious, show_recordings, tokens_of
from .conftest import Tabs, Used, Visit, reused

REPLAY = "#replay"


@pytest.fixture
def page(tabs: Tabs, used: list[Used], url: str, script: Script) -> Iterator[Page]:
    with reused(tabs, used, url, replayed=True) as page:
        yield page


def open_replay(page: Page, trace: str | None = None) -> Page:
    show_recordings(page)
    page.locator(".sd-play:enabled").wait_for()
    if trace is not None:
        page.locator(".sd-facts-of").evaluate("facts => { facts.textContent = ''; }")  # those of an earlier file
        upload(page, trace)
        expect(page.locator(".sd-facts-of")).to_contain_text(telling("your file,"))
    return page


def upload(page: Page, trace: str | bytes, name: str = "trace.jsonl") -> None:
    content = trace.encode() if isinstance(trace, str) else trace
    page.locator(".sd-file").set_input_files({"name": name, "mimeType": "text/plain", "buffer": content})


def words_of(page: Page) -> str:
    return page.locator(f"{REPLAY} .sd-sentence").inner_text()


def words(page: Page) -> str:
    return page.locator(".sd-step-words").inner_text()


@pytest.mark.slow
def test_a_recording_plays_at_its_own_pace_while_no_model_is_loaded(visit: Visit, unloaded: Script) -> None:
    text, entries = traced()
    end = max(LaneFigures.of(e.event for e in entries if e.lane == lane).seconds for lane in (PLAIN, SPECULATIVE))
    page = open_replay(visit())
    expect(page.locator(".sd-facts-of")).to_contain_text(telling("recording measured"))
    upload(page, text)
    expect(page.locator(".sd-facts-of")).to_contain_text(telling("your file,"))
    for speed, pace in (("1×", 1), ("4×", 4)):
        page.get_by_role("button", name=speed, exact=True).click()
        began = time.monotonic()
        page.get_by_role("button", name="Play", exact=True).click()
        page.locator(f"{REPLAY} [data-state=ended]").wait_for()
        assert end / pace <= time.monotonic() - began < end / pace + 2
        for lane in (PLAIN, SPECULATIVE):
            assert replayed(page, lane) == tokens_of(entries, lane)
    assert tells(page.locator(f"{REPLAY} [data-part=finding]").text_content() or "", "tokens target")
    assert page.locator(f"{REPLAY} .sd-speed").inner_text().endswith("in all")
    assert unloaded.loads == []


def test_the_figures_of_a_paused_replay_are_those_of_its_text(page: Page) -> None:
    open_replay(page, traced()[0])
    page.get_by_role("button", name="0.25×", exact=True).click()
    assert words_of(page) == "A recording."
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.locator(f"{REPLAY} .sd-sentence")).to_have_text(telling("Playing recording."))
    expect(page.locator(f"{REPLAY} .sd-why-exact")).not_to_contain_text("Press Play")
    ninth = page.locator(f"{REPLAY} [data-lane=speculative] .sd-text .tok").nth(8)
    ninth.wait_for(state="attached")  # it may be a guess that has faded
    page.get_by_role("button", name="Pause", exact=True).click()
    assert tells(words_of(page), "recording, paused.")
    for lane in (PLAIN, SPECULATIVE):
        count = sum(code not in "xug" for _, code in replayed(page, lane))
        assert 0 < count < 24
        expect(page.locator(f"{REPLAY} [data-lane={lane}] .sd-tokens")).to_have_text(f"{count} of 24 tokens")


def test_space_plays_wherever_it_does_nothing_else(page: Page) -> None:
    open_replay(page, traced(max_new_tokens=400)[0])
    play = page.locator(".sd-play")
    page.get_by_role("tab", name="Race").focus()  # where a click on it leaves the keyboard
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
    seconds = LaneFigures.of(entry.event for entry in rounds[:3]).seconds
    page.locator(".sd-scrub").fill(str(seconds + 0.001))
    expect_tokens(page, tokens_of(rounds[:3], SPECULATIVE))
    hide = page.locator(f"{REPLAY} .sd-hide input")
    page.keyboard.press("h")  # not while the scrubber has the keys
    expect(hide).not_to_be_checked()
    page.locator(".sd-prompt").click()
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
    assert re.search(rf"guesses {len(event.drafted)} token", words(page))
    for token, place in zip(event.drafted, places, strict=False):
        page.keyboard.press("ArrowRight")
        passed = token.outcome is DraftOutcome.ACCEPTED
        assert [end for end in ("accepted.", "rejected.") if tells(words(page), end)] == [
            "accepted." if passed else "rejected."
        ]
        assert (page.locator(".sd-passes").count(), page.locator(".sd-fails").count()) == (passed, not passed)
        assert token.p is not None
        assert token.q is not None
        assert token.draw is not None
        chance = page.locator(".sd-gauge-track").get_attribute("aria-label") or ""
        named = shares(min(1, token.p / token.q)), shares(token.draw)
        assert re.match(r"\D*{}\D+{}".format(*map(re.escape, named)), chance)
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
    assert tells(words(page), f"grew {before} {before + kept + trimmed} leaves {before + kept}.")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".sd-step h3")).to_have_text(f"Round {at + 2} of {len(rounds)}")
    page.keyboard.press("ArrowLeft")
    assert tells(words(page), f"grew {before}")
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
    assert page.locator(".sd-prompt").inner_text().startswith("<img src=x")
    assert page.locator(f"{REPLAY} :is(.sd-text, .sd-step, .sd-recorded) :is(img, script)").count() == 0
    assert page.evaluate("window.pwned === undefined")


def test_a_file_that_is_no_trace_is_refused_and_what_was_there_stays(page: Page) -> None:
    text, _ = traced()
    open_replay(page, text)
    page.keyboard.press("End")
    verdict = words_of(page)
    upload(page, "<img src=x onerror=window.pwned=1>")
    refused = page.locator(".sd-choose [role=alert]")
    expect(refused).to_contain_text(telling("not trace"))
    expect(refused).to_be_in_viewport()
    assert words_of(page) == verdict
    page.select_option(".sd-which", SHIPPED[0])
    expect(page.locator(".sd-facts-of")).to_contain_text(telling("recording ships"))
    expect(refused).to_be_empty()
    upload(page, "nothing")
    expect(refused).to_contain_text(telling("not trace"))
    expect(page.locator(".sd-which")).to_have_value(SHIPPED[0])  # which is what would be played
    upload(page, text)
    expect(page.locator(".sd-facts-of")).to_contain_text(telling("your file,"))


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
    expect(refused).to_contain_text(telling("This 32 MB"))
    upload(page, b"not packed", "trace.jsonl.gz")
    expect(refused).to_contain_text(telling("This cannot unpacked"))
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
    expect(refused).to_contain_text(telling("This 32 MB"))
    assert MAX_TRACE < page.evaluate("window.unpacked") < 2 * MAX_TRACE  # and then it stops
    page.evaluate("put_back()")
    assert replayed(page, SPECULATIVE) == tokens_of(entries, SPECULATIVE)


def test_a_packed_trace_of_one_lane_is_played(page: Page) -> None:
    open_replay(page, traced()[0])
    upload(page, gzip.compress(traced(only=PLAIN)[0].encode()), "trace.jsonl.gz")
    expect(page.locator(f"{REPLAY} [data-lane=speculative]")).to_be_hidden()
    page.keyboard.press("End")
    expect(page.locator(f"{REPLAY} .sd-sentence")).to_contain_text(telling("trace one"))
    page.keyboard.press("t")
    assert tells(words(page), "drafted round")


@pytest.mark.slow
def test_the_race_just_run_is_replayed(visit: Visit, script: Script) -> None:
    page = open_replay(visit())
    page.select_option(".sd-which", ":race")
    expect(page.locator(".sd-choose [role=alert]")).to_contain_text(telling("been page"))
    expect(page.locator(".sd-which")).to_have_value(SHIPPED[0])
    page.get_by_role("tab", name="Race").click()
    page.fill("#prompt textarea", "one two three four")
    page.click("#run")
    page.locator("#race[data-state=ended], #race [data-state=ended]").wait_for()
    page.click("#race .sd-again")
    expect(page.locator(".sd-facts-of")).to_contain_text(telling("last page"))
    page.locator(".sd-step").wait_for()
    page.keyboard.press("Escape")
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


# What the page gets of a trace: the rows and figures of a race, or why it cannot be read; recordings that ship

PAIR = "qwen2.5-coder"


# What the page gets --------------------------------------------------------------------------------------


def test_a_trace_is_told_with_the_rows_and_figures_of_a_race() -> None:
    text, entries = traced()
    replay = json.loads(uploaded(text))
    assert replay["kind"] == "file"
    for lane in (PLAIN, SPECULATIVE):
        mine = [entry for entry in entries if entry.lane == lane]
        events = replay["lanes"][lane]["events"]
        assert [event["row"] for event in events] == [json.loads(json.dumps(row_of(entry))) for entry in mine]
        stats = LaneFigures.of(entry.event for entry in mine)
        assert replay["end"]["stats"][lane] == json.loads(json.dumps(stats.as_dict()))
        assert events[-1]["figures"]["tokens"] == stats.tokens
        assert events[-1]["at"] == pytest.approx(stats.seconds)
        assert replay["lanes"][lane]["prompt"] == stats.prompt_tokens
    assert tells(replay["end"]["exactness"]["title"], "Same word")
    assert replay["facts"] == {"dtype": "bfloat16", "device_name": "a scripted processor"}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "rule": REJECTION}, {"tree": True}], ids=str)
@pytest.mark.parametrize("events", [8, 99])
def test_a_replay_ends_as_the_race_did(events: int, fields: dict[str, Any]) -> None:
    script, settings = Script(), Settings(**{"k": 4, "max_new_tokens": 24, **fields})
    script.differ_at = 9
    race = RaceRun(Request("one two three four five six", "scripted", "prompt-lookup", settings))
    for _ in race._race(script.engine(), ScriptedLoaded(PRESETS["scripted"])):
        if len(race.entries) >= events:
            race.stop.set()
    assert race.outcome is not None
    live = json.loads(json.dumps(race.outcome.ending()))
    end = json.loads(uploaded(race.trace()))["end"]
    assert end["stopped"] is (events < 99)
    for verdict in live["verdicts"].values():
        del verdict["comparison"]  # the badge says it
    assert end == live


def test_a_trace_tells_what_its_weights_were_stored_in_if_it_knows() -> None:
    environment = {"dtype": "float32", "weights_dtype": "float16", "cores": 2}
    replay = json.loads(uploaded(header_with(environment=environment)))
    assert replay["facts"] == {"dtype": "float32", "weights_dtype": "float16", "cores": "2"}


def test_a_trace_of_one_lane_is_told() -> None:
    replay = json.loads(uploaded(traced(only=SPECULATIVE)[0]))
    assert [*replay["lanes"]] == [SPECULATIVE]
    assert tells(replay["end"]["sentence"], "trace one")


def test_more_lanes_are_told_whatever_they_are_called() -> None:
    replay = json.loads(uploaded(three_lanes()))
    titles = {side: lane["title"] for side, lane in replay["lanes"].items()}
    assert [*titles.items()] == [(PLAIN, NAMES[1]), (SPECULATIVE, NAMES[0]), ("drafted-2", NAMES[2])]
    usual = json.loads(uploaded(traced()[0]))
    end, ratio = usual["end"], usual["end"]["speed_up"]
    fastest = replay["end"].pop("sentence").removesuffix(end.pop("sentence"))
    assert tells(fastest, "fastest tied")
    assert [name for name in NAMES if name in fastest] == [NAMES[0], NAMES[2]]
    assert replay["end"] == {  # the same lane twice, by other names
        **end,
        "speed_ups": {SPECULATIVE: ratio, "drafted-2": ratio},
        "speed_ups_in_all": dict.fromkeys((SPECULATIVE, "drafted-2"), end["speed_up_in_all"]),
        "stats": {**end["stats"], "drafted-2": end["stats"][SPECULATIVE]},
        "headline": f"{NAMES[0]}: {end['headline']}",
        "verdicts": dict.fromkeys((NAMES[0], NAMES[2]), end["verdicts"][SPECULATIVE]),
    }
    assert replay["note"] == usual["note"] == ""
    without_target = json.loads(uploaded(three_lanes(alone=None)))
    assert [lane["title"] for lane in without_target["lanes"].values()] == NAMES
    assert without_target["end"]["speed_up"] is None
    assert tells(without_target["end"]["sentence"], "None these lanes")


def test_of_five_lanes_four_are_told() -> None:
    lines = three_lanes().splitlines()
    header = json.loads(lines[0])
    header["lanes"] += [{"name": name, "drafter": "eagle"} for name in ("four", "five")]
    more = [json.loads(line) | {"lane": name} for name in ("four", "five") for line in lines[1:] if NAMES[0] in line]
    replay = json.loads(uploaded("\n".join(map(json.dumps, [header, *map(json.loads, lines[1:]), *more]))))
    assert gist(replay["note"]) == "The 5 4"
    assert [lane["title"] for lane in replay["lanes"].values()] == [NAMES[1], NAMES[0], NAMES[2], "four"]


def test_a_tree_is_told_in_the_order_of_its_draft() -> None:
    drafted = (
        DraftedToken(5, DraftOutcome.REJECTED, parent=-1),
        DraftedToken(6, DraftOutcome.ACCEPTED, parent=-1),
        DraftedToken(7, DraftOutcome.REJECTED, parent=1),
    )
    emitted = Token(6, TokenKind.ACCEPTED), Token(8, TokenKind.RESAMPLED)
    place = TokenProbabilities(0.5, tuple(Candidate(number, str(number), 0.25, 0.25) for number in (5, 6, 7, 8)))
    event = Round(0, drafted, emitted, 0.0, 0.1, 0.1)
    entry = Entry(SPECULATIVE, with_text(event, (" six", " eight"), (" five", " six", " seven")), (place, place))
    prefilled = Entry(SPECULATIVE, with_text(Prefilled(3, Token(1, TokenKind.TARGET), 0.1), ("one",)))
    asked = Request("one", "scripted", "eagle", Settings(temperature=1.0))
    header = Script().header(ScriptedLoaded(PRESETS["scripted"]), asked)
    event = json.loads(uploaded("".join(write_trace(header, [prefilled, entry]))))["lanes"][SPECULATIVE]["events"][1]
    row = [[" five", "x", 1, 0], [" six", "a", 2, 0], [" seven", "x", 3, 2], [" eight", "r"]]
    assert [[*token[:2], *token[5:]] for token in event["row"][2]] == row
    marks = [{text: mark for text, _, _, mark, _ in candidates} for _, candidates in event["places"]]
    assert marks == [{"5": "g", "6": "g", "7": "", "8": ""}, {"5": "", "6": "", "7": "g", "8": "d"}]


def test_several_readers_are_told_with_all_their_lanes() -> None:
    text, entries = traced(others=("seven eight nine", "ten eleven"))
    assert tells(json.loads(uploaded(text))["error"], "1 2 4 8")
    text, entries = traced(others=("seven eight nine",))
    replay = json.loads(uploaded(text))
    names = ["alone 1", "alone 2", "prompt-lookup 1", "prompt-lookup 2"]
    assert (list(replay["lanes"]), replay["note"], replay["request"]["others"]) == (names, "", ["seven eight nine"])
    assert tells(replay["end"]["sentence"], "2 prompt-lookup")
    at_once = ReaderFigures.of_lanes(names[2:], ((entry.lane, entry.event) for entry in entries))
    assert replay["end"]["stats"][SPECULATIVE]["tokens_per_second_of_all"] == 2 * (at_once.tokens_per_second or 0)
    of_all = [event["of_all"] for name in names[2:] for event in replay["lanes"][name]["events"] if "of_all" in event]
    lengths = {str(length): rounds for length, rounds in at_once.accepted_lengths.items()}
    assert {"acceptance_rate": at_once.acceptance_rate, "accepted_lengths": lengths}.items() <= of_all[-1].items()
    other = text.replace('"alone 2"', '"another"')  # lanes that are not those of readers
    replay = json.loads(uploaded(other))
    assert (len(replay["lanes"]), replay["request"]["others"]) == (4, [])


def test_a_race_that_was_stopped_is_told_as_stopped() -> None:
    lines = traced()[0].splitlines()[:-4]
    assert json.loads(uploaded("\n".join(lines)))["end"]["stopped"] is True


def header_with(**fields: Any) -> str:
    lines = traced()[0].splitlines()
    return "\n".join([json.dumps({**json.loads(lines[0]), **fields}), *lines[1:]])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("", "trace empty."),
        ("<b>hello</b>", "not trace"),
        (traced()[0].partition("\n")[0], "no events."),
        (header_with(prompt=7), "Line 1 prompt, preset drafter"),
        (header_with(drafter="x" * 1000), "too long."),
        (header_with(settings=[]), "Line 1"),
        (header_with(settings={"k": 99}), "K 0 16, 99."),
        (header_with(settings={"speed": 1}), "Line 1"),
        (header_with(settings={"\ud800": 1}), "Line 1"),
        (header_with(prompt="\ud800"), "half"),
    ],
    ids=range(10),
)
def test_what_is_no_trace_is_refused_in_words(file: Any, words: str) -> None:
    answer = json.loads(uploaded(file).encode("utf-8"))
    assert [*answer] == ["error"]
    assert tells(answer["error"], words)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_a_real_trace_with_something_changed_is_told_or_refused(data: st.DataObject) -> None:
    lines = [json.loads(line) for line in REAL[:12]]
    at = data.draw(st.sampled_from(lines))
    while True:
        key = data.draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], (dict, list)) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(values)
    answer = json.loads(uploaded("\n".join(map(json.dumps, lines))))
    assert [*answer] == ["error"] or {"request", "lanes", "end"} <= answer.keys()


@pytest.mark.parametrize("name", ["", "nothing", "..%2Fsmollm2-135m.toml", SHIPPED[0]])
def test_only_recordings_that_ship_can_be_asked_for(url: str, name: str) -> None:
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{url}recordings/{name}")


def test_a_recording_is_a_file_that_was_made_before_and_that_browsers_keep(
    url: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdemo.ui.replay.playable.playable", None)  # which made it, and makes nothing now
    for shipped in recordings():
        with urlopen(f"{url}recordings/{shipped['file']}") as answer:
            assert (answer.headers["content-encoding"], answer.headers["content-type"]) == ("gzip", "application/json")
            assert "immutable" in answer.headers["cache-control"]
            replay = json.loads(gzip.decompress(answer.read()))
        assert (replay["kind"], replay["request"]["prompt"]) == ("recording", shipped["prompt"])


def posted(url: str, trace: bytes) -> Any:
    """What the page gets of a file."""
    with urlopen(WebRequest(f"{url}replays", trace)) as answer:
        return json.load(answer)


def refused(url: str, trace: bytes, words: str) -> bool:
    answer = posted(url, trace)
    return [*answer] == ["error"] and tells(answer["error"], words)


def test_a_file_is_read_by_another_process(url: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specdemo.ui.replay.playable.read_trace", None
    )  # which is needed, but not in the process of the engine
    text, _ = traced()
    answer = posted(url, text.encode())
    monkeypatch.undo()
    assert answer == json.loads(uploaded(text))
    assert refused(url, b"\xff\xfe", "not trace")
    assert refused(url, b"x" * (MAX_TRACE + 1), "trace 32 MB.")


@pytest.mark.parametrize(
    ("module", "limit", "value"), [(routes, "OPENING_SECONDS", 0.01), (opening, "OPEN", "raise SystemExit(1)")]
)
def test_a_file_that_takes_too_much_is_given_up(
    url: str, script: Script, monkeypatch: pytest.MonkeyPatch, module: Any, limit: str, value: Any
) -> None:
    monkeypatch.setattr(module, limit, value)
    assert posted(url, b"") == {"error": opening.NOT_OPENED}
    monkeypatch.setattr(routes, "AT_ONCE", asyncio.Semaphore(0))
    assert posted(url, b"") == {"error": routes.BUSY}


def test_slow_uploads_do_not_keep_others_from_opening_a_file(url: str, script: Script) -> None:
    host, port = urlsplit(url).netloc.split(":")
    with ExitStack() as uploads:
        for _ in range(3):
            slow = uploads.enter_context(socket.create_connection((host, int(port))))
            slow.sendall(f"POST /replays HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\nx".encode())
            time.sleep(0.1)  # else it might come later than the next, and hinder nobody
        assert refused(url, b"nothing", "not trace")


def test_files_that_arrive_have_a_limit_together(url: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(routes, "MOST_ARRIVING", 10)
        assert posted(url, b"x" * 11) == {"error": routes.BUSY}
        assert refused(url, b"x" * 10, "not trace")  # the first has gone


def test_a_client_that_leaves_while_it_sends_a_file_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    async def anyone(request: Asked) -> bool:
        return True

    monkeypatch.setattr(routes, "may_see", anyone)
    came = iter([{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(came)

    replay = next(route for route in routes.replay_routes() if route.path == "/replays")
    answer = in_a_loop_of_its_own(replay.endpoint(Asked({"type": "http", "method": "POST", "headers": []}, receive)))
    assert answer.status_code == 400


# The recordings that ship -----------------------------------------------------------------------------------


def test_every_example_prompt_has_a_recording_and_they_are_small() -> None:
    headers = [header_of(name) for name in SHIPPED]
    greedy = {header_of(name)["prompt"] for name in GREEDY if name not in ON_A_GPU}
    prompts = {prompt for prompts in load_prompts().values() for prompt in prompts}
    assert greedy == prompts
    assert {header["preset"] for header in headers} == {DEFAULT_PRESET, PAIR}
    assert all(
        (PAIR in shipped["settings"]) == (header_of(shipped["name"])["preset"] == PAIR) for shipped in recordings()
    )
    names = [shipped["name"] for shipped in recordings() if "NVIDIA H100" in shipped["settings"]]
    assert names == ON_A_GPU
    assert len(names) == 8
    sizes = [path.stat().st_size for path in RECORDINGS.glob(f"*{SUFFIX}")]
    assert max(sizes) < 150_000
    assert sum(sizes) < 1_500_000


@pytest.mark.parametrize(("more", "words"), [({}, "near-tie"), ({"exact_tree_rows": 64}, "report")])
def test_the_badge_of_a_tree_on_a_gpu_says_near_tie_unless_its_trace_tells_that_trees_are_exact(
    more: dict[str, int], words: str
) -> None:
    header, entries = read_trace(lines_of("code-5-eagle-tree"))
    header["environment"] = {"engine": "graph", "exact_rows": 17, "dtype": "bfloat16", **more}
    at = [place for place, entry in enumerate(entries) if entry.lane == SPECULATIVE][2]
    event = entries[at].event
    assert isinstance(event, Round)
    parted = replace(event.emitted[0], id=event.emitted[0].id + 1, margin=0.125)
    entries[at] = replace(entries[at], event=replace(event, emitted=(parted, *event.emitted[1:])))
    assert words in playable(header, entries)["end"]["exactness"]["words"]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recording_can_be_played(name: str) -> None:
    header, entries = read_trace(lines_of(name))
    replay = playable(header, entries)
    assert {*replay["lanes"]} == {PLAIN, SPECULATIVE}
    greedy = header["settings"]["temperature"] == 0
    by_chance = not greedy and header["settings"].get("rule") != "match"
    assert replay["end"]["exactness"]["mark"] == ("chance" if by_chance else "same")
    drafted = [entry for entry in entries if entry.lane == SPECULATIVE and isinstance(entry.event, Round)]
    assert all(bool(entry.probabilities) != greedy for entry in drafted)
    assert replay["facts"].keys() == {"dtype", "weights_dtype", "device_name", "cores"}
    assert header["environment"]["system"] == "Linux"  # and nothing more that tells one machine from another
