"""A drafter that lets one of two others draft each round."""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import Answer
from .drafter import Drafter


class Either(Drafter):
    """Lets one of two drafters draft each round. K = auto learns about each of them by its own name."""

    def __init__(self, first: Drafter, other: Drafter) -> None:
        self.first, self.other = first, other

    @property
    def waited(self) -> float:  # type: ignore[override]
        return self.first.waited + self.other.waited

    def choice(self, context: Sequence[int]) -> Drafter:
        """Which of the two would propose what follows `context`."""
        raise NotImplementedError

    def observe(self, answer: Answer) -> None:
        self.first.observe(answer)  # both in every round: a head reads the states of all tokens
        self.other.observe(answer)

    def release(self) -> None:
        self.first.release()
        self.other.release()


def source_of(drafter: Drafter, context: Sequence[int]) -> Drafter:
    """The drafter that would propose what follows `context`: this one, unless it hands over to another."""
    while isinstance(drafter, Either):
        drafter = drafter.choice(context)
    return drafter


def sources_of(drafter: Drafter) -> list[Drafter]:
    """All that `source_of` may name."""
    return [*sources_of(drafter.first), *sources_of(drafter.other)] if isinstance(drafter, Either) else [drafter]
