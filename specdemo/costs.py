"""What the parts of a round cost on this machine, and how guesses fared: what K = auto goes by (`control`).

The unit is a pass of one token in the machine's present weather: `Costs.pace` seconds, which follow the load, so that
what was measured at different times can be compared.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median_high, median_low
from typing import TYPE_CHECKING

import torch

from .runners import Runner
from .sampling import probabilities
from .types import MAX_K, Draft, Fate, Settings
from .verify import verify

if TYPE_CHECKING:
    from .drafters import Drafter

FORGET = 0.93  # this much of what the tests of a run said is left one draft later
FORGET_RUNS = 0.998  # and of what those of all runs said
LIKELY, LIKELY_TESTS = 0.5, 2.0  # the chance that a guess passes, until tests say more; as sure as so many tests
EARLIER_TESTS = 8.0  # a run believes its own tests before those of earlier ones, which count as so many at most
WEATHER = 0.2  # how fast the pace follows the last pass
HICCUP = 1.5  # a pass that takes longer than this many times the usual was held up by something else
CALIBRATION_SECONDS = 0.3
CALIBRATED = 4  # so many rounds say as much on the cost of a pass as the calibration
STEADY = 100  # no round says less on the cost of a pass than one of so many
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17)  # passes that a calibration measures
LARGE = 1e12  # counts are brought back from here
RECENT = 9  # drafts of a length that are remembered


class Costs:
    """Passes of each length and drafts by each drafter, refined by every round. An object outlives its run."""

    def __init__(self, seconds: Mapping[int, float], most_k: int = MAX_K) -> None:
        """`seconds` has those of passes by the tokens read, from 1 to MAX_K + 1; auto picks no K above `most_k`."""
        self.most_k = most_k
        self.pace = seconds[1]
        self.passes = [0.0] * (MAX_K + 2)  # by the tokens read
        for low, high in pairwise(sorted(seconds)):
            for tokens in range(low, high + 1):
                part = (tokens - low) / (high - low)
                self.passes[tokens] = ((1 - part) * seconds[low] + part * seconds[high]) / self.pace
        self._seen = [CALIBRATED] * len(self.passes)
        self._drafting: defaultdict[type[Drafter], Drafting] = defaultdict(Drafting)
        self._firsts: defaultdict[type[Drafter], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self.fared: defaultdict[type[Drafter], Tally] = defaultdict(lambda: Tally(FORGET_RUNS))
        self.rested: Counter[type[Drafter]] = Counter()  # rounds without a draft since its last, in whatever run
        self.tried: set[str] = set()  # drafters by name, see `race.costs_of`

    @classmethod
    @torch.inference_mode()
    def measured(cls, runner: Runner, settings: Settings, most_k: int = MAX_K) -> Costs:
        """From passes of every length and what follows them in a round; `runner` is free and stays so."""
        noise = torch.Generator(runner.device).manual_seed(0)
        seconds = dict.fromkeys(LENGTHS, float("inf"))
        end, turn = time.perf_counter() + CALIBRATION_SECONDS, 0
        try:
            runner.prefill([0])
            while not turn or time.perf_counter() < end:  # the first pass of a length also sets up its kernels
                for tokens in LENGTHS:
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

    def learn_pass(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens took so long, with everything else in its round but the drafting."""
        slower = min(seconds / self.pace / self.passes[tokens], HICCUP)
        self._seen[tokens] = min(self._seen[tokens] + 1, STEADY)
        self.passes[tokens] *= slower ** (1 / self._seen[tokens])
        self.pace *= slower**WEATHER

    def of_draft(self, drafter: type[Drafter], tokens: int) -> float | None:
        """The cost of a draft of so many tokens, None while too little is known: a single one may have been held up."""
        drafting = self._drafting[drafter]
        return drafting.cost(1 if drafter.at_once else tokens) if drafting.drafts > 1 else None

    def learn_draft(self, drafter: type[Drafter], tokens: int, seconds: float) -> None:
        """A draft of so many tokens, perhaps none, took so long."""
        self._drafting[drafter].add(min(tokens, 1) if drafter.at_once else tokens, seconds / self.pace)

    def of_beginning(self, drafter: type[Drafter]) -> float:
        """What the first draft of a run costs more than a later one: it reads the prompt."""
        firsts = self._firsts[drafter]
        return median_high(firsts) if firsts else 0.0

    def learn_first(self, drafter: type[Drafter], tokens: int, seconds: float) -> None:
        """The first draft of a run took so long."""
        self._firsts[drafter].append(max(seconds / self.pace - (self.of_draft(drafter, tokens) or 0.0), 0.0))


