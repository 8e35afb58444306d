"""Which guesses are accepted: the walk from the text to an accepted token that follows it, and on from token to token.

A draft is a tree; a chain is the tree with parents -1, 0, 1, ... The pass over it has one row more than the draft has
tokens: row 0 reads the pending token, row i + 1 token i. So the row of a token's parent tests it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from ..errors import NotFinite
from ..settings import MAX_NODES
from ..tokens import Draft, DraftedToken, DraftOutcome, Token, TokenKind

if TYPE_CHECKING:
    from torch import Tensor

OVERFLOWED = "{} gave logits that are not finite numbers: choose another dtype, such as float32, or {}."
TARGET_OVERFLOWED = OVERFLOWED.format("The target", "another preset")
DRAFTER_OVERFLOWED = OVERFLOWED.format("The drafter", "another drafter")


def walk(
    parents: Sequence[int], passed: Sequence[bool], most: int = MAX_NODES + 1
) -> tuple[list[int], list[DraftOutcome]]:
    """The path of accepted tokens, each the parent of the next, and the outcome of each drafted token.

    If several siblings passed, the first is accepted. The children of the text and of each accepted token are tested,
    until `most` tokens are accepted.
    """
    path, outcomes, tested = list[int](), list[DraftOutcome](), {-1}
    for node, (parent, passes) in enumerate(zip(parents, passed, strict=True)):  # parents come first
        if passes and len(path) < most and parent == (path[-1] if path else -1):
            path.append(node)
            outcomes.append(DraftOutcome.ACCEPTED)
            if len(path) < most:
                tested.add(node)
        else:
            outcomes.append(DraftOutcome.REJECTED if parent in tested else DraftOutcome.UNTESTED)
    return path, outcomes


def kind_after(path: Sequence[int], parents: Sequence[int]) -> TokenKind:
    """The kind of the token that follows a path through a draft."""
    if not parents:
        return TokenKind.TARGET
    return TokenKind.RESAMPLED if (path[-1] if path else -1) in parents else TokenKind.BONUS


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


class Answer(NamedTuple):
    """What became of a draft of k tokens.

    Attributes:
        guesses: its tokens with their outcomes, [k].
        emitted: the accepted ones, then a token of the target's own, if the text does not end before it.
        target_ids: what the target draws after each row of the pass, [k + 1], where the rule draws that.
        target_probs: the target's distribution after each row, [k + 1, V], and perhaps more, above temperature 0.
    """

    guesses: tuple[DraftedToken, ...]
    emitted: tuple[Token, ...]
    target_ids: Sequence[int] = ()
    target_probs: Tensor | None = None

    @property
    def accepted(self) -> int:
        """The emitted tokens before the newest one."""
        return len(self.emitted) - 1

    @property
    def last(self) -> Token:
        return self.emitted[-1]

    def until(self, count: int) -> Answer:
        """This answer for a text that ends after `count` emitted tokens. Guesses after them become untested."""
        passed = [guess.outcome is DraftOutcome.ACCEPTED for guess in self.guesses]
        _, outcomes = walk(parents_of(self.guesses), passed, count)
        guesses = (replace(guess, outcome=outcome) for guess, outcome in zip(self.guesses, outcomes, strict=True))
        return self._replace(guesses=tuple(guesses), emitted=self.emitted[:count])


def answer_to(
    draft: Draft,
    passed: Sequence[bool],
    own: Sequence[float],
    own_p: Sequence[float],
    p: Sequence[float],
    q: Sequence[float],
    x: Sequence[float],
    margins: Sequence[float] = (),
    draws: Sequence[float] = (),
) -> Answer:
    """What became of a draft whose tokens passed or not.

    Args:
        own, own_p: a token of the target's own for the row at which the path ends, and its probability, [k + 1].
        p, q: the probabilities of the drafted tokens x for the target and for the drafter, [k] each.
        margins: of the target's own tokens, [k + 1], where it draws by noise, see `noise.draw`.
        draws: the numbers that rejection sampling tested with, [k].
    Raises:
        NotFinite: a probability that an answer holds is of logits that were not finite.
    """
    parents = draft.parents
    path, outcomes = walk(parents, passed)
    unknown = repeat(None)
    ids = [int(token) for token in x]
    guesses = tuple(map(DraftedToken, ids, outcomes, p, q, draws or unknown, parents if draft.tree else unknown))
    rows = [0, *(node + 1 for node in path)]
    # NaN fails every comparison, and no figure is NaN, even of a token that the text does not depend on.
    if not (own_p[rows[-1]] > 0 and all(chance >= 0 for chance in [*p, *(own_p[row] for row in rows)])):
        raise NotFinite(TARGET_OVERFLOWED)
    if not all(chance > 0 for chance in q):
        raise NotFinite(DRAFTER_OVERFLOWED)
    near = [margins[row] if isfinite(margins[row]) else None for row in rows] if margins else [None] * len(rows)
    emitted = [Token(ids[node], TokenKind.ACCEPTED, p[node], margin) for node, margin in zip(path, near, strict=False)]
    emitted.append(Token(int(own[rows[-1]]), kind_after(path, parents), own_p[rows[-1]], near[-1]))
    return Answer(guesses, tuple(emitted))


def follow(
    draft: Draft,
    own: Sequence[float],
    own_p: Sequence[float],
    margins: Sequence[float],
    p: Sequence[float],
    q: Sequence[float],
    x: Sequence[float],
) -> Answer:
    """Walk as long as the target's own token was drafted.

    What the target draws last is emitted in any case, so the text follows p whatever was drafted ("naive sampling" in
    SpecInfer, arXiv 2305.09781).

    Args:
        own, own_p, margins: what the target draws after each row, [k + 1], see `noise.draw`; no margins if it draws
            by none.
        p: the target's probabilities of the drafted tokens, [k]; empty if it is certain of its own.
        q: the drafter's, [k]; empty if they were chosen.
        x: the drafted tokens, [k]. This and all of the above may go on with what is none of the draft.
    """
    k = len(draft.token_ids)
    own, p, q, x = own[: k + 1], p[:k], q[:k], x[:k]
    passed = [own[parent + 1] == token for parent, token in zip(draft.parents, x, strict=True)]
    found = answer_to(draft, passed, own, own_p, p or [float(passes) for passes in passed], q or [1.0] * k, x, margins)
    return found._replace(target_ids=[int(token) for token in own])
