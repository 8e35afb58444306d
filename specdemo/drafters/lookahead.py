"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target's own pass guesses further tokens beside the draft.

The guesses are a window of columns. A token of level 0 follows those of the columns before it; a token of a higher
level follows the lower levels of its own column. That is a tree: level 0 is a trunk, from which each column branches
off. So the window is a part of the draft. What the target draws after the end of each column becomes the next top level
(Jacobi's iteration). A column and that draw make an n-gram, which is drafted when its first token comes up in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from ..decoding.acceptance import Answer
from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..settings import MAX_NODES
from ..tokens import Draft
from .tree import tree_of

LEVELS = 2  # of the window: an n-gram has one token more
WIDEST = MAX_NODES // LEVELS  # columns
KEPT = 8  # n-grams with the same first token; the oldest goes first


class Lookahead(Drafter):
    """Drafts collected n-grams and further guesses. Needs no model, no training and no other text.

    Up to half of a tree holds n-grams. A chain has no room for columns: it is level 0 alone, which is Jacobi decoding
    (Santilli et al., arXiv 2305.10427).
    """

    name = "lookahead"

    def __init__(self) -> None:
        self._fill: Iterator[int] = cycle([0])  # guesses where nothing is known: the prompt
        self._levels = list[list[int]]()  # in each the first token after the text comes first
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}  # what followed a token, the oldest first
        self._ends: list[int] = []  # of the columns in the last draft

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        if not self._levels:
            self._fill = cycle(context[:-1] or [0])
            self._levels = [self._unknown(WIDEST) for _ in range(LEVELS)]
        if options.depth is not None:
            return self._tree(context, k, options.depth)
        self._ends = []
        return Draft(self._levels[0][:k])

    def _tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        tree: dict[tuple[int, int], int] = {}  # the place of each token by its parent's and itself

        def add(parent: int, token: int) -> int:
            return tree.setdefault((parent, token), len(tree))

        for gram in reversed(self._grams.get(context[-1], {})):
            if len(tree) + len(gram) <= nodes // 2:  # the latest comes first
                last = -1
                for token in gram[:depth]:
                    last = add(last, token)
        width = min((nodes - len(tree)) // LEVELS, depth - LEVELS + 1)
        trunk, self._ends = -1, []
        for column in range(width):
            trunk = end = add(trunk, self._levels[0][column])
            for level in self._levels[1:]:
                end = add(end, level[column])
            self._ends.append(end)
        if not tree:
            add(-1, self._levels[0][0])
        return tree_of(tree)

    def observe(self, answer: Answer) -> None:
        if not self._levels:
            return
        emitted = answer.accepted + 1
        if self._ends and answer.target_ids:
            top = [answer.target_ids[end + 1] for end in self._ends]
            for column, token in enumerate(top):
                self._collect([*(level[column] for level in self._levels), token])
            self._levels = [*self._levels[1:], [*top, *self._levels[-1][len(top) + 1 :]]]
            emitted -= 1  # each level has become the one below, for the next token
        elif answer.target_ids and all(guess.parent is None for guess in answer.guesses):
            self._levels[0][: len(answer.target_ids)] = answer.target_ids
        self._levels = [[*level[emitted:], *self._unknown(WIDEST)][:WIDEST] for level in self._levels]
        self._ends = []

    def _collect(self, gram: Sequence[int]) -> None:
        kept, following = self._grams.setdefault(gram[0], {}), tuple(gram[1:])
        kept.pop(following, None)
        kept[following] = None
        if len(kept) > KEPT:
            del kept[next(iter(kept))]

    def _unknown(self, count: int) -> list[int]:
        return list(islice(self._fill, count))
