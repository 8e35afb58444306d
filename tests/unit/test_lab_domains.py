"""Acceptance counted by category of prompt and by position in the draft."""

from __future__ import annotations

from collections import Counter

from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.studies.domains import CATEGORY, POSITION, Counts
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind

from ..sentences import gist, tells

A, R, U = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED


def round_of(*outcomes: DraftOutcome) -> Round:
    drafted = tuple(DraftedToken(0, outcome, 0.5, 0.5, 0.5) for outcome in outcomes)
    return Round(0, drafted, (Token(0, TokenKind.TARGET, 0.5),), 0, 0, 0)


STORY: list[Event] = [
    Prefilled(3, Token(0, TokenKind.TARGET, 1), 0),
    round_of(A, R, U),
    round_of(A, A),
    round_of(),
    Finished(FinishReason.EOS),
]
CODE = [round_of(R)]


def figures(counts: Counts, by: str) -> dict[str, tuple[int, int, int]]:
    rows = [row for row in counts.rows() if row["by"] == by]
    return {row["name"]: (row["drafted"], row["tested"], row["accepted"]) for row in rows}


def test_counts_by_hand() -> None:
    counts = Counts()
    counts.add("story", STORY)
    counts.add("code", CODE)
    assert figures(counts, CATEGORY) == {"story": (5, 4, 3), "code": (1, 1, 0)}
    assert figures(counts, POSITION) == {"1": (3, 3, 2), "2": (2, 2, 1), "3": (1, 0, 0)}
    row = counts.rows()[0]
    assert (row["acceptance_rate"], row["draft_efficiency"]) == (3 / 4, 3 / 5)


def test_the_positions_are_in_the_order_of_numbers() -> None:
    counts = Counts()
    counts.add("story", [round_of(*[A] * 12)])
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
