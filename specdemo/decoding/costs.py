"""What the parts of a round cost on this machine, and how many guesses pass: what K = auto goes by (`adaptive_k`).

The unit of cost is a pass over one token at the machine's present speed, which takes `CostModel.baseline_seconds`. That
follows the load of the machine, so that costs measured at different times can be compared.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from ..engines.runner import Runner
from ..system.progress import check_stopped
from ..types import MAX_K, Draft, DraftOutcome
from .rule import Rule

FORGET = 0.93  # the weight that a draft keeps when one more is made
FORGET_RANKS = 0.98  # the same of a tree, which is wide or deep as the text of the moment asks for
LIKELY, LIKELY_TESTS = 0.5, 2.0  # the prior of the chance that a guess passes, and its weight in tests
DRIFT = 0.2  # how fast `baseline_seconds` follows the last pass
OUTLIER = 1.5  # what takes this many times the usual, or more, counts as this many times
HELD_UP = 4.0  # drafts that usually take more than this many times the last one were held up
CALIBRATED, STEADY = 12, 100  # the weight of a calibration, in rounds, and the most that a pass's cost weighs
CALIBRATION_SECONDS = 0.6
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17)  # passes that a calibration measures, as far as auto takes them


class CostModel:
    """What passes and drafts cost, and how many guesses pass, learnt from every round of every run.

    One object serves all runs of the same models with the same kind of sampling. Drafters go by their names, and their
    trees by names of their own (`adaptive_k.Kind`).

    Attributes:
        passes: the cost of a pass by the tokens that it reads; the one at 0 means nothing.
        baseline_seconds: the seconds of a pass over one token, as the machine is now.
    """

    def __init__(self, seconds: Mapping[int, float], most_k: int = MAX_K) -> None:
        """`seconds` are those of some passes by the tokens read; those between lie on a line. Auto picks no K above
        `most_k`. An interruption makes a pass look dear and never cheap, so none is taken to cost more than a longer
        one.

        Raises:
            ValueError: that of one token is missing, or none reaches `most_k + 1`.
        """
        if 1 not in seconds or max(seconds) <= most_k:
            raise ValueError(f"The seconds of passes from 1 token to at least {most_k + 1} are needed.")
        seconds = dict(seconds)
        for longer, shorter in pairwise(sorted(seconds, reverse=True)):
            seconds[shorter] = min(seconds[shorter], seconds[longer])
        self.most_k, self.baseline_seconds = most_k, seconds[1]
        self.passes = [0.0] * (max(seconds) + 1)
        for low, high in pairwise(sorted(seconds)):
            for tokens in range(low, high + 1):
                part = (tokens - low) / (high - low)
                self.passes[tokens] = ((1 - part) * seconds[low] + part * seconds[high]) / self.baseline_seconds
        self._weights = [CALIBRATED] * len(self.passes)
        self.drafts: defaultdict[str, DraftCost] = defaultdict(DraftCost)
        self.acceptance: defaultdict[str, AcceptanceStats] = defaultdict(AcceptanceStats)
        self.idle = Counter[str]()  # rounds since the last draft of a kind, in this run and earlier ones
        self.tried: set[tuple[str, bool]] = set()  # drafters by name, for chains only or for trees too: `race.try_out`

    def learn_pass(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens, with everything else in its round but the drafting, took `seconds`."""
        if tokens >= len(self.passes):  # of a fixed K that auto never picks
            return
        slower = min(max(seconds / self.baseline_seconds / self.passes[tokens], 1 / OUTLIER), OUTLIER)
        self._weights[tokens] = min(self._weights[tokens] + 1, STEADY)
        self.passes[tokens] *= slower ** (1 / self._weights[tokens])
        self.baseline_seconds *= slower**DRIFT

    def pass_over(self, tokens: float) -> float:
        """The cost of a pass over so many tokens on average."""
        low = int(tokens)
        part = tokens - low
        return self.passes[low] + (part * (self.passes[low + 1] - self.passes[low]) if part else 0.0)

    def learn_draft(self, drafter: str, steps: float, seconds: float) -> None:
        """A draft of `steps` steps (`Drafter.steps`) took `seconds`."""
        self.drafts[drafter].add(steps, seconds / self.baseline_seconds)

    def learn_first(self, drafter: str, steps: float, seconds: float, prompt_tokens: int) -> None:
        """The first draft of a run, of `steps` steps, which also read the prompt, took `seconds`."""
        cost = self.drafts[drafter]
        extra = max(seconds / self.baseline_seconds - (cost.of(steps) or 0.0), 0.0) / prompt_tokens
        cost.reading = min(extra, (extra + cost.reading) / 2) if cost.reading else extra


