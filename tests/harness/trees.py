"""Trees of rows, and a check of a runner's pass over one against the chains to each of its rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from specdemo.engines.rows import MOST_ROWS
from specdemo.engines.runner import Runner

CHAIN, ONE, STAR = list(range(-1, 8)), [-1], [-1, *[0] * 9]
FORKED = [-1, 0, 0, 1, 1, 2, 5, 3]
FULL = [-1, *((row - 1) // 2 for row in range(1, MOST_ROWS))]  # 64 rows


def random_tree(seed: int, rows: int) -> list[int]:
    choose = random.Random(seed)
    return [-1, *(max(choose.randrange(row), choose.randrange(row)) for row in range(1, rows))]


TREES = [CHAIN, ONE, STAR, FORKED, FULL, random_tree(1, 17), random_tree(2, 40), [-1, -1, 0, 1, 1]]


def tokens_of(parents: Sequence[int]) -> list[int]:
    return [(11 * row + 3) % (41) for row in range(len(parents))]  # some siblings are the same token


def path_to(parents: Sequence[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def check(
    make: Callable[[], Runner], text: Sequence[int], parents: Sequence[int], same: Callable[[Tensor, Tensor], bool]
) -> None:
    """A pass over a tree against the chains to each of its rows, then what follows a path that is kept."""
    tree, chain, ids = make(), make(), tokens_of(parents)
    for runner in (tree, chain):
        runner.capture_hidden_states([1, 0])
        runner.prefill(text)
    logits, states = tree.forward(ids, parents), tree.hidden_states
    assert states is not None
    assert tree.length == len(text) + len(ids)
    leaves = [row for row in range(len(ids)) if row not in parents]
    for row in leaves:
        path = path_to(parents, row)
        alone = chain.forward([ids[each] for each in path])
        assert chain.hidden_states is not None
        assert same(logits[path], alone)
        assert same(states[path], chain.hidden_states)
        chain.rollback(len(text))
    path = path_to(parents, leaves[len(leaves) // 2])
    path = path[: max(1, len(path) - 1)]
    tree.keep(path)
    chain.forward([ids[each] for each in path])
    assert tree.length == chain.length == len(text) + len(path)
    assert tree.hidden_states is not None
    assert chain.hidden_states is not None
    assert same(tree.hidden_states, chain.hidden_states)
    for again in ([7, 1], [4]):
        assert same(tree.forward(again), chain.forward(again))
    tree.keep([0])  # of a chain
    chain.rollback(chain.length)
    assert same(tree.forward([5]), chain.forward([5]))
