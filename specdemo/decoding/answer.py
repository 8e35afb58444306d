"""What became of a draft, from what its test on the device found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines.rows import depths_of
from ..system.device import to_device
from ..types import Draft, DraftedToken, DraftOutcome, NotFinite, Token, TokenKind
from .walk import kind_after, parents_of, path_of, walk

OVERFLOWED = "{} gave logits that are not finite numbers: choose another dtype, such as float32, or {}."
TARGET_OVERFLOWED = OVERFLOWED.format("The target", "another preset")
DRAFTER_OVERFLOWED = OVERFLOWED.format("The drafter", "another drafter")


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
        """The same where the text ends with the emitted token of this number. What would follow is not tested."""
        passed = [guess.outcome is DraftOutcome.ACCEPTED for guess in self.guesses]
        _, outcomes = walk(parents_of(self.guesses), passed, count)
        guesses = (replace(guess, outcome=outcome) for guess, outcome in zip(self.guesses, outcomes, strict=True))
        return self._replace(guesses=tuple(guesses), emitted=self.emitted[:count])


def row_parents(draft: Draft) -> list[int] | None:
    """The parents of the rows, for `Runner.forward`; None for a chain, for which engines have a pass of its own."""
    return [-1, *(parent + 1 for parent in draft.parents)] if draft.tree else None


def row_depths(draft: Draft) -> Sequence[int]:
    """The position that each row's logits predict, counted from the first drafted token, [k + 1]."""
    parents = row_parents(draft)
    return range(len(draft.token_ids) + 1) if parents is None else depths_of(parents)


def drafted_probs(target_probs: Tensor, x: Tensor, rows: Tensor | None) -> Tensor:
    """The target's probability of each drafted token x [k], from its distribution after each row [k + 1, V].

    Args:
        rows: those of the tokens' parents, int64 [k]; None for a chain.
    """
    if rows is None:  # an index for the rows would take three times as long
        return target_probs[: len(x)].gather(1, x[:, None])[:, 0]
    return target_probs[rows, x]


def parent_rows(draft: Draft, device: torch.device) -> Tensor | None:
    """See `drafted_probs`."""
    return to_device([parent + 1 for parent in draft.parents], device) if draft.tree else None


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
    """
    parents = draft.parents
    path, outcomes = walk(parents, passed)
    unknown = repeat(None)
    ids = [int(token) for token in x]
    guesses = tuple(map(DraftedToken, ids, outcomes, p, q, draws or unknown, parents if draft.tree else unknown))
    rows = [0, *(node + 1 for node in path)]
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
    Raises:
        NotFinite: the logits of the target or of the drafter were not finite where the round depends on them.
    """
    k = len(draft.token_ids)
    own, p, q, x = own[: k + 1], p[:k], q[:k], x[:k]
    passed = [own[parent + 1] == token for parent, token in zip(draft.parents, x, strict=True)]
    found = answer_to(draft, passed, own, own_p, p or [float(passes) for passes in passed], q or [1.0] * k, x, margins)
    rows = [node + 1 for node in path_of(found.guesses)]
    check_finite([own_p[row] for row in rows], q)
    return found._replace(target_ids=[int(token) for token in own])


def check_finite(target: Sequence[float], drafter: Sequence[float]) -> None:
    """Refuse probabilities of logits that were not finite: NaN fails every comparison.

    Args:
        target: of the tested tokens, at least 0, then of the emitted token, above 0.
        drafter: of the drafted tokens, above 0.
    """
    if not (target[-1] > 0 and all(p >= 0 for p in target)):
        raise NotFinite(TARGET_OVERFLOWED)
    if not all(q > 0 for q in drafter):
        raise NotFinite(DRAFTER_OVERFLOWED)
