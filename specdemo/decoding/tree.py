"""Drafts that branch: which path through a tree the target's own tokens take.

The tokens of a tree are chosen, not drawn. At each token the target draws its own next one from p; the walk goes on
while that is drafted there, and what it meets last is emitted in any case. So the text follows p whatever the tree
holds ("naive sampling" in SpecInfer, arXiv 2305.09781). Children that are tested by p / q instead would have to be
drawn from q: with the likeliest ones the text no longer follows p.

A pass over a tree has one row more than the tree has tokens: row 0 reads the pending token, row i + 1 token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines.rows import depths_of
from ..system.hardware import to_device
from ..types import Draft, DraftedToken, DraftOutcome, TokenKind, Verdict
from .rule import check_finite


def rows_of(parents: Sequence[int]) -> list[int]:
    """The parents of the rows of a pass over a tree, for `Runner.forward`."""
    return [-1, *(parent + 1 for parent in parents)]


def depths(draft: Draft) -> list[int]:
    """How many positions behind the first drafted token the token lies that each row's logits are of, [k + 1]."""
    assert draft.parents is not None
    return depths_of(rows_of(draft.parents))


class Draws(NamedTuple):
    """What the target draws after each row of a pass over a tree, [k + 1] each."""

    tokens: Tensor  # int64
    p: Tensor  # of the drawn token
    margins: Tensor | None = None  # under the match rule, see `noise.draw`


def walk(token_ids: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The drafted tokens that are the target's own, one behind the other; `drawn` is what it draws after each row."""
    path, last = [], -1
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):  # parents come first
        if parent == last and token == drawn[last + 1]:
            path.append(node)
            last = node
    return path


def verdict_of(draft: Draft, target: Draws, p: Tensor) -> Verdict:
    """The target's answer to a tree of k tokens, whose probabilities under the target are p [k].

    Raises:
        NotFinite: the logits of the target or of the drafter were not finite where the round depends on them.
    """
    assert draft.parents is not None
    k, device = len(draft.token_ids), target.tokens.device
    q = torch.ones_like(p) if draft.q is None else to_device(draft.q, device)
    margins = torch.zeros_like(target.p) if target.margins is None else target.margins
    x = to_device(draft.token_ids, device)
    # One transfer, and on a GPU the only wait, brings everything to the host.
    answer = torch.cat([part.double() for part in (target.tokens, target.p, margins, p, q, x)]).tolist()
    drawn, p_drawn, margin = (answer[i * (k + 1) : (i + 1) * (k + 1)] for i in range(3))
    p_x, q_x, ids = (answer[3 * (k + 1) + i * k : 3 * (k + 1) + (i + 1) * k] for i in range(3))

    path = walk(ids, draft.parents, drawn)
    rows = [0, *(node + 1 for node in path)]
    check_finite([p_drawn[row] for row in rows], q_x)
    after = TokenKind.RESAMPLED if rows[-1] - 1 in draft.parents else TokenKind.BONUS  # whether more was drafted there
    return Verdict(
        accepted=len(path),
        token_id=int(drawn[rows[-1]]),
        kind=after if k else TokenKind.TARGET,
        token_p=p_drawn[rows[-1]],
        p=p_x,
        q=q_x,
        drafted=[int(token) for token in ids],
        margins=() if target.margins is None else [margin[row] for row in rows],
        target_ids=[int(token) for token in drawn],
        path=path,
        parents=list(draft.parents),
    )


def tests_of(verdict: Verdict, emitted: int) -> tuple[DraftedToken, ...]:
    """The outcome of each token of a tree, of whose path the first `emitted` tokens were emitted.

    A token that the target did not draw where it was drafted is rejected, as all are that follow an accepted one in
    vain; those on branches that the walk left, or behind the end of the text, are untested.
    """
    assert verdict.parents is not None
    accepted = set(verdict.path[:emitted])
    tested = {-1, *verdict.path[: emitted - 1]}  # whose children were

    def outcome(node: int, parent: int) -> DraftOutcome:
        if node in accepted:
            return DraftOutcome.ACCEPTED
        return DraftOutcome.REJECTED if parent in tested else DraftOutcome.UNTESTED

    numbers = zip(verdict.drafted, verdict.p, verdict.q, strict=True)
    return tuple(
        DraftedToken(token, outcome(node, parent), p, q, parent=parent)
        for node, ((token, p, q), parent) in enumerate(zip(numbers, verdict.parents, strict=True))
    )
