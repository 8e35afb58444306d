"""Runners: a model and its key-value cache. No other object touches a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Runner(Protocol):
    """A causal language model reading one sequence, with a cache that rolls back.

    `length` is the number of tokens in the cache, `context` the most it can ever hold, `device`
    where logits come out, `vocab_size` their width V. `states` are the hidden states that `keep_states`
    asked for, of every token of the last pass, [T, layers * hidden]; None where nothing was asked for or read.
    """

    device: torch.device
    context: int
    vocab_size: int
    states: Tensor | None

    @property
    def length(self) -> int: ...

    def keep_states(self, layers: Sequence[int]) -> None:
        """From the next pass on, keep the outputs of these decoder layers in `states`, side by side in this order.

        Layers count from 0. An output is the residual stream behind the layer, before any final norm: what
        transformers calls `hidden_states[layer + 1]`, except for the last layer, where that is already normed.
        """
        ...

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Read a prompt into the empty cache; logits after its last token, [1, V]."""
        ...

    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Read T more tokens; logits after each of them, [T, V]. Ids may be a tensor [T] int64 on any device."""
        ...

    def rollback(self, length: int) -> None:
        """Forget every token from position `length` on. Costs nothing; the rest is kept as it is."""
        ...

    def read_ahead(self, ids: Sequence[int], layers: int) -> Tensor:
        """Read T more tokens with the first `layers` layers only; what norm and head make of that, [T, V].

        The tokens are not part of the text: `length` stays. The next call reads behind them, and a `forward` of
        the same tokens goes on where these layers ended, so that no layer reads a token twice.
        `forward` and `rollback` forget whatever else was read ahead.
        """
        ...

    def release(self) -> None:
        """Free the cache and the states. Safe to call twice."""
        ...


def check_part(layers: int, total: int) -> None:
    """Refuse an early exit that is none.

    Raises:
        ValueError: with the layers asked for and all there are.
    """
    if not 1 <= layers < total:
        raise ValueError(f"The model has {total} layers; the first {layers} of them are not a proper part.")


def check_fits(runner: Runner, count: int) -> None:
    """Refuse a pass of `count` tokens that the cache has no room for; slices would cut it off silently.

    Raises:
        ValueError: with the room there is and what was asked for.
    """
    if runner.length + count > runner.context:
        raise ValueError(
            f"The cache has room for {runner.context} tokens and holds {runner.length}; {count} more do not fit."
        )
