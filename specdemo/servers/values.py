"""Values in a server's answers, checked by pydantic: anything may answer at an address.

Each kind of server has dataclasses with the fields of its answers that are read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasPath, Field, Strict

from ..types import BadInput, FinishReason

LIKELIEST = 10  # how many next tokens a probability is asked for
UNFINISHED = "The server ended its answer before the text was finished."
Count = Annotated[int, Strict(), Field(ge=0, lt=2**53)]
Number = Annotated[float, Strict(), Field(ge=0, lt=1e12)]
Ids = tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """An answer with token ids."""

    tokens: Ids


def at(name: str, *path: str | int) -> Any:
    """The place of a field in an answer."""
    return Field(validation_alias=AliasPath(name, *path))


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
