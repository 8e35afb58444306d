"""How many tokens to draft next: a fixed K, or K = auto, which follows what rounds cost and how many guesses pass.

The text stays exact with auto because K is chosen before the draft is made, from earlier rounds alone. Given the
text so far, a round emits the target's law for a draft of any length, so also for a length that is any function
of the past, the clock included. To drop guesses for what they are would not be safe: those that are kept would be
a biased choice. What a different K does change is which random draws a token meets: above
temperature 0 the same seed can give other tokens with auto, since the clock has a say. Their law is the same.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import torch

from .events import Round
from .runners import Runner
from .sampling import probabilities
from .types import AUTO, MAX_K, Draft, Fate, Settings
from .verify import verify

if TYPE_CHECKING:
    from .drafters import Drafter

LIKELY, LIKELY_TESTS = 0.5, 2.0  # the chance that a guess passes, until tests say more; as sure as so many tests
FORGET = 0.93  # this much of what the tests said is left one draft later
PROBING = 0.01  # share of the time that may go to drafting where it does not pay, to see whether it does by now
WEATHER = 0.2  # how fast the pace follows the last pass
HICCUP = 1.5  # a pass that takes longer than this many times the usual was held up by something else
HELD_UP = 4.0  # and so was a draft: what one costs varies more, with its tokens and with what it met
CALIBRATION_SECONDS = 0.3
CALIBRATED = 4  # so many rounds say as much on the cost of a pass as the calibration
NO_DRAFTS = 0.0, 0.0, 0.0
LENGTHS = (1, 2, 3, 4, 6, 9, 13, 17)  # passes that a calibration measures


class Costs:
    """What a target pass of each length and a drafted token cost on this machine, refined by every round.

    The unit is a pass of one token in the machine's present weather: `pace` seconds, which follow the load, so that
    lengths measured at different times can be compared. An object outlives its run: the models stay as fast.
    """

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
        # By drafter: time spent, tokens drafted (the drafts with any, if it drafts at once) and drafts, all fading.
        self._drafting: dict[type[Drafter], tuple[float, float, float]] = {}
        self.rested: Counter[type[Drafter]] = Counter()  # rounds without a draft since its last, in whatever run
        self.first_draft: defaultdict[type[Drafter], float] = defaultdict(float)  # the cost of its last run's first

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

    def of_draft(self, drafter: type[Drafter], tokens: int) -> float | None:
        """The cost of a draft of so many tokens, None while too little is known: a single one may have been held up."""
        spent, drafted, drafts = self._drafting.get(drafter, NO_DRAFTS)
        return spent / max(drafted, 1.0) * _counted(drafter, tokens) if drafts > 1 else None

    def learn_pass(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens took so long, with everything else in its round but the drafting."""
        usual = self.passes[tokens]
        cost = min(seconds / self.pace, HICCUP * usual)
        self._seen[tokens] += 1
        self.passes[tokens] += (cost - usual) / self._seen[tokens]
        self.pace *= (cost / usual) ** WEATHER

    def learn_draft(self, drafter: type[Drafter], tokens: int, seconds: float) -> None:
        """A draft of so many tokens, perhaps none, took so long.

        One that was far cheaper than usual shows that those before were held up: they are forgotten.
        """
        spent, drafted, drafts = self._drafting.get(drafter, NO_DRAFTS)
        cost, counted = seconds / self.pace, _counted(drafter, tokens)
        if spent:
            usual = spent / drafts, spent / max(drafted, 1.0) * counted
            if HELD_UP * cost < min(usual):
                spent, drafted, drafts = NO_DRAFTS
            cost = min(cost, HELD_UP * max(usual))
        self._drafting[drafter] = FORGET * spent + cost, FORGET * drafted + counted, FORGET * drafts + 1


def _counted(drafter: type[Drafter], tokens: int) -> int:
    """What the cost of a draft of so many tokens grows with: the tokens, or whether there are any."""
    return min(tokens, 1) if drafter.at_once else tokens


class History:
    """How the guesses of one drafter fared in this run."""

    def __init__(self) -> None:
        self.passed, self.tested = [0.0] * MAX_K, [0.0] * MAX_K  # by place in the draft, fading
        self.drafts = 0  # in a row: since the run began or since it rested
        self.began = self.resting = False  # at rest it drafts nothing until it is time to try again

    def add(self, fates: Sequence[Fate]) -> None:
        """One more draft was tested."""
        self.passed, self.tested = [FORGET * n for n in self.passed], [FORGET * n for n in self.tested]
        for place, fate in enumerate(fates):
            self.tested[place] += fate is not Fate.UNTESTED
            self.passed[place] += fate is Fate.ACCEPTED

    def chances(self) -> Iterator[float]:
        """How likely the guess at each place passes if those before it did; until tests say more, as the one before."""
        passing = LIKELY
        for passed, tested in zip(self.passed, self.tested, strict=True):
            passing = (passed + LIKELY_TESTS * passing) / (tested + LIKELY_TESTS)
            yield passing


class Control:
    """Chooses the K of every round of one run.

    Where a drafter hands over to others (`Drafter.author`), each of them has a history of its own: a copied phrase
    is worth a long draft, a guess beside it a short one or none.
    """

    def __init__(self, k: int | str, costs: Costs | None) -> None:
        """`k` may be AUTO and needs `costs` then. A fixed K adds what its rounds cost to them."""
        self.k, self.costs = k, costs
        self._histories: defaultdict[type[Drafter], History] = defaultdict(History)
        self._author: type[Drafter]  # of the last round that K was chosen for

    def choose(self, most: int, last: Round | None, author: type[Drafter]) -> int:
        """How many tokens `author` is to draft next, at most `most`, having seen the `last` round of this run."""
        costs = self.costs
        if costs and last:
            self._learn(costs, last)
        self._author = author
        if self.k != AUTO:
            return min(int(self.k), most)
        assert costs is not None, "K = auto goes by costs"
        return self._choose(author, min(most, costs.most_k), costs)

    def _choose(self, author: type[Drafter], most: int, costs: Costs) -> int:
        """The K of most tokens per second, as far as one can tell; 0 while drafting does not pay."""
        if not most:
            return 0
        history, passes = self._histories[author], costs.passes
        k, rate, cost = 0, 0.0, 0.0
        tokens = chance = 1.0
        for place, passing in enumerate(islice(history.chances(), most)):
            chance *= passing
            tokens += chance
            draft = costs.of_draft(author, place + 1)
            if draft is None:
                return 1  # to see what one costs
            length = passes[place + 2] + draft
            if tokens / length > rate:
                k, rate, cost = place + 1, tokens / length, length
        wait = cost / passes[1] - 1 + (0 if history.began else costs.first_draft[author])
        costs.rested[author] += 1
        due = history.drafts == 1 or PROBING * costs.rested[author] >= wait
        history.resting = not due and (history.resting or rate * passes[1] <= 1)
        if history.resting:
            history.drafts = 0
            return 0
        costs.rested[author] = 0
        return k

    def _learn(self, costs: Costs, last: Round) -> None:
        drafted = len(last.drafted)
        if not (last.k and self._author.reads_ahead):
            costs.learn_pass(drafted + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        history = self._histories[self._author]
        history.drafts += 1
        if history.drafts > 1:  # the first of a row reads the prompt, or what was written while it rested
            costs.learn_draft(self._author, drafted, last.draft_seconds)
        elif not history.began:
            costs.first_draft[self._author] = last.draft_seconds / costs.pace
        history.began = True
        if drafted:
            history.add([token.fate for token in last.drafted])
