"""The tokens that an early exit has read, for the whole model to continue from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor


class EarlyExitBuffer:
    """Tokens after the end of a text that only the first `layers` layers have read.

    Their keys and values are in the cache. The other layers can continue from the output of the last of these layers,
    so that no layer reads a token twice.
    """

    def __init__(self, layers: int = 0) -> None:
        self.layers = layers
        self._read: list[tuple[int, Tensor]] = []  # tokens, and the output of layer `layers` for each, [hidden]

    def __len__(self) -> int:
        return len(self._read)

    def add(self, ids: Sequence[int] | Tensor, states: Tensor) -> None:
        """Add T tokens that were read, with their hidden states [T, hidden]."""
        self._read += zip(map(int, ids), states, strict=True)

    def keep_beginning_of(self, ids: Sequence[int] | Tensor) -> None:
        """Keep the tokens up to the first that differs from `ids`."""
        same = takewhile(lambda pair: pair[0][0] == pair[1], zip(self._read, ids, strict=False))
        self._read = [read for read, _ in same]

    def clear(self) -> None:
        self._read.clear()

    def hidden_states(self) -> Tensor:
        """The hidden states of all these tokens, [T, hidden]."""
        return torch.stack([state for _, state in self._read])
