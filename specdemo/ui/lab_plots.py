"""Plots and tables as data for `lab.js` and `plot.js`. Formats (`FORMATS` in plot.js) say how numbers are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..lab.tables import Spread

Row = Mapping[str, Any]
Picture = list[dict[str, Any]]
"""Sections, one below the other."""


def section(
    verdict: str,
    words: Sequence[str],
    plots: Sequence[dict[str, Any]] = (),
    tables: Sequence[dict[str, Any]] = (),
    title: str = "",
) -> dict[str, Any]:
    """One sentence that concludes, more of them, and what they rest on."""
    told = {"title": title, "verdict": verdict, "words": list(words)}
    return {**told, "plots": list(plots), "tables": list(tables)}


def lines(
    title: str,
    words: str,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    series: Iterable[tuple[str, Sequence[Sequence[float | None]]]],
    rules: Iterable[tuple[float, str]] = (),
) -> dict[str, Any]:
    """Series of points [x, y, low, high] by name (the whiskers may be missing), and horizontal lines to compare with.

    An axis has a `label`, a `format`, perhaps where it begins and ends (`from`, `to`), `log`, or `ticks`: the names of
    its places 0, 1, 2, ...
    """
    return {
        **{"kind": "lines", "title": title, "words": words, "x": x, "y": y},
        "series": [{"name": name, "points": points} for name, points in series if points],
        "rules": [{"y": at, "name": name} for at, name in rules],
    }


def bars(
    title: str, words: str, form: str, rows: Iterable[Row], mark: str = "", whisker: str = "", wide: bool = False
) -> dict[str, Any]:
    """Rows of `name` and `value`, and perhaps `low` and `high` (called `whisker`), a `mark`, a `start`, and `words`."""
    key = {"format": form, "mark": mark, "whisker": whisker, "wide": wide}
    return {"kind": "bars", "title": title, "words": words, "rows": list(rows), **key}


def table(title: str, columns: Sequence[tuple[str, str, str]], rows: Iterable[Row]) -> dict[str, Any]:
    """Columns are (key in a row, heading, format); a `Spread` becomes [mean, low, high]."""
    cells = [[_cell(row.get(key)) for key, _, _ in columns] for row in rows]
    return {"title": title, "columns": [column[1:] for column in columns], "rows": cells}


def _cell(value: Any) -> Any:
    return [value.mean, value.low, value.high] if isinstance(value, Spread) else value
