"""TOML files read field by field, with complaints that name the file and the field."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..types import BadInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Table:
    def __init__(self, file: str, place: str, fields: dict[str, Any]) -> None:
        self._file, self._place, self._left = file, place, dict(fields)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, f"must be a text in quotes, not {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.take(name)
        if not isinstance(value, list) or not value or any(not isinstance(v, str) or not v.strip() for v in value):
            raise self.wrong(name, "must be a list of texts, none of them empty")
        return [text.strip("\n") for text in value]

    def whole(self, name: str, low: int) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(name, f"must be a whole number of at least {low}, not {value!r}")
        return value

    def choice(self, name: str, known: Collection[str]) -> str:
        value = self.text(name)
        if value not in known:
            raise self.wrong(name, f"must be one of {', '.join(known)}, not {value!r}")
        return value

    def truth(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {value!r}")
        return value

    def sha256(self, name: str) -> str:
        value = self.text(name).lower()
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise self.wrong(name, f"must be a SHA-256 of 64 hexadecimal digits, not {value!r}")
        return value

    def file(self, name: str, folder: Path) -> Path:
        path = folder / self.text(name)
        if not path.is_file():
            raise self.wrong(name, f"names a file that does not exist: {path}")
        return path

    def table(self, name: str) -> Table:
        value = self.take(name)
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be a table, not {value!r}")
        return Table(self._file, f"{self._place}{name}.", value)

    def has_table(self, name: str) -> bool:
        return isinstance(self._left.get(name), dict)

    def tables(self, name: str) -> list[Table]:
        value = self.take(name)
        if not isinstance(value, list) or not value or any(not isinstance(part, dict) for part in value):
            raise self.wrong(name, "must be a list of tables")
        return [Table(self._file, f"{self._place}{name}[{number}].", part) for number, part in enumerate(value)]

    def rest(self) -> dict[str, Any]:
        """Whatever fields there are, unchecked."""
        rest, self._left = self._left, {}
        return rest

    def refuse_unknown(self) -> None:
        """Call when every known field has been read."""
        for name in self._left:
            raise self.wrong(name, "is not a field that is known here")

    def wrong(self, name: str, problem: str) -> BadInput:
        """The complaint about a field, or about the table itself if the name is empty."""
        field_name = f"{self._place}{name}".rstrip(".")
        return BadInput(f"{self._file}: the field {field_name} {problem}.")

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise self.wrong(name, "is missing")
        return self._left.pop(name)


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says.

    Raises:
        BadInput: one sentence naming the file.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name}: the file is not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path.name}: the file is not valid TOML: {error}.") from error
    except OSError as error:
        raise BadInput(f"{path.name}: the file cannot be read: {error.strerror}.") from error
