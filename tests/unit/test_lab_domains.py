"""Acceptance counted by category of prompt and by position in the draft."""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.studies.domains import CATEGORY, POSITION, counts_of, in_words, rows_of
from specdemo.studies.summaries import Row, Runs
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


def counted(**texts: Sequence[Event]) -> list[Row]:
    return [
        {"prompt_id": name, CATEGORY: name, **count} for name, events in texts.items() for count in counts_of(events)
    ]


def figures(runs: Runs, by: str) -> dict[str, tuple[int, int, int]]:
    return {row["name"]: (row["drafted"], row["tested"], row["accepted"]) for row in rows_of(runs, by)}


def test_counts_by_hand() -> None:
    runs = counted(story=STORY, code=CODE)
    assert figures(runs, CATEGORY) == {"story": (5, 4, 3), "code": (1, 1, 0)}
    assert figures(runs, POSITION) == {"1": (3, 3, 2), "2": (2, 2, 1), "3": (1, 0, 0)}
    row, _ = rows_of(runs, CATEGORY)
    assert (row["acceptance_rate"], row["draft_efficiency"]) == (3 / 4, 3 / 5)


def test_the_positions_are_in_the_order_of_numbers() -> None:
    rows = rows_of(counted(story=[round_of(*[A] * 12)]), POSITION)
    assert [row["name"] for row in rows] == [str(n) for n in range(1, 13)]


def group(category: str, position: int, *accepted: int, of: int = 40) -> list[Row]:
    """A count for each text."""
    names = {CATEGORY: category, POSITION: position, "drafted": of, "tested": of}
    return [{**names, "prompt_id": f"{category} {n}", "accepted": passed} for n, passed in enumerate(accepted)]


def test_texts_are_the_units_of_an_interval() -> None:
    """Forty guesses of each of eight texts: all alike they would be known to 1%, by texts they vary by 10%."""
    (row,) = rows_of(group("code", 1, 24, 12, 30, 16, 28, 20, 10, 20), CATEGORY)
    assert row["acceptance_rate"] == 0.5
    assert 0.05 < row["acceptance_rate"] - row["low"] < 0.2
    (row,) = rows_of(group("code", 1, 24), CATEGORY)
    assert (row["low"], row["high"]) == (None, None)


def test_in_words_tells_what_may_be_chance() -> None:
    runs = [*group("code", 1, 30, 28, 32), *group("story", 1, 10, 8, 12), *group("story", 2, 0, of=9)]
    by_category, *others = in_words(runs)
    assert not others  # too few were tested at the second position
    assert gist(by_category) == "By code 75% 23%"
    runs = [*group("code", 1, 5, 15, 25), *group("code", 2, 8, 16, 24), *group("code", 3, 0, of=9)]
    (by_position,) = in_words(runs)
    assert tells(by_position, "groups chance")
    assert "3 least" not in by_position
    (by_category,) = in_words([*group("code", 1, 30), *group("story", 1, 10)])
    assert tells(by_category, "chance")  # two texts say nothing of their kinds
