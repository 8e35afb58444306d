"""Grows trees of the drafted tokens with the largest values.

A drafter estimates for each token the chance that the target draws it, its *share*. The *value* of a token is the
product of the shares on the path to it, as in EAGLE-2 (arXiv 2406.16858). It falls along every path, so the tokens
with the largest values are a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from ..decoding.answer import DRAFTER_OVERFLOWED
from ..decoding.drafter import answered
from ..decoding.rule import Rule
from ..engines.rows import MOST_ROWS, WIDTH
from ..engines.runner import Wanted
from ..types import Draft, NotFinite
from .chain import NextLogits, fitted

State = TypeVar("State")
Child = tuple[int, float, State]


def grow(
    root: State, children: Callable[[State], Iterable[Child[State]]], nodes: int, depth: int, stop_below: float = 0.0
) -> Draft:
    """A tree of at most `nodes` tokens, `depth` of them on a path, grown token by token: for cheap drafters.

    The largest value comes first. No token but the first has a value below `stop_below`.

    Args:
        children: gives the tokens that may follow, from the state of a token or of the text (`root`). Each comes with
            its share, from 0 to 1, and its own state. Of equal values the one named first is taken first.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    q: list[float] = []
    named = count()
    waiting: list[tuple[float, int, int, int, int, float, State]] = []

    def name(state: State, value: float, parent: int, behind: int) -> None:
        for token, share, following in children(state):
            heappush(waiting, (-value * share, next(named), token, parent, behind, share, following))

    name(root, 1.0, -1, 1)
    while waiting and len(token_ids) < nodes:
        value, _, token, parent, behind, share, state = heappop(waiting)
        if token_ids and -value < stop_below:
            break
        token_ids.append(token)
        parents.append(parent)
        q.append(share)
        if behind < depth and len(token_ids) < nodes:
            name(state, -value, len(token_ids) - 1, behind + 1)
    return (
        Draft(token_ids, q=torch.tensor(q, dtype=torch.float64), parents=parents, tree=True) if token_ids else Draft()
    )


def grow_by_logits(
    next_logits: NextLogits,
    nodes: int,
    depth: int,
    rule: Rule,
    position: int,
    token_ids: Tensor | None = None,
    stop_below: float = 0.0,
) -> Draft:
    """`grow` for a drafter that has logits for any path: what `draw_chain` is for chains."""

    def children(drawn: tuple[Tensor, ...]) -> Iterator[Child[tuple[Tensor, ...]]]:
        columns, shares = rule.likeliest(next_logits(drawn), position + len(drawn), min(nodes, WIDTH), token_ids)
        estimates = _checked(shares[0].tolist())
        tokens = columns[0] if token_ids is None else token_ids[columns[0]]
        for token, share in zip(tokens.split(1), estimates, strict=True):
            if share > 0:
                yield int(token), share, (*drawn, token)

    nothing: tuple[Tensor, ...] = ()
    return grow(nothing, children, nodes, depth, stop_below)


def merged(one: Draft, other: Draft) -> Draft:
    """The tokens of two trees, taken in turn; q is that of the tree from which a token was taken."""
    tree, q = Branches(), list[float]()
    places: list[dict[int, int]] = [{-1: -1}, {-1: -1}]
    for node_of_each in zip_longest(_nodes(one), _nodes(other)):
        for place, named in zip(places, node_of_each, strict=True):
            if named:
                node, token, parent, share = named
                place[node] = tree.add(place[parent], int(token))
                if len(tree) > len(q):
                    q.append(share)
    return replace(tree.draft(), q=torch.tensor(q, dtype=torch.float64)) if q else Draft()


def _nodes(draft: Draft) -> Iterator[tuple[int, int | Tensor, int, float]]:
    """Place, token, parent and q of each node; q is 1 where the draft has none."""
    shares = [1.0] * len(draft.token_ids) if draft.q is None else draft.q.tolist()
    yield from zip(count(), draft.token_ids, draft.parents, shares, strict=False)


