"""Figures from events, and from nothing else. All times are engine time."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from .events import Event, Finished, Prefilled, Round, emitted_tokens, engine_seconds
from .types import Fate, FinishReason

EVEN = 0.98, 1.02  # times as fast is neither faster nor slower
FEW_TOKENS = 16  # with fewer a text tells little
ENOUGH = 5  # passes for a typical one
CONSIDERABLE = 0.1  # a share of a lane's time, and how far two ratios of one verdict may lie apart
MOST_ROUNDS = 0.9  # with a draft: that the others had none need not be told


@dataclass(slots=True)
class Stats:
    """Running totals of one lane; `add` every event in order."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    seconds: float = 0.0
    ttft_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    """How many rounds accepted 0, 1, 2, ... tokens; rounds with an empty draft are not in it."""
    first_draft_seconds: float = 0.0
    draft_times: list[float] = field(default_factory=list)
    """Seconds of each draft that guessed something, in order of size; `verify_times` of each verification pass,
    `checks` of those of a draft."""
    verify_times: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Stats:
        stats = cls()
        for event in events:
            stats.add(event)
        return stats

    def add(self, event: Event) -> None:
        self.seconds += engine_seconds(event)
        self.tokens += len(emitted_tokens(event))
        if isinstance(event, Prefilled):
            self.prompt_tokens, self.ttft_seconds = event.prompt_tokens, event.seconds
        elif isinstance(event, Finished):
            self.finish_reason = event.reason
        else:
            self._add_round(event)

    def _add_round(self, event: Round) -> None:
        fates = [token.fate for token in event.drafted]
        accepted = fates.count(Fate.ACCEPTED)
        self.rounds += 1
        self.drafted += len(fates)
        self.accepted += accepted
        self.tested += accepted + fates.count(Fate.REJECTED)
        self.draft_seconds += event.draft_seconds
        self.verify_seconds += event.verify_seconds
        self.verify_times.append(event.verify_seconds)
        if fates:
            if not self.draft_times:
                self.first_draft_seconds = event.draft_seconds
            insort(self.draft_times, event.draft_seconds)
            self.checks.append(event.verify_seconds)
            self.accepted_lengths[accepted] = self.accepted_lengths.get(accepted, 0) + 1

    @property
    def other_seconds(self) -> float:
        """Engine time of the rounds that was neither drafting nor verifying."""
        return max(0.0, self.seconds - self.ttft_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens over all engine time, the prefill included."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def prompt_seconds(self) -> float:
        """Engine time that a longer text would not take again: the prefill, and what the first draft took longer than
        others, since a draft model reads the prompt then."""
        return self.ttft_seconds + max(self.first_draft_seconds - self._usual_draft, 0.0)

    @property
    def _usual_draft(self) -> float:
        """The median of `draft_times`; without sorting, since every event of a replay asks for it."""
        last = len(self.draft_times) - 1
        return (self.draft_times[last // 2] + self.draft_times[-(last // 2) - 1]) / 2 if self.draft_times else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / tested: the share of tested guesses that passed, an estimate of alpha."""
        return self.accepted / self.tested if self.tested else None

    @property
    def draft_efficiency(self) -> float | None:
        """Accepted / drafted: the share of all guesses that were used. Falls as K grows."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tau: tokens emitted by rounds / rounds, that is, tokens per target pass after the prefill."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def draft_cost(self) -> float | None:
        """What a typical draft costs as a share of the pass that checks it (medians); empty drafts are not in it."""
        pass_seconds = median(self.checks) if self.checks else 0.0
        return self._usual_draft / pass_seconds if pass_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Every figure under its name, ready for JSON; a figure that does not exist yet is None."""
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "tested": self.tested,
            "accepted": self.accepted,
            "seconds": self.seconds,
            "ttft_seconds": self.ttft_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason.value if self.finish_reason else None,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": self.acceptance_rate,
            "draft_efficiency": self.draft_efficiency,
            "tokens_per_round": self.tokens_per_round,
            "draft_cost": self.draft_cost,
            "accepted_lengths": {str(n): self.accepted_lengths[n] for n in sorted(self.accepted_lengths)},
        }


def counts_by_place(events: Iterable[Event]) -> list[tuple[int, int]]:
    """How many guesses were tested and how many accepted at each place of a draft, up to the end of the longest."""
    tested, accepted = Counter[int](), Counter[int]()
    for event in events:
        for place, token in enumerate(event.drafted if isinstance(event, Round) else ()):
            tested[place] += token.fate is not Fate.UNTESTED
            accepted[place] += token.fate is Fate.ACCEPTED
    return [(tested[place], accepted[place]) for place in sorted(tested)]


class Pace(NamedTuple):
    """How long a text of so many tokens took, and how much of that a longer one would not take again."""

    tokens: int
    seconds: float
    prompt_seconds: float

    def seconds_for(self, tokens: int) -> float | None:
        """The time of a text of another length; None where no token followed the first."""
        if tokens == self.tokens:
            return self.seconds or None
        if self.tokens < 2:
            return None
        return self.prompt_seconds + (tokens - 1) * (self.seconds - self.prompt_seconds) / (self.tokens - 1)

    def to(self, other: Pace) -> float | None:
        """How many times as fast as another this is, over a text as long as the longer of theirs.

        Texts that end at different places cannot be compared by tokens per second: the shorter one is, the more of its
        time went into reading the prompt, which drafting does not shorten.
        """
        tokens = max(self.tokens, other.tokens)
        own, others = self.seconds_for(tokens), other.seconds_for(tokens)
        return others / own if own and others else None

    def without_prompt(self) -> Pace:
        """That of the same text as if its prompt had been read already."""
        return Pace(self.tokens, self.seconds - self.prompt_seconds, 0.0)


def speed_up(plain: Stats, speculative: Stats) -> float | None:
    """How many times as fast as the plain lane the speculative one is, see `Pace.to`.

    None where a lane has a single token, which says how long the prompt is to read, or where nothing was drafted: what
    then lies between two lanes that did the same is chance.
    """
    told = speculative.drafted and min(plain.tokens, speculative.tokens) > 1
    return _pace(speculative).to(_pace(plain)) if told else None


def in_words(plain: Stats, speculative: Stats) -> str:
    """What the race showed and why, in a sentence or two.

    The reasons give the ratio that it begins with, or it says what else is in that: the prompt, chance, or both lanes
    being short. What rests on fewer than `ENOUGH` passes is left out.
    """
    alone, drafting = _pace(plain), _pace(speculative)
    ratio, shorter = drafting.to(alone), min(plain.tokens, speculative.tokens)
    ended = plain.finish_reason and speculative.finish_reason
    if shorter < 2 and ended:
        return "A lane wrote a single token: too little to compare."
    if shorter < 2 or ratio is None:
        return "Nothing to compare yet."
    if not speculative.drafted:
        chance = f"{abs(ratio - 1):.0%}"
        words = "Nothing was drafted, so both lanes did the same work"
        return f"{words}." if chance == "0%" else f"{words}; the {chance} between them is chance."
    verdict = {
        -1: f"Slower, {ratio:.2f}x the speed of the target alone",
        0: "No faster and no slower",
        1: f"{ratio:.2f}x faster",
    }[_side(ratio)]
    if ended and plain.tokens != speculative.tokens:
        verdict += " at equal length"
    rest = drafting.without_prompt().to(alone.without_prompt())
    reading = "" if rest is None else _reading(alone, drafting, ratio, rest)
    if shorter < FEW_TOKENS:
        return f"{verdict}: {_per_pass(speculative)}.{reading} So short a text tells little."
    return f"{verdict}: {_reasons(plain, speculative, rest, bool(reading))}.{reading}"


def _pace(lane: Stats) -> Pace:
    return Pace(lane.tokens, lane.seconds, lane.prompt_seconds)


def _reasons(plain: Stats, speculative: Stats, rest: float | None, rest_is_told: bool) -> str:
    """Why drafting is faster or slower once the prompt has been read, `rest` times as fast.

    What typical drafts and checks cost need not add up to that: some rounds take longer than typical ones, and sampling
    takes time as well. Then it is what a round takes on average that is told.
    """
    tokens, drafts = speculative.tokens_per_round or 0.0, len(speculative.checks)
    often, made = drafts / speculative.rounds, f"made in {drafts} of {speculative.rounds} rounds"
    if often >= MOST_ROUNDS:
        often, made = 1.0, ""
    costs, told = "", tokens  # told: the ratio that the words give
    longer = _verification_cost(plain, speculative)
    if longer is not None:
        costs = f"; a draft{f', {made},' if made else ''} costs {_share(speculative)} of a pass"
        if longer > EVEN[1]:
            costs += f", and checking it makes a pass {longer - 1:.0%} longer"
        told /= often * max(longer, 1.0) * (1 + (speculative.draft_cost or 0.0)) + 1 - often
    elif made:
        costs = f"; a draft was {made}"
    words = f"{_per_pass(speculative)}{costs}"
    if rest is None:
        return words
    if rest > tokens * EVEN[1]:
        return f"{words}; what is beyond {_tokens(tokens)}x is chance"
    exact = f"{tokens:.2f} tokens per target pass"  # with fewer digits the two could look the same
    average = f"a round takes as long as {tokens / rest:.2f} tokens of the target alone"
    if not _agree(told, rest):
        return f"{exact}; on average {average}"
    return f"{exact}{costs}, so {average}" if rest < EVEN[0] and not rest_is_told else words


def _reading(alone: Pace, drafting: Pace, ratio: float, rest: float) -> str:
    """What reading the prompt did to the ratio, which is `rest` without it; empty if that is little."""
    longest = max(alone.tokens, drafting.tokens)
    shares = sorted(lane.prompt_seconds / (lane.seconds_for(longest) or 1.0) for lane in (alone, drafting))
    if shares[-1] < CONSIDERABLE and _agree(ratio, rest):
        return ""
    least, most = (f"{share:.0%}" for share in shares)
    share = most if least == most else f"{least} to {most}"
    words = f", which drafting does not shorten, took {share} of the time"
    low, high = sorted((rest, 1.0))  # where it would be, had both lanes read the prompt as fast
    if not low * EVEN[0] <= ratio <= high * EVEN[1]:
        words = f" took {'longer' if ratio < rest else 'less time'} with the drafter, {share} of the time"
    return f" Reading the prompt{words}: {rest:.2f}x without it."


def _side(ratio: float) -> int:
    """1 is faster, -1 slower, 0 neither."""
    return (ratio > EVEN[1]) - (ratio < EVEN[0])


def _agree(one: float, other: float) -> bool:
    """Whether two ratios say the same: of one verdict and not far apart, or else hardly apart."""
    apart = abs(one / other - 1)
    return apart <= (CONSIDERABLE if _side(one) == _side(other) else EVEN[1] - 1)


def _per_pass(stats: Stats) -> str:
    return f"{_tokens(stats.tokens_per_round or 0.0)} tokens per target pass"


def _tokens(count: float) -> str:
    return f"{count:.2f}" if count < 2 else f"{count:.1f}"


def _share(stats: Stats) -> str:
    cost = stats.draft_cost or 0.0
    return "under 1%" if cost < 0.01 else f"{cost:.0%}"


def _verification_cost(plain: Stats, speculative: Stats) -> float | None:
    """A typical pass that checks a draft over a typical pass of the plain lane; None for want of either."""
    if min(len(plain.verify_times), len(speculative.checks)) < ENOUGH:
        return None
    plain_pass = median(plain.verify_times)
    return median(speculative.checks) / plain_pass if plain_pass else None
