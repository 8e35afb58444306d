"""Passes that are waited for, so that those of several texts can be one."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class PendingPass:
    """A pass that is waited for. Passes of the same `together` can be one pass."""

    @property
    def rows(self) -> int:
        raise NotImplementedError

    @property
    def together(self) -> Together | None:
        """What can do this pass together with others; None if nothing can."""
        return None

    @property
    def place(self) -> int:
        """Where it begins in the cache. Only for a pass that can be done together with others, before it is done."""
        raise NotImplementedError

    def go_back(self, place: int) -> None:
        """Forget what was done of this pass, which began at `place`, so that it can be done again."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Run the pass. Returns the logits, [T, V] or [1, V]."""
        raise NotImplementedError


W = TypeVar("W", bound=PendingPass)


class Together(Protocol):
    """A model that reads the rows of several sequences in one pass. It is the same object for all of them."""

    def read(self, passes: Sequence[Any]) -> list[Tensor]:
        """Do passes of this model, each of another sequence, in one. Returns the logits of each.

        Raises:
            ValueError: as `Runner.forward` does.
        """


def in_groups(passes: Sequence[W], most: int) -> Iterator[list[W]]:
    """Passes in order, in groups of at most `most` rows; a longer pass is a group of its own."""
    group, rows = list[W](), 0
    for one in passes:
        if group and rows + one.rows > most:
            yield group
            group, rows = [], 0
        group.append(one)
        rows += one.rows
    yield group


@torch.inference_mode()
def alone(steps: Generator[PendingPass, Tensor, T]) -> T:
    """The result of what yields passes, each of which is read by itself."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(wanted.read())
    except StopIteration as ended:
        result: T = ended.value
        return result


def answered(logits: Tensor | PendingPass) -> Generator[PendingPass, Tensor, Tensor]:
    """The logits, or those of the pass that gives them."""
    return (yield logits) if isinstance(logits, PendingPass) else logits