class Branches:
    """A tree in which siblings are different tokens."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}  # by parent and token

    def __len__(self) -> int:
        return len(self._places)

    def add(self, parent: int, token: int) -> int:
        """The place of a token that follows a parent, or the text (-1)."""
        return self._places.setdefault((parent, token), len(self._places))

    def add_path(self, token_ids: Iterable[int]) -> None:
        """Add a path that follows the text."""
        last = -1
        for token in token_ids:
            last = self.add(last, token)

    def draft(self) -> Draft:
        """The tokens in the order in which they came."""
        if not self._places:
            return Draft()
        parents, token_ids = zip(*self._places, strict=True)
        return Draft(list(token_ids), parents=list(parents), tree=True)


class Named:
    """The candidates for a tree, parents first; see `grow_by_depth`."""

    def __init__(self, nodes: int, stop_below: float = 0.0) -> None:
        self.nodes, self.stop_below = nodes, stop_below
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []
        self.values: list[float] = []
        self.row_parents: list[int] = []  # of the candidates that were read, see `engines.rows`
        self._rows = {-1: -1}  # of the same, by candidate

    def give_rows(self, nodes: Sequence[int]) -> None:
        """Count candidates as read, in this order. Their parents were read before."""
        for node in nodes:
            self._rows[node] = len(self.row_parents)
            self.row_parents.append(self._rows[self.parents[node]])

    def add(self, parent: int, token_ids: Sequence[int], shares: Sequence[float]) -> None:
        """Add candidates that follow a token, or the text (-1)."""
        value = self.values[parent] if parent >= 0 else 1.0
        for token, share in zip(token_ids, _checked(shares), strict=True):
            if share > 0:
                self.token_ids.append(token)
                self.parents.append(parent)
                self.shares.append(share)
                self.values.append(value * share)

    def best(self) -> list[int]:
        """The `nodes` tokens with the largest values, the largest first, so a parent comes before its children."""
        ranked = sorted(range(len(self.values)), key=lambda node: (-self.values[node], node))[: self.nodes]
        return [node for place, node in enumerate(ranked) if not place or self.values[node] >= self.stop_below]

    def draft(self) -> Draft:
        chosen = self.best()
        place = {-1: -1, **{node: at for at, node in enumerate(chosen)}}
        parents = [place[self.parents[node]] for node in chosen]
        q = torch.tensor([self.shares[node] for node in chosen], dtype=torch.float64)
        return Draft([self.token_ids[node] for node in chosen], q=q, parents=parents, tree=True)


def grow_by_depth(
    logits: Tensor,
    read: Callable[[Named, list[int]], Tensor | Wanted],
    nodes: int,
    depth: int,
    rule: Rule,
    position: int,
    token_ids: Tensor | None = None,
    stop_below: float = 0.0,
) -> Generator[Wanted, Tensor, Draft]:
    """A tree of at most `nodes` tokens, `depth` of them on a path, grown depth by depth: for models, which read tokens.

    A token that is not among the `nodes` best up to its depth has no descendant among them, so it is not read.

    Args:
        logits: after the text, [1, V'].
        read: gets tokens of one depth, at most `WIDTH` and never more than `MOST_ROWS` in all, and returns the logits
            after them, [T, V'], or a pass whose last rows these are. They are the last of `Named.row_parents`.
        position: of the first drafted token.
        token_ids: the target's tokens that the columns stand for; None if they are all.
    """
    named, known = Named(nodes, stop_below), 0
    following = [-1]
    for behind in range(depth):
        columns, shares = rule.likeliest(logits, position + behind, min(nodes, WIDTH), token_ids)
        tokens = columns if token_ids is None else token_ids[columns]
        first = len(named.values)
        for node, ids, estimates in zip(following, tokens.tolist(), shares.tolist(), strict=True):
            named.add(node, ids, estimates)
        promising = sorted((node for node in named.best() if node >= first), key=lambda node: -named.values[node])
        following = promising[: min(WIDTH, MOST_ROWS - known)]
        if not following or behind + 1 == depth:
            break
        known += len(following)
        named.give_rows(following)
        answer = yield from answered(read(named, following))
        logits = fitted(answer[-len(following) :], logits.shape[-1])
    return named.draft()


def _checked(shares: Sequence[float]) -> Sequence[float]:
    """Check estimates, the largest of which comes first; one that underflowed is 0.

    Raises:
        NotFinite: the drafter's logits were not.
    """
    if not shares[0] > 0:
        raise NotFinite(DRAFTER_OVERFLOWED)
    return shares
