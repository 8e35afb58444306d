"""A measured race beside the theory, and the gap between the two by its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import fmean

from ..events import Event, Round
from ..stats import Stats, counts_by_place, speed_up
from ..types import BadInput
from . import theory


@dataclass(frozen=True, slots=True)
class Part:
    """One simplification of the theory replaced by what was measured.

    `speedup` is the prediction from there on, `change` what the replacement did to it.
    """

    name: str
    words: str
    speedup: float
    change: float


@dataclass(frozen=True, slots=True)
class Explained:
    """A race in the terms of the theory.

    `one_pass` are the seconds of a mean target pass over one token, `k` is the longest draft, `alpha` the acceptance
    rate, `draft_cost` c and `verify_cost` the mean verification pass, both in target passes, `by_position` the
    acceptance rate at each place of the draft, None where nothing was tested. `parts` begins with the formula and ends
    with the measured speed-up: their changes add up to the gap exactly.
    """

    one_pass: float
    k: int
    alpha: float
    draft_cost: float
    verify_cost: float
    by_position: tuple[float | None, ...]
    predicted: float
    measured: float
    parts: tuple[Part, ...]

    def in_words(self) -> list[str]:
        """The gap in sentences."""
        lines = [
            f"{self.alpha:.0%} of the tested guesses passed, a drafted token cost {self.draft_cost:.0%} of a target "
            f"pass, and drafts were up to {self.k} long: the formula says {self.predicted:.2f}x. "
            f"Measured: {self.measured:.2f}x."
        ]
        return lines + [f"{part.change:+.2f}x  {part.words}" for part in self.parts]


def explain(plain: Sequence[Event], speculative: Sequence[Event]) -> Explained:
    """Take the formula's simplifications back, one after the other, until the measured speed-up is left.

    The order is fixed, since what a part is worth depends on those before it. Every figure is a mean over
    rounds, so that the last prediction is the measurement itself and nothing is left over.

    Raises:
        BadInput: a lane has no rounds, or nothing was drafted and tested.
    """
    alone = [event for event in plain if isinstance(event, Round)]
    rounds = [event for event in speculative if isinstance(event, Round)]
    stats, measured = Stats.of(speculative), speed_up(Stats.of(plain), Stats.of(speculative))
    if not alone or stats.acceptance_rate is None or stats.tokens_per_round is None or measured is None:
        raise BadInput("There is nothing to explain: a race of both lanes is needed in which guesses were tested.")

    one_pass = fmean(event.verify_seconds for event in alone)
    lengths = [len(event.drafted) for event in rounds]
    k, alpha, tau = max(lengths), stats.acceptance_rate, stats.tokens_per_round
    draft = stats.draft_seconds / len(rounds) / one_pass  # of a mean round
    verify = stats.verify_seconds / len(rounds) / one_pass
    c = draft / fmean(lengths)
    by_position = [accepted / tested if tested else None for tested, accepted in counts_by_place(rounds)]
    passing = [rate or 0.0 for rate in by_position]
    reached = [0.0, *accumulate(accumulate(passing, mul))]  # tokens accepted of a draft of 0, 1, 2, ... tokens
    seconds = fmean(event.seconds for event in rounds) / fmean(event.seconds for event in alone)

    predicted = theory.speed_up(alpha, k, theory.Costs(c))
    stages = [
        ("drafts", "drafts were shorter", fmean(theory.expected_tokens(alpha, n) for n in lengths) / (draft + 1)),
        (
            "positions",
            "guesses pass more or less often by their place in the draft",
            (1 + fmean(reached[n] for n in lengths)) / (draft + 1),
        ),
        ("rounds", "they also do so by the round, and the end of the text cuts some off", tau / (draft + 1)),
        (
            "checking",
            f"a pass that checks guesses takes {verify:.2f} times as long as one over a single token",
            tau / (draft + verify),
        ),
        ("overhead", "sampling and bookkeeping", tau / seconds),
        ("first token", "reading the prompt, which drafting does not shorten", measured),
    ]
    before, parts = predicted, []
    for name, words, after in stages:
        parts.append(Part(name, words, after, after - before))
        before = after
    return Explained(one_pass, k, alpha, c, verify, tuple(by_position), predicted, measured, tuple(parts))
