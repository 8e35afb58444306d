"""What the page is told of a trace: the rows and figures of a race, or why it cannot be read; recordings that ship."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request as WebRequest
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as Asked

from specdemo.decoding.events import Prefilled, Round
from specdemo.models.presets import DEFAULT_PRESET, load_prompts
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.stats import Stats
from specdemo.racing.trace import Candidate, Entry, Request, Spans, TokenProbabilities, read_trace, write_trace
from specdemo.types import REJECTION, DraftedToken, DraftOutcome, Settings, Token, TokenKind
from specdemo.ui.race.messages import row_of
from specdemo.ui.race.run import Run
from specdemo.ui.replay import opening, routes
from specdemo.ui.replay.opening import MAX_TRACE
from specdemo.ui.replay.playable import playable, uploaded
from specdemo.ui.replay.routes import RECORDINGS, SUFFIX, recordings

from ..fakes.engine import PRESETS, Script, ScriptedLoaded
from ..sentences import gist, tells
from .browser import in_a_loop_of_its_own

SHIPPED = sorted(path.name.removesuffix(SUFFIX) for path in RECORDINGS.glob(f"*{SUFFIX}"))
PAIR = "qwen2.5-coder"


def traced(
    prompt: str = "one two three four five six", only: str = "", others: tuple[str, ...] = (), **settings: Any
) -> tuple[str, list[Entry]]:
    """The trace of a scripted race, and its entries."""
    script, loaded = Script(), ScriptedLoaded(PRESETS["scripted"])
    asked = Request(
        prompt, "scripted", "prompt-lookup", Settings(**{"k": 4, "max_new_tokens": 24, **settings}), others=others
    )
    entries = list(script.race(loaded, asked))
    entries = [entry for entry in entries if only in ("", entry.lane)]
    header = script.header(loaded, asked)
    return "".join(write_trace(header, entries)), entries


# What the page is told --------------------------------------------------------------------------------------


def test_a_trace_is_told_with_the_rows_and_figures_of_a_race() -> None:
    text, entries = traced()
    told = json.loads(uploaded(text))
    assert told["kind"] == "file"
    for lane in (PLAIN, SPECULATIVE):
        mine = [entry for entry in entries if entry.lane == lane]
        events = told["lanes"][lane]["events"]
        assert [event["row"] for event in events] == [json.loads(json.dumps(row_of(entry))) for entry in mine]
        stats = Stats.of(entry.event for entry in mine)
        assert told["end"]["stats"][lane] == json.loads(json.dumps(stats.as_dict()))
        assert events[-1]["figures"]["tokens"] == stats.tokens
        assert events[-1]["at"] == pytest.approx(stats.seconds)
        assert told["lanes"][lane]["prompt"] == stats.prompt_tokens
    assert tells(told["end"]["exactness"]["title"], "Same text word")
    assert told["facts"] == {"dtype": "bfloat16", "device_name": "a scripted processor"}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "rule": REJECTION}, {"tree": True}], ids=str)
@pytest.mark.parametrize("events", [8, 99])
def test_a_replay_ends_as_the_race_did(events: int, fields: dict[str, Any]) -> None:
    script, settings = Script(), Settings(**{"k": 4, "max_new_tokens": 24, **fields})
    script.differ_at = 9
    race = Run(Request("one two three four five six", "scripted", "prompt-lookup", settings))
    for _ in race._race(script.engine(), ScriptedLoaded(PRESETS["scripted"])):
        if len(race.entries) >= events:
            race.stop.set()
    assert race.outcome is not None
    live = json.loads(json.dumps(race.outcome.ending()))
    told = json.loads(uploaded(race.trace()))["end"]
    assert told["stopped"] is (events < 99)
    for verdict in live["verdicts"].values():
        del verdict["comparison"]  # the badge says it
    assert told == live


def test_a_trace_tells_what_its_weights_were_stored_in_if_it_knows() -> None:
    environment = {"dtype": "float32", "weights_dtype": "float16", "cores": 2}
    told = json.loads(uploaded(header_with(environment=environment)))
    assert told["facts"] == {"dtype": "float32", "weights_dtype": "float16", "cores": "2"}


def test_a_trace_of_one_lane_is_told() -> None:
    told = json.loads(uploaded(traced(only=SPECULATIVE)[0]))
    assert [*told["lanes"]] == [SPECULATIVE]
    assert tells(told["end"]["sentence"], "This trace holds")


NAMES = ["eagle <b>K = 4</b>", "target", "eagle K = 8"]


def three_lanes(alone: int | None = 1, **settings: Any) -> str:
    """The trace of lanes with any names, none of which tells a p, a q or a draw; lane `alone` is the target alone."""
    text, entries = traced(**settings)
    header, *_ = text.split("\n")
    lanes = [{"name": name, "drafter": "none" if at == alone else "eagle"} for at, name in enumerate(NAMES)]
    lines = [json.dumps(json.loads(header) | {"lanes": lanes})]
    for at, name in enumerate(NAMES):
        lane = PLAIN if at == alone else SPECULATIVE
        unknown = write_trace({}, [replace(entry, lane=name) for entry in entries if entry.lane == lane])
        lines += [json.dumps(without(json.loads(line), ("p", "q", "draw"))) for line in [*unknown][1:]]
    return "\n".join(lines)


def without(value: Any, fields: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {name: without(field, fields) for name, field in value.items() if name not in fields}
    return [without(item, fields) for item in value] if isinstance(value, list) else value


def test_more_lanes_are_told_whatever_they_are_called() -> None:
    told = json.loads(uploaded(three_lanes()))
    titles = {side: lane["title"] for side, lane in told["lanes"].items()}
    assert [*titles.items()] == [(PLAIN, NAMES[1]), (SPECULATIVE, NAMES[0]), ("drafted-2", NAMES[2])]
    usual = json.loads(uploaded(traced()[0]))
    end, ratio = usual["end"], usual["end"]["speed_up"]
    assert told["end"] == {  # the same lane twice, by other names
        **end,
        "speed_ups": {SPECULATIVE: ratio, "drafted-2": ratio},
        "stats": {**end["stats"], "drafted-2": end["stats"][SPECULATIVE]},
        "headline": f"{NAMES[0]}: {end['headline']}",
        "verdicts": dict.fromkeys((NAMES[0], NAMES[2]), end["verdicts"][SPECULATIVE]),
        "sentence": f"The fastest lane is {NAMES[0]}, tied with {NAMES[2]}. {end['sentence']}",
    }
    assert told["note"] == usual["note"] == ""
    without_target = json.loads(uploaded(three_lanes(alone=None)))
    assert [lane["title"] for lane in without_target["lanes"].values()] == NAMES
    assert without_target["end"]["speed_up"] is None
    assert tells(without_target["end"]["sentence"], "None these lanes")


def test_of_five_lanes_four_are_told() -> None:
    lines = three_lanes().splitlines()
    header = json.loads(lines[0])
    header["lanes"] += [{"name": name, "drafter": "eagle"} for name in ("four", "five")]
    more = [json.loads(line) | {"lane": name} for name in ("four", "five") for line in lines[1:] if NAMES[0] in line]
    told = json.loads(uploaded("\n".join(map(json.dumps, [header, *map(json.loads, lines[1:]), *more]))))
    assert gist(told["note"]) == "The 5 4"
    assert [lane["title"] for lane in told["lanes"].values()] == [NAMES[1], NAMES[0], NAMES[2], "four"]


def test_a_tree_is_told_in_the_order_of_its_draft() -> None:
    drafted = (
        DraftedToken(5, DraftOutcome.REJECTED, parent=-1),
        DraftedToken(6, DraftOutcome.ACCEPTED, parent=-1),
        DraftedToken(7, DraftOutcome.REJECTED, parent=1),
    )
    emitted = Token(6, TokenKind.ACCEPTED), Token(8, TokenKind.RESAMPLED)
    place = TokenProbabilities(0.5, tuple(Candidate(number, str(number), 0.25, 0.25) for number in (5, 6, 7, 8)))
    event = Round(0, drafted, emitted, 0.0, 0.1, 0.1)
    entry = Entry(SPECULATIVE, event, Spans((" six", " eight"), (" five", " six", " seven")), (place, place))
    prefilled = Entry(SPECULATIVE, Prefilled(3, Token(1, TokenKind.TARGET), 0.1), Spans(("one",)))
    asked = Request("one", "scripted", "eagle", Settings(temperature=1.0))
    header = Script().header(ScriptedLoaded(PRESETS["scripted"]), asked)
    told = json.loads(uploaded("".join(write_trace(header, [prefilled, entry]))))["lanes"][SPECULATIVE]["events"][1]
    row = [[" five", "x", 1, 0], [" six", "a", 2, 0], [" seven", "x", 3, 2], [" eight", "r"]]
    assert [[*token[:2], *token[5:]] for token in told["row"][2]] == row
    marks = [{text: mark for text, _, _, mark, _ in candidates} for _, candidates in told["places"]]
    assert marks == [{"5": "g", "6": "g", "7": "", "8": ""}, {"5": "", "6": "", "7": "g", "8": "d"}]


def test_several_readers_are_told_with_all_their_lanes() -> None:
    text, entries = traced(others=("seven eight nine", "ten eleven"))
    assert tells(json.loads(uploaded(text))["error"], "1 2 4 8")
    text, entries = traced(others=("seven eight nine",))
    told = json.loads(uploaded(text))
    names = ["alone 1", "alone 2", "prompt-lookup 1", "prompt-lookup 2"]
    assert (list(told["lanes"]), told["note"], told["request"]["others"]) == (names, "", ["seven eight nine"])
    assert tells(told["end"]["sentence"], "2 prompt-lookup")
    at_once = Stats.at_once(((entry.lane, entry.event) for entry in entries if entry.lane in names[2:]), 2)
    assert told["end"]["stats"][SPECULATIVE]["tokens_per_second_of_all"] == 2 * (at_once.tokens_per_second or 0)
    of_all = [event["of_all"] for name in names[2:] for event in told["lanes"][name]["events"] if "of_all" in event]
    lengths = {str(length): rounds for length, rounds in at_once.accepted_lengths.items()}
    assert {"acceptance_rate": at_once.acceptance_rate, "accepted_lengths": lengths}.items() <= of_all[-1].items()
    other = text.replace('"alone 2"', '"another"')  # lanes that are not those of readers
    told = json.loads(uploaded(other))
    assert (len(told["lanes"]), told["request"]["others"]) == (4, [])


def test_a_race_that_was_stopped_is_told_as_stopped() -> None:
    lines = traced()[0].splitlines()[:-4]
    assert json.loads(uploaded("\n".join(lines)))["end"]["stopped"] is True


def header_with(**fields: Any) -> str:
    lines = traced()[0].splitlines()
    return "\n".join([json.dumps({**json.loads(lines[0]), **fields}), *lines[1:]])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("", "The trace is empty."),
        ("<b>hello</b>", "This is not a trace of specdemo."),
        (traced()[0].partition("\n")[0], "The trace holds no events."),
        (header_with(prompt=7), "Line 1 of the trace cannot be read: prompt, preset and drafter are texts."),
        (header_with(drafter="x" * 1000), "is too long."),
        (header_with(settings=[]), "Line 1 of the trace cannot be read: "),
        (header_with(settings={"k": 99}), "K must be a whole number from 0 to 16, not 99."),
        (header_with(settings={"speed": 1}), "Line 1 of the trace cannot be read: "),
        (header_with(settings={"\ud800": 1}), "Line 1 of the trace cannot be read: "),
        (header_with(prompt="\ud800"), "The trace holds half of a character (a lone surrogate), which is not text."),
    ],
    ids=range(10),
)
def test_what_is_no_trace_is_refused_in_words(file: Any, words: str) -> None:
    told = json.loads(uploaded(file).encode("utf-8"))
    assert [*told] == ["error"]
    assert words in told["error"]


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
    told = json.loads(uploaded("\n".join(map(json.dumps, lines))))
    assert [*told] == ["error"] or {"request", "lanes", "end"} <= told.keys()


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
            told = json.loads(gzip.decompress(answer.read()))
        assert (told["kind"], told["request"]["prompt"]) == ("recording", shipped["prompt"])


def posted(url: str, trace: bytes) -> Any:
    """What the page is told of a file."""
    with urlopen(WebRequest(f"{url}replays", trace)) as answer:
        return json.load(answer)


def test_a_file_is_read_by_another_process(url: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specdemo.ui.replay.playable.read_trace", None
    )  # which is needed, but not in the process of the engine
    text, _ = traced()
    told = posted(url, text.encode())
    monkeypatch.undo()
    assert told == json.loads(uploaded(text))
    assert posted(url, b"\xff\xfe") == {"error": "This is not a trace of specdemo."}
    assert posted(url, b"x" * (MAX_TRACE + 1)) == {"error": "This file is too large: a trace has at most 32 MB."}


@pytest.mark.parametrize(
    ("module", "limit", "value"), [(routes, "OPENING_SECONDS", 0.01), (opening, "OPEN", "raise SystemExit(1)")]
)
def test_a_file_that_takes_too_much_is_given_up(
    url: str, script: Script, monkeypatch: pytest.MonkeyPatch, module: Any, limit: str, value: Any
) -> None:
    monkeypatch.setattr(module, limit, value)
    assert posted(url, b"") == {"error": opening.NOT_OPENED}
    monkeypatch.setattr(routes, "AT_ONCE", asyncio.Semaphore(0))
    assert posted(url, b"") == {"error": "Others are opening files just now. Try again in a moment."}


def test_slow_uploads_do_not_keep_others_from_opening_a_file(url: str, script: Script) -> None:
    host, port = urlsplit(url).netloc.split(":")
    with ExitStack() as uploads:
        for _ in range(3):
            slow = uploads.enter_context(socket.create_connection((host, int(port))))
            slow.sendall(f"POST /replays HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\nx".encode())
            time.sleep(0.1)  # else it might come later than the next, and hinder nobody
        assert posted(url, b"nothing") == {"error": "This is not a trace of specdemo."}


def test_files_that_arrive_have_a_limit_together(url: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(routes, "MOST_ARRIVING", 10)
        assert posted(url, b"x" * 11) == {"error": routes.BUSY}
        assert posted(url, b"x" * 10) == {"error": "This is not a trace of specdemo."}  # the first has gone


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


def lines_of(name: str) -> list[str]:
    return gzip.decompress((RECORDINGS / f"{name}{SUFFIX}").read_bytes()).decode("ascii").splitlines()


@cache
def header_of(name: str) -> dict[str, Any]:
    with gzip.open(RECORDINGS / f"{name}{SUFFIX}", "rt", encoding="ascii") as lines:
        return read_trace([lines.readline()])[0]


GREEDY = [name for name in SHIPPED if header_of(name)["settings"]["temperature"] == 0]
ON_A_GPU = [name for name in SHIPPED if header_of(name)["environment"]["device"].startswith("cuda")]
REAL = lines_of(next(name for name in SHIPPED if "rule" not in header_of(name)["settings"] and name not in GREEDY))


def test_every_example_prompt_has_a_recording_and_they_are_small() -> None:
    headers = [header_of(name) for name in SHIPPED]
    greedy = {header_of(name)["prompt"] for name in GREEDY if name not in ON_A_GPU}
    prompts = {prompt for prompts in load_prompts().values() for prompt in prompts}
    assert greedy == prompts
    assert {header["preset"] for header in headers} == {DEFAULT_PRESET, PAIR}
    assert all(
        (PAIR in shipped["settings"]) == (header_of(shipped["name"])["preset"] == PAIR) for shipped in recordings()
    )
    told = [shipped["name"] for shipped in recordings() if "NVIDIA H100" in shipped["settings"]]
    assert told == ON_A_GPU
    assert len(told) == 8
    sizes = [path.stat().st_size for path in RECORDINGS.glob(f"*{SUFFIX}")]
    assert max(sizes) < 150_000
    assert sum(sizes) < 1_500_000


@pytest.mark.parametrize(("told", "words"), [({}, "near-tie"), ({"exact_tree_rows": 64}, "Please report this")])
def test_the_badge_of_a_tree_on_a_gpu_says_near_tie_unless_its_trace_tells_that_trees_are_exact(
    told: dict[str, int], words: str
) -> None:
    header, entries = read_trace(lines_of("code-5-eagle-tree"))
    header["environment"] = {"engine": "graph", "exact_rows": 17, "dtype": "bfloat16", **told}
    at = [place for place, entry in enumerate(entries) if entry.lane == SPECULATIVE][2]
    event = entries[at].event
    assert isinstance(event, Round)
    parted = replace(event.emitted[0], id=event.emitted[0].id + 1, margin=0.125)
    entries[at] = replace(entries[at], event=replace(event, emitted=(parted, *event.emitted[1:])))
    assert words in playable(header, entries)["end"]["exactness"]["words"]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recording_can_be_played(name: str) -> None:
    header, entries = read_trace(lines_of(name))
    told = playable(header, entries)
    assert {*told["lanes"]} == {PLAIN, SPECULATIVE}
    greedy = header["settings"]["temperature"] == 0
    by_chance = not greedy and header["settings"].get("rule") != "match"
    assert told["end"]["exactness"]["mark"] == ("chance" if by_chance else "same")
    drafted = [entry for entry in entries if entry.lane == SPECULATIVE and isinstance(entry.event, Round)]
    assert all(bool(entry.probabilities) != greedy for entry in drafted)
    assert told["facts"].keys() == {"dtype", "weights_dtype", "device_name", "cores"}
    assert header["environment"]["system"] == "Linux"  # and nothing more that tells one machine from another
