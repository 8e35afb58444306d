"""What is said of a published head whose first guesses nearly all fail."""

from __future__ import annotations

import pytest

from specdemo.decoding.events import Round
from specdemo.racing.stats import Stats
from specdemo.racing.summary import USUAL, head_doubt
from specdemo.types import DraftedToken, DraftOutcome, Token, TokenKind


def test_a_head_that_is_nearly_always_wrong_is_doubted_with_the_causes_in_their_order() -> None:
    sentence = head_doubt("eagle", "EAGLE-3", 50, 2)
    assert sentence == (
        "Only 4% of the first guesses of this EAGLE-3 head pass, where 65% to 85% are usual. Likely causes, in this "
        "order: the layers it reads, its rope_theta, the chat template, the thinking mode, a quantized target."
    )


def test_what_is_usual_and_what_is_far_below_it_depend_on_the_kind_of_head() -> None:
    assert set(USUAL) == {"eagle", "block", "medusa"}
    sentence = head_doubt("medusa", "Medusa", 50, 2) or ""
    assert sentence.startswith("Only 4% of the first guesses of this Medusa head pass, where 50% to 65% are usual. ")
    assert head_doubt("eagle", "EAGLE-3", 500, 95)  # 19%
    assert head_doubt("medusa", "Medusa", 500, 95) is None


@pytest.mark.parametrize(
    ("kind", "drafts", "passed"),
    [("eagle", 500, 110), ("eagle", 10, 0), ("eagle", 15, 1), ("medusa", 14, 0), ("eagle", 0, 0)],
)
def test_nothing_is_said_where_more_pass_or_too_little_is_known(kind: str, drafts: int, passed: int) -> None:
    assert head_doubt(kind, "a format", drafts, passed) is None


def test_a_few_drafts_are_enough_where_none_passes() -> None:
    assert head_doubt("eagle", "EAGLE-3", 11, 0)
    assert head_doubt("medusa", "Medusa", 15, 0)


def test_of_a_tree_the_likeliest_first_guess_counts() -> None:
    """Among eight first guesses one passes often, also where the head knows nothing."""
    stats = Stats()
    for passing in (0, 1, 1):
        outcomes = [DraftOutcome.ACCEPTED if node == passing else DraftOutcome.REJECTED for node in range(2)]
        drafted = tuple(DraftedToken(node, outcome, parent=-1) for node, outcome in enumerate(outcomes))
        stats.add(Round(0, drafted, (Token(passing, TokenKind.ACCEPTED), Token(5, TokenKind.BONUS)), 0.1, 0.1, 0.1))
    assert (stats.drafts, stats.first_passed, stats.accepted_lengths) == (3, 1, {1: 3})
