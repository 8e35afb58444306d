"""Prompt lookup: what followed the last time these words appeared (Saxena 2023, prompt-lookup-decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Draft
from .base import Drafter

LONGEST, SHORTEST = 5, 2  # tokens that must match


class PromptLookup(Drafter):
    """Finds the longest recent n-gram that occurred before in the text and copies what followed it.

    >>> PromptLookup().propose([1, 2, 3, 4, 9, 1, 2, 3], k=3).token_ids
    [4, 9, 1]

    A copy that reaches the end of the text goes on into itself, so a repeating text is repeated:

    >>> PromptLookup().propose([7, 8, 7, 8], k=5).token_ids
    [7, 8, 7, 8, 7]
    """

    description = (
        "Copies what followed the last time the same words appeared in prompt or text. Free; shines on quoting."
    )

    def __init__(self) -> None:
        self.reset(())

    def reset(self, prompt_ids: Sequence[int]) -> None:
        # For each n-gram, where the token that followed its latest occurrence stands.
        self._next_place: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, context: Sequence[int], k: int) -> Draft:
        place = self.match(context)
        if place is None:
            return Draft()
        source = list(context[place:])
        while len(source) < k:
            source += source
        return Draft(source[:k])

    def match(self, context: Sequence[int]) -> int | None:
        """Where what followed the last time stands; None if these words are new."""
        # The n-grams that end the context have no continuation yet and stay out of the index.
        for place in range(max(self._indexed, 1), len(context)):
            for n in range(SHORTEST, min(LONGEST, place) + 1):
                self._next_place[tuple(context[place - n : place])] = place
        self._indexed = len(context)

        for n in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
            if (found := self._next_place.get(tuple(context[-n:]))) is not None:
                return found
        return None
