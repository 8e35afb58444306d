"""What the parts of a round cost on this machine, and how guesses fared: what K = auto goes by (`control`).

The unit is a pass of one token in the machine's present weather: `Costs.pace` seconds, which follow the load, so that
what was measured at different times can be compared.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from random import Random
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

import torch

from .runners import Runner
from .sampling import probabilities
from .types import MAX_K, Draft, Fate, Settings
from .verify import verify

if TYPE_CHECKING:
    from .drafters import Drafter

FORGET = 0.93  # this much of what a draft showed is left one draft later
FORGET_RUNS = 0.998  # and this much of what it says to later runs
LIKELY, LIKELY_TESTS = 0.5, 2.0  # the chance that a guess passes, until tests say more; as sure as so many tests
WEATHER = 0.2  # how fast the pace follows the last pass
HICCUP = 1.5  # a pass that takes longer than this many times the usual was held up by something else
HELD_UP = 4.0  # and drafts that usually take longer than this many times the last one all were
CALIBRATION_SECONDS = 0.6
CALIBRATED = 12  # so many rounds say as much on the cost of a pass as the calibration
STEADY = 100  # no round says less on the cost of a pass than one of so many
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17)  # passes that a calibration measures, as far as auto takes them
RECENT = 9  # drafts of a length that are remembered,
STALE = 0.96  # what they count after another one,
TOO_FEW = 0.5  # and from where they are forgotten


class Costs:
    """What passes of each length and drafts by each drafter cost, and how their guesses fared, refined by every round.

    An object outlives its run: the models stay as fast and as alike.
    """

    def __init__(self, seconds: Mapping[int, float], most_k: int = MAX_K) -> None:
        """`seconds` has those of passes by the tokens read, from 1 to `most_k` + 1; auto picks no K above `most_k`.

        What holds a pass up makes it too dear, never too cheap, so none is taken to cost more than a longer one.
        """
        self.most_k = most_k
        seconds = dict(seconds)
        for longer, shorter in pairwise(sorted(seconds, reverse=True)):
            seconds[shorter] = min(seconds[shorter], seconds[longer])
        self.pace = seconds[1]
        self.passes = [0.0] * (max(seconds) + 1)  # by the tokens read
        for low, high in pairwise(sorted(seconds)):
            for tokens in range(low, high + 1):
                part = (tokens - low) / (high - low)
                self.passes[tokens] = ((1 - part) * seconds[low] + part * seconds[high]) / self.pace
        self._seen = [CALIBRATED] * len(self.passes)
        self._drafting: defaultdict[type[Drafter], Drafting] = defaultdict(Drafting)
        self._firsts: defaultdict[type[Drafter], deque[First]] = defaultdict(lambda: deque(maxlen=RECENT))
        self.fared: defaultdict[type[Drafter], Tally] = defaultdict(lambda: Tally(FORGET_RUNS))
        self.rested: Counter[type[Drafter]] = Counter()  # rounds of the last run since a draft, and of those before
        self.tried: set[str] = set()  # drafters by name, see `race.start`
        self._runs = 0

    @classmethod
    @torch.inference_mode()
    def measured(cls, runner: Runner, settings: Settings, most_k: int = MAX_K) -> Costs:
        """From passes that auto takes and what follows them in a round; `runner` is free and stays so."""
        noise = torch.Generator(runner.device).manual_seed(0)
        seconds = dict.fromkeys((tokens for tokens in LENGTHS if tokens <= most_k + 1), float("inf"))
        end, turn = time.perf_counter() + CALIBRATION_SECONDS, 0
        try:
            runner.prefill([0])
            while not turn or time.perf_counter() < end:  # the first pass of a length also sets up its kernels
                for tokens in seconds:
                    draws = torch.rand(tokens, generator=noise, device=noise.device, dtype=torch.float64)
                    began = time.perf_counter()
                    logits = runner.forward([0] * tokens)
                    verify(probabilities(logits, settings), Draft([0] * (tokens - 1)), draws)
                    seconds[tokens] = min(seconds[tokens], time.perf_counter() - began)
                    runner.rollback(1)
                turn += 1
        finally:
            runner.release()
        return cls(seconds, most_k)

    def on_trial(self) -> Costs:
        """A copy whose passes and drafts teach this one, for a text that nobody asked for: how guesses fare in it, and
        what its first draft costs, stays with the copy. So does its pace, which is to be handed back."""
        trial = copy(self)
        trial.fared, trial._firsts = copy(self.fared), copy(self._firsts)
        trial.fared.clear()
        trial._firsts.clear()
        return trial

    def fresh_seed(self, seed: int) -> int:
        """Another seed for every run: what earlier ones showed may only have a say in draws that had none in them."""
        self._runs += 1
        return Random(f"{seed} {self._runs}").getrandbits(32)

    def learn_pass(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens took so long, with everything else in its round but the drafting."""
        if tokens >= len(self.passes):  # of a fixed K that auto never picks
            return
        slower = min(max(seconds / self.pace / self.passes[tokens], 1 / HICCUP), HICCUP)
        self._seen[tokens] = min(self._seen[tokens] + 1, STEADY)
        self.passes[tokens] *= slower ** (1 / self._seen[tokens])
        self.pace *= slower**WEATHER

    def of_draft(self, drafter: type[Drafter], tokens: int) -> float | None:
        """The cost of a draft of so many tokens, None while too little is known: a single one may have been held up."""
        drafting = self._drafting[drafter]
        return drafting.cost(_counted(drafter, tokens)) if drafting.drafts > 1 else None

    def learn_draft(self, drafter: type[Drafter], tokens: int, seconds: float) -> None:
        """A draft of so many tokens, perhaps none, took so long."""
        self._drafting[drafter].add(_counted(drafter, tokens), seconds / self.pace)

    def of_beginning(self, drafter: type[Drafter], prompt_tokens: int) -> float:
        """What the first draft of a run costs more than a later one: it reads the prompt.

        Of a longer prompt this one takes its share. If all were shorter it is hoped to take no more than they did, or
        auto might never learn better.
        """
        firsts = self._firsts[drafter]
        longer = [first for first in firsts if first.prompt_tokens >= prompt_tokens]
        costs = [first.cost * prompt_tokens / first.prompt_tokens for first in longer] or [
            first.cost for first in firsts
        ]
        return median_low(costs) if costs else 0.0

    def learn_first(self, drafter: type[Drafter], tokens: int, seconds: float, prompt_tokens: int) -> None:
        """The first draft of a run, of so many tokens, took so long."""
        extra = seconds / self.pace - (self.of_draft(drafter, tokens) or 0.0)
        self._firsts[drafter].append(First(max(extra, 0.0), prompt_tokens))


