"""Prompt lookup: what followed the last time these words appeared (Saxena 2023, prompt-lookup-decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from ..decoding.drafter import Drafter
from ..types import Draft

LONGEST, SHORTEST = 5, 2  # tokens that must match


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
        self.reset(())

    def reset(self, prompt_ids: Sequence[int]) -> None:
        # For each n-gram, the position of the token that followed its latest occurrence.
        self._next_position: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, context: Sequence[int], k: int) -> Draft:
        position = self.match(context)
        if position is None:
            return Draft()
        source = list(context[position:])
        while len(source) < k:
            source += source
        return Draft(source[:k])

    def match(self, context: Sequence[int]) -> int | None:
        """The position of what followed the last time; None if these words are new."""
        # The n-grams that end the context have no continuation yet and stay out of the index.
        for position in range(max(self._indexed, 1), len(context)):
            for n in range(SHORTEST, min(LONGEST, position) + 1):
                self._next_position[tuple(context[position - n : position])] = position
        self._indexed = len(context)

        for n in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
            if (found := self._next_position.get(tuple(context[-n:]))) is not None:
                return found
        return None
