"""The accept walk: from the text to an accepted token that follows it, and on from token to token.

A draft is a tree; a chain is the tree with parents -1, 0, 1, ... The pass over it has one row more than the draft has
tokens: row 0 reads the pending token, row i + 1 token i. So the row of a token's parent tests it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engines.rows import depths_of
from ..system.hardware import to_device
from ..types import Draft, NotFinite, TokenKind, Verdict, parents_or_chain
from .rule import DRAFTER_OVERFLOWED, TARGET_OVERFLOWED


def row_parents(draft: Draft) -> list[int] | None:
    """The parents of the rows, for `Runner.forward`; None for a chain, for which engines have a pass of its own."""
    return None if draft.parents is None else [-1, *(parent + 1 for parent in draft.parents)]


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
    return None if draft.parents is None else to_device([parent + 1 for parent in draft.parents], device)


def walk(parents: Sequence[int], passed: Sequence[bool]) -> list[int]:
    """The path: drafted tokens that passed, each the parent of the next. Of siblings the first counts."""
    path, last = [], -1
    for node, (parent, passes) in enumerate(zip(parents, passed, strict=True)):  # parents come first
        if parent == last and passes:
            path.append(node)
            last = node
    return path


def follow(
    draft: Draft,
    own: Sequence[float],
    own_p: Sequence[float],
    margins: Sequence[float],
    p: Sequence[float],
    q: Sequence[float],
    x: Sequence[float],
) -> Verdict:
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
    parents = parents_or_chain(draft.parents, k)
    passed = [own[parent + 1] == token for parent, token in zip(parents, x, strict=True)]
    path = walk(parents, passed)
    rows = [0, *(node + 1 for node in path)]
    check_finite([own_p[row] for row in rows], q)
    return Verdict(
        path=path,
        token_id=int(own[rows[-1]]),
        kind=kind_after(path, parents),
        token_p=own_p[rows[-1]],
        p=p or [float(passes) for passes in passed],
        q=q or [1.0] * len(x),
        drafted=[int(token) for token in x],
        margins=[margins[row] for row in rows] if margins else (),
        target_ids=[int(token) for token in own],
        parents=draft.parents,
    )


def kind_after(path: Sequence[int], parents: Sequence[int]) -> TokenKind:
    """The kind of the token that follows a path through a draft."""
    if not parents:
        return TokenKind.TARGET
    return TokenKind.RESAMPLED if (path[-1] if path else -1) in parents else TokenKind.BONUS


def check_finite(target: Sequence[float], drafter: Sequence[float]) -> None:
    """Refuse probabilities of logits that were not finite: NaN fails every comparison.

    Args:
        target: of the tested tokens, at least 0, then of the emitted token, above 0.
        drafter: of the drafted tokens, above 0.
    Raises:
        NotFinite: the message names the model.
    """
    if not (target[-1] > 0 and all(p >= 0 for p in target)):
        raise NotFinite(TARGET_OVERFLOWED)
    if not all(q > 0 for q in drafter):
        raise NotFinite(DRAFTER_OVERFLOWED)
