"""What came of a race, for the page, a replay, the command line and servers alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..decoding.events import emitted_tokens
from ..settings import Settings
from ..tokens import FloatIfKnown
from .bandwidth import NOWHERE, memory_rate_of, memory_share
from .busy import Pace
from .compare import Comparison, Texts, first_to_part, tokens_of, worst
from .figures import MUCH, LaneFigures, ReaderFigures
from .request import PLAIN, SPECULATIVE, DraftedLane
from .trace import Entry
from .verdict import LaneVerdict
from .words import sentence

RACE = "verdicts", "speed_up", "speed_up_in_all", "busy", "sentence", "comparison"
MEMORY = "memory_shares", "memory_rate"
SPEED_UPS = "speed_up", "speed_up_in_all", "speed_ups", "speed_ups_in_all"
PAGE = "stopped", *SPEED_UPS, "sentence", "headline", "advice", "chips", "formula", "verdicts", "exactness", "stats"


@dataclass(frozen=True)
class Outcome:
    """What came of a race, finished or stopped.

    Attributes:
        verdicts: on each drafted lane; of several readers one on all of them, as of a lane SPECULATIVE.
        badge: whether the texts are the same, see `Texts.badge`.
        sentence: what the race showed, "" if there is nothing to compare.
        stopped: whether a lane did not finish.
        environment: where it ran, with the `memory_rate` measured after it; empty for servers.
        reports: of each lane, ready for JSON, see `report`.
    """

    lanes: Mapping[str, LaneFigures]
    verdicts: Mapping[str, LaneVerdict] = field(default_factory=dict)
    badge: Mapping[str, Any] = field(default_factory=dict)
    sentence: str = ""
    stopped: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[str, dict[str, Any]] = field(default_factory=dict)

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
        figures = {lane: LaneFigures.of(entry.event for entry in entries if entry.lane == lane) for lane in lanes}
        stopped = any(lane.finish_reason is None for lane in figures.values())
        tokens = {lane: tokens_of(found.events) for lane, found in figures.items()}
        verdicts, badges = dict[str, LaneVerdict](), dict[str, dict[str, Any]]()
        for lane, other in (pairs or {lane: alone for lane in lanes if alone not in (None, lane)}).items():
            texts = Texts(tokens[other], tokens[lane], settings, lanes[lane], environment, stopped)
            badges[lane] = texts.badge
            alike = figures[other], figures[lane], lanes[lane], texts.comparison, environment
            verdicts[lane] = LaneVerdict(*alike, pace=Pace.of([figures[other]], environment))
        if pairs:
            events = [(entry.lane, entry.event) for entry in entries]
            plain, drafted = (ReaderFigures.of_lanes({*group}, events) for group in (pairs.values(), pairs))
            parted = first_to_part(found.comparison for found in verdicts.values())
            first, pace = lanes[next(iter(pairs))], Pace.of([plain], environment)
            verdicts = {SPECULATIVE: LaneVerdict(plain, drafted, first, parted, pace=pace)}
        found = cls(figures, verdicts, worst(badges), stopped=stopped, environment=environment)
        badge = found.badge
        if pairs and badge["mark"] == "same":
            badge = {**badge, "words": sentence("badge of readers", found)}
        return replace(found, badge=badge, sentence=sentence("race", found))

    @property
    def speed_up(self) -> float | None:
        """That of the fastest lane while writing; None if there is none."""
        return self.best.speed_up if self.verdicts else None

    @property
    def speed_up_in_all(self) -> float | None:
        """That of the same lane, prompt included."""
        return self.best.in_all if self.verdicts else None

    @property
    def busy(self) -> FloatIfKnown:
        """See `Pace.busy`; of all lanes, since the target alone is the same for each."""
        return self.best.pace.busy if self.verdicts else None

    @property
    def comparison(self) -> Comparison | None:
        """Of the texts of the lanes with that of the target alone the first to differ."""
        return first_to_part(found.comparison for found in self.verdicts.values())

    # Facts for its sentences ------------------------------------------------------------------------------------

    @property
    def readers(self) -> int:
        return max((found.readers for found in self.verdicts.values()), default=1)

    @property
    def fastest(self) -> str:
        """The name of the fastest drafted lane. Lanes without a speed-up come last."""
        return max(self.verdicts, key=lambda lane: self.verdicts[lane].speed_up or 0.0)

    @property
    def best(self) -> LaneVerdict:
        return self.verdicts[self.fastest]

    @property
    def _slower(self) -> dict[str, bool]:
        """Of the other lanes with reliable figures whether they are slower than the fastest beyond the noise."""
        best = self.best
        others = {lane: found for lane, found in self.verdicts.items() if found.is_long and found is not best}
        found = {lane: best.speed_up > (1 + best.noise) * other.speed_up for lane, other in others.items()}
        return found if best.is_long else {}

    @property
    def tied(self) -> str:
        """The names of the lanes that are as fast as the fastest within the noise."""
        return " and ".join(lane for lane, slower in self._slower.items() if not slower)

    @property
    def most_apt(self) -> str:
        """The slower lane of which the most guesses pass, if clearly more than of the fastest; else the fastest."""
        rates = {lane: self._rate(lane) for lane, slower in self._slower.items() if slower}
        apt = max(rates, key=rates.__getitem__, default=self.fastest)
        return apt if self._rate(apt) > self._rate(self.fastest) + MUCH / 2 else self.fastest

    def _rate(self, lane: str) -> float:
        return self.verdicts[lane].lane.acceptance_rate or 0.0

    @property
    def apt_rate(self) -> float:
        return self._rate(self.most_apt)

    # JSON -------------------------------------------------------------------------------------------------------

    def _json(self) -> dict[str, Any]:
        """All there is, ready for JSON; what shows a race leaves fields out.

        In `verdicts` see `LaneVerdict.as_dict`; `stats` are the figures of each lane, of several readers those of both
        groups.
        """
        long = bool(self.verdicts) and self.best.is_long and not self.busy
        verdicts = {lane: found.as_dict() for lane, found in self.verdicts.items()}
        return {
            "stopped": self.stopped,
            "speed_up": self.speed_up,
            "speed_up_in_all": self.speed_up_in_all,
            "busy": self.busy,
            "speed_ups": {lane: found["speed_up"] for lane, found in verdicts.items()},
            "speed_ups_in_all": {lane: found["speed_up_in_all"] for lane, found in verdicts.items()},
            "sentence": self.sentence,
            "headline": sentence("race headline", self),
            "advice": sentence("advice", self.best) if long and self.readers == 1 else "",
            "chips": self.best.chips if long else [],
            "formula": self.best.formula if long else None,
            "verdicts": verdicts,
            "exactness": {**self.badge},
            "stats": {lane: found.as_dict() for lane, found in (self._groups or self.lanes).items()},
            "comparison": self.comparison and asdict(self.comparison),
            "memory_shares": {lane: memory_share(found, self.environment) for lane, found in self.lanes.items()},
            "memory_rate": memory_rate_of(self.environment),
        }

    @property
    def _groups(self) -> dict[str, LaneFigures]:
        """Of several readers all without a drafter, and all with it."""
        return {PLAIN: self.best.plain, SPECULATIVE: self.best.lane} if self.readers > 1 else {}

    def as_dict(self) -> dict[str, Any]:
        """The report of each lane by its name, of several readers the `stats` of both groups, and what the whole race
        showed; if weights are known, `memory_shares` and `memory_rate`."""
        found = self._json()
        groups = {name: {"stats": found["stats"][name]} for name in self._groups}
        return {**self.reports, **groups, **{name: found[name] for name in RACE + MEMORY * bool(self.environment)}}

    def ending(self, disturbed: bool = False) -> dict[str, Any]:
        """What the page shows at the end of a race, without the texts, which it has. It always gets figures of two
        lanes; of a busy machine it gets no speed-ups."""
        found = self._json()
        if self.busy:
            nothing = dict.fromkeys(self.verdicts)
            found |= dict(zip(SPEED_UPS, (None, None, nothing, nothing), strict=True))
        if len(self.lanes) < 2:
            found["stats"] = {PLAIN: LaneFigures().as_dict(), SPECULATIVE: LaneFigures().as_dict(), **found["stats"]}
        return {**{name: found[name] for name in PAGE}, "disturbed": disturbed}


def report(text: str, figures: LaneFigures) -> dict[str, Any]:
    """What came of a lane, ready for JSON."""
    tokens, stats = [token for event in figures.events for token in emitted_tokens(event)], figures.as_dict()
    return {
        "text": text,
        "token_ids": [token.id for token in tokens],
        "kinds": [token.kind.value for token in tokens],
        "finish_reason": stats["finish_reason"],
        "stats": stats,
    }
