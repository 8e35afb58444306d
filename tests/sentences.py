"""Sentences are told by the values that they name: their other words are in `golden/messages.txt`, and may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

VALUE = re.compile(r"[\d_'\"`/\[\]{}A-Z]|\w[.-]\w")  # what only figures, names and what is quoted hold


def gist(sentence: Any) -> str:
    """The first word of every sentence, and all figures and names."""
    words = str(sentence).split()
    begins = [not at or words[at - 1].endswith((".", ":")) for at in range(len(words))]
    kept = [word for word, begin in zip(words, begins, strict=True) if begin or VALUE.search(word)]
    return " ".join(word.strip("(),.;:") for word in kept)


def tells(sentence: Any, words: str) -> bool:
    """Whether a sentence holds all these words, which are its values wherever it has some."""
    return bool(telling(words).search(str(sentence)))


def telling(words: str) -> re.Pattern[str]:
    """The same for what Playwright expects."""
    return re.compile("^" + "".join(rf"(?=.*(?<!\w){re.escape(word)}(?!\w))" for word in words.split()), re.DOTALL)


@contextmanager
def refuses(kind: type[BaseException] | tuple[type[BaseException], ...], values: str) -> Iterator[Any]:
    with pytest.raises(kind) as refused:
        yield refused
    assert tells(refused.value, values), f"{refused.value!r} does not name all of {values}"
