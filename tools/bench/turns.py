"""Works that are measured in turn, so that whatever slows down the machine for a while slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt
from statistics import fmean, stdev
from typing import TypeVar

from specdemo.studies.grid import rotated
from specdemo.studies.statistics import CONFIDENCE, Spread, special

Name = TypeVar("Name")
Value = TypeVar("Value")


def in_turns(works: Mapping[Name, Callable[[], Value]], turns: int) -> dict[Name, list[Value]]:
    """What each of some works gives, once in every turn."""
    found: dict[Name, list[Value]] = {name: [] for name in works}
    for turn in range(turns):
        for name in rotated([*works], turn):
            found[name].append(works[name]())
    return found


def ratio(ones: Sequence[float], others: Sequence[float]) -> Spread | None:
    """The mean of the ratios of two works in the same turns, see `mean_of`."""
    return mean_of([one / other for one, other in zip(ones, others, strict=True)])


def mean_of(values: Sequence[float], most: float = inf) -> Spread | None:
    """The mean of values from 0 to `most`, with Student's interval; None without values."""
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count == 1:
        return Spread(mean, None, None, 1)
    half = float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / sqrt(count)
    return Spread(mean, max(0.0, mean - half), min(most, mean + half), count)
