"""The events that a decode yields.

The page, the command line, the statistics, the recorder and the tests read these events and nothing else. A trace
holds them as JSON lines, see `racing.trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..types import Ahead, DraftedToken, DraftOutcome, FinishReason, FloatIfKnown, Token


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been read and the first token emitted. `seconds` is the time to first token."""

    prompt_tokens: int
    token: Token
    seconds: float
    seed: int | None = None  # of this run; None in a trace that does not say


@dataclass(frozen=True, slots=True)
class Round:
    """One draft, one verification, its emitted tokens. The drafted tokens of a tree name their parents.

    `k` is how many tokens the drafter was asked for; it may propose fewer. `seconds` is the whole round on the engine's
    clock: drafting, verifying and bookkeeping, without the time spent showing earlier events. `draft_seconds` and
    `verify_seconds` are None for a server, which does not report them. Where it does not report how many tokens it
    drafted, the last token is of kind UNKNOWN, and `drafted` holds the accepted tokens only.

    `merged` is how many rounds of a server this one stands for, if the server reported several together. Which tokens
    belong to which of them is then unknown, and so are the kinds of the tokens. `ahead` is that of the draft.
    """

    index: int
    drafted: tuple[DraftedToken, ...]
    emitted: tuple[Token, ...]
    draft_seconds: FloatIfKnown
    verify_seconds: FloatIfKnown
    seconds: float
    k: int | None = None  # None in a trace that does not say
    merged: int | None = None
    ahead: Ahead | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more is emitted."""

    reason: FinishReason


Event: TypeAlias = Prefilled | Round | Finished


def emitted_tokens(event: Event) -> tuple[Token, ...]:
    if isinstance(event, Prefilled):
        return (event.token,)
    return event.emitted if isinstance(event, Round) else ()


def engine_seconds(event: Event) -> float:
    """The time that an event adds to its lane's clock."""
    return 0.0 if isinstance(event, Finished) else event.seconds


def branches(drafted: Sequence[DraftedToken]) -> bool:
    """Whether a draft is a tree. Only the tokens of a tree name their parents."""
    return any(token.parent is not None for token in drafted)


def parents_of(drafted: Sequence[DraftedToken]) -> list[int]:
    """The index of each token's parent in the draft, -1 for the text."""
    return [index - 1 if token.parent is None else token.parent for index, token in enumerate(drafted)]


def path_of(drafted: Sequence[DraftedToken]) -> list[int]:
    """The indices of the accepted tokens, after a -1 for the text."""
    return [-1, *(index for index, token in enumerate(drafted) if token.outcome is DraftOutcome.ACCEPTED)]


def places_tested(drafted: Sequence[DraftedToken]) -> list[DraftedToken]:
    """The drafted tokens that were tested, one for each place: the accepted ones, then the rejected one, if any.

    In a tree all children of a token are tested together. If all were rejected, one of them stands for all.
    """
    path, followed = path_of(drafted), zip(drafted, parents_of(drafted), strict=True)
    failed = [token for token, parent in followed if parent == path[-1] and token.outcome is DraftOutcome.REJECTED]
    return [*(drafted[index] for index in path[1:]), *failed[:1]]
