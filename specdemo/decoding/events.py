"""The events that a decode yields.

The page, the command line, the statistics, the recorder and the tests read these events and nothing else. A trace
holds them as JSON lines, see `racing.trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from ..tokens import Ahead, DraftedToken, DraftOutcome, FinishReason, FloatIfKnown, Token

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been read and the first token emitted. `seconds` is the time to first token."""

    prompt_tokens: int
    token: Token
    seconds: float
    seed: int | None = None  # of this run; None in a trace that does not say


@dataclass(frozen=True, slots=True)
class Distributions:
    """What the tokens of a round were drawn from, above temperature 0.

    Attributes:
        position: of the first drafted token.
        target_probs: after each row of the pass, [k + 1, V].
        draft_probs: see `Draft.drawn_from`; none where the tokens were chosen.
        seed: of the noise of the match rule; None under rejection sampling.
    """

    position: int
    target_probs: Tensor
    draft_probs: Sequence[tuple[Tensor, Tensor | None]]
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One draft, one verification, its emitted tokens. The drafted tokens of a tree name their parents.

    `k` is how many tokens the drafter was asked for; it may propose fewer. `seconds` is the whole round on the engine's
    clock: drafting, verifying and bookkeeping, without the time spent showing earlier events. `draft_seconds` and
    `verify_seconds` are None for a server, which does not report them. Where it does not report what a round
    drafted, all tokens are of kind UNKNOWN and `drafted` is empty: they may be those of several rounds.

    `merged` is how many rounds of a server this one stands for, if the server reported several together and their
    number is known. Which tokens belong to which of them is then unknown, as above. `ahead` is that of the draft.
    `distributions` are there if they were asked for. They are large: who keeps a round leaves them out.
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
    distributions: Distributions | None = field(default=None, repr=False, compare=False)

    @property
    def accepted(self) -> int:
        """How many drafted tokens passed their test."""
        return sum(token.outcome is DraftOutcome.ACCEPTED for token in self.drafted)

    @property
    def tested(self) -> int:
        return sum(token.outcome is not DraftOutcome.UNTESTED for token in self.drafted)


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more is emitted. `text` are bytes at the end that never completed a character."""

    reason: FinishReason
    text: str = ""
    seconds: ClassVar = 0.0  # that it adds to the clock of its lane


Event: TypeAlias = Prefilled | Round | Finished


def emitted_tokens(event: Event) -> tuple[Token, ...]:
    if isinstance(event, Prefilled):
        return (event.token,)
    return event.emitted if isinstance(event, Round) else ()


def text_of(event: Event) -> str:
    """What an event adds to the text."""
    return event.text if isinstance(event, Finished) else "".join(token.text for token in emitted_tokens(event))
