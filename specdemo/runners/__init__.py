"""Runners: a model and its key-value cache. No other object touches a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Runner(Protocol):
    """A causal language model reading one sequence, with a cache that rolls back.

    `length` is the number of tokens in the cache, `context` the most it can ever hold, `device`
    where logits come out, `vocab_size` their width V.
    """

    device: torch.device
    context: int
    vocab_size: int

    @property
    def length(self) -> int: ...

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Read a prompt into the empty cache; logits after its last token, [1, V]."""
        ...

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Read T more tokens; logits after each of them, [T, V]."""
        ...

    def rollback(self, length: int) -> None:
        """Forget every token from position `length` on. Costs nothing; the rest is kept as it is."""
        ...

    def first_layers(self, count: int) -> Runner:
        """The same model ended after `count` layers, reading and writing this runner's cache."""
        ...

    def release(self) -> None:
        """Free the cache. Safe to call twice."""
        ...


def check_fits(runner: Runner, count: int) -> None:
    """Refuse a pass of `count` tokens that the cache has no room for; slices would cut it off silently.

    Raises:
        ValueError: with the room there is and what was asked for.
    """
    if runner.length + count > runner.context:
        raise ValueError(
            f"The cache has room for {runner.context} tokens and holds {runner.length}; {count} more do not fit."
        )
