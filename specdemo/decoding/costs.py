"""What the parts of a round cost on this machine, and how many guesses pass: what K = auto goes by (`adaptive_k`).

The unit of cost is a pass over one token at the machine's present speed, which takes `CostModel.baseline_seconds`. That
follows the load of the machine, so that costs measured at different times can be compared.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate, zip_longest
from math import inf
from typing import NamedTuple

import numpy as np
import torch

from ..engines.runner import Runner
from ..system.progress import check_stopped
from ..types import MAX_K, Draft, DraftOutcome
from .rule import Rule

FORGET = 0.95  # the weight that a draft keeps when one more is made
PRIOR_TESTS = 2.0  # what a position's prior weighs in tests, and all tests of earlier texts
FOLLOW = 0.02  # how fast the costs of passes follow the last one
DRIFT = 0.2  # how fast `baseline_seconds` does
OUTLIER = 1.5  # a pass that takes this many times the usual, or more, counts as this many times
CALIBRATION_SECONDS = 0.6
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17)  # passes that a calibration measures, as far as auto takes them


class Plan(NamedTuple):
    """The best draft of one kind, and what a round with it is expected to do."""

    rate: float  # tokens in the time of a pass over one token
    cost: float  # of the round
    k: int
    tree: bool
    stop_below: float  # see `Drafter.stop_below`


class CostModel:
    """What passes and drafts cost, and how many guesses pass, learnt from every round of every run.

    One object serves all runs of the same models with the same kind of sampling.

    Attributes:
        most_k: the largest K that auto picks: a pass over it was measured.
        passes: the cost of a pass by the tokens that it reads; the one at 0 means nothing.
        baseline_seconds: the seconds of a pass over one token, as the machine is now.
        drafts: what the latest run knows of each kind of draft.
        first_guesses: how many first guesses of all runs passed, and how many did not, by (drafter, whether it did).
        tried: the drafters, for chains only or for trees too, that `race.try_out` has measured.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds` are those of some passes, from one token on, by the tokens read; those between lie on a line. An
        interruption makes a pass look dear and never cheap, so none is taken to cost more than a longer one.
        """
        lengths = sorted(seconds)
        least = list(accumulate((seconds[tokens] for tokens in reversed(lengths)), min))[::-1]
        self.most_k, self.baseline_seconds = lengths[-1] - 1, least[0]
        self.passes = (np.interp(range(lengths[-1] + 1), lengths, least) / least[0]).tolist()
        self.drafts: defaultdict[tuple[str, bool], DraftStats] = defaultdict(DraftStats)
        self.first_guesses: Counter[tuple[str, bool]] = Counter()
        self.tried: set[tuple[str, bool]] = set()

    def learn_pass(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens, with everything else in its round but the drafting, took `seconds`."""
        if tokens < len(self.passes):  # not of a fixed K that auto never picks
            slower = min(max(seconds / self.baseline_seconds / self.passes[tokens], 1 / OUTLIER), OUTLIER)
            self.passes[tokens] *= slower**FOLLOW
            self.baseline_seconds *= slower**DRIFT


@torch.inference_mode()
def measure_passes(runner: Runner, rule: Rule, most_k: int) -> dict[int, float]:
    """The seconds of passes that auto takes, with what follows them in a round, by the tokens that they read.

    Args:
        runner: it is free, and is so again afterwards.
    Raises:
        Stopped: whoever waits for it has stopped it.
    """
    lengths = [*(tokens for tokens in LENGTHS if tokens <= most_k), most_k + 1]
    seconds = dict.fromkeys(lengths, inf)
    end, turn = time.perf_counter() + CALIBRATION_SECONDS, 0
    try:
        runner.prefill([0])
        while not turn or time.perf_counter() < end:  # the first pass of a length also sets up its kernels
            for tokens in seconds:
                check_stopped()
                began = time.perf_counter()
                rule.verify(runner.forward([0] * tokens), Draft([0] * (tokens - 1)), position=1)
                seconds[tokens] = min(seconds[tokens], time.perf_counter() - began)
                runner.rollback(1)
            turn += 1
    finally:
        runner.release()
    return seconds


class DraftStats:
    """What is known of one kind of draft: what k steps cost, a + b k, and how many guesses pass, by position. Older
    drafts weigh less.

    Plain Python does it between two passes: the processor's caches are cold then, and NumPy takes three times as long.

    Attributes:
        idle: rounds since the last draft, in this run and earlier ones; infinite before the first.
        reading: what the first draft of a run costs more, by the tokens of the prompt.
        tested: drafts that had a guess at the position, behind guesses that all passed.
        passed: those whose guess there passed.
    """

    def __init__(self) -> None:
        self.idle, self.reading = inf, 0.0
        self.plan: Plan | None = None
        self._timed, self._sums = 0, [0.0] * 5  # of 1, x, y, x x and x y, for x steps of cost y
        self.tested, self.passed = [0.0] * MAX_K, [0.0] * MAX_K

    def learn_cost(self, steps: float, cost: float) -> None:
        """One more draft. The relative error counts, so that a draft which was held up counts for little."""
        if steps:  # one without a token says nothing of the others
            self._timed += 1
            weight, terms = max(cost, 0.01) ** -2, (1.0, steps, cost, steps * steps, steps * cost)
            self._sums = [FORGET * total + weight * term for total, term in zip(self._sums, terms, strict=True)]

    @property
    def cost_known(self) -> bool:
        """Whether two drafts were timed: one may have been held up."""
        return self._timed > 1

    def line(self) -> tuple[float, float]:
        """a and b, by least squares; 0 while they are not known."""
        if not self.cost_known:
            return 0.0, 0.0
        n, x, y, xx, xy = self._sums
        # The constant is held back a little: drafts of one length say nothing of it.
        constant = max((xx * y - x * xy) / (1.03 * n * xx - x * x), 0.0)
        each = (xy - constant * x) / xx
        return (constant, each) if each >= 0 else (y / n, 0.0)  # no draft costs less for being longer

    def learn(self, outcomes: Sequence[DraftOutcome], asked: int, tree: bool = False) -> None:
        """One more draft was tested, up to its first rejected guess. It may have stopped before `asked` tokens.

        The positions of a tree are the ranks of its tokens, the best first. All of them count as tested, and a token
        that was left out did not pass.
        """
        passes = [outcome is DraftOutcome.ACCEPTED for outcome in outcomes[:MAX_K]]
        if passes:
            tests = asked if tree else min(sum(passes) + 1, len(passes))
            self.tested = [FORGET * tested + (i < tests) for i, tested in enumerate(self.tested)]
            self.passed = [FORGET * old + new for old, new in zip_longest(self.passed, passes, fillvalue=False)]

    def for_another_text(self) -> DraftStats:
        """A copy in which what passed so far weighs little."""
        stats = copy(self)
        stats.plan = None
        weight = PRIOR_TESTS / max(self.tested[0], PRIOR_TESTS)
        stats.tested, stats.passed = ([weight * count for count in counts] for counts in (self.tested, self.passed))
        return stats

    def chances(self) -> list[float]:
        """a_i: the chance that guess i passes if those before it did; at first that of the one before.

        In a tree it is the chance that the token of rank i is on the path, whatever became of the others.
        """
        chance, tests = 0.5, zip(self.passed, self.tested, strict=True)
        return [chance := (passed + PRIOR_TESTS * chance) / (tested + PRIOR_TESTS) for passed, tested in tests]
