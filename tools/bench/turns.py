"""Works that are measured in turn, so that whatever slows down the machine for a while slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from specdemo.studies.grid import rotated
from specdemo.studies.statistics import Spread

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
    """The mean of the ratios of two works in the same turns, with Student's interval."""
    return Spread.of([one / other for one, other in zip(ones, others, strict=True)])
