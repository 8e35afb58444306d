"""Rows as a table for a terminal, and in Markdown for the docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdemo.formats import formatted
from specdemo.studies.tables import Rows, aligned

Columns = Mapping[str, str | tuple[str | Callable[[Any], Any], str]]
"""By heading: the format of a figure of that name; or its name, or a function of the row, and its format."""


def text_table(rows: Rows, columns: Columns, sparse: bool = False) -> str:
    """The rows for a terminal; `sparse` leaves out the columns in which nothing is known."""
    columns_ = zip(*_lines(rows, columns), strict=True)
    known = [column for column in columns_ if not sparse or {*column[1:]} - {"-"}]
    return aligned(list(zip(*known, strict=True)))


def markdown_table(rows: Rows, columns: Columns) -> list[str]:
    """The rows as the lines of a table in Markdown."""
    lines = ["|".join(["", *(f" {cell} " if cell else " " for cell in line), ""]) for line in _lines(rows, columns)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


def _lines(rows: Rows, columns: Columns) -> list[list[str]]:
    read = [column if isinstance(column, tuple) else (name, column) for name, column in columns.items()]
    cells = ([formatted(of(row) if callable(of) else row.get(of), shape, "-") for of, shape in read] for row in rows)
    return [[*columns], *cells]
