"""Prompt lookup: what followed the last time these words appeared (Saxena 2023, prompt-lookup-decoding)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..tokens import Draft
from .tree import grow

LONGEST, SHORTEST = 5, 2  # tokens that must match
MOST_COPIES = 64  # the most copies in a tree
SURER, DOUBT = 4.0, 4.0  # a copy's factor for one more matching token, and the weight of none being right


class PromptLookup(Drafter):
    """Finds the longest recent n-gram that occurred before in the text and copies what followed it.

    >>> PromptLookup().propose([1, 2, 3, 4, 9, 1, 2, 3], k=3).token_ids
    [4, 9, 1]

    A copy that reaches the end of the text goes on into itself, so a repeating text is repeated:

    >>> PromptLookup().propose([7, 8, 7, 8], k=5).token_ids
    [7, 8, 7, 8, 7]
    """

    name = "prompt-lookup"

    def __init__(self) -> None:
        # For each n-gram, the positions of the tokens that followed it.
        self._followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._indexed = 0

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        if options.depth is not None:
            return self._tree(context, k, options.depth)
        position = self.match(context)
        if position is None:
            return Draft()
        return Draft([context[position + drafted % (len(context) - position)] for drafted in range(k)])

    def match(self, context: Sequence[int]) -> int | None:
        """The position of what followed these words the last time; None if they are new."""
        return next((positions[-1] for _, positions in self._matching(context)), None)

    def _matching(self, context: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """For each n-gram that ends the context, the longest first: its length, and the positions of what followed."""
        # The n-grams that end the context have no continuation yet and stay out of the index.
        for position in range(self._indexed, len(context)):
            for n in range(SHORTEST, min(LONGEST, position) + 1):
                self._followers[tuple(context[position - n : position])].append(position)
        self._indexed = len(context)

        for n in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
            if positions := self._followers.get(tuple(context[-n:])):
                yield n, positions

    def _tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        """What followed at each earlier place, merged where the copies agree.

        >>> draft = PromptLookup().propose([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 4, DraftOptions(depth=2))
        >>> draft.token_ids, draft.parents
        ([4, 3, 8, 9], [-1, -1, 0, 1])
        """
        copies = self._copies(context)

        def children(state: tuple[int, list[tuple[int, int]]]) -> Iterator[tuple[int, float, tuple[int, list]]]:
            drafted, agreeing = state
            by_token: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            weights: defaultdict[int, float] = defaultdict(float)
            for position, matched in agreeing:
                token = context[position + drafted % (len(context) - position)]  # a copy goes on into itself
                by_token[token].append((position, matched))
                weights[token] += SURER ** (min(matched + drafted, LONGEST) - SHORTEST)
            total = sum(weights.values()) + DOUBT
            for token in sorted(by_token, key=weights.__getitem__, reverse=True):
                yield token, weights[token] / total, (drafted + 1, by_token[token])

        return grow((0, copies), children, nodes, depth)

    def _copies(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """The earlier places of the words that end the context: the position after them, and how many tokens match.

        The longest matches come first, of these the latest.
        """
        matched: dict[int, int] = {}
        for n, positions in self._matching(context):
            for position in reversed(positions):
                matched.setdefault(position, n)
                if len(matched) == MOST_COPIES:
                    return list(matched.items())
        return list(matched.items())
