"""What a study shows, as data: sections of sentences, plots and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .tables import Rows, Table


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of numbers, in a format of `formats.formatted`.

    `scale` is Vega's: linear, log, or ordinal, which gives each number a place of its own.
    """

    label: str
    format: str = ",.0f"
    start: float = 0
    end: float | None = None
    scale: str = "linear"


@dataclass(frozen=True, slots=True)
class Plot:
    """How rows are drawn: as lines along `x`, or without `x` as a bar each.

    Whiskers are the interval of a `Spread`, or of `low` and `high` in a row. A bar begins at the row's `start`, if it
    has one: it is a change then.

    Attributes:
        figures: the columns that are drawn, each with the name of its line.
        y: the axis of the figures.
        at: the column of the places along x, or of the names of the bars.
        by: the column of the names of the lines, if these are not of the columns.
        rule: what to compare with, a number or a column, and in words. A bar below a number is outlined.
        part: of `Study.drawn`.
    """

    title: str
    words: str
    figures: Mapping[str, str]
    y: Axis
    at: str
    x: Axis | None = None
    by: str = ""
    rule: tuple[float | str, str] | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One sentence that concludes, more of them, and what they rest on; `paste` is for another place."""

    verdict: str = ""
    words: Sequence[str] = ()
    plots: Sequence[tuple[Plot, Rows]] = ()
    tables: Sequence[Table] = ()
    title: str = ""
    paste: str = ""


TIMES = Axis("times the target alone", "times")
ALONE = 1, "the target alone"
DRAFT_LENGTH = Axis("draft length K (tokens per round)")
IN_DRAFT = Axis("position in the draft")
OVER_TEXTS = "Of the tested tokens, how many passed. Whiskers: 95% confidence interval over texts."
passing = partial(Plot, figures={"acceptance_rate": ""}, y=Axis("share of the tested tokens", ".0%", end=1))
