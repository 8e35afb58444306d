"""The kinds of sources of models, and how they are found from a preset file or a name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo

from ..system.allowed import allowed
from ..types import BadInput, is_text
from .folder import Folder
from .gguf_file import Gguf
from .hub import Hub
from .parts import Parts
from .source import Source
from .tables import folder_of, problem
from .wheel import Wheel

KINDS: list[type[Source]] = [Wheel, Parts, Folder, Gguf, Hub]  # the first that recognises a table or a name is used


def head_source(text: str) -> Source:
    """The source of a head that a person names: a hub id (also `id@revision`) or a folder.

    Raises:
        BadInput: it is neither.
    """
    source = source_named(text)
    if not source.holds_heads:
        raise BadInput(f"{text} is no head: name its hub id or its folder.")
    return source


def source_named(text: str) -> Source:
    """The source of a model that a person names, see `presets.preset_of`. Only local files are looked up.

    Raises:
        BadInput: the name is of no kind of source, or is not allowed on this Space.
    """
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
