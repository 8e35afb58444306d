"""Grows trees of the drafted tokens with the largest values.

A drafter estimates for each token the chance that the target draws it, its *share*. The *value* of a token is the
product of the shares on the path to it, as in EAGLE-2 (arXiv 2406.16858). It falls along every path, so the tokens
with the largest values are a tree. Of equal values the one that was named first comes first.

`grow` names tokens one parent at a time, for drafters that copy or look up. `grow_by_depth` names those of one depth
together, since a model reads them in one pass. On a GPU `captured_trees` grows the trees of `grow_by_depth`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..decoding.acceptance import DRAFTER_OVERFLOWED
from ..decoding.rule import Rule
from ..engines.passes import PendingPass, answered
from ..engines.rows import MOST_ROWS, WIDTH
from ..errors import NotFinite
from ..tokens import Draft
from .chain import fitted

State = TypeVar("State")
Child = tuple[int, float, State]


def tree_of(branches: Iterable[tuple[int, int]], shares: Sequence[float] | None = None) -> Draft:
    """The draft of a tree, from the parent and the token of each of its nodes; it may have no shares."""
    parents, token_ids = list[int](), list[int]()
    for parent, token in branches:
        parents.append(parent)
        token_ids.append(token)
    if not token_ids:
        return Draft()
    q = None if shares is None else torch.tensor(shares, dtype=torch.float64)
    return Draft(token_ids, q=q, parents=parents, tree=True)


class Tree:
    """The tokens that were named for a tree of at most `nodes`, in the order in which they were.

    `best` are the places of those with the largest values, the largest first, so a parent comes before its children. No
    token but the first has a value below `stop_below`.
    """

    def __init__(self, nodes: int, stop_below: float = 0.0) -> None:
        self.nodes, self.stop_below = nodes, stop_below
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []
        self.values: list[float] = []
        self.best: list[int] = []
        self._ranked = 0

    def add(self, parent: int, token_id: int, share: float) -> None:
        """Add a token that follows another, or the text (-1), with a share above 0. `best` waits for `rank`."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.shares.append(share)
        self.values.append(share if parent < 0 else self.values[parent] * share)

    def rank(self) -> None:
        """Put what was added since the last time among the best."""
        best, value = self.best, self.values.__getitem__
        best += range(self._ranked, len(self.values))
        self._ranked = len(self.values)
        best.sort(key=value, reverse=True)  # those of equal values keep their order
        del best[self.nodes :]
        while len(best) > 1 and value(best[-1]) < self.stop_below:
            best.pop()

    def draft(self) -> Draft:
        place = {-1: -1, **{node: at for at, node in enumerate(self.best)}}
        branches = [(place[self.parents[node]], self.token_ids[node]) for node in self.best]
        return tree_of(branches, [self.shares[node] for node in self.best])


def grow(
    root: State, children: Callable[[State], Iterable[Child[State]]], nodes: int, depth: int, stop_below: float = 0.0
) -> Draft:
    """A tree of at most `nodes` tokens, `depth` of them on a path, for cheap drafters.

    Args:
        children: gives the tokens that may follow, from the state of a token or of the text (`root`). Each comes with
            its share, above 0 and at most 1, and its own state.
    """
    tree, states, depths = Tree(nodes, stop_below), [root], [0]  # of the text, then of each token

    def follow(node: int) -> None:
        for token, share, state in children(states[node + 1]):
            tree.add(node, token, share)
            states.append(state)
            depths.append(depths[node + 1] + 1)
        tree.rank()

    follow(-1)
    place = 0
    while place < min(len(tree.best), nodes - 1):
        node = tree.best[place]  # for good: what is named from now on has no larger value
        if depths[node + 1] < depth:
            follow(node)
        place += 1
    return tree.draft()


def grow_by_depth(
    logits: Tensor,
    read: Callable[[list[int], list[int]], Tensor | PendingPass],
    nodes: int,
    depth: int,
    rule: Rule,
    position: int,
    token_ids: Tensor | None = None,
    stop_below: float = 0.0,
    width: int = WIDTH,
    most_rows: int = MOST_ROWS,
) -> Generator[PendingPass, Tensor, Draft]:
    """A tree of at most `nodes` tokens, `depth` of them on a path, for models, which read tokens.

    A token that is not among the `nodes` best up to its depth has no descendant among them, so it is not read.

    Args:
        logits: after the text, [1, V'].
        read: gets tokens of one depth, at most `width` and never more than `most_rows` in all, and the parents of all
            that were read, these included, as `engines.rows` has them. Returns the logits after these tokens, [T, V'],
            or [1, V'] if they are all the same, or a pass whose last rows are those.
        position: of the first drafted token.
        token_ids: the target's tokens that the columns stand for; None if they are all.
    """
    tree, following, rows, parents = Tree(nodes, stop_below), [-1], {-1: -1}, list[int]()
    for behind in range(depth):
        columns, shares = rule.likeliest(logits, position + behind, min(nodes, WIDTH), token_ids)
        tokens, first = columns if token_ids is None else token_ids[columns], len(tree.values)
        every_tokens, every_shares = tokens.tolist(), shares.tolist()
        if len(every_tokens) < len(following):
            every_tokens, every_shares = (each * len(following) for each in (every_tokens, every_shares))
        for node, ids, estimates in zip(following, every_tokens, every_shares, strict=True):
            if not estimates[0] > 0:  # the largest
                raise NotFinite(DRAFTER_OVERFLOWED)
            for token, share in zip(ids, estimates, strict=True):
                if share > 0:  # else it underflowed
                    tree.add(node, token, share)
        tree.rank()
        following = [node for node in tree.best if node >= first][: min(width, most_rows - len(parents))]
        if not following or behind + 1 == depth:
            break
        for node in following:
            rows[node] = len(parents)
            parents.append(rows[tree.parents[node]])
        answer = yield from answered(read([tree.token_ids[node] for node in following], parents))
        logits = fitted(answer[-len(following) :], logits.shape[-1])
    return tree.draft()


def merged(one: Draft, other: Draft) -> Draft:
    """The tokens of two trees, taken in turn; q is that of the tree from which a token was taken."""
    branches, shares = dict[tuple[int, int], int](), list[float]()  # the places of what was taken
    trees = [(draft, [1.0] * len(draft.token_ids) if draft.q is None else draft.q.tolist()) for draft in (one, other)]
    places: list[list[int]] = [[], []]
    for node in range(max(len(one.token_ids), len(other.token_ids))):
        for (draft, q), place in zip(trees, places, strict=True):
            if node < len(q):
                parent = draft.parents[node]
                branch = place[parent] if parent >= 0 else -1, int(draft.token_ids[node])
                if branch not in branches:
                    branches[branch] = len(branches)
                    shares.append(q[node])
                place.append(branches[branch])
    return tree_of(branches, shares)
