"""What K = auto (`adaptive_k`) goes by: the costs of passes and drafts on this machine, and how many guesses pass.

The unit of cost is a pass over one token at the machine's present speed, so costs do not change with its load. What
runs between two passes is plain Python: the processor's caches are cold then, and NumPy takes three times as long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ..settings import MAX_K
from ..tokens import DraftOutcome

FORGET = 0.95  # a draft's weight is multiplied by this when one more is made
PRIOR_TESTS = 2.0  # the weight of a position's prior, in tests
FOLLOW = 0.02  # how fast the costs of passes follow the last one
DRIFT = 0.2  # how fast `baseline_seconds` and the share of readers who draft do
OUTLIER = 1.5  # a pass slower than this many times the usual time counts as this slow


class CostModel:
    """What is learnt from all runs of the same models with the same kind of sampling, round by round."""

    def __init__(self, seconds: Mapping[int, float], parallel: Container[str] = ()) -> None:
        """`seconds` maps numbers of tokens, 1 among them, to the time of a pass. Other lengths are interpolated. A
        draft of many tokens by one of the `parallel` drafters costs what a draft of one costs."""
        self.parallel = parallel
        lengths = sorted(seconds)
        # An interruption makes a pass look dear, never cheap, so no pass may cost more than a longer one.
        least = np.minimum.accumulate([seconds[tokens] for tokens in reversed(lengths)])[::-1]
        self.baseline_seconds = float(least[0])  # of a pass over one token, as the machine is now
        # The cost of a pass by the tokens that it reads; the one at 0 means nothing.
        self.passes = (np.interp(range(lengths[-1] + 1), lengths, least) / least[0]).tolist()
        self.drafting = 1.0  # share of the readers of a pass who draft, if any does
        self.drafts = defaultdict[tuple[str, bool], DraftStats](DraftStats)  # by (drafter, whether they are trees)
        self.first_guesses = Counter[tuple[str, bool]]()  # how many, by (drafter, whether they passed)
        self.tried = set[tuple[str, bool]]()  # what `measuring.try_out` has measured: (drafter, whether trees too)

    def steps(self, drafter: str, tokens: int) -> int:
        """How many sequential steps a draft of this many tokens takes."""
        return min(tokens, 1) if drafter in self.parallel else tokens

    def most_k(self, readers: int = 1) -> int:
        """The largest K that auto picks for each of several readers: a pass over it was measured."""
        return len(self.shares(readers)) - 2

    def shares(self, readers: int) -> list[float]:
        """A reader's share of a pass over 0, 1, 2, ... of its tokens, in passes over one token; the first is 0.

        Readers that draft share what their drafts add. The first drafts make a pass much longer, so each costs more in
        a round where few readers draft than where all do.
        """
        if readers == 1:
            return self.passes
        alone, drafting = self.passes[readers], max(round(self.drafting * readers), 1)
        return [0.0, *(alone / readers + (cost - alone) / drafting for cost in self.passes[readers::drafting])]

    def learn_pass(self, rows: Sequence[int], seconds: float) -> None:
        """Learn that a round over so many `rows` of each reader took `seconds`, drafting left out."""
        tokens, drafting = sum(rows), sum(each > 1 for each in rows)
        if drafting:
            self.drafting += DRIFT * (drafting / len(rows) - self.drafting)
        if tokens < len(self.passes):  # a fixed K may be larger than any that auto picks
            slower = min(max(seconds / self.baseline_seconds / self.passes[tokens], 1 / OUTLIER), OUTLIER)
            self.passes[tokens] *= slower**FOLLOW
            self.baseline_seconds *= slower**DRIFT


class DraftPlan(NamedTuple):
    """The best draft of one form, and what a round with it is expected to do."""

    rate: float  # tokens in the time of a pass over one token
    cost: float  # of the round
    k: int
    tree: bool
    stop_below: float  # see `DraftOptions`


@dataclass
class DraftStats:
    """What a form of draft costs, a + b k for k steps, and how many of its guesses pass. Older drafts weigh less."""

    plan: DraftPlan = field(init=False)  # the best such draft
    rest: float = 0.0  # rounds until it is tried, in this run and later ones; 0 or less if it is now
    timed: int = 0  # drafts whose cost was learnt; a line takes two
    sums: Sequence[float] = (0.0,) * 5  # of 1, x, y, x x and x y, for drafts of x steps that cost y
    tested: Sequence[float] = (0.0,) * MAX_K  # by position, drafts with a guess there and none rejected before it
    passed: Sequence[float] = (0.0,) * MAX_K  # those whose guess there passed

    def learn_cost(self, steps: float, cost: float) -> None:
        """Learn the cost of one more draft. The relative error counts, so one that was held up counts for little."""
        if steps:  # an empty draft says nothing of the others
            self.timed += 1
            weight, terms = max(cost, 0.01) ** -2, (1.0, steps, cost, steps * steps, steps * cost)
            self.sums = [FORGET * total + weight * term for total, term in zip(self.sums, terms, strict=True)]

    def line(self) -> tuple[float, float]:
        """a and b, by least squares; 0 while they are not known."""
        if self.timed < 2:
            return 0.0, 0.0
        n, x, y, xx, xy = self.sums
        # The 1.03 attributes the cost of drafts of one length to their steps. No draft costs less for being longer.
        each = min(max((1.03 * n * xy - x * y) / (1.03 * n * xx - x * x), 0.0), y / x)
        return (y - each * x) / n, each

    def learn(self, outcomes: Sequence[DraftOutcome], wanted: int, tree: bool = False) -> None:
        """Learn from a tested draft of at most `wanted` tokens. The positions of a tree are the ranks of its tokens,
        the best first, and all of them count as tested.
        """
        passes = [outcome is DraftOutcome.ACCEPTED for outcome in outcomes[:MAX_K]]
        if passes:
            tests = wanted if tree else min(sum(passes) + 1, len(passes))
            self.tested = [FORGET * tested + (i < tests) for i, tested in enumerate(self.tested)]
            self.passed = [FORGET * old + new for old, new in zip_longest(self.passed, passes, fillvalue=False)]

    def chances(self) -> list[float]:
        """a_i: the chance that guess i passes (in a chain: if those before it pass). Its prior is a_(i - 1)."""
        chance, tests = 0.5, zip(self.passed, self.tested, strict=True)
        return [chance := (passed + PRIOR_TESTS * chance) / (tested + PRIOR_TESTS) for passed, tested in tests]
