"""The figures of a lane, from its events alone. All times are engine time."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from ..decoding.acceptance import branches, places_tested
from ..decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from ..tokens import DraftedToken, DraftOutcome, FinishReason, FloatIfKnown, IntIfKnown, TokenKind

FIGURES = (
    "tokens",
    "rounds",
    "drafted",
    "tested",
    "accepted",
    "seconds",
    "ttft_seconds",
    "prompt_seconds",
    "draft_seconds",
    "verify_seconds",
    "other_seconds",
    "prompt_tokens",
    "tokens_per_second",
    "acceptance_rate",
    "draft_efficiency",
    "tokens_per_round",
    "draft_cost",
)


class DraftCounts(NamedTuple):
    """How many tokens of a draft were drafted, tested and accepted."""

    drafted: int
    tested: int
    accepted: int


@dataclass(slots=True)
class Stats:
    """Running totals of one lane; `add` every event in order.

    If a server does not tell a figure of one round, its total is None from then on: tokens drafted and tested, and the
    time spent drafting and verifying. In a tree the tokens tested at the same place count as one test.
    """

    tokens: int = 0
    rounds: int = 0
    drafted: IntIfKnown = 0
    tested: IntIfKnown = 0
    accepted: IntIfKnown = 0
    seconds: float = 0.0
    ttft_seconds: float = 0.0
    draft_seconds: FloatIfKnown = 0.0
    verify_seconds: FloatIfKnown = 0.0
    prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    """How many rounds accepted 0, 1, 2, ... tokens; rounds with an empty draft are not in it."""
    first_passed: int = 0
    """In how many of these the first guess was accepted, in a tree the likeliest of those that follow the text."""
    first_draft_seconds: float = 0.0
    draft_times: list[float] = field(default_factory=list)
    """Seconds of each draft that was not empty, sorted. `verify_times` are those of each verification pass, `checks`
    those of passes that verified a draft."""
    verify_times: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    round_times: list[float] = field(default_factory=list)
    drafts_tested: list[DraftCounts] = field(default_factory=list)
    """Each draft that was not empty and is known. `trees` says whether one was a tree."""
    trees: bool = False
    readers: int = 1
    """How many texts are decoded at once, if these are the figures of all of them, see `at_once`."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Stats:
        stats = cls()
        for event in events:
            stats.add(event)
        return stats

    @classmethod
    def at_once(cls, events: Iterable[tuple[str, Event]], readers: int) -> Stats:
        """The figures of several readers, see `AtOnce`; the events come with the name of the reader's lane."""
        found = AtOnce(readers)
        for lane, event in events:
            found.add(lane, event)
        return found.stats

    def add(self, event: Event) -> None:
        self.seconds += event.seconds
        self.tokens += len(emitted_tokens(event))
        if isinstance(event, Prefilled):
            self.prompt_tokens, self.ttft_seconds = event.prompt_tokens, event.seconds
        elif isinstance(event, Finished):
            self.finish_reason = event.reason
        else:
            self._add_round(event)

    def _add_round(self, event: Round) -> None:
        outcomes = [token.outcome for token in event.drafted]
        accepted = outcomes.count(DraftOutcome.ACCEPTED)
        self.rounds += event.merged or 1
        unknown = sum(token.kind is TokenKind.UNKNOWN for token in event.emitted)
        known = not unknown
        self.drafted = _sum(self.drafted, len(outcomes) if known else None)
        self.accepted = _sum(self.accepted, None if unknown > 1 else accepted)
        self.tested = _sum(self.tested, len(places_tested(event.drafted)) if known else None)
        self.draft_seconds = _sum(self.draft_seconds, event.draft_seconds)
        self.verify_seconds = _sum(self.verify_seconds, event.verify_seconds)
        self.round_times.append(event.seconds / (event.merged or 1))
        self.trees |= any(token.parent is not None for token in event.drafted)
        if outcomes and known:
            tested = accepted + outcomes.count(DraftOutcome.REJECTED)
            self.drafts_tested.append(DraftCounts(len(outcomes), tested, accepted))
            self.accepted_lengths[accepted] = self.accepted_lengths.get(accepted, 0) + 1
            self.first_passed += outcomes[0] is DraftOutcome.ACCEPTED
        if event.verify_seconds is None:
            return
        self.verify_times.append(event.verify_seconds)
        if outcomes:
            if not self.draft_times:
                self.first_draft_seconds = event.draft_seconds
            insort(self.draft_times, event.draft_seconds)
            self.checks.append(event.verify_seconds)

    @property
    def drafts(self) -> int:
        """How many rounds had a draft of known size."""
        return sum(self.accepted_lengths.values())

    @property
    def other_seconds(self) -> float | None:
        """Engine time of the rounds besides drafting and verifying; None if those are not known."""
        if self.draft_seconds is None or self.verify_seconds is None:
            return None
        return max(0.0, self.seconds - self.ttft_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def pace(self) -> Pace:
        return Pace(self.tokens, self.seconds, self.prompt_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first over the engine time after the prompt, see `Pace`."""
        return self.pace.tokens_per_second

    @property
    def prompt_seconds(self) -> float:
        """Engine time for the prompt: the prefill, and the extra time of the first draft, in which a draft model reads
        the prompt."""
        return self.ttft_seconds + max(self.first_draft_seconds - self._usual_draft, 0.0)

    @property
    def _usual_draft(self) -> float:
        """The median of `draft_times`. They are kept sorted, since every event of a replay asks for it."""
        last = len(self.draft_times) - 1
        return (self.draft_times[last // 2] + self.draft_times[-(last // 2) - 1]) / 2 if self.draft_times else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / tested: the share of tested tokens that passed, an estimate of alpha."""
        return self.accepted / self.tested if self.tested else None

    @property
    def draft_efficiency(self) -> float | None:
        """Accepted / drafted: the share of drafted tokens that were used. It falls as K grows."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tau: tokens emitted by rounds / rounds, that is, tokens per target pass after the prefill."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def draft_cost(self) -> float | None:
        """The time of a typical draft over that of the pass that verifies it (medians), without empty drafts."""
        pass_seconds = median(self.checks) if self.checks else 0.0
        return self._usual_draft / pass_seconds if pass_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """All figures by name, for JSON. A figure that does not exist yet is None."""
        figures: dict[str, Any] = {name: getattr(self, name) for name in FIGURES}
        figures["finish_reason"] = self.finish_reason.value if self.finish_reason else None
        figures["accepted_lengths"] = {str(n): self.accepted_lengths[n] for n in sorted(self.accepted_lengths)}
        return figures


class AtOnce:
    """The `stats` of several readers while all are decoded: from when all prompts were read until a text ends.

    A round takes as long as its reader waits for it, so times, and the speed, are those of a single reader.
    """

    def __init__(self, readers: int) -> None:
        self.stats = Stats(tokens=1, readers=readers)  # a round follows a token
        self._begun, self._ready, self._over = 0, set[str](), False

    def add(self, lane: str, event: Event) -> bool:
        """Take in the next event of all. Returns whether it counts."""
        self._over |= isinstance(event, Finished)
        self._begun += isinstance(event, Prefilled)
        counts = lane in self._ready and not self._over
        if counts:
            self.stats.add(event)
        elif self._begun == self.stats.readers:  # the round that has just ended may have begun before
            self._ready.add(lane)
        return counts


def _sum(total: float | None, more: float | None) -> float | None:
    """The sum; None if either is unknown."""
    return None if total is None or more is None else total + more


def counts_by_place(events: Iterable[Event]) -> list[tuple[int, int]]:
    """How many tokens were tested and how many accepted at each position of a draft, [(tested, accepted), ...]."""
    tested, accepted = Counter[int](), Counter[int]()
    for event in events:
        drafted: Sequence[DraftedToken] = event.drafted if isinstance(event, Round) else ()
        if branches(drafted):
            drafted = places_tested(drafted)
        for place, token in enumerate(drafted):
            tested[place] += token.outcome is not DraftOutcome.UNTESTED
            accepted[place] += token.outcome is DraftOutcome.ACCEPTED
    return [(tested[place], accepted[place]) for place in sorted(tested)]


class Pace(NamedTuple):
    """How fast a text was written after its prompt was read.

    Texts of different lengths cannot be compared by tokens over all seconds: the shorter a text is, the larger is the
    share of the prompt, which drafting does not speed up.

    Attributes:
        tokens: emitted tokens. The first comes with the prompt.
        seconds: engine time of the whole text.
        prompt_seconds: the part of it that is for the prompt.
    """

    tokens: int
    seconds: float
    prompt_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """(tokens - 1) / (seconds - prompt_seconds); None if either is 0."""
        behind = self.seconds - self.prompt_seconds
        return (self.tokens - 1) / behind if self.tokens > 1 and behind > 0 else None

    def to(self, other: Pace) -> float | None:
        """The speed-up: this text's tokens per second over the other's, both after the prompt."""
        own, others = self.tokens_per_second, other.tokens_per_second
        return own / others if own and others else None

    def seconds_for(self, tokens: int) -> float | None:
        """Seconds of a text of another length, prompt included; None if no token followed the first."""
        speed = self.tokens_per_second
        return self.prompt_seconds + (tokens - 1) / speed if speed else None

    def with_prompt_to(self, other: Pace) -> float | None:
        """The speed-up with the prompt included, for the length of the longer of the two texts."""
        tokens = max(self.tokens, other.tokens)
        own, others = self.seconds_for(tokens), other.seconds_for(tokens)
        return others / own if own and others else None


def speed_up(plain: Stats, speculative: Stats) -> float | None:
    """The speed of the speculative lane over that of the plain lane, see `Pace.to`.

    The page, the Lab, the bench and the sentences all use this definition. None if a lane has a single token, which
    only measures the prompt, or if nothing was drafted: the difference of two equal lanes is timing noise.
    """
    return None if speculative.drafted == 0 else speculative.pace.to(plain.pace)
