"""How a number is written for people and for files, and how the words of others are quoted."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, overload

QUOTED = 60  # characters of what someone sent, in a sentence
TRACED = 6  # decimals of a probability in a trace
LONG_WAIT = 90  # seconds; longer waits are given in minutes
FOLDERS = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:\\|/)(?:[^\s'\"/\\]+[/\\])*")  # of an absolute path


def byte_size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


FORMATS: dict[str, Callable[[Any], str]] = {  # besides those of Python
    "bytes": byte_size,
    "gap": lambda logits: f"{logits:.2g}",  # between two candidate tokens
    "more": lambda share: f"+{share:.0%}" if share >= 0.005 else "<1%",
    "ms": lambda value: f"{value:.{3 if value < 1 else 2 if value < 100 else 0}f}",
    "p": lambda value: f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}",
    "times": lambda value: f"{value:.2f}×",
    "times3": lambda value: f"{value:.3f}×",
    "tokens": lambda count: f"{count:.2f}" if count < 2 else f"{count:.1f}",  # of a round
    "wait": lambda value: f"{max(1, round(value))} s" if value < LONG_WAIT else f"{round(value / 60)} minutes",
    "yes": lambda value: "✓ yes" if value else "✗ no",
}


def formatted(value: Any, form: str = "", nothing: str = "–") -> str:
    """A value in words: a `studies.statistics.Spread` with its interval, `nothing` for None; text stays as it is.

    The format is one of Python's or of `FORMATS`.
    """
    if value is None or isinstance(value, str):
        return nothing if value is None else value
    if hasattr(value, "low"):
        mean, low, high = (formatted(each, form) for each in (value.mean, value.low, value.high))
        return mean if value.low is None else f"{mean} ({low} to {high})"
    return FORMATS[form](value) if form in FORMATS else f"{value:{form}}"


@overload
def significant(number: float, digits: int = 4) -> float: ...
@overload
def significant(number: None, digits: int = 4) -> None: ...
def significant(number: float | None, digits: int = 4) -> float | None:
    """A number of JSON that people or their programs read; None is unknown."""
    return None if number is None else float(f"{number:.{digits}g}")


def traced(probability: float) -> float:
    """A probability as traces keep it. A sum in single precision can exceed 1."""
    return round(min(probability, 1.0), TRACED)


def clipped(text: str, most: int = QUOTED) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def brief(value: object, most: int = QUOTED) -> str:
    """A value as a sentence can quote it, whatever someone sent."""
    try:
        return clipped(repr(value), most)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def reason(error: BaseException) -> str:
    """What a library says of a failure, as a sentence can quote it: its first line, and the second if that is a part of
    the sentence, without the folders of a path."""
    first, *others = str(error).strip().splitlines() or [""]
    if isinstance(error, KeyError):  # its text is the key alone
        first += " is missing"
    elif first.endswith(":") and others:
        first += f" {others[0].strip()}"
    return FOLDERS.sub("", first).rstrip(".")


def printable(text: str) -> str:
    """Text with control characters shown, not obeyed: neither a model nor a server must drive the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)
