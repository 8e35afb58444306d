"""The grid that studies share: every case writes every text with every setting, in turns; and one summary of the runs.

A *run* is a row of names and figures: what was measured (a drafter, its K, a prompt ...), and what was found. A *cell*
is all runs that have the same names on some *axes*, and the summary has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, product
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..racing.figures import LaneFigures
from ..settings import Settings
from ..system.imports import LazyModule
from .prompts import Prompt
from .statistics import geometric_mean, pooled_rate
from .study import Study, settings_in
from .tables import group_by

if TYPE_CHECKING:
    from ..decoding.events import Event
    from ..models.loaded import Loaded
    from ..racing import race
else:
    race = LazyModule("specdemo.racing.race")

Row = dict[str, Any]
Runs = Sequence[Row]
Get = str | Callable[[Row], Any]
"""The name of a figure of a run, or what makes one of it."""
Figure = Callable[[Runs], Any]
"""A figure of a row from the runs of its cell. Each has a `unit`, over which intervals are taken."""
Figures = Mapping[str, Figure]
Value = TypeVar("Value")

ALONE = "none"  # the drafter of the target alone
WARM_UP = 8  # tokens
OF_TEXT = ("tokens", "rounds", "drafted", "tested", "accepted", "seconds", "tokens_per_second")


# The summary ---------------------------------------------------------------------------------------------------


def summarise(runs: Runs, axes: Sequence[str], figures: Figures, units: Sequence[str] = ("prompt_id",)) -> list[Row]:
    """A row for each cell, in the order in which the runs bring them: its names, then its figures."""
    cells = group_by(runs, lambda run: tuple(run.get(axis) for axis in axes))
    return [{**dict(zip(axes, key, strict=True)), **cell(mine, figures, units)} for key, mine in cells.items()]


def cell(runs: Runs, figures: Figures, units: Sequence[str] = ("prompt_id",)) -> Row:
    """The figures of some runs.

    Args:
        units: the first of these of which there are several is the unit of the intervals.
    """
    several = [unit for unit in units if len({run[unit] for run in runs}) > 1]
    mine = [{**run, "unit": run[[*several, units[-1]][0]]} for run in runs]
    return {name: figure(mine) for name, figure in figures.items()}


def mean(of: Get, of_many: int = 1) -> Figure:
    """The geometric mean of a figure over units, see `geometric_mean`; runs without it are left out."""
    return lambda runs: geometric_mean(by_unit(runs, of), of_many)


def rate(part: Get, whole: Get, most: float = inf, least: float = 0.0) -> Figure:
    """A rate over all runs together, with its interval over units. Runs are left out whose part is unknown, or whose
    whole is unknown or 0."""
    return lambda runs: pooled_rate([*parts(runs, part, whole).values()], most, least)


def parts(runs: Runs, part: Get, whole: Get, unit: str = "unit") -> dict[str, tuple[float, float]]:
    """The part and the whole of each unit, see `rate`."""
    return {name: _sums(mine, part, whole) for name, mine in group_by(runs, lambda run: run[unit]).items()}


def share(part: Get, whole: Get) -> Figure:
    """As `rate`, without an interval."""

    def shared(runs: Runs) -> float | None:
        parts, wholes = _sums(runs, part, whole)
        return parts / wholes if wholes else None

    return shared


def total(of: Get) -> Figure:
    return lambda runs: sum(_value(run, of) for run in runs)


def average(of: Get, by: Callable[[Sequence[float]], float] = fmean) -> Figure:
    """The arithmetic mean, or another one, over the runs that have the figure."""
    return lambda runs: by(known) if (known := values(runs, of)) else None


def values(runs: Runs, of: Get) -> list[Any]:
    """A figure of the runs in which it is known."""
    return [value for run in runs if (value := _value(run, of)) is not None]


def by_unit(runs: Runs, of: Get, unit: str = "unit") -> dict[str, list[float]]:
    """A figure of the runs that have it, by unit."""
    return {name: [*filter(None, values(mine, of))] for name, mine in group_by(runs, lambda run: run[unit]).items()}


def with_speedups(runs: Runs, base: Callable[[Row], bool], *same: str) -> list[Row]:
    """The runs with their `speedup` over the base that wrote the `same`; None for the base and without one."""

    def key(run: Row) -> tuple[Any, ...]:
        return tuple(run[name] for name in same)

    speeds = {key(run): run["tokens_per_second"] for run in runs if base(run)}

    def ratio(run: Row) -> float | None:
        speed, other = run["tokens_per_second"], speeds.get(key(run))
        return None if base(run) or not speed or not other else speed / other

    return [{**run, "speedup": ratio(run)} for run in runs]


def _value(run: Row, of: Get) -> Any:
    return of(run) if callable(of) else run.get(of)


def _sums(runs: Runs, part: Get, whole: Get) -> tuple[float, float]:
    both = [(_value(run, part), size) for run in runs if (size := _value(run, whole))]
    known = [(one, size) for one, size in both if one is not None]
    return sum(one for one, _ in known), sum(size for _, size in known)


TOKENS_PER_ROUND = rate(lambda run: run["tokens"] - 1, "rounds")
ACCEPTANCE_RATE, DRAFT_EFFICIENCY = (rate("accepted", whole, 1.0) for whole in ("tested", "drafted"))


# The grid ------------------------------------------------------------------------------------------------------


def rotation(items: Sequence[Value], turn: int) -> list[Value]:
    """The items in their order, from another one on in each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


