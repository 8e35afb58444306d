"""Models as `save_pretrained` writes them: in a folder of this machine, or on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..types import BadInput
from .source import GGUF, Place, Source, Told, path_of
from .store import LoadError, Progress
from .tables import Beside, Text, table_as

if TYPE_CHECKING:
    import torch

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


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

    def place(self, dtype: torch.dtype, progress: Progress) -> Place:
        progress(None, f"looking for {self} on the hub")
        commit, unreached = self.commit()  # so that every file is of this commit
        revision = commit or self.revision
        identity = {"source": "hub", "repo": self.repo, "revision": revision}
        return Place(self.repo, identity, revision or "main", unreached=unreached)

    def commit(self) -> tuple[str | None, bool]:
        """See `on_hub.commit_of`."""
        from .on_hub import commit_of

        return commit_of(self.repo, self.revision)

    def told(self, revision: str | None = None) -> Told:
        from .on_hub import told_of

        return told_of(self.repo, revision or self.revision)

    def head_folder(self) -> Path:
        from .on_hub import config_of

        return config_of(self.repo, self.revision).parent

    def head_file(self, folder: Path, name: str, progress: Progress) -> Path | None:
        from .on_hub import download_bar, file_of

        return file_of(self.repo, folder.name, name, tqdm_class=download_bar(self, progress))

    def head_sizes(self) -> dict[str, int]:
        from .on_hub import info_of, sizes_in

        return {name: size or 0 for name, size in sizes_in(info_of(self.repo, self.revision)).items()}
