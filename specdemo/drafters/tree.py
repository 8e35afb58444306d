"""Grows a tree of drafted tokens: the most valuable ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from ..types import Draft

WIDTH = 8  # the most children that a drafter names of a token
State = TypeVar("State")
Child = tuple[int, float, State]


def grow(root: State, children: Callable[[State], Iterable[Child[State]]], nodes: int, depth: int) -> Draft:
    """The `nodes` tokens of the largest values, at most `depth` of them one behind the other.

    The value of a token is the product of the shares on the path to it, as in EAGLE-2 (arXiv 2406.16858): an estimate
    of the chance that it is reached. It falls along every path, so parents are taken before their children.

    Args:
        children: from what is known of a token, or of the text (`root`), the tokens that may follow: each with its
            share, from 0 to 1, and what is known of it. Of equal values the one named first is taken first.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    named = count()
    waiting: list[tuple[float, int, int, int, int, State]] = []

    def name(state: State, value: float, parent: int, behind: int) -> None:
        for token, share, following in children(state):
            heappush(waiting, (-value * share, next(named), token, parent, behind, following))

    name(root, 1.0, -1, 1)
    while waiting and len(token_ids) < nodes:
        value, _, token, parent, behind, state = heappop(waiting)
        token_ids.append(token)
        parents.append(parent)
        if behind < depth and len(token_ids) < nodes:
            name(state, -value, len(token_ids) - 1, behind + 1)
    return Draft(token_ids, parents=parents) if token_ids else Draft()
