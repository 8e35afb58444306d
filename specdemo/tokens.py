"""What is drafted, tested and emitted, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


IntIfKnown: TypeAlias = Any
"""An int, or None in the lane of a server that does not tell it. Our own lanes know it, so what reads them need not
ask; a checked `int | None` would make all of them."""
FloatIfKnown: TypeAlias = Any
"""A float, or None: see `IntIfKnown`."""


class TokenKind(str, Enum):
    """Where an emitted token came from, see `decoding.rule.Rule`."""

    ACCEPTED = "accepted"
    RESAMPLED = "resampled"
    BONUS = "bonus"
    TARGET = "target"
    UNKNOWN = "unknown"  # one of the above, but a server does not say which


class DraftOutcome(str, Enum):
    """The outcome of a drafted token's test, see `decoding.rule.Rule`."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNTESTED = "untested"


class FinishReason(str, Enum):
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Ahead:
    """How a draft was prepared ahead, see `drafters.ahead`.

    `hit` says whether it was there at once. Drafts for `prepared` outcomes of the round before were made in `seconds`.
    """

    hit: bool
    prepared: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of k proposed tokens. An empty draft is legal: the round is then plain decoding.

    The tokens of a chain may have been drawn from the drafter's distributions; those of a tree were chosen. They are
    tested as they came, whatever their shape: a tree of one token is not a chain.

    Attributes:
        token_ids: [k]; an int64 tensor where tokens were drawn on a device, so that the host need not wait for them.
        probs: [k, V], the distribution that each token was drawn from, after warping. Only rejection sampling reads it.
            None stands for one-hot: the tokens were chosen.
        q: [k], the drafter's probability of each token, NaN where its logits were not finite; in a tree its estimate of
            the chance that the target draws it. None stands for 1.
        parents: [k], the token of the draft that each one follows, which comes before it, or -1 where it follows the
            text. By default those of a chain: -1, 0, 1, ...
        tree: whether the tokens are to be tested as those of a tree, which were chosen.
        ahead: whether and how it was prepared ahead; None where nothing is.
        drawn_from: for each drawn token the drafter's probabilities [1, V'], and the tokens int64 [V'] that the columns
            stand for (None for the whole vocabulary).
    """

    token_ids: Sequence[int] | Tensor = ()
    probs: Tensor | None = None
    q: Tensor | None = None
    parents: Sequence[int] = ()
    tree: bool = False
    ahead: Ahead | None = None
    drawn_from: Sequence[tuple[Tensor, Tensor | None]] = ()

    def __post_init__(self) -> None:
        if not self.tree:
            object.__setattr__(self, "parents", range(-1, len(self.token_ids) - 1))

    @property
    def row_parents(self) -> list[int] | None:
        """The parents of the rows, for `Runner.forward`; None for a chain, for which engines have a pass of its own."""
        return [-1, *(parent + 1 for parent in self.parents)] if self.tree else None


@dataclass(frozen=True, slots=True)
class Token:
    """An emitted token. What is not known is None: a server may not tell probabilities, nor every id.

    `p` is the target's probability of it. `margin` tells under the match rule how close the second candidate came, see
    `noise.draw`. The loop leaves `text` empty; what reads its events fills it in.
    """

    id: IntIfKnown
    kind: TokenKind
    p: float | None = None
    margin: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A proposed token and the outcome of its test.

    Under rejection sampling a token of a chain passes iff `draw` < min(1, `p` / `q`); elsewhere `draw` is None. `id`,
    `p` and `q` are None where they are not known.
    `parent` is the index in the draft of the token that this one follows, -1 for the first of a path; None in a chain,
    where each token follows the one before it. `text` is filled in as that of a `Token` is.
    """

    id: IntIfKnown
    outcome: DraftOutcome
    p: float | None = None
    q: float | None = None
    draw: float | None = None
    parent: int | None = None
    text: str = ""
