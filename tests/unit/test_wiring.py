"""What is said of a published head whose first guesses nearly all fail."""

from __future__ import annotations

import pytest

from specdemo.racing.stats import Stats
from specdemo.racing.wiring import CAUSES, ENOUGH, head_doubt

FORMATS = {"eagle": "EAGLE-3", "medusa": "Medusa"}


def stats_of(failed: int, passed: int) -> Stats:
    return Stats(accepted_lengths={0: failed, 2: passed})


def test_a_head_that_is_nearly_always_wrong_is_doubted_with_the_causes_in_their_order() -> None:
    sentence = head_doubt(FORMATS, "eagle", stats_of(48, 2))
    assert sentence is not None
    assert sentence.startswith("Only 4% of the first guesses of this EAGLE-3 head pass, where 65% to 85% are usual: ")
    places = [sentence.index(f"{number}. {cause}") for number, cause in enumerate(CAUSES, start=1)]
    assert places == sorted(places)
    words = ("layers", "rope_theta", "chat template", "thinks", "quantized")
    assert [word in cause for word, cause in zip(words, CAUSES, strict=True)] == [True] * 5


def test_what_is_usual_depends_on_the_kind_of_head() -> None:
    sentence = head_doubt(FORMATS, "medusa", stats_of(48, 2)) or ""
    assert sentence.startswith("Only 4% of the first guesses of this Medusa head pass, where 50% to 65% are usual: ")


@pytest.mark.parametrize(
    ("drafter", "stats"),
    [
        ("eagle", stats_of(ENOUGH * 4 // 5, ENOUGH // 5 + 1)),  # a fifth passes
        ("eagle", stats_of(ENOUGH - 1, 0)),  # too few to tell
        ("eagle", Stats()),
        ("block", stats_of(50, 0)),  # trained here
        ("draft-model", stats_of(50, 0)),
    ],
)
def test_nothing_is_said_of_others(drafter: str, stats: Stats) -> None:
    assert head_doubt(FORMATS, drafter, stats) is None
