"""Kinds of tokens, and acceptance counted by them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding.events import Finished, Prefilled, Round
from specdemo.racing.trace import Entry
from specdemo.studies.domains import CATEGORY, KIND, POSITION, Counts, Kind, kind_of
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from tests.harness.texts import with_text

from ..sentences import gist, tells

A, R, U = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED


@pytest.mark.parametrize(
    ("before", "token", "kind"),
    [
        ("He came", ",", Kind.PUNCTUATION),
        ("He came", ' ."', Kind.PUNCTUATION),
        ("He said ", "\u201c", Kind.PUNCTUATION),
        ("He came to", " the", Kind.FUNCTION_WORD),
        ("", "The", Kind.FUNCTION_WORD),
        ("end.\n", "If", Kind.FUNCTION_WORD),
        ("(", "and", Kind.FUNCTION_WORD),
        ("the", " lighthouse", Kind.CONTENT_WORD),
        ("", "Lighthouse", Kind.CONTENT_WORD),
        ("'", "Lighthouse", Kind.CONTENT_WORD),
        ("light", "house", Kind.CONTINUATION),
        ("don", "'t", Kind.CONTINUATION),
        ("don'", "t", Kind.CONTINUATION),
        ("it\u2019", "s", Kind.CONTINUATION),
        ("my_", "name", Kind.CONTINUATION),
        ("my", "_name", Kind.CONTINUATION),
        ("e\u0301", "tude", Kind.CONTINUATION),
        ("in", " 1999", Kind.NUMBER),
        ("19", "99", Kind.NUMBER),
        ("costs", " 3.50", Kind.NUMBER),
        ("a word", "\n\n", Kind.SYMBOL),
        ("    ", "    ", Kind.SYMBOL),
        ("x", " =", Kind.SYMBOL),
        ("f()", " {", Kind.SYMBOL),
        ("x", "**", Kind.SYMBOL),
        ("half a character", "", Kind.CONTINUATION),
        ("hello", "\U0001f600", Kind.SYMBOL),
    ],
)
def test_kinds(before: str, token: str, kind: Kind) -> None:
    assert kind_of(token, before) is kind


@given(st.text(max_size=6), st.text(max_size=6))
def test_every_token_has_a_kind(token: str, before: str) -> None:
    assert kind_of(token, before) in Kind


def entry(outcomes: list[DraftOutcome], drafted: list[str], emitted: list[str]) -> Entry:
    tokens = tuple(DraftedToken(0, outcome, 0.5, 0.5, 0.5) for outcome in outcomes)
    written = tuple(Token(0, TokenKind.ACCEPTED, 0.5) for _ in emitted)
    return Entry("speculative", with_text(Round(0, tokens, written, 0, 0, 0), tuple(emitted), tuple(drafted)))


STORY = [
    Entry("speculative", with_text(Prefilled(3, Token(0, TokenKind.TARGET, 1), 0), ("The",))),
    entry([A, R, U], [" light", "er", "."], [" light", "house"]),
    entry([A, A], [" is", " old"], [" is", " old", "."]),
    entry([], [], ["\n"]),
    Entry("speculative", Finished(FinishReason.EOS)),
]
CODE = [entry([R], ["ing"], [" ="])]


def figures(counts: Counts, by: str) -> dict[str, tuple[int, int, int]]:
    rows = [row for row in counts.rows() if row["by"] == by]
    return {row["name"]: (row["drafted"], row["tested"], row["accepted"]) for row in rows}


def test_counts_by_hand() -> None:
    counts = Counts()
    counts.add("story", STORY)
    counts.add("code", CODE)
    assert figures(counts, CATEGORY) == {"story": (5, 4, 3), "code": (1, 1, 0)}
    assert figures(counts, POSITION) == {"1": (3, 3, 2), "2": (2, 2, 1), "3": (1, 0, 0)}
    assert figures(counts, KIND) == {
        "punctuation": (1, 0, 0),  # untested
        "function word": (1, 1, 1),
        "content word": (3, 2 + 1, 2),  # light, old, and ing with nothing before it
        "word continuation": (1, 1, 0),  # er, after the drafted light
    }
    row = counts.rows()[0]
    assert (row["acceptance_rate"], row["draft_efficiency"]) == (3 / 4, 3 / 5)


def test_the_positions_are_in_the_order_of_numbers() -> None:
    counts = Counts()
    counts.add("story", [entry([A] * 12, ["x"] * 12, ["x"] * 13)])
    assert [row["name"] for row in counts.rows() if row["by"] == POSITION] == [str(n) for n in range(1, 13)]


def counted(*accepted: int, first: int = 0, of: int = 40) -> dict[str, Counter[str]]:
    """A count for each text."""
    return {str(place): Counter(drafted=of, tested=of, accepted=passed) for place, passed in enumerate(accepted, first)}


def test_texts_are_the_units_of_an_interval() -> None:
    """Forty guesses of each of eight texts: all alike they would be known to 1%, by texts they vary by 10%."""
    counts = Counts()
    counts.groups = {(CATEGORY, "code"): counted(24, 12, 30, 16, 28, 20, 10, 20)}
    (row,) = counts.rows()
    assert row["acceptance_rate"] == 0.5
    assert 0.05 < row["acceptance_rate"] - row["low"] < 0.2
    counts.groups = {(CATEGORY, "code"): counted(24)}
    assert (counts.rows()[0]["low"], counts.rows()[0]["high"]) == (None, None)


def test_in_words_tells_what_may_be_chance() -> None:
    counts = Counts()
    counts.groups = {
        **{(CATEGORY, "code"): counted(30, 28, 32), (CATEGORY, "story"): counted(10, 8, 12, first=3)},
        **{(POSITION, "1"): counted(5, 15, 25), (POSITION, "2"): counted(8, 16, 24), (POSITION, "3"): counted(0, of=9)},
    }
    by_category, by_position = counts.in_words()
    assert gist(by_category) == "By code 75% 25%"
    assert tells(by_position, "groups chance")
    assert "3 least" not in by_position
    counts.groups = {(CATEGORY, "code"): counted(30), (CATEGORY, "story"): counted(10, first=1)}
    assert tells(counts.in_words()[0], "chance")  # two texts say nothing of their kinds
