"""A model in a folder of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .source import GGUF, Place, Source, path_of
from .store import LoadError, Progress
from .tables import Beside, table_as

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Folder(Source):
    """A folder written by `save_pretrained`; a relative path is looked up beside the preset file."""

    keys = ("path",)
    holds_heads = True
    path: Beside

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of_table(cls, table: Mapping[str, Any], folder: Path) -> Folder | None:
        found = table_as(cls, table, folder) if "path" in table else None
        return None if found and found.path.suffix == GGUF and not found.path.is_dir() else found

    @classmethod
    def named(cls, text: str) -> Folder | None:
        return cls(path_of(text)) if path_of(text).is_dir() else None

    def place(self, dtype: torch.dtype, progress: Progress) -> Place:
        if not (self.path / "config.json").is_file():
            raise LoadError(f"There is no model in the folder {self.path}: it has no config.json.")
        return Place(str(self.path), {"source": "folder", "name": self.path.name})

    def head_folder(self) -> Path:
        return self.path
