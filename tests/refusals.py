"""What is refused, told by its kind and the values that its sentence names; the words are in `golden/messages.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def names(sentence: Any, values: str) -> bool:
    """Whether a sentence names all these values, with spaces between them."""
    return all(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", str(sentence)) for value in values.split())


@contextmanager
def refuses(kind: type[BaseException] | tuple[type[BaseException], ...], values: str) -> Iterator[Any]:
    with pytest.raises(kind) as refused:
        yield refused
    assert names(refused.value, values), f"{refused.value!r} does not name all of {values}"