class Grid(Study):
    """A study whose cases write texts in turns. It names its axes, figures and words.

    `texts`, `settings` and `cases` are lists of names, see `plan`. The cases begin with another one at each text, so
    that with no setting one always comes first.

    Attributes:
        axes: see `summarise`, as `units`.
        figures: of a row, by name.
        timed: whether times matter: then each case writes a few tokens before all others, to warm up.
        runs: what was measured so far.
        turn: the number of the text that is being written.
    """

    axes: ClassVar[Sequence[str]] = ()
    figures: ClassVar[Figures] = {}
    units: ClassVar[Sequence[str]] = ("prompt_id",)
    timed: ClassVar[bool] = True

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        self.runs: list[Row] = []
        self.prompt_ids: dict[str, list[int]] = {}
        self.turn = 0
        self.plan([])

    def plan(self, texts: Sequence[Row], cases: Sequence[Row] = ({},), settings: Sequence[Row] = ({},)) -> None:
        """Say what is written, and refuse what cannot be. Names of `settings_in` hold for their runs."""
        self.texts, self.cases, self.settings = texts, cases, settings
        warm_up = len(cases) if self.timed else 0
        self.steps = warm_up + len(texts) * len(settings) * len(cases)
        for text, case, setting in product(texts, cases, settings):
            self.check_run({**text, **case, **setting})

    def texts_of(self, prompts: Sequence[Prompt]) -> list[Row]:
        """The names of some prompts."""
        self.prompt_ids |= {prompt.id: self.loaded.encode(prompt.prompt) for prompt in prompts}
        return [{"prompt_id": prompt.id, "category": prompt.category} for prompt in prompts]

    def run(self) -> Iterator[str]:
        for case in self.cases if self.timed else ():
            names = {**self.texts[0], **case, **self.settings[0]}
            few = min(WARM_UP, self.settings_of(names).max_new_tokens)
            for _ in self.write({**names, "max_new_tokens": few}):
                pass
            self.done += 1
            yield "Warming up"
        for turn, text in enumerate(self.texts):
            self.turn = turn
            for settings in self.settings:
                before, found = len(self.runs), list[list[Row]]([] for _ in self.cases)
                for place in rotation(range(len(self.cases)), turn):
                    names = {**text, **self.cases[place], **settings}
                    found[place] = [{**names, **one} for one in self.write(names)]
                    self.runs[before:] = chain(*found)  # in the order of the cases, whichever began
                    self.done += 1
                    yield self.at(names)

    def check_run(self, names: Row) -> None:
        """Refuse what cannot be written."""
        drafter, settings = self.drafter_of(names), self.settings_of(names)
        race.check_drafter(self.loaded, drafter)
        race.check_rule(drafter, settings)
        for ids in self.ids_of(names):
            race.check_fits(self.loaded, len(ids), settings, drafter)

    def at(self, names: Row) -> str:
        """What was written, in words."""
        return "Writing texts"

    def ids_of(self, names: Row) -> list[list[int]]:
        """The prompts that are read."""
        return [self.prompt_ids[names["prompt_id"]]]

    def settings_of(self, names: Row) -> Settings:
        return settings_in({**self.chosen, **names})

    def drafter_of(self, names: Row) -> str:
        """The drafter that is named, or that was asked for."""
        return str(names.get("drafter", self.chosen.get("drafter", ALONE)))

    def events(self, names: Row) -> Iterator[Event]:
        (ids,) = self.ids_of(names)
        return race.start(self.loaded, self.drafter_of(names), ids, self.settings_of(names))

    def write(self, names: Row) -> Iterator[Row]:
        """Write one text: its figures, in one row or more; none if it is too short to have any."""
        with closing(self.events(names)) as events:  # type: ignore[type-var]
            yield figures_of(LaneFigures.of(events))

    @classmethod
    def with_comparison(cls, runs: Runs) -> Runs:
        """The runs with what is known of them beside others."""
        return runs

    @classmethod
    def rows_of(cls, runs: Runs) -> list[Row]:
        return summarise(cls.with_comparison(runs), cls.axes, cls.figures, cls.units)

    def rows(self) -> list[Row]:
        return self.rows_of(self.runs)


def figures_of(stats: LaneFigures) -> Row:
    """The figures of a text by the names of `OF_TEXT`."""
    return {name: getattr(stats, name) for name in OF_TEXT}
