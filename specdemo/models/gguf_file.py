"""A model in a GGUF file, on this machine or on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..types import BadInput
from .converted import Converted
from .folder import Folder
from .gguf_header import Header, read_header
from .hub import HUB_ID
from .source import GGUF, Source, Told, path_of
from .store import LoadError, Progress, sha256_of
from .tables import Text, table_as, table_of

MAGIC = b"GGUF"
SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Gguf(Converted):
    """A GGUF file: a path, or the name of a file in a repository on the hub."""

    keys = ("hub", "path")
    file: Text
    repo: Annotated[Text | None, Field(alias="hub")] = None
    revision: Text | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.repo else self.file

    @classmethod
    def of_table(cls, table: Mapping[str, Any], folder: Path) -> Gguf | None:
        if "path" in table:  # of a file, since `Folder` comes first
            return cls(str(table_as(Folder, table, folder).path))
        return table_as(cls, table, folder) if "file" in table else None

    @classmethod
    def named(cls, text: str) -> Gguf | None:
        path = path_of(text)
        repo, _, file = text.partition(":")
        if SHARD.search(text):
            raise BadInput(f"{text} is one of several files of a model: join them first, by llama-gguf-split --merge.")
        if path.is_file() and path.suffix == GGUF:
            return cls(str(path))
        if file.endswith(GGUF) and HUB_ID.fullmatch(repo):
            name, _, revision = repo.partition("@")
            return cls(file, name, revision or None)
        return None

    def table(self) -> dict[str, Any]:
        return {"path": self.file} if self.repo is None else table_of(self)

    def found(self, progress: Progress) -> Source:
        if self.repo is None:
            return self
        from .on_hub import download

        progress(None, f"looking for {self} on the hub")
        return Gguf(download(self, self.repo, self.revision, self.file, progress))

    def header(self) -> tuple[Header, Told]:
        from .on_hub import header_of, told_of

        if self.repo is None:
            with Path(self.file).open("rb") as file:
                return read_header(file), Told()
        told = told_of(self.repo, self.revision, self.file)
        return header_of(self.repo, self.revision, self.file), told

    def check(self) -> None:
        path = Path(self.file)
        if not path.is_file():
            raise LoadError(f"There is no file {path}.")
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise LoadError(f"{path} is not a GGUF file.")

    @property
    def size(self) -> int:
        return Path(self.file).stat().st_size

    @property
    def label(self) -> str:
        return Path(self.file).stem

    def identity(self) -> dict[str, str]:
        path = Path(self.file)
        return {"source": "gguf", "gguf": path.name, "gguf_sha256": sha256_of(path)}

    def fetch(self, folder: Path, kept: Path, progress: Progress) -> Path:
        return Path(self.file)

    def gguf_path(self, progress: Progress) -> Path:
        self.check()
        return Path(self.file)
