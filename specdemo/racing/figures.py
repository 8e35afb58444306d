"""The numbers behind a verdict: what a round of a drafted lane costs and brings, and what another K would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from ..drafters.names import DRAFTERS
from .asked import DraftedLane
from .stats import Stats, speed_up

EVEN = 0.98, 1.02  # a ratio between these is neither faster nor slower
MUCH = 0.1  # of a token of the target alone, of a rate or of a pass: less is not worth a sentence
ENOUGH = 5  # the fewest passes to take a mean of
ENOUGH_DRAFTS = 10  # the fewest drafts to say what another K would give
LONGEST = 8  # the largest K that is predicted from shorter drafts: longer passes may cost more than the line
STEPS = 10**9  # of a rate from 0 to 1, to find one by bisection
MEASURED = "memory_rate", "experts"  # of an environment: what a race adds to it
NOWHERE: Mapping[str, Any] = {}  # an unknown environment


@dataclass(frozen=True, slots=True)
class Figures:
    """A drafted lane against the target alone, after the prompt. The unit of costs is the time that the target alone
    takes for a token. None or empty is not known.

    Attributes:
        speed_up: `tokens` / `needed`; by chance it may be off by the share `noise`.
        tokens: what a mean round emits. It breaks even at `needed`, which is the cost of the round.
        parts: what of that cost, beyond 1, goes into `drafting`, `checking` drafts and the `rest`.
        draft_cost, check_cost: of a mean draft that is not empty, and of the pass over it, in passes of the target
            alone; None if there were too few.
        rows: how many rows the target reads for each token of the text.
        k: that of the race; None, and `by_k` empty, if it is AUTO or unknown or the drafts are trees.
        by_k: the speed-up by K from 1 on, see `speeds_by_k`.
    """

    plain: Stats
    lane: Stats
    asked: DraftedLane | None
    speed_up: float
    noise: float
    tokens: float
    parts: Mapping[str, float]
    draft_cost: float | None
    check_cost: float | None
    k: int | None
    by_k: Sequence[float]

    @classmethod
    def of(cls, plain: Stats, lane: Stats, asked: DraftedLane | None = None) -> Figures | None:
        """None if there is nothing to compare, or nothing was drafted.

        Args:
            asked: the drafter and its K; None if unknown.
        """
        ratio, tokens, speed = speed_up(plain, lane), lane.tokens_per_round, plain.tokens_per_second
        if ratio is None or not tokens or not speed:
            return None
        parts: dict[str, float] = {}
        draft_cost = check_cost = None
        if None not in (lane.draft_seconds, lane.verify_seconds) and plain.verify_times:
            one_pass, read = fmean(plain.verify_times), lane.prompt_seconds - lane.ttft_seconds
            parts["drafting"] = (lane.draft_seconds - read) / lane.rounds * speed
            parts["checking"] = (lane.verify_seconds / lane.rounds - one_pass) * speed
            parts["rest"] = tokens / ratio - 1 - sum(parts.values())
            if min(len(plain.verify_times), len(lane.checks)) >= ENOUGH and one_pass:
                draft_cost = (lane.draft_seconds - read) / len(lane.checks) / one_pass
                check_cost = fmean(lane.checks) / one_pass
        known = asked is not None and asked.drafter in DRAFTERS and not lane.trees and draft_cost is not None
        k = asked.k if known and asked and isinstance(asked.k, int) and lane.drafts >= ENOUGH_DRAFTS else None
        by_k: Sequence[float] = ()
        if k and asked:
            once = ["drafting"] if DRAFTERS[asked.drafter].parallel_drafting else []
            each = sum(cost for part, cost in parts.items() if part not in ("rest", *once)) * lane.rounds / lane.drafted
            by_k = _by_k(lane, k, each, sum(parts[part] for part in ("rest", *once)))
            by_k = [speed * ratio / by_k[k - 1] for speed in by_k]  # so that the race's own K gets what was measured
        return cls(plain, lane, asked, ratio, noise(plain, lane), tokens, parts, draft_cost, check_cost, k, by_k)

    @property
    def needed(self) -> float:
        """The cost of a mean round, in tokens of the target alone: so many it must emit to break even."""
        return self.tokens / self.speed_up

    @property
    def side(self) -> int:
        """1 is faster, -1 slower, 0 a tie."""
        return (self.speed_up > 1 + self.noise) - (self.speed_up < 1 - self.noise)

    @property
    def best(self) -> tuple[int, float]:
        """The K of the largest speed-up in `by_k`, and that speed-up; the smallest K wins a tie. (0, 0) if unknown."""
        return max(((k, speed) for k, speed in enumerate(self.by_k, 1)), key=lambda found: found[1], default=(0, 0.0))

    @property
    def rows(self) -> float | None:
        """See the class. A pass has a row for the pending token and one for each drafted token."""
        lane = self.lane
        return None if lane.drafted is None else (lane.rounds + lane.drafted) / (lane.tokens - 1)

    @property
    def needed_acceptance(self) -> float | None:
        """See `alpha_for`, which gets the mean length of the drafts."""
        drafts = [] if self.lane.trees else self.lane.drafts_tested
        often = len(drafts) / self.lane.rounds
        return (
            alpha_for(1 + (self.needed - 1) / often, round(fmean(draft.drafted for draft in drafts))) if often else None
        )


def weight_bytes(environment: Mapping[str, Any]) -> int | None:
    """How many bytes of weights a pass of the target over one row reads; None if the environment does not say.

    Older traces have only the bytes of all weights, which are more if embeddings are not tied, or if there are experts.
    """
    placement = environment.get("placement")
    sizes = [environment["bytes_per_pass"]] if "bytes_per_pass" in environment else []
    sizes = sizes or ([*placement.values()] if isinstance(placement, dict) else [])
    known = bool(sizes) and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    return sum(sizes) if known else None


def bytes_of(lane: Stats, environment: Mapping[str, Any]) -> int | None:
    """How many bytes of weights a mean pass of a lane reads; None if unknown.

    In a model with experts a pass over more rows reads more of them. How many was counted, see `experts_counted`, or is
    estimated, see `experts_read`.
    """
    one_row, experts = weight_bytes(environment), environment.get("experts")
    facts = [experts.get(name) for name in ("count", "used", "bytes")] if isinstance(experts, dict) else []
    count, used, size = (fact if type(fact) is int and fact > 0 else 0 for fact in facts or [0] * 3)
    if one_row is None or not (count >= used > 0 < size) or not lane.rounds or lane.drafted is None:
        return one_row
    read = experts_counted(lane, environment) or experts_read(count, used, 1 + lane.drafted / lane.rounds)
    return round(one_row + size / count * (read - used))


def experts_counted(lane: Stats, environment: Mapping[str, Any]) -> float | None:
    """How many experts of a layer a mean pass of a lane reads, as passes of so many rows did where it ran; None if that
    was not counted for all of them."""
    experts = environment.get("experts")
    read = experts.get("read") if isinstance(experts, dict) else None
    if not isinstance(read, dict) or not lane.drafts_tested:
        return None
    rows = [1 + draft.drafted for draft in lane.drafts_tested] + [1] * (lane.rounds - len(lane.drafts_tested))
    counts = [read.get(str(number)) for number in rows]
    known = [count for count in counts if isinstance(count, float) and 0 < count < float("inf")]
    return fmean(known) if len(known) == len(rows) else None


def experts_read(count: int, used: int, rows: float) -> float:
    """How many of `count` experts some row of a pass is expected to use, if each row uses `used` of them at random.

    Rows of one text prefer the same experts, so there are fewer of them.
    """
    return count * (1 - (1 - used / count) ** rows)


def memory_rate_of(environment: Mapping[str, Any]) -> float | None:
    """Bytes per second that the memory streamed after a race; None if the environment does not say, or if some
    weights lie elsewhere."""
    rate, placement = environment.get("memory_rate"), environment.get("placement")
    known = isinstance(rate, float) and 0 < rate < float("inf")
    return rate if known and isinstance(placement, dict) and len(placement) == 1 else None


def memory_share(lane: Stats, pass_bytes: int | None, rate: float | None) -> float | None:
    """How close a mean pass of a lane comes to what the memory allows, at most 1; None if unknown.

    Args:
        pass_bytes: how many bytes of weights a pass of the target reads.
        rate: bytes per second that the memory streams.
    """
    if not pass_bytes or not rate or len(lane.verify_times) < ENOUGH or not fmean(lane.verify_times):
        return None
    return min(pass_bytes / fmean(lane.verify_times) / rate, 1.0)


def memory_shares(lanes: Mapping[str, Stats], environment: Mapping[str, Any]) -> dict[str, float | None]:
    """`memory_share` of each lane, by what the environment of the race tells."""
    rate = memory_rate_of(environment)
    return {name: memory_share(lane, bytes_of(lane, environment), rate) for name, lane in lanes.items()}


def noise(plain: Stats, lane: Stats) -> float:
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


def speeds_by_k(reached: Iterable[float], costs: Iterable[float]) -> list[float]:
    """The speed-up by K from 0 on: the tokens of a mean round divided by its cost:

        speed(k) = (1 + r_1 + ... + r_k) / cost(k)

    `adaptive_k.best_length` does the same between two rounds.

    Args:
        reached: r_i, the share of rounds whose guess i was accepted.
        costs: of a round by K from 0 on, in rounds of the target alone.
    """
    return [tokens / cost for tokens, cost in zip(accumulate(reached, initial=1.0), costs, strict=True)]


def _by_k(lane: Stats, k: int, each: float, fixed: float) -> Sequence[float]:
    """`speeds_by_k` from 1 up to the K of the race. If enough drafts were that long, it goes on to twice that K, with
    the rate of the last place.

    Args:
        each: the cost that a drafted token adds to a round, in rounds of the target alone. Below 0 it is timing noise.
        fixed: the cost of a round beyond one of the target alone, however short the draft.
    """
    drafts = lane.drafts_tested
    made = [sum(draft.drafted > place for draft in drafts) / lane.rounds for place in range(k)]
    reached = [sum(draft.accepted > place for draft in drafts) / lane.rounds for place in range(k)]
    if sum(draft.tested >= k for draft in drafts) >= ENOUGH_DRAFTS:
        before = reached[-2] if k > 1 else made[0]
        further = range(1, min(2 * k, LONGEST) - k + 1)
        reached += [reached[-1] * (reached[-1] / before) ** i for i in further]
        made += [made[-1]] * len(further)
    rows = accumulate(made, initial=0.0)  # of the drafts that may stop before k
    return speeds_by_k(reached, [max(1 + fixed + max(each, 0.0) * n, 1e-9) for n in rows])[1:]


def expected_tokens(alpha: float, k: int) -> float:
    """The mean tokens of a round: (1 - alpha^(K+1)) / (1 - alpha) (Leviathan et al., arXiv 2211.17192, equation 1).

    Position i of the draft is reached and passed with probability alpha^i, and one more token always follows. The sum
    is written out, since the quotient is 0 / 0 at alpha = 1.
    """
    return sum(alpha**i for i in range(k + 1))


def alpha_for(tokens: float, k: int) -> float | None:
    """The least acceptance rate with which rounds of K drafted tokens emit this many; None if not even 1 is enough."""
    steps = bisect_left(range(STEPS + 1), tokens, key=lambda step: expected_tokens(step / STEPS, k))
    return steps / STEPS if steps <= STEPS else None
