"""The summary of the runs of a study.

A *run* is a row of names and figures: what was measured (a drafter, its K, a prompt ...), and what was found. A *cell*
is all runs that have the same names on some *axes*, and the summary has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any

from .statistics import geometric_mean, pooled_rate
from .tables import group_by

Row = dict[str, Any]
Runs = Sequence[Row]
Get = str | Callable[[Row], Any]
"""The name of a figure of a run, or what makes one of it."""
Figure = Callable[[Runs], Any]
"""A figure of a row from the runs of its cell. Each has a `unit`, over which intervals are taken."""
Figures = Mapping[str, Figure]


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