class Drafting:
    """What drafts cost by their tokens: a line through the medians of the newest ones of each length.

    Medians, since what holds up one draft says nothing of the next.
    """

    def __init__(self) -> None:
        self.drafts = 0
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._medians: dict[int, tuple[int, float]] = {}  # by length: how many, and their median
        self._useful = 1.0  # share of the newest drafts that had any token
        self._constant = self._each = 0.0

    def add(self, tokens: int, cost: float) -> None:
        """One more draft. What one without a token cost is paid by those that have some."""
        self.drafts += 1
        self._useful = FORGET * self._useful + (1 - FORGET) * (tokens > 0)
        recent = self._recent[max(tokens, 1)]
        recent.append(cost)
        self._medians[max(tokens, 1)] = len(recent), median_low(recent)
        # Least squares. The constant is kept down as by one more point: drafts of one length say nothing of it.
        n, x, y, xx, xy = 1.0, 0.0, 0.0, 0.0, 0.0
        for length, (count, usual) in self._medians.items():
            n, x, y = n + count, x + count * length, y + count * usual
            xx, xy = xx + count * length**2, xy + count * length * usual
        self._constant = max((xx * y - x * xy) / (n * xx - x * x), 0.0)
        self._each = max((xy - self._constant * x) / xx, 0.0)

    def cost(self, tokens: int) -> float:
        return (self._constant + self._each * tokens) / self._useful


class Tally:
    """How many guesses were tested at each place of a draft, and how many passed; the newest drafts count most."""

    def __init__(self, forget: float = FORGET) -> None:
        self._passed, self._tested = [0.0] * MAX_K, [0.0] * MAX_K
        self._forget, self._newest = forget, 1.0  # what the newest draft counts: more than those before it

    def add(self, fates: Sequence[Fate]) -> None:
        """One more draft was tested."""
        self._newest /= self._forget
        for place, fate in enumerate(fates):
            self._tested[place] += self._newest * (fate is not Fate.UNTESTED)
            self._passed[place] += self._newest * (fate is Fate.ACCEPTED)
        if self._newest > LARGE:
            self._passed, self._tested = ([n / LARGE for n in counts] for counts in (self._passed, self._tested))
            self._newest /= LARGE

    def at(self, place: int) -> tuple[float, float]:
        """Of how many guesses at this place that were tested, and how many passed, in newest drafts."""
        return self._passed[place] / self._newest, self._tested[place] / self._newest


def chances(run: Tally, ever: Tally) -> Iterator[float]:
    """How likely the guess at each place passes if those before it did, by the tests of this run and of all runs.

    Until tests say more, a place is as good as the one before it; and until those of this run do, as much better or
    worse than that one as it ever was.
    """
    usual = passing = LIKELY
    for place in range(MAX_K):
        (passed, tested), (ever_passed, ever_tested) = run.at(place), ever.at(place)
        before, usual = usual, (ever_passed + LIKELY_TESTS * usual) / (ever_tested + LIKELY_TESTS)
        expected = min(passing * usual / before, 1.0)
        sure = min(LIKELY_TESTS + ever_tested, EARLIER_TESTS)
        passing = (passed + sure * expected) / (tested + sure)
        yield passing
