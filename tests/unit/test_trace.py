"""The trace: what is written is read back, and what is no trace is refused in words."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding.events import Finished, Prefilled, Round
from specdemo.errors import BadInput
from specdemo.racing import trace as trace_module
from specdemo.racing.trace import (
    MAX_CANDIDATES,
    MAX_DRAFTED,
    MAX_TEXT,
    PLAIN,
    SPECULATIVE,
    TRACE_VERSION,
    Candidate,
    Entry,
    TokenProbabilities,
    read_trace,
    write_trace,
)
from specdemo.settings import MAX_K, MAX_NODES, MAX_SEED
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from tests.harness.texts import with_text

from ..sentences import refuses

shares = st.floats(0, 1)
maybe = st.none() | shares  # a server may not tell probabilities
margins = st.none() | st.floats(0, 1e6)
seconds = st.floats(0, 1e6)
ids = st.integers(0, 300_000)
seeds = st.none() | st.integers(0, MAX_SEED)
# Everything that ends a line somewhere, and what the escaping has to survive.
texts = st.one_of(st.text(max_size=8), st.sampled_from(["\n", "\r\n", "\u2028", "\u2029", "\x85", "\x1c", '"\\', "😀"]))
candidates = st.builds(Candidate, ids, texts, shares, shares)


def strings(draw: st.DrawFn, count: int) -> tuple[str, ...]:
    return tuple(draw(st.lists(texts, min_size=count, max_size=count)))


@st.composite
def rounds(draw: st.DrawFn, lane: str, index: int) -> Entry:
    """A round that `decode` can make, with or without its probabilities."""
    guesses = draw(st.lists(ids, max_size=4))
    accepted = draw(st.integers(0, len(guesses)))
    ended = accepted > 0 and draw(st.booleans())  # the text ended with an accepted token
    outcomes = [DraftOutcome.ACCEPTED] * accepted + [DraftOutcome.REJECTED] * (not ended and accepted < len(guesses))
    outcomes += [DraftOutcome.UNTESTED] * (len(guesses) - len(outcomes))
    last = TokenKind.TARGET if not guesses else TokenKind.BONUS if accepted == len(guesses) else TokenKind.RESAMPLED
    drafted = [
        DraftedToken(i, outcome, draw(maybe), draw(st.none() | st.floats(0.001, 1)), draw(maybe))
        for i, outcome in zip(guesses, outcomes, strict=True)
    ]
    emitted = [Token(i, TokenKind.ACCEPTED, draw(maybe), draw(margins)) for i in guesses[:accepted]]
    if not ended:
        emitted.append(Token(draw(ids), last, draw(maybe), draw(margins)))
    k = draw(st.none() | st.integers(len(guesses), MAX_K))
    event = Round(index, tuple(drafted), tuple(emitted), draw(seconds), draw(seconds), draw(seconds), k)
    positions = [TokenProbabilities(draw(shares), tuple(draw(st.lists(candidates, max_size=3)))) for _ in emitted]
    read = with_text(event, strings(draw, len(emitted)), strings(draw, len(drafted)))
    return Entry(lane, read, tuple(positions) if draw(st.booleans()) else ())


@st.composite
def server_rounds(draw: st.DrawFn, lane: str, index: int) -> Entry:
    """A round of a server that does not tell everything: the size of the draft, some ids, or where its rounds part."""
    known = st.none() | ids
    known_ids = draw(st.lists(known, max_size=4))
    merged = draw(st.none() | st.integers(2, 4)) if len(known_ids) > 2 else None
    merged = min(merged, len(known_ids) + 1) if merged else None
    kind = TokenKind.UNKNOWN if merged or draw(st.booleans()) else TokenKind.ACCEPTED
    emitted = [*(Token(i, kind) for i in known_ids), Token(draw(known), TokenKind.UNKNOWN)]
    drafted = [DraftedToken(i, DraftOutcome.ACCEPTED) for i in known_ids if kind is TokenKind.ACCEPTED]
    event = Round(index, tuple(drafted), tuple(emitted), None, None, draw(seconds), merged=merged)
    return Entry(lane, with_text(event, strings(draw, len(emitted)), strings(draw, len(drafted))))


@st.composite
def runs(draw: st.DrawFn) -> list[Entry]:
    """The entries of up to all `LANES`, one lane after the other."""
    entries: list[Entry] = []
    for lane in LANES[: draw(st.integers(1, len(LANES)))]:
        first = Prefilled(draw(ids), Token(draw(ids), TokenKind.TARGET, draw(shares)), draw(seconds), draw(seeds))
        entries.append(Entry(lane, with_text(first, strings(draw, 1))))
        entries += [draw(rounds(lane, index) | server_rounds(lane, index)) for index in range(draw(st.integers(0, 3)))]
        if draw(st.booleans()):
            ending = with_text(Finished(draw(st.sampled_from(FinishReason))), strings(draw, draw(st.integers(0, 1))))
            entries.append(Entry(lane, ending))
    return entries


LANES = (PLAIN, SPECULATIVE, "eagle, K = 4", "a server")
headers = st.dictionaries(
    texts.filter(lambda key: key not in ("type", "version", "lanes")),
    st.one_of(st.none(), st.integers(), texts, st.lists(texts, max_size=2), st.dictionaries(texts, texts, max_size=2)),
    max_size=4,
)


@given(headers, runs())
def test_what_is_written_is_read_back(header: dict[str, Any], run: list[Entry]) -> None:
    header = {**header, "lanes": [{"name": lane} for lane in LANES]}
    lines = list(write_trace(header, run))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert read_trace(lines) == (header, run)
    assert read_trace("".join(lines).splitlines()) == (header, run)
    assert read_trace(io.StringIO("".join(lines))) == (header, run)


def test_a_line_says_what_it_is() -> None:
    round_ = Round(
        3,
        (DraftedToken(7, DraftOutcome.REJECTED, 0.25, 0.5, 0.75),),
        (Token(9, TokenKind.RESAMPLED, 0.5),),
        0.125,
        0.25,
        0.5,
        k=2,
    )
    header, line = map(json.loads, write_trace({"preset": "x"}, [Entry("plain", with_text(round_, ["b"], ["a"]))]))
    assert header == {"type": "header", "version": TRACE_VERSION, "preset": "x"}
    assert line == {
        "type": "round",
        "lane": "plain",
        "index": 3,
        "drafted": [{"id": 7, "outcome": "rejected", "p": 0.25, "q": 0.5, "draw": 0.75}],
        "emitted": [{"id": 9, "kind": "resampled", "p": 0.5}],
        "draft_seconds": 0.125,
        "verify_seconds": 0.25,
        "seconds": 0.5,
        "k": 2,
        "text": {"emitted": ["b"], "drafted": ["a"]},
    }


HEADER = {"type": "header", "version": TRACE_VERSION, "lanes": [{"name": "plain"}, {"name": "speculative"}]}
FINISHED = {"type": "finished", "lane": "plain", "reason": "eos", "text": {"emitted": [], "drafted": []}}
PREFILLED = {
    "type": "prefilled",
    "lane": "plain",
    "prompt_tokens": 1,
    "seconds": 0.5,
    "token": {"id": 1, "kind": "target", "p": 0.5},
    "text": {"emitted": ["a"], "drafted": []},
}
GUESS = {"id": 7, "outcome": "accepted", "p": 0.25, "q": 0.5, "draw": 0.125}
WRONG = {"id": 8, "outcome": "rejected", "p": 0.25, "q": 0.5, "draw": 0.75}
LATE = {"id": 9, "outcome": "untested", "p": 0.25, "q": 0.5, "draw": 0.75}
PLACE: dict[str, Any] = {"residual": 0.5, "candidates": [{"id": 7, "text": "b", "p": 0.25, "q": 0.5}]}
ROUND: dict[str, Any] = {
    "type": "round",
    "lane": "plain",
    "index": 0,
    "drafted": [GUESS, WRONG, LATE],
    "emitted": [{"id": 7, "kind": "accepted", "p": 0.25}, {"id": 3, "kind": "resampled", "p": 0.5}],
    "draft_seconds": 0.125,
    "verify_seconds": 0.25,
    "seconds": 0.5,
    "k": 3,
    "text": {"emitted": ["b", "c"], "drafted": ["b", "x", "y"]},
    "probabilities": [PLACE, PLACE],
}
TRACE = [json.dumps(line) for line in (HEADER, PREFILLED, ROUND, FINISHED)]


def changed(line: dict[str, Any], **fields: Any) -> str:
    return json.dumps({**line, **fields})


def test_a_mark_at_the_beginning_of_the_file_and_blank_lines_are_passed_over() -> None:
    assert read_trace(["\ufeff" + TRACE[0], *TRACE[1:]]) == read_trace(TRACE)
    assert read_trace(["\n", *TRACE[:2], "  ", *TRACE[2:], ""]) == read_trace(TRACE)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "not json",
        "null",
        "[]",
        "3",
        '"text"',
        "{}",
        changed(ROUND, type=["round"]),
        changed(ROUND, lane="a third"),
        changed(ROUND, lane=["plain"]),
        changed(ROUND, index=1),
        changed(ROUND, index=0.0),
        changed(ROUND, index=True),
        changed(ROUND, k=MAX_NODES + 1),
        changed(ROUND, seconds=-1),
        changed(ROUND, seconds=float("nan")),
        changed(ROUND, verify_seconds=float("inf")),
        changed(ROUND, draft_seconds="0.1"),
        changed(ROUND, draft_seconds=10**400),
        changed(ROUND, drafted=[GUESS, {**WRONG, "p": 1.5}, LATE]),
        changed(ROUND, drafted=[GUESS, {**WRONG, "q": -0.1}, LATE]),
        changed(ROUND, drafted=[GUESS, {**WRONG, "q": 0}, LATE]),
        changed(ROUND, drafted=[GUESS, {**WRONG, "draw": "0.5"}, LATE]),
        changed(ROUND, drafted=[GUESS, {**WRONG, "parent": 1}, LATE]),
        changed(ROUND, drafted=[GUESS, {**WRONG, "parent": -2}, LATE]),
        changed(ROUND, drafted=[{**GUESS, "parent": -1}, {**GUESS, "parent": -1}, LATE]),
        changed(ROUND, drafted=[GUESS, WRONG]),
        changed(ROUND, drafted=[WRONG, GUESS, LATE]),
        changed(ROUND, drafted=[GUESS, LATE, WRONG]),
        changed(ROUND, drafted=[{**GUESS, "id": 6}, WRONG, LATE]),
        changed(ROUND, drafted="all"),
        changed(ROUND, emitted=[]),
        changed(ROUND, emitted=ROUND["emitted"][:1]),
        changed(ROUND, emitted=ROUND["emitted"][::-1]),
        changed(ROUND, emitted=[ROUND["emitted"][0], {"id": 3, "kind": "bonus", "p": 0.5}]),
        changed(ROUND, emitted=[ROUND["emitted"][0], {"id": 3, "kind": "unknown"}]),
        changed(ROUND, merged=1),
        changed(ROUND, merged=2),
        changed(ROUND, merged=3, drafted=[], emitted=[{"kind": "unknown"}, {"kind": "unknown"}]),
        changed(ROUND, merged=2, drafted=[], emitted=[{"kind": "unknown"}, {"kind": "target"}]),
        changed(ROUND, text=None),
        changed(ROUND, text={"emitted": ["b"], "drafted": ["b", "x", "y"]}),
        changed(ROUND, text={"emitted": ["b", 1], "drafted": ["b", "x", "y"]}),
        changed(ROUND, text={"emitted": ["b", "c"], "drafted": []}),
        changed(ROUND, text={"emitted": ["b", "c" * (MAX_TEXT + 1)], "drafted": ["b", "x", "y"]}),
        changed(ROUND, probabilities=[PLACE]),
        changed(ROUND, probabilities=7),
        changed(ROUND, probabilities=[PLACE, {**PLACE, "residual": 2}]),
        changed(ROUND, probabilities=[PLACE, {**PLACE, "candidates": PLACE["candidates"] * (MAX_CANDIDATES + 1)}]),
        changed(ROUND, probabilities=[PLACE, {**PLACE, "candidates": [{**PLACE["candidates"][0], "text": 3}]}]),
        changed(PREFILLED),
        changed(PREFILLED, lane="speculative", token=None),
        changed(PREFILLED, lane="speculative", prompt_tokens=-1),
        changed(PREFILLED, lane="speculative", probabilities=[PLACE]),
        changed(FINISHED, reason="because " * 10_000),
        changed(FINISHED, lane="speculative"),
        changed(FINISHED, text={"emitted": ["a", "b"], "drafted": []}),
        *(
            json.dumps({k: v for k, v in ROUND.items() if k != name})
            for name in ROUND
            if name not in ("k", "probabilities", "draft_seconds", "verify_seconds")
        ),
    ],
    ids=lambda line: line[:60],
)
def test_a_broken_line_is_refused_with_its_number(line: str) -> None:
    read_trace(TRACE)
    with refuses(BadInput, "Line 3") as refused:
        read_trace([*TRACE[:2], line])
    assert len(str(refused.value)) < 240


def test_nothing_follows_the_end_of_a_lane() -> None:
    for line in (json.dumps(ROUND), json.dumps(FINISHED), changed(ROUND, index=1)):
        with refuses(BadInput, "Line 5 order"):
            read_trace([*TRACE, line])


def test_a_trace_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_EVENTS", 5)
    more = [changed(ROUND, index=index) for index in range(5)]
    read_trace([*TRACE[:2], *more[:4]])
    with refuses(BadInput, "Line 7 5"):
        read_trace([*TRACE[:2], *more])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(values.map(json.dumps) | st.text(max_size=30), max_size=4))
def test_whatever_stands_in_a_file_is_read_or_refused(lines: list[str]) -> None:
    for trace in (lines, [*TRACE[:2], *lines]):
        with suppress(BadInput):
            header, entries = read_trace(trace)
            assert read_trace(write_trace(header, entries)) == (header, entries)


@given(st.data())
def test_a_trace_with_something_changed_is_read_or_refused(data: st.DataObject) -> None:
    lines = [json.loads(line) for line in TRACE]
    at = data.draw(st.sampled_from(lines))
    while True:  # down to some field
        key = data.draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], (dict, list)) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(values)
    with suppress(BadInput):
        header, entries = read_trace(map(json.dumps, lines))
        assert read_trace(write_trace(header, entries)) == (header, entries)


@pytest.mark.parametrize(
    "first",
    [
        json.dumps(FINISHED),
        '{"type": "header", "version": 99}',
        '{"type": "header"}',
        "id,text",
        "[1]",
        '"a"',
        "7",
        "{}",
    ],
)
def test_a_trace_begins_with_a_header_of_a_known_version(first: str) -> None:
    with refuses(BadInput, "trace specdemo"):
        read_trace([first, *TRACE[1:]])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (json.dumps(ROUND)[:40], "cut JSON"),
        ("[1]", "object"),
        (json.dumps({**ROUND, "emitted": 3}), "emitted 3"),
        ("[" * 100_000, "cut JSON"),
        ("9" * 5_000, "cut JSON"),  # more digits than Python reads
        (changed(ROUND, emitted=[ROUND["emitted"][0], {"id": 3, "kind": "lucky", "p": 0.5}]), 'kind "lucky"'),
        (changed(ROUND, drafted=[GUESS, {**WRONG, "outcome": "unlucky"}, LATE]), 'outcome "unlucky"'),
        (changed(FINISHED, reason="because"), 'reason "because"'),
        (changed(ROUND, seconds=None), "seconds null"),
        (changed(ROUND, index=0.5), "index 0.5"),
        (changed(ROUND, drafted=[LATE] * (MAX_DRAFTED + 1)), f"drafted {MAX_DRAFTED}"),
        (changed(ROUND, drafted=[{**WRONG, "q": 0}]), "q 0."),
        (changed(ROUND, text={"emitted": ["a" * 1001], "drafted": []}), "emitted 1000"),
        (changed(ROUND, drafted={}), "drafted {}"),
        (json.dumps({name: ROUND[name] for name in ROUND if name != "seconds"}), "field 'seconds'"),
        ('{"type": "surprise", "lane": "plain", "text": {"emitted": [], "drafted": []}}', 'event "surprise"'),
    ],
)
def test_a_line_that_is_none_of_a_trace_is_told_in_words(line: str, reason: str) -> None:
    with refuses(BadInput, f"Line 3 {reason}"):
        read_trace([*TRACE[:2], line])


@pytest.mark.parametrize("lines", [[], ["", "\n"]])
def test_an_empty_trace_is_refused(lines: list[str]) -> None:
    with refuses(BadInput, "empty"):
        read_trace(lines)


def test_a_trace_of_version_1_is_read_as_one_of_version_2() -> None:
    def older(line: str) -> str:
        return line.replace('"outcome"', '"fate"').replace('"probabilities"', '"places"')

    header = {"type": "header", "version": 1, "drafter": "eagle"}
    read, entries = read_trace([json.dumps(header), *map(older, TRACE[1:])])
    assert read["lanes"] == [{"name": "plain", "drafter": "none"}, {"name": "speculative", "drafter": "eagle"}]
    assert entries == read_trace(TRACE)[1]
    assert read_trace(write_trace(read, entries)) == (read, entries)
    with refuses(BadInput, 'Line 2 plain, speculative, "a third"'):
        read_trace([json.dumps(header), changed(PREFILLED, lane="a third")])


def test_a_round_of_a_tree_has_one_accepted_path() -> None:
    def tree(*outcomes: str, last: str = "resampled") -> str:
        parents = (-1, -1, 1, 1)  # two first tokens; the second has two that follow it
        drafted = [{"id": at, "outcome": o, "parent": parents[at]} for at, o in enumerate(outcomes)]
        accepted = [{"id": at, "kind": "accepted"} for at, outcome in enumerate(outcomes) if outcome == "accepted"]
        emitted = [*accepted, {"id": 9, "kind": last}]
        text = {"emitted": ["a"] * len(emitted), "drafted": ["b"] * len(drafted)}
        return json.dumps({**ROUND, "drafted": drafted, "emitted": emitted, "text": text, "probabilities": []})

    fits = [
        tree("rejected", "rejected", "untested", "untested"),
        tree("rejected", "accepted", "rejected", "rejected"),
        tree("rejected", "accepted", "rejected", "accepted", last="bonus"),
        tree("accepted", "rejected", "untested", "untested", last="bonus"),
    ]
    broken = [
        tree("accepted", "accepted", "untested", "untested"),
        tree("rejected", "rejected", "accepted", "untested"),
        tree("rejected", "accepted", "accepted", "accepted", last="bonus"),
        tree("rejected", "accepted", "rejected", "rejected", last="bonus"),
        tree("rejected", "untested", "untested", "untested"),
        tree("untested", "accepted", "rejected", "rejected"),  # siblings are tested together
    ]
    for line in fits:
        (event,) = (entry.event for entry in read_trace([*TRACE[:2], line])[1][1:])
        assert isinstance(event, Round)
        assert [token.parent for token in event.drafted] == [-1, -1, 1, 1]
    for line in broken:
        with refuses(BadInput, "Line 3 fit"):
            read_trace([*TRACE[:2], line])


@pytest.mark.parametrize(
    "lanes", [None, [], "plain", [{}], [{"name": ""}], [{"name": "x" * 61}], [{"name": 1}], [{"name": "a"}] * 2]
)
def test_a_header_names_its_lanes(lanes: Any) -> None:
    with refuses(BadInput, "Line 1"):
        read_trace([json.dumps({**HEADER, "lanes": lanes}), *TRACE[1:]])
