"""Reads the header of a GGUF file, so that the rest of the file need not be there.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a GGUF file by its keys, and the shapes of its tensors by their names."""

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def numbers(self) -> int:
        """The number of weights."""
        return sum(map(prod, self.shapes.values()))

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model."""
        return str(self.fields["general.architecture"])

    def of_model(self, key: str, default: Any = None) -> Any:
        """A field that begins with the architecture's name."""
        return self.fields.get(f"{self.architecture}.{key}", default)


def read_header(file: BinaryIO) -> Header:
    """The header of a GGUF file.

    Raises:
        ValueError: it is not a GGUF file, or its header is incomplete.
    """
    try:
        return _read(file)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError("The header of the GGUF file is not whole.") from error


def _read(file: BinaryIO) -> Header:
    def take(form: str) -> Any:
        size = struct.calcsize("<" + form)
        return struct.unpack("<" + form, file.read(size))[0]

    def text() -> str:
        size = take("Q")
        content = file.read(size)
        if len(content) < size:
            raise struct.error
        return content.decode("utf-8")

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind != ARRAY:
            return take(SCALARS[kind])
        inner, count = take("I"), take("Q")
        return [value(inner) for _ in range(count)]

    if file.read(4) != b"GGUF":
        raise ValueError("It is not a GGUF file: it does not begin as one does.")
    if take("I") < 2:
        raise ValueError("It is a GGUF file of version 1, which is not read any more.")
    tensors, count = take("Q"), take("Q")
    fields = {}
    for _ in range(count):
        key = text()
        fields[key] = value(take("I"))
    shapes = {}
    for _ in range(tensors):
        name = text()
        shapes[name] = tuple(take("Q") for _ in range(take("I")))
        take("I"), take("Q")  # the type and the place of its numbers
    return Header(fields, shapes)
