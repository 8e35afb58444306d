"""A drafted lane against the target alone: what a round costs and brings, and what another K would.

These are the facts of the sentences in `verdict_words`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from ..drafters.names import DRAFTERS, PARALLEL
from ..tokens import FloatIfKnown, IntIfKnown
from .bandwidth import ENOUGH, bytes_of, memory_share
from .busy import NO_PACE, Pace
from .compare import OWN_DRAFTER, Comparison, exact_rows
from .figures import EVEN, MUCH, LaneFigures, alpha_for, ratio_of_speeds, speed_up, speed_up_in_all, speeds_by_k
from .request import DraftedLane
from .words import sentence, sentences

BETTER = 1.05  # another K is advised if the figures say that it is this many times as fast
FEW_TOKENS = 16  # a shorter text gives no reliable figure
ENOUGH_DRAFTS = 10  # the fewest drafts to say what another K would give
LONGEST = 8  # the largest K that is predicted from shorter drafts: longer passes may cost more than the line
NEARLY_FREE = "prompt-lookup", "ngram", "lookup-ngram"  # drafters without a model


@dataclass
class LaneVerdict:
    """The figures are of the time after the prompt. The unit of costs is the time that the target alone takes for a
    token. None or empty is not known; without a `speed_up` nothing is.

    Attributes:
        plain, lane: of several readers those of all, `ReaderFigures`.
        request: the drafter and its K; None if unknown.
        comparison: of the two texts; None if they need not be the same.
        environment: of the loaded preset, or from a trace; with the `memory_rate` measured after the race.
        pace: of the target alone; if the machine is busy, nothing is concluded from times.
        doubt: a sentence if the head that drafts seems to be wired wrongly.
        speed_up: while writing; None if nothing was drafted; `ratio` is that of the speeds all the same.
        in_all: the speed-up of all the time, prompt included.
        noise: by this share the speed-up may be off by chance.
        tokens: what a mean round emits. It breaks even at `needed`, which is the cost of the round.
        parts: what of that cost, beyond 1, goes into `drafting`, `checking` drafts and the `rest`.
        draft_cost, check_cost: of a mean draft that is not empty, and of the pass over it, in passes of the target
            alone; None if there were too few.
        k: that of the race; None, and `by_k` empty, if it is AUTO or unknown or the drafts are trees.
        by_k: the speed-up by K from 1 on.
    """

    plain: LaneFigures
    lane: LaneFigures
    request: DraftedLane | None = None
    comparison: Comparison | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""
    pace: Pace = NO_PACE

    def __post_init__(self) -> None:
        plain, lane = self.plain, self.lane
        self.ratio: FloatIfKnown = ratio_of_speeds(plain, lane)
        self.speed_up: FloatIfKnown = speed_up(plain, lane)
        self.in_all: FloatIfKnown = speed_up_in_all(plain, lane)
        self.shorter, self.readers = min(plain.tokens, lane.tokens), lane.readers
        self.has_ended = bool(plain.finish_reason and lane.finish_reason)
        self.is_long = self.speed_up is not None and self.shorter >= FEW_TOKENS * self.readers
        self.parts, self.by_k = dict[str, float](), list[float]()
        self.draft_cost: FloatIfKnown = None
        self.check_cost: FloatIfKnown = None
        self.longer_pass: FloatIfKnown = None
        self.k: IntIfKnown = None
        if self.speed_up is None:
            return
        self.noise = noise(plain, lane)
        self.tokens = lane.tokens_per_round or 0.0
        self.needed = self.tokens / self.speed_up
        self.token_ms = 1000 / (plain.tokens_per_second or 1.0)
        passes, checks, speed = plain.verify_times, lane.checks, plain.tokens_per_second or 0.0
        if None not in (lane.draft_seconds, lane.verify_seconds) and passes:
            drafts = lane.draft_seconds - (lane.prompt_seconds - lane.ttft_seconds)  # without reading the prompt
            self.parts["drafting"] = drafts / lane.rounds * speed
            self.parts["checking"] = (lane.verify_seconds / lane.rounds - fmean(passes)) * speed
            self.parts["rest"] = self.needed - 1 - sum(self.parts.values())
            if min(len(passes), len(checks)) >= ENOUGH and fmean(passes):
                self.draft_cost = drafts / len(checks) / fmean(passes)
                self.check_cost = fmean(checks) / fmean(passes)
                self.longer_pass = max(self.check_cost - 1, 0.0)  # what is below 0 is timing noise
        known = self.request is not None and self.request.drafter in DRAFTERS and not lane.trees
        if self.request and known and self.draft_cost is not None and lane.drafts >= ENOUGH_DRAFTS:
            self.k = self.request.k if isinstance(self.request.k, int) else None
        if self.request and self.k:
            self.by_k = self._by_k(self.k, DRAFTERS[self.request.drafter].parallel_drafting)

    def _by_k(self, k: int, at_once: bool) -> list[float]:
        """`speeds_by_k` from 1 up to the K of the race, which gets what was measured. If enough drafts were that long,
        it goes on to twice that K, with the rate of the last place."""
        drafts, rounds = self.lane.known_drafts, self.lane.rounds
        fixed = ["rest", "drafting"] if at_once else ["rest"]
        # What a drafted token adds to the cost of a round. Below 0 it is timing noise.
        each = sum(cost for part, cost in self.parts.items() if part not in fixed) * rounds / self.lane.drafted
        made = [sum(len(draft.drafted) > place for draft in drafts) / rounds for place in range(k)]
        reached = [sum(draft.accepted > place for draft in drafts) / rounds for place in range(k)]
        if sum(draft.tested >= k for draft in drafts) >= ENOUGH_DRAFTS:
            before = reached[-2] if k > 1 else made[0]
            further = range(1, min(2 * k, LONGEST) - k + 1)
            reached += [reached[-1] * (reached[-1] / before) ** i for i in further]
            made += [made[-1]] * len(further)
        rows = accumulate(made, initial=0.0)  # of the drafts that may stop before k
        shortest = 1 + sum(self.parts[part] for part in fixed)
        speeds = speeds_by_k(reached, [max(shortest + max(each, 0.0) * count, 1e-9) for count in rows])[1:]
        return [speed * self.speed_up / speeds[k - 1] for speed in speeds]

    @property
    def side(self) -> int:
        """1 is faster, -1 slower, 0 a tie."""
        return (self.speed_up > 1 + self.noise) - (self.speed_up < 1 - self.noise)

    @property
    def best(self) -> tuple[int, float]:
        """The K of the largest speed-up in `by_k`, and that speed-up; the smallest K wins a tie. (0, 0) if unknown."""
        return max(((k, speed) for k, speed in enumerate(self.by_k, 1)), key=lambda found: found[1], default=(0, 0.0))

    @property
    def has_better_k(self) -> bool:
        """Whether by the figures another K is faster, beyond the noise, than what ran and than the target alone."""
        enough = max(BETTER, 1 + self.noise) * max(self.speed_up, 1.0)
        return bool(self.k) and self.best[0] != self.k and self.best[1] > enough

    @property
    def would_pay_if_free(self) -> bool:
        """Whether a slower lane with a drafter that is not nearly free would be faster if its drafts took no time."""
        free = self.request is None or self.request.drafter in (*NEARLY_FREE, OWN_DRAFTER)
        drafting = 0.0 if free else self.parts.get("drafting", 0.0)
        return self.side < 0 and drafting >= MUCH and self.needed - drafting < self.tokens

    @property
    def rows(self) -> FloatIfKnown:
        """How many rows the target reads for each token of the text. A pass has a row for the pending token and one for
        each drafted token."""
        lane = self.lane
        return None if lane.drafted is None else (lane.rounds + lane.drafted) / (lane.tokens - 1)

    @property
    def rows_of_all(self) -> float:
        """How many rows a mean round of all readers has: for each the pending token and the draft."""
        return round(self.readers * (1 + self.lane.drafted / self.lane.rounds), 1)

    @property
    def is_seldom(self) -> bool:
        """Whether many rounds had no draft."""
        return self.lane.drafted is not None and self.lane.drafts < 0.9 * self.lane.rounds

    @property
    def formula(self) -> dict[str, Any] | None:
        """What the page computes a speed-up from, by the formula of `studies.theory`. None of trees, of several
        readers, who share passes, and if costs are unknown.

        Costs are in passes of the target alone: `draft` of a guess, or `at_once` of a draft, and `row` of each further
        token of a pass. `gigabytes` are those of a pass, 0 if unknown or if longer passes read more, as with experts.
        """
        lane = self.lane
        if None in (self.draft_cost, lane.acceptance_rate) or lane.trees or self.readers > 1:
            return None
        length = fmean(len(each.drafted) for each in lane.known_drafts)
        at_once = self.request is not None and self.request.drafter in PARALLEL
        return {
            "k": round(length),
            "acceptance": lane.acceptance_rate,
            "draft": max(self.draft_cost, 0.0) / (1 if at_once else length),
            "row": self.longer_pass / length,
            "at_once": at_once,
            "gigabytes": self.gigabytes[0] if self.gigabytes[0] == self.gigabytes[1] else 0,
        }

    @property
    def needed_acceptance(self) -> FloatIfKnown:
        """See `alpha_for`, which gets the mean length of the drafts."""
        drafts = [] if self.lane.trees else self.lane.known_drafts
        often = len(drafts) / self.lane.rounds
        length = round(fmean(len(each.drafted) for each in drafts)) if often else 0
        return alpha_for(1 + (self.needed - 1) / often, length) if often else None

    @property
    def reason(self) -> str:
        """Why a lane is slower: the largest extra cost of a round, or `acceptance` if costs are small; else ""."""
        part = max(self.parts, key=self.parts.__getitem__, default="")
        rate, least = self.lane.acceptance_rate, self.needed_acceptance
        if part and self.parts[part] < MUCH:
            return "acceptance" if rate is not None and least is not None and least > rate else ""
        return part if part == "rest" or self.draft_cost is not None else ""

    @property
    def prompt_shares(self) -> list[float]:
        """The shares of the two texts' times that reading the prompt takes, the smaller first."""
        longest = max(self.plain.tokens, self.lane.tokens)
        return sorted(lane.prompt_seconds / (lane.seconds_for(longest) or 1.0) for lane in (self.plain, self.lane))

    @property
    def prompt_matters(self) -> bool:
        """Whether reading the prompt changes the ratio by much."""
        if self.in_all is None:
            return False
        sides = [(ratio > EVEN[1]) - (ratio < EVEN[0]) for ratio in (self.in_all, self.speed_up)]
        close = MUCH if sides[0] == sides[1] else EVEN[1] - 1
        return self.prompt_shares[-1] >= MUCH or abs(self.in_all / self.speed_up - 1) > close

    @property
    def reads_alike(self) -> bool:
        """Whether the speed-up in all is one of lanes that read the prompt at the same speed."""
        low, high = sorted((self.speed_up, 1.0))
        return low * EVEN[0] <= self.in_all <= high * EVEN[1]

    @property
    def exact_rows(self) -> int:
        return exact_rows(self.environment, tree=self.request is not None and self.request.tree)

    @property
    def is_rounded_apart(self) -> bool:
        """Whether the text differs, and rounding can explain it."""
        differs = self.comparison is not None and not self.comparison.identical
        return differs and self.has_ended and self.exact_rows < self.lane.longest_pass

    @property
    def gigabytes(self) -> list[float]:
        """Of weights that a mean pass of each lane reads, 0 if unknown."""
        return [(bytes_of(one, self.environment) or 0) / 1e9 for one in (self.plain, self.lane)]

    @property
    def text_bytes(self) -> list[float]:
        """Of weights that all passes of each lane read."""
        both = zip((self.plain, self.lane), self.gigabytes, strict=True)
        return [(one.rounds + 1) * size * 1e9 for one, size in both]

    @property
    def memory_speed(self) -> float:
        """Gigabytes of weights that the target alone reads in a second, 0 if unknown."""
        times = self.plain.verify_times
        return self.gigabytes[0] / fmean(times) if times and fmean(times) else 0.0

    @property
    def memory_shares(self) -> list[float | None]:
        return [memory_share(one, self.environment) for one in (self.plain, self.lane)]

    @property
    def passed_to_the_end(self) -> float:
        """The share of drafts of which all K tokens passed."""
        return sum(each.accepted >= self.k for each in self.lane.known_drafts) / self.lane.drafts

    # What is said -----------------------------------------------------------------------------------------------

    @property
    def finding(self) -> str:
        """What the lane showed, why, and what to do. Examples:

        2.22× writing, 2.15× in all: 3.0 tokens per target pass; a draft costs 5% of a pass, and checking it makes a
        pass 30% longer.
        Slower, 0.92× writing, 0.93× in all, because a draft costs 117% of a pass: a round needs 2.60 tokens to break
        even and has 2.40. Try K = 2 (1.12× by these rounds), or a nearly free drafter such as prompt-lookup or ngram.
        """
        return sentence("verdict", self)

    @property
    def headline(self) -> str:
        return sentence("headline", self)

    @property
    def chips(self) -> list[dict[str, str]]:
        """Its three figures, each with a sentence; none if the machine is busy."""
        if self.pace.busy:
            return []
        values, explained = sentences("chips", self), sentences("meanings", self)
        return [{"name": name, "value": value, "sentence": explained[name]} for name, value in values.items()]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: the finding, further sentences, a table of names and values for a text that is long enough,
        and whether the lane is slower beyond the noise."""
        return {
            "speed_up": self.speed_up,
            "speed_up_in_all": self.in_all,
            "busy": self.pace.busy,
            "sentence": f"{self.finding} {self.doubt}".rstrip(),
            "notes": [*sentences("notes", self).values()] if self.is_long and self.readers == 1 else [],
            "numbers": [*sentences("numbers", self).items()] if self.is_long else [],
            "slower": self.is_long and not self.pace.busy and self.side < 0,
            "comparison": self.comparison and asdict(self.comparison),
        }


def noise(plain: LaneFigures, lane: LaneFigures) -> float:
    """The share by which the ratio of two lanes may be off by chance, at least that of `EVEN`.

    All rounds of the target alone do the same work, so their spread comes from the machine. The share is twice the
    standard error of the ratio of two means of such rounds, as many as the lanes have. Rounds of several readers that
    share a pass are one.
    """
    times, least = plain.round_times, EVEN[1] - 1
    if len(times) < ENOUGH or not fmean(times):
        return least
    rounds = len(times) / plain.readers, max(lane.rounds, 1) / lane.readers
    return max(least, 2 * stdev(times) / fmean(times) * sqrt(sum(1 / count for count in rounds)))
