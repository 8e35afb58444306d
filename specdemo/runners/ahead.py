"""What an early exit has read of a text before the whole model does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor


class Ahead:
    """Tokens behind the end of a text that only the first `layers` layers have read.

    Their keys and values are in the cache. From the states which the last of these layers left, the other layers
    can read on, so that no layer reads a token twice.
    """

    def __init__(self, layers: int = 0) -> None:
        self.layers = layers
        self._read: list[tuple[int, Tensor]] = []  # tokens and their states, [hidden] each

    def __len__(self) -> int:
        return len(self._read)

    def add(self, ids: Sequence[int] | Tensor, states: Tensor) -> None:
        """T more tokens were read, with states [T, hidden]."""
        self._read += zip(map(int, ids), states, strict=True)

    def keep_beginning_of(self, ids: Sequence[int] | Tensor) -> None:
        """Forget what was read from the first token on that differs from `ids`."""
        same = takewhile(lambda pair: pair[0][0] == pair[1], zip(self._read, ids, strict=False))
        self._read = [read for read, _ in same]

    def clear(self) -> None:
        self._read.clear()

    def states(self) -> Tensor:
        """The states of everything read ahead, [T, hidden]."""
        return torch.stack([state for _, state in self._read])
