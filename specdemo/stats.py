"""Figures from events, and from nothing else. All times are engine time."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from .events import Event, Finished, Prefilled, Round, emitted_tokens, engine_seconds
from .types import Fate, FinishReason

EVEN = 0.98, 1.02  # times as fast is neither faster nor slower
FEW_TOKENS = 16  # with fewer a text tells little
ENOUGH = 5  # passes for a typical one
SMALL = 0.03  # a difference that needs no explanation


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


def speed_up(plain: Stats, speculative: Stats) -> float | None:
    """How many times as fast as the plain lane the speculative one is, see `Pace.to`.

    None where a lane has a single token, which says how long the prompt is to read, or where nothing was drafted: what
    then lies between two lanes that did the same is chance.
    """
    told = speculative.drafted and min(plain.tokens, speculative.tokens) > 1
    return _ratio(plain, speculative) if told else None


def _ratio(plain: Stats, speculative: Stats) -> float | None:
    alone, drafting = (Pace(lane.tokens, lane.seconds, lane.prompt_seconds) for lane in (plain, speculative))
    return drafting.to(alone)


def in_words(plain: Stats, speculative: Stats) -> str:
    """One plain sentence on what the race showed, and why. What it rests on fewer than `ENOUGH` passes is left out."""
    ratio = _ratio(plain, speculative)
    ended, shorter = plain.finish_reason and speculative.finish_reason, min(plain.tokens, speculative.tokens)
    if ended and shorter < 2:
        return "A lane wrote a single token: too little to compare."
    if ratio is None:
        return "Nothing to compare yet."
    if not speculative.drafted:
        chance = f"{abs(ratio - 1):.0%}"
        words = "Nothing was drafted, so both lanes did the same work"
        return f"{words}." if chance == "0%" else f"{words}; the {chance} between them is chance."
    if EVEN[0] <= ratio <= EVEN[1]:
        verdict = "No faster and no slower"
    else:
        verdict = f"{ratio:.2f}x faster" if ratio > 1 else f"Slower, {ratio:.2f}x the speed of the target alone"
    if ended and plain.tokens != speculative.tokens:
        verdict += " at equal length"
    sentence = f"{verdict}: {_reasons(plain, speculative, ratio)}."
    return sentence if shorter >= FEW_TOKENS else f"{sentence} So short a text tells little."


def _reasons(plain: Stats, speculative: Stats, ratio: float) -> str:
    """What the ratio comes from; all figures but the prompt's share are of the rounds alone."""
    tokens = speculative.tokens_per_round or 0.0
    reasons = [f"a draft costs {_share(speculative)} of a pass"]
    dearer = _verification_cost(plain, speculative)
    if dearer is not None and dearer > EVEN[1]:
        reasons.append(f"checking it makes a pass {dearer - 1:.0%} longer")
    words = f"{_tokens(tokens)} tokens per target pass; {', and '.join(reasons)}"
    rounds = _ratio(*(_without_prompt(lane) for lane in (plain, speculative)))
    if rounds is None:
        return words
    if rounds < EVEN[0]:
        words += f", so a round takes as long as {_tokens(tokens / rounds)} tokens of the target alone"
    elif rounds > tokens * EVEN[1]:
        words += f"; what is beyond {_tokens(tokens)}x is chance"
    if abs(rounds / ratio - 1) > SMALL:  # drafting does not shorten it
        prompt = max(lane.prompt_seconds / lane.seconds for lane in (plain, speculative))
        words += f". Reading the prompt took {prompt:.0%} of the time: {rounds:.2f}x without it"
    return words


def _tokens(count: float) -> str:
    return f"{count:.2f}" if count < 2 else f"{count:.1f}"


def _share(stats: Stats) -> str:
    cost = stats.draft_cost or 0.0
    return "under 1%" if cost < 0.01 else f"{cost:.0%}"


def _without_prompt(stats: Stats) -> Stats:
    """The same lane as if its prompt had been read already."""
    return replace(stats, seconds=stats.seconds - stats.prompt_seconds, ttft_seconds=0.0, first_draft_seconds=0.0)


def _verification_cost(plain: Stats, speculative: Stats) -> float | None:
    """A typical pass that checks a draft over a typical pass of the plain lane; None for want of either."""
    if min(len(plain.verify_times), len(speculative.checks)) < ENOUGH:
        return None
    plain_pass = median(plain.verify_times)
    return median(speculative.checks) / plain_pass if plain_pass else None
