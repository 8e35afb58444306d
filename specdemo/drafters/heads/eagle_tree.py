"""EAGLE's tree: the likeliest tokens of each depth, one pass of the head a depth (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...decoding.rule import DRAFTER_OVERFLOWED, Rule
from ...engines.rows import MOST_ROWS
from ...types import Draft, NotFinite
from ..tree import WIDTH
from .ready import HeadPasses


class Tree:
    """Tokens that were named up to now, parents first; those of the largest values are drafted.

    The value of a token is the product of the head's estimates on the path to it. It falls along every path, so a
    token that is not among the `nodes` largest has no descendant among them.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []
        self.values: list[float] = []

    def add(self, parent: int, token_ids: list[int], shares: list[float]) -> None:
        """Name what may follow a token, or the text (-1)."""
        if not shares[0] > 0:
            raise NotFinite(DRAFTER_OVERFLOWED)
        value = self.values[parent] if parent >= 0 else 1.0
        for token, share in zip(token_ids, shares, strict=True):
            if share > 0:  # it may be too small for a number
                self.token_ids.append(token)
                self.parents.append(parent)
                self.shares.append(share)
                self.values.append(value * share)

    def best(self) -> list[int]:
        """The tokens of the largest values, parents first."""
        ranked = sorted(range(len(self.values)), key=lambda node: (-self.values[node], node))
        return sorted(ranked[: self.nodes])

    def draft(self) -> Draft:
        """The best tokens."""
        chosen = self.best()
        place = {-1: -1, **{node: at for at, node in enumerate(chosen)}}
        return Draft(
            [self.token_ids[node] for node in chosen],
            q=torch.tensor([self.shares[node] for node in chosen], dtype=torch.float64),
            parents=[place[self.parents[node]] for node in chosen],
        )


def draft_tree(
    passes: HeadPasses[Any], logits: Tensor, output: Tensor, rule: Rule, position: int, nodes: int, depth: int
) -> Draft:
    """The `nodes` likeliest tokens behind a text, at most `depth` of them one behind the other.

    Args:
        logits, output: of the head's pass over the text, [1, V'] and [1, hidden].
        position: of the first drafted token.
    """
    ready, backend = passes.ready, passes.backend
    tree, count = Tree(nodes), min(nodes, WIDTH)
    ancestors: list[int] = []  # of the tokens that the head has read
    words: dict[int, int] = {-1: 0}  # the same, by token
    outputs: dict[int, Tensor] = {-1: output}
    read = [-1]
    for behind in range(depth):
        columns, shares = rule.likeliest(logits, position + behind, count, ready.token_ids)
        named = len(tree.values)
        for row, (ids, estimates) in enumerate(zip(ready.token_ids[columns].tolist(), shares.tolist(), strict=True)):
            tree.add(read[row], ids, estimates)
        room = min(WIDTH, MOST_ROWS - len(ancestors))  # of a pass, and of the words
        promising = [node for node in tree.best() if node >= named]
        following = sorted(sorted(promising, key=lambda node: -tree.values[node])[:room])
        if not following or behind + 1 == depth:
            break
        x = torch.cat([outputs[tree.parents[node]] for node in following])
        for node in following:
            words[node] = words[tree.parents[node]] | 1 << len(ancestors)
            ancestors.append(words[node])
        y = backend.branch(x, ready.embed([tree.token_ids[node] for node in following]), ancestors)
        outputs = {node: y[row : row + 1] for row, node in enumerate(following)}
        logits, read = backend.logits(y), following
    return tree.draft()