@torch.inference_mode()
def measure_passes(runner: Runner, rule: Rule, most_k: int) -> dict[int, float]:
    """The seconds of passes that auto takes, with what follows them in a round, by the tokens that they read.

    Args:
        runner: it is free, and is so again afterwards.
    Raises:
        Stopped: whoever waits for it has stopped it.
    """
    lengths = [*(tokens for tokens in LENGTHS if tokens <= most_k), most_k + 1]
    seconds = dict.fromkeys(lengths, float("inf"))
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


class DraftCost:
    """What a draft of k steps costs, a + b k: least squares over drafts, of which older ones weigh less.

    `reading` is what the first draft of a run costs more, by the tokens of the prompt.
    """

    def __init__(self) -> None:
        self.reading = 0.0
        self._drafts = 0
        self._sums = [0.0] * 5  # of 1, x, y, x x and x y

    def add(self, steps: float, cost: float) -> None:
        """One more draft. One without a token says nothing of the others."""
        if not steps:
            return
        if self._drafts:
            usual = self._fit(steps)
            if HELD_UP * cost < usual:  # something held all of them up
                self._sums = [0.0] * 5
            cost = min(cost, OUTLIER * usual)
        self._drafts += 1
        terms = 1.0, steps, cost, steps * steps, steps * cost
        self._sums = [FORGET * total + term for total, term in zip(self._sums, terms, strict=True)]

    def of(self, steps: float) -> float | None:
        """The cost of a draft of `steps` steps; None until two drafts are known: one may be an outlier."""
        return self._fit(steps) if self._drafts > 1 else None

    def _fit(self, steps: float) -> float:
        n, x, y, xx, xy = self._sums
        # Half a draft of no steps and no cost: drafts of one length say nothing of the constant.
        constant = max((xx * y - x * xy) / ((n + 0.5) * xx - x * x), 0.0)
        each = (xy - constant * x) / xx
        return constant + each * steps if each >= 0 else y / n  # no draft costs less for being longer


class AcceptanceStats:
    """What became of the guesses at each position of a draft; older drafts weigh less.

    Attributes, each by position:
        asked: drafts that were to reach it.
        made: those that did; a drafter may stop earlier.
        tested: those of which all guesses before it passed, whether they reached it or not.
        passed: those whose guess there passed.
    """

    def __init__(self) -> None:
        self.asked, self.made, self.tested, self.passed = ([0.0] * MAX_K for _ in range(4))

    def add(self, outcomes: Sequence[DraftOutcome], asked: int, tree: bool = False) -> None:
        """One more draft was tested. One that stopped before `asked` tokens failed where it stopped; none if empty.

        The positions of a tree are the ranks of its tokens, the best first. All of them count as tested.
        """
        if not outcomes:
            return
        self.weigh(FORGET_RANKS if tree else FORGET)
        stopped = [DraftOutcome.REJECTED] * (len(outcomes) < asked and DraftOutcome.REJECTED not in outcomes)
        for position, outcome in enumerate([*outcomes, *stopped][:MAX_K]):
            self.tested[position] += not tree and outcome is not DraftOutcome.UNTESTED
            self.passed[position] += outcome is DraftOutcome.ACCEPTED
        for position in range(min(asked, MAX_K)):
            self.tested[position] += tree
            self.asked[position] += 1
            self.made[position] += position < len(outcomes)

    def weigh(self, factor: float) -> None:
        """Have all drafts up to now weigh less."""
        for counts in (self.asked, self.made, self.tested, self.passed):
            counts[:] = [factor * n for n in counts]

    def chances(self) -> list[float]:
        """a_i: the chance that guess i is made and passes if those before it did; at first that of the one before.

        In a tree it is the chance that the token of rank i is on the path, whatever became of the others.
        """
        return _shares(self.passed, self.tested, LIKELY)

    def shares_made(self) -> list[float]:
        """m_i: the share of drafts that reach guess i if they are to; at first that of the one before."""
        return _shares(self.made, self.asked, 1.0)


def _shares(parts: Sequence[float], totals: Sequence[float], share: float) -> list[float]:
    """Part of total by position; each has the one before it as its prior, and the first one `share`."""
    return [
        share := (part + LIKELY_TESTS * share) / (total + LIKELY_TESTS)
        for part, total in zip(parts, totals, strict=True)
    ]
