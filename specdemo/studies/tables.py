"""Tables of what was measured, for files and for people."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from ..formats import formatted
from .statistics import Spread

Row = TypeVar("Row")
Key = TypeVar("Key", bound=Hashable)
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in words. `names` are the columns in JSON and CSV, which the command line shows, `headers` on the page."""

    title: str
    names: list[str]
    headers: list[str]
    rows: list[list[str]]


def table(title: str, columns: Sequence[tuple[str, str, str]], rows: Iterable[Mapping[str, Any]]) -> Table:
    """Columns are (key in a row, heading, format)."""
    cells = [[formatted(row.get(key), form) for key, _, form in columns] for row in rows]
    return Table(title, [key for key, *_ in columns], [heading for _, heading, _ in columns], cells)


def group_by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows by their key, in the order in which they come."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def json_text(result: Any) -> str:
    """The result as JSON, one item of a list on each line; dataclasses in it become objects."""

    def compact(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, default=asdict)

    if not isinstance(result, Mapping):
        return compact(result) + "\n"
    parts = []
    for key, value in result.items():
        rows = ",\n  ".join(map(compact, value)) if isinstance(value, (list, tuple)) and value else None
        parts.append(f" {json.dumps(key)}: " + (compact(value) if rows is None else f"[\n  {rows}\n ]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row; what is nested in a row becomes columns called `outer.inner`, None an empty cell."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = StringIO(newline="")
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def write_json(path: Path, result: Any) -> None:
    """`json_text` as a file, whole or not at all: what was there before is lost only when this is written."""
    path, text = path.resolve(), json_text(result)
    if not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):  # such as a pipe
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """`csv_text` as a file in UTF-8."""
    path.write_bytes(csv_text(rows).encode())


def _flat(row: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        inner = asdict(value) if isinstance(value, Spread) else value
        cells |= _flat(inner, f"{outer}{name}.") if isinstance(inner, Mapping) else {f"{outer}{name}": inner}
    return cells


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
