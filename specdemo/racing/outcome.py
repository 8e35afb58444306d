"""What came of a race, for the page, a replay, the command line and servers alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..decoding.events import Event, Finished, emitted_tokens
from ..settings import Settings
from .asked import PLAIN, SPECULATIVE, DraftedLane
from .compare import NOTHING_YET, Comparison, badge, compared, first_to_part, of_readers, tokens_of, worst
from .figures import NOWHERE, memory_rate_of, memory_shares
from .stats import Stats
from .trace import Entry
from .verdict import LaneVerdict, in_short, judge_lane, judge_readers, lanes_verdict


@dataclass(frozen=True, slots=True)
class Group:
    """Several readers that are decoded at once: the figures while all are, and those of the one that took longest.

    `tokens` are those of all.
    """

    at_once: Stats
    longest: Stats
    tokens: int

    @classmethod
    def of(cls, entries: Sequence[Entry], lanes: Collection[str]) -> Group:
        held = {lane: [entry.event for entry in entries if entry.lane == lane] for lane in lanes}
        each = [Stats.of(events) for events in held.values()]
        at_once = Stats.at_once(((entry.lane, entry.event) for entry in entries if entry.lane in held), len(held))
        return cls(at_once, max(each, key=lambda stats: stats.seconds), sum(stats.tokens for stats in each))

    def as_dict(self) -> dict[str, Any]:
        """Figures as those of a lane, for JSON: of a single reader while all are decoded, but the times of the whole
        run, and the tokens of all. `tokens_per_second_of_all` is the speed of all together."""
        times = {name: value for name, value in self.longest.as_dict().items() if name.endswith("seconds")}
        rate, readers = self.at_once.tokens_per_second, self.at_once.readers
        of_all = {"tokens": self.tokens, "readers": readers, "tokens_per_second_of_all": rate and rate * readers}
        return {**self.at_once.as_dict(), **times, **of_all}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a race, finished or stopped.

    Attributes:
        events, stats: of each lane.
        comparisons: of the text of each drafted lane with that of the target alone. None under rejection sampling above
            temperature 0, where texts differ by chance, though their distribution does not.
        verdicts: on each drafted lane; of several readers one on all of them, as of a lane SPECULATIVE.
        sentence: what the race showed, "" if there is nothing to compare.
        badge: whether the texts are the same: `mark`, `title` and `words`, see `compare.badge`.
        stopped: whether a lane did not finish.
        environment: where it ran, with the `memory_rate` measured after it; empty for servers.
        reports: of each lane, ready for JSON, see `report`.
        groups: of several readers, all lanes without a drafter as one lane PLAIN, and those with it as SPECULATIVE.
    """

    events: Mapping[str, Sequence[Event]]
    stats: Mapping[str, Stats]
    comparisons: Mapping[str, Comparison | None]
    verdicts: Mapping[str, LaneVerdict]
    sentence: str
    badge: Mapping[str, str]
    stopped: bool
    environment: Mapping[str, Any]
    reports: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        settings: Settings,
        entries: Sequence[Entry],
        lanes: Mapping[str, DraftedLane | None],
        alone: str | None = PLAIN,
        environment: Mapping[str, Any] = NOWHERE,
        pairs: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Read a race.

        Args:
            settings: those of all lanes.
            lanes: by name the drafter and K of each; None if unknown.
            alone: the lane of the target alone; None if there is none, and so nothing to compare.
            pairs: of several readers, see `Request.pairs`.
        """
        held = {lane: [entry for entry in entries if entry.lane == lane] for lane in lanes}
        events = {lane: [entry.event for entry in found] for lane, found in held.items()}
        stats = {lane: Stats.of(found) for lane, found in events.items()}
        stopped = not all(found and isinstance(found[-1], Finished) for found in events.values())
        tokens = {lane: tokens_of(found) for lane, found in held.items()}
        comparisons, verdicts, badges = {}, {}, {}
        for lane, other in (pairs or ({} if alone is None else dict.fromkeys(lanes, alone))).items():
            if lane == other:
                continue
            asked, pair = lanes[lane], (tokens[other], tokens[lane])
            found = comparisons[lane] = compared(*pair, settings)
            known = asked if asked and asked.k else None  # of a server it is not known
            if not pairs:
                verdicts[lane] = judge_lane(stats[other], stats[lane], known, found, environment)
            badges[lane] = badge(*pair, found, asked, settings, environment, stopped)
        groups: dict[str, Group] = {}
        if pairs:
            groups = {PLAIN: Group.of(entries, {*pairs.values()}), SPECULATIVE: Group.of(entries, pairs)}
            verdicts[SPECULATIVE] = judge_readers(groups[PLAIN].at_once, groups[SPECULATIVE].at_once, known)
        sentence = lanes_verdict(verdicts) if verdicts else ""
        overall = worst(badges) if badges else NOTHING_YET
        overall = of_readers(overall, len(pairs), stopped) if pairs else overall
        return cls(events, stats, comparisons, verdicts, sentence, overall, stopped, environment, groups=groups)

    @property
    def speed_up(self) -> float | None:
        """The largest of all lanes; None if there is none."""
        return max((found.speed_up for found in self.verdicts.values() if found.speed_up is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: the report of each lane by its name, and of several readers the `stats` of both groups; in
        `verdicts` the fields of `LaneVerdict` and the `comparison` of the text for each drafted lane; for the whole
        race the largest `speed_up`, a `sentence`, and the first `comparison` to differ; if weights are known,
        `memory_shares` and `memory_rate`."""
        parted = [found for found in self.comparisons.values() if found]
        memory = {}
        if self.environment:
            shares = memory_shares(self.stats, self.environment)
            memory = {"memory_shares": shares, "memory_rate": memory_rate_of(self.environment)}
        return {
            **self.reports,
            **{name: {"stats": group.as_dict()} for name, group in self.groups.items()},
            "verdicts": self._verdicts(),
            "speed_up": self.speed_up,
            "sentence": self.sentence,
            "comparison": asdict(first_to_part(parted)) if parted else None,
            **memory,
        }

    def _verdicts(self) -> dict[str, Any]:
        reports = {lane: found and asdict(found) for lane, found in self.comparisons.items()}
        if self.groups:
            parted = [found for found in self.comparisons.values() if found]
            reports[SPECULATIVE] = asdict(first_to_part(parted)) if parted else None
        return {lane: {**found.as_dict(), "comparison": reports[lane]} for lane, found in self.verdicts.items()}

    def ending(self, disturbed: bool = False) -> dict[str, Any]:
        """What the page shows at the end of a race, without the texts, which it has. It always gets figures of two
        lanes."""
        stats = {**({PLAIN: Stats(), SPECULATIVE: Stats()} if len(self.stats) < 2 else {}), **self.stats}
        return {
            "stopped": self.stopped,
            "speed_up": self.speed_up,
            "speed_ups": {lane: found.speed_up for lane, found in self.verdicts.items()},
            "sentence": self.sentence,
            **in_short(self.verdicts),
            "verdicts": self._verdicts(),
            "exactness": {**self.badge},
            "stats": {lane: found.as_dict() for lane, found in (self.groups or stats).items()},
            "disturbed": disturbed,
        }


def report(text: str, events: Sequence[Event], stats: Stats) -> dict[str, Any]:
    """What came of a lane, ready for JSON: `text, token_ids, kinds, finish_reason, stats`."""
    tokens, figures = [token for event in events for token in emitted_tokens(event)], stats.as_dict()
    return {
        "text": text,
        "token_ids": [token.id for token in tokens],
        "kinds": [token.kind.value for token in tokens],
        "finish_reason": figures["finish_reason"],
        "stats": figures,
    }