class First(NamedTuple):
    """The first draft of a run: what it cost more than a later one, and how long the prompt was."""

    cost: float
    prompt_tokens: int


def _counted(drafter: type[Drafter], tokens: int) -> int:
    """What the cost of a draft of so many tokens grows with: the tokens, or whether there are any."""
    return min(tokens, 1) if drafter.at_once else tokens


class Drafting:
    """What drafts cost by their tokens: a line through the medians of the newest ones of each length.

    Medians, since what holds up one draft says nothing of the next. A length counts the less, the longer ago it was.
    """

    def __init__(self) -> None:
        self.drafts = 0
        self._found = False  # any token, ever
        self._useful = 1.0  # share of the newest drafts that had any
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._medians: dict[int, tuple[float, float]] = {}  # by length: what it counts, and the median
        self._constant = self._each = 0.0

    def add(self, tokens: int, cost: float) -> None:
        """One more draft. What one without a token cost is paid by the others, as if it had cost what they do."""
        self.drafts += 1
        self._useful = max(FORGET * self._useful + (1 - FORGET) * (tokens > 0), 1 - FORGET)
        self._found = self._found or tokens > 0
        if not tokens and self._found:
            return
        for length, (weight, usual) in list(self._medians.items()):
            self._medians[length] = STALE * weight, usual
            if STALE * weight < TOO_FEW:
                del self._medians[length], self._recent[length]
        length = max(tokens, 1)
        weight, usual = self._medians.get(length, (0.0, 0.0))
        if HELD_UP * cost < usual:  # whatever held those up may have held up the ones of other lengths
            self._recent.clear()
            self._medians.clear()
            weight = 0.0
        recent = self._recent[length]
        recent.append(cost)
        self._medians[length] = min(weight + 1, RECENT), median_low(recent)
        self._fit()

    def _fit(self) -> None:
        """Least squares. The constant is kept down as by half a point: drafts of one length say nothing of it."""
        n, x, y, xx, xy = 0.0, 0.0, 0.0, 0.0, 0.0
        for length, (count, usual) in self._medians.items():
            n, x, y = n + count, x + count * length, y + count * usual
            xx, xy = xx + count * length**2, xy + count * length * usual
        self._constant = max((xx * y - x * xy) / ((n + 0.5) * xx - x * x), 0.0)
        self._each = (xy - self._constant * x) / xx
        if self._each < 0:  # no draft costs less for being longer
            self._constant, self._each = y / n, 0.0

    def cost(self, tokens: int) -> float:
        """Of a draft of so many tokens, with its share of the drafts that came to nothing."""
        return (self._constant + self._each * tokens) / self._useful


class Tally:
    """How many guesses were tested at each place of a draft, and how many passed; fading with every draft."""

    def __init__(self, forget: float) -> None:
        self.forget = forget
        self.passed, self.tested = [0.0] * MAX_K, [0.0] * MAX_K

    def add(self, fates: Sequence[Fate]) -> None:
        """One more draft was tested."""
        self.passed, self.tested = [self.forget * n for n in self.passed], [self.forget * n for n in self.tested]
        for place, fate in enumerate(fates):
            self.tested[place] += fate is not Fate.UNTESTED
            self.passed[place] += fate is Fate.ACCEPTED

    def chances(self) -> list[float]:
        """How likely the guess at each place passes if those before it did; until tests say more, as the one before."""
        passing = LIKELY
        return [
            passing := (passed + LIKELY_TESTS * passing) / (tested + LIKELY_TESTS)
            for passed, tested in zip(self.passed, self.tested, strict=True)
        ]
