"""The trace: what is written is read back, and what is no trace is refused in words."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.events import (
    TRACE_VERSION,
    Entry,
    Finished,
    Prefilled,
    Round,
    Spans,
    emitted_tokens,
    engine_seconds,
    read_trace,
    write_trace,
)
from specdemo.types import BadInput, DraftedToken, Fate, FinishReason, Token, TokenKind

numbers = st.floats(0, 1e6)
ids = st.integers(0, 300_000)
tokens = st.builds(Token, ids, st.sampled_from(TokenKind), numbers)
drafted = st.builds(DraftedToken, ids, st.sampled_from(Fate), numbers, numbers, numbers)
events = st.one_of(
    st.builds(Prefilled, ids, tokens, numbers),
    st.builds(
        Round,
        ids,
        st.lists(drafted, max_size=4).map(tuple),
        st.lists(tokens, min_size=1, max_size=4).map(tuple),
        *[numbers] * 3,
    ),
    st.builds(Finished, st.sampled_from(FinishReason)),
)
# Everything that ends a line somewhere, and what the escaping has to survive.
texts = st.one_of(st.text(max_size=8), st.sampled_from(["\n", "\r\n", "\u2028", "\u2029", "\x85", "\x1c", '"\\', "😀"]))
strings = st.lists(texts, max_size=3).map(tuple)
entries = st.builds(
    Entry, st.sampled_from(["plain", "speculative", "a lane"]), events, st.builds(Spans, strings, strings)
)
headers = st.dictionaries(
    texts.filter(lambda key: key not in ("type", "version")),
    st.one_of(st.none(), st.integers(), texts, st.lists(texts, max_size=2), st.dictionaries(texts, texts, max_size=2)),
    max_size=4,
)


@given(headers, st.lists(entries, max_size=6))
def test_what_is_written_is_read_back(header: dict[str, Any], run: list[Entry]) -> None:
    lines = list(write_trace(header, run))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert read_trace(lines) == (header, run)
    assert read_trace("".join(lines).splitlines()) == (header, run)
    assert read_trace(io.StringIO("".join(lines))) == (header, run)


def test_a_line_says_what_it_is() -> None:
    round_ = Round(
        3,
        (DraftedToken(7, Fate.REJECTED, 0.25, 0.5, 0.75),),
        (Token(9, TokenKind.RESAMPLED, 0.5),),
        0.125,
        0.25,
        0.5,
        k=2,
    )
    header, line = map(json.loads, write_trace({"preset": "x"}, [Entry("plain", round_, Spans(["b"], ["a"]))]))
    assert header == {"type": "header", "version": TRACE_VERSION, "preset": "x"}
    assert line == {
        "type": "round",
        "lane": "plain",
        "index": 3,
        "drafted": [{"id": 7, "fate": "rejected", "p": 0.25, "q": 0.5, "draw": 0.75}],
        "emitted": [{"id": 9, "kind": "resampled", "p": 0.5}],
        "draft_seconds": 0.125,
        "verify_seconds": 0.25,
        "seconds": 0.5,
        "k": 2,
        "text": {"emitted": ["b"], "drafted": ["a"]},
    }


def test_blank_lines_are_passed_over() -> None:
    lines = list(write_trace({}, [Entry("plain", Finished(FinishReason.EOS), Spans())]))
    assert read_trace(["\n", *lines, "  ", ""]) == read_trace(lines)


HEADER = json.dumps({"type": "header", "version": TRACE_VERSION})
FINISHED = {"type": "finished", "lane": "plain", "reason": "eos", "text": {"emitted": [], "drafted": []}}
PREFILLED = {
    **FINISHED,
    "type": "prefilled",
    "prompt_tokens": 1,
    "seconds": 0.5,
    "token": {"id": 1, "kind": "target", "p": 0.5},
}


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
        "[" * 100_000,
        json.dumps({**FINISHED, "type": "surprise"}),
        json.dumps({**FINISHED, "type": ["finished"]}),
        json.dumps({**FINISHED, "reason": "because"}),
        json.dumps({**FINISHED, "text": None}),
        json.dumps({**FINISHED, "text": {"emitted": "abc", "drafted": []}}),
        json.dumps({**FINISHED, "text": {"emitted": [1], "drafted": []}}),
        json.dumps({**PREFILLED, "prompt_tokens": "many"}),
        json.dumps({**PREFILLED, "prompt_tokens": float("inf")}),
        json.dumps({**PREFILLED, "token": {"id": 1, "kind": "lucky", "p": 0.5}}),
        json.dumps({**PREFILLED, "token": None}),
        *(json.dumps({k: v for k, v in PREFILLED.items() if k != name}) for name in PREFILLED if name != "reason"),
    ],
    ids=lambda line: line[:60],
)
def test_a_broken_line_is_refused_with_its_number(line: str) -> None:
    read_trace([HEADER, json.dumps(FINISHED), json.dumps(PREFILLED)])
    with pytest.raises(BadInput, match=r"^Line 3 of the trace cannot be read: .+\.$"):
        read_trace([HEADER, json.dumps(FINISHED), line])


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadInput, match="it has no field 'seconds'"):
        read_trace([HEADER, json.dumps({k: v for k, v in PREFILLED.items() if k != "seconds"})])


@pytest.mark.parametrize("first", [json.dumps(FINISHED), '{"type": "header", "version": 99}', '{"type": "header"}'])
def test_a_trace_begins_with_a_header_of_a_known_version(first: str) -> None:
    with pytest.raises(BadInput, match="Line 1 of the trace"):
        read_trace([first, json.dumps(FINISHED)])


@pytest.mark.parametrize("lines", [[], ["", "\n"]])
def test_an_empty_trace_is_refused(lines: list[str]) -> None:
    with pytest.raises(BadInput, match="trace is empty"):
        read_trace(lines)


def test_what_an_event_adds_to_the_text_and_to_the_clock() -> None:
    token = Token(1, TokenKind.TARGET, 0.5)
    assert (emitted_tokens(Prefilled(4, token, 0.5)), engine_seconds(Prefilled(4, token, 0.5))) == ((token,), 0.5)
    round_ = Round(0, (), (token, token), 0.1, 0.2, 0.4)
    assert (emitted_tokens(round_), engine_seconds(round_)) == ((token, token), 0.4)
    assert (emitted_tokens(Finished(FinishReason.EOS)), engine_seconds(Finished(FinishReason.EOS))) == ((), 0.0)
