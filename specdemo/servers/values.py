"""Checks values in a server's answers: anything may answer at an address."""

from __future__ import annotations

from typing import Any

from ..types import BadInput, FinishReason

LIKELIEST = 10  # how many next tokens a probability is asked for
UNFINISHED = "The server ended its answer before the text was finished."


def count(value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        ValueError: it is something else; so do the functions below.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError("no count")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise ValueError("no number")
    return float(value)


def text_in(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def reason_in(reason: str, matched: object) -> FinishReason:
    """Why a text ended, as vLLM and SGLang tell it: `matched` is the stop string or the id that ended it.

    Raises:
        BadInput: the server gave up before its end.
    """
    if reason == "length":
        return FinishReason.LENGTH
    if reason == "stop":
        return FinishReason.STOP if isinstance(matched, str) else FinishReason.EOS
    raise BadInput("The server gave up the text before it was finished.")


def check_limit(tokens: int, most: int) -> None:
    """Refuse an endless answer.

    Raises:
        BadInput: `tokens` is more than `most`.
    """
    if tokens > most:
        raise BadInput(f"The server sends more than the {most} tokens that it was asked for.")
