"""The figures of a lane, from its events alone. All times are engine time.

>>> figures = LaneFigures.of(start(loaded, "prompt-lookup", loaded.encode("ROMEO:"), Settings(max_new_tokens=16)))
>>> figures.tokens, figures.tokens == 1 + figures.rounds + figures.accepted
(16, True)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from statistics import median
from typing import Any

from ..decoding.acceptance import branches, places_tested
from ..decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from ..tokens import DraftedToken, DraftOutcome, FinishReason, FloatIfKnown, IntIfKnown, TokenKind

COUNTS = "tokens", "rounds", "drafted", "tested", "accepted"
TIMES = "seconds", "ttft_seconds", "prompt_seconds", "draft_seconds", "verify_seconds", "other_seconds"
RATES = "tokens_per_second", "acceptance_rate", "draft_efficiency", "tokens_per_round", "draft_cost"
FIGURES = *COUNTS, *TIMES, "prompt_tokens", *RATES, "finish_reason", "accepted_lengths"
EVEN = 0.98, 1.02  # a ratio between these is neither faster nor slower
MUCH = 0.1  # of a text's time, of a ratio, a rate, a pass or a token of the target alone: less is not worth a sentence
SURE = 3.0  # standard errors between two rates that differ by more than chance
MANY_PASSES, LONGER = 32, 1.2  # passes, and their growth, for a note on the context
STEPS = 10**9  # of a rate from 0 to 1, to find one by bisection


@dataclass
class LaneFigures:
    """The events of a lane so far, and their running totals; `add` every event in order.

    If a server does not tell a figure of one round, its total is None from then on: tokens drafted and tested, and the
    time spent drafting and verifying. In a tree the tokens tested at the same place count as one test.
    """

    events: list[Event] = field(default_factory=list)
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
    first_draft_seconds: float = 0.0
    draft_times: list[float] = field(default_factory=list)
    """Seconds of each draft that was not empty, sorted, since every event of a replay asks for their median."""
    readers: int = 1
    """How many texts are decoded at once, see `ReaderFigures`."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> LaneFigures:
        figures = cls()
        for event in events:
            figures.add(event)
        return figures

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.seconds += event.seconds
        self.tokens += len(emitted_tokens(event))
        if isinstance(event, Prefilled):
            self.prompt_tokens, self.ttft_seconds = event.prompt_tokens, event.seconds
        elif isinstance(event, Finished):
            self.finish_reason = event.reason
        else:
            self._add_round(event)

    def _add_round(self, event: Round) -> None:
        self.rounds += event.merged or 1
        unknown = sum(token.kind is TokenKind.UNKNOWN for token in event.emitted)
        self.drafted = _sum(self.drafted, None if unknown else len(event.drafted))
        self.accepted = _sum(self.accepted, None if unknown > 1 else event.accepted)
        self.tested = _sum(self.tested, None if unknown else len(places_tested(event.drafted)))
        self.draft_seconds = _sum(self.draft_seconds, event.draft_seconds)
        self.verify_seconds = _sum(self.verify_seconds, event.verify_seconds)
        if event.drafted and not unknown:
            self.accepted_lengths[event.accepted] = self.accepted_lengths.get(event.accepted, 0) + 1
        if event.drafted and event.draft_seconds is not None:
            if not self.draft_times:
                self.first_draft_seconds = event.draft_seconds
            insort(self.draft_times, event.draft_seconds)

    @property
    def all_rounds(self) -> list[Round]:
        return [event for event in self.events if isinstance(event, Round)]

    @property
    def known_drafts(self) -> list[Round]:
        """The rounds whose draft was not empty and is known."""
        known = (each for each in self.all_rounds if all(one.kind is not TokenKind.UNKNOWN for one in each.emitted))
        return [each for each in known if each.drafted]

    @property
    def trees(self) -> bool:
        """Whether one of the drafts was a tree."""
        return any(token.parent is not None for each in self.all_rounds for token in each.drafted)

    @property
    def drafts(self) -> int:
        """How many rounds had a draft of known size."""
        return sum(self.accepted_lengths.values())

    @property
    def first_passed(self) -> int:
        """How many `known_drafts` had their first guess accepted; in a tree, the likeliest child of the text."""
        return sum(each.drafted[0].outcome is DraftOutcome.ACCEPTED for each in self.known_drafts)

    @property
    def verify_times(self) -> list[float]:
        return [each.verify_seconds for each in self.all_rounds if each.verify_seconds is not None]

    @property
    def checks(self) -> list[float]:
        """The seconds of the passes that verified a draft."""
        return [each.verify_seconds for each in self.all_rounds if each.drafted and each.verify_seconds is not None]

    @property
    def round_times(self) -> list[float]:
        return [each.seconds / (each.merged or 1) for each in self.all_rounds]

    @property
    def other_seconds(self) -> float | None:
        """Engine time of the rounds besides drafting and verifying; None if those are not known."""
        if self.draft_seconds is None or self.verify_seconds is None:
            return None
        return max(0.0, self.seconds - self.ttft_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        return tokens_per_second(self.tokens, self.seconds, self.prompt_seconds)

    @property
    def prompt_seconds(self) -> float:
        """Engine time for the prompt: the prefill, and the extra time of the first draft, in which a draft model reads
        the prompt."""
        return self.ttft_seconds + max(self.first_draft_seconds - self._usual_draft, 0.0)

    @property
    def _usual_draft(self) -> float:
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
        checks = self.checks
        pass_seconds = median(checks) if checks else 0.0
        return self._usual_draft / pass_seconds if pass_seconds else None

    def seconds_for(self, tokens: int) -> float | None:
        """Seconds of a text of another length, prompt included; None if no token followed the first."""
        speed = self.tokens_per_second
        return self.prompt_seconds + (tokens - 1) / speed if speed else None

    @property
    def longest_pass(self) -> int:
        """The rows of the longest pass."""
        return 1 + max((len(each.drafted) for each in self.known_drafts), default=0)

    @property
    def places(self) -> list[tuple[int, int]]:
        """How many tokens were tested and how many accepted at each position of the drafts; none of trees."""
        return [] if self.trees else counts_by_place(self.known_drafts)

    @property
    def falling_rates(self) -> list[float]:
        """The acceptance rates in the first and in the second half of the drafts if they fall by more than chance."""
        drafts = self.known_drafts
        parts = drafts[: len(drafts) // 2], drafts[len(drafts) // 2 :]
        tested = [sum(each.tested for each in part) for part in parts]
        passed = [sum(each.accepted for each in part) for part in parts]
        if not all(tested):
            return []
        rates, mean = [n / count for n, count in zip(passed, tested, strict=True)], sum(passed) / sum(tested)
        chance = SURE * sqrt(mean * (1 - mean) * sum(1 / count for count in tested))
        return [] if rates[0] - rates[1] < max(MUCH, chance) else rates

    @property
    def slowdown(self) -> float:
        """By what share passes take longer in the last quarter than in the first: the context has grown, or the machine
        was slower. 0 if that is little."""
        times, quarter = self.verify_times, len(self.verify_times) // 4
        first = median(times[:quarter]) if len(times) >= MANY_PASSES else 0.0
        growth = median(times[-quarter:]) / first if first else 0.0
        return growth - 1 if growth >= LONGER else 0.0

    @property
    def longest(self) -> LaneFigures:
        """Of several readers the one that took longest."""
        return self

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.tokens

    def some(self, names: Collection[str]) -> dict[str, Any]:
        """Figures by name, ready for JSON. A figure that does not exist yet is None."""
        lengths = {str(length): self.accepted_lengths[length] for length in sorted(self.accepted_lengths)}
        found = {"finish_reason": self.finish_reason and self.finish_reason.value, "accepted_lengths": lengths}
        return {name: found[name] if name in found else getattr(self, name) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return self.some(FIGURES)


@dataclass
class ReaderFigures(LaneFigures):
    """The figures of a single one of several readers while all are decoded: from when all prompts were read until a
    text ends.

    A round takes as long as its reader waits for it, so times, and the speed, are those of a single reader. `lanes`
    has the whole text of each reader by the name of its lane.
    """

    lanes: dict[str, LaneFigures] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)

    @classmethod
    def of_lanes(cls, names: Collection[str], events: Iterable[tuple[str, Event]] = ()) -> ReaderFigures:
        """Events of other lanes are left out."""
        figures = cls(tokens=1, readers=len(names), lanes={name: LaneFigures() for name in names})
        for name, event in events:
            if name in names:
                figures.add_of(name, event)
        return figures  # a round follows a token, hence the first

    def add_of(self, name: str, event: Event) -> bool:
        """Take in the next event of all. Returns whether it counts."""
        self.lanes[name].add(event)
        counts = name in self._ready and all(lane.finish_reason is None for lane in self.lanes.values())
        if counts:
            self.add(event)
        elif all(lane.events for lane in self.lanes.values()):  # the round that has just ended may have begun before
            self._ready.add(name)
        return counts

    @property
    def longest(self) -> LaneFigures:
        return max(self.lanes.values(), key=lambda lane: lane.seconds, default=self)

    @property
    def context(self) -> int:
        return max(lane.context for lane in self.lanes.values())

    def as_dict(self) -> dict[str, Any]:
        """Of the whole run the times, which are those of the reader that took longest, and the tokens of all;
        `tokens_per_second_of_all` is the speed of all together."""
        rate = self.tokens_per_second
        of_all = {"tokens": sum(lane.tokens for lane in self.lanes.values()), "readers": self.readers}
        return {
            **self.some(FIGURES),
            **self.longest.some(TIMES),
            **of_all,
            "tokens_per_second_of_all": rate and rate * self.readers,
        }


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


# Speeds ---------------------------------------------------------------------------------------------------------


def tokens_per_second(tokens: int, seconds: float, prompt_seconds: float) -> float | None:
    """How fast a text was written after its prompt was read: tokens after the first, which comes with the prompt, over
    the engine time behind the prompt; None if either is 0.

    Texts of different lengths cannot be compared by tokens over all seconds: the shorter a text is, the larger is the
    share of the prompt, which drafting does not speed up.
    """
    behind = seconds - prompt_seconds
    return (tokens - 1) / behind if tokens > 1 and behind > 0 else None


def ratio_of_speeds(plain: LaneFigures, lane: LaneFigures) -> float | None:
    """The `tokens_per_second` of a lane over those of the target alone; None if a lane has a single token, which only
    measures the prompt."""
    alone, own = plain.tokens_per_second, lane.tokens_per_second
    return own / alone if own and alone else None


def speed_up(plain: LaneFigures, lane: LaneFigures) -> float | None:
    """How many times as fast a text is written, `ratio_of_speeds`: without the time to read the prompt and what the
    first draft takes beyond the usual one. None if nothing was drafted: the difference of two equal lanes is noise.

    The page, the Lab, the bench and the sentences all use this definition, and call it "writing".
    """
    return None if lane.drafted == 0 else ratio_of_speeds(plain, lane)


def speed_up_in_all(plain: LaneFigures, lane: LaneFigures) -> float | None:
    """The seconds of the target alone over those of a lane, prompt included: "in all". If one text is shorter, its time
    is that of a text as long as the other. None without a `speed_up`.

    Of several readers the times are those of the reader that took longest, from before its prompt was read.
    """
    if speed_up(plain, lane) is None:
        return None
    alone, own = plain.longest, lane.longest
    tokens = max(alone.tokens, own.tokens)
    others, mine = alone.seconds_for(tokens), own.seconds_for(tokens)
    return others / mine if others and mine else None


def speeds_by_k(reached: Iterable[float], costs: Iterable[float]) -> list[float]:
    """The speed-up by K from 0 on: the tokens of a mean round divided by its cost:

        speed(k) = (1 + r_1 + ... + r_k) / cost(k)

    `adaptive_k.best_length` does the same between two rounds.

    Args:
        reached: r_i, the share of rounds whose guess i was accepted.
        costs: of a round by K from 0 on, in rounds of the target alone.
    """
    return [tokens / cost for tokens, cost in zip(accumulate(reached, initial=1.0), costs, strict=True)]


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
