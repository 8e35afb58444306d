"""People draft: one types what comes next, or a room votes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from ..decoding.drafter import CHAIN, Drafter, DraftOptions, Needs
from ..decoding.parts import DrafterParts, Guesses
from ..decoding.rule import Rule
from ..engines.runner import Runner
from ..tokens import Draft
from .tree import Child, grow

Votes = tuple[Sequence[Sequence[int]], int]  # guesses that are the same up to a token, and how many tokens these are


def votes_tree(guesses: Sequence[Sequence[int]], k: int, depth: int) -> Draft:
    """The tree of the k tokens that most people guess; equal guesses are one branch. q is the share of those who guess
    a token among those who guess what is before it.

    >>> draft = votes_tree([[5, 6], [7], [5, 8], [5, 6]], k=3, depth=2)
    >>> draft.token_ids, draft.parents, draft.q.tolist()
    ([5, 6, 7], [-1, 0, -1], [0.75, 0.6666666666666666, 0.25])
    """

    def following(votes: Votes) -> Iterable[Child[Votes]]:
        alike, length = votes
        counts = Counter(guess[length] for guess in alike if len(guess) > length)
        for token, count in counts.most_common():
            agreeing = [guess for guess in alike if len(guess) > length and guess[length] == token]
            yield token, count / len(alike), (agreeing, length + 1)

    return grow((guesses, 0), following, k, depth)


class You(Drafter):
    """Asks people for each draft, and counts the time they take as nobody's. A chain is the guess of most people; a
    tree is `votes_tree`."""

    name = "you"

    def __init__(self, guesses: Guesses) -> None:
        self.guesses = guesses

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        return Needs(
            "nobody types guesses for this preset; on the page, press Guess yourself" if parts.guesses is None else None
        )

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Drafter:
        assert parts.guesses is not None
        return cls(parts.guesses)

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        began = time.perf_counter()
        guesses = [tuple(guess) for guess in self.guesses(context) if guess]
        self.waited += time.perf_counter() - began
        if options.depth is not None:
            return votes_tree(guesses, k, options.depth)
        most = Counter(guesses).most_common(1)
        return Draft(most[0][0][:k]) if most else Draft()
