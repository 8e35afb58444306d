"""The keys and values that a head keeps of a text, for torch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engines.layout import Rope
from .networks import LayeredHead, Rotation, doubled


class HeadCache:
    """Keys and values of each layer, `entries` [depth, 2, kv_heads, capacity, width], the first of them *live*.

    New entries are written after the live ones. They become live by `advance`, or are overwritten.
    """

    def __init__(self, head: LayeredHead, capacity: int, like: Tensor) -> None:
        """Of the type and on the device of `like`."""
        shape, rope = head.shape, Rope(head.rope.frequencies.to(like.device), head.rope.scale)
        self.capacity = capacity
        self.entries = like.new_zeros(shape.depth, 2, shape.kv_heads, capacity, shape.width)
        cos, sin = doubled(*rope.rotation(capacity))
        self.rotations = cos.to(like), sin.to(like)
        self._live: Any = 0

    def seek(self, live: int) -> None:
        self._live = live

    def advance(self, count: int) -> None:
        self._live += count

    def rotation(self, count: int) -> Rotation:
        """The rotation of the next positions, in the type of the entries."""
        cos, sin = self.rotations
        return cos[self._live : self._live + count], sin[self._live : self._live + count]

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write entries after the live ones, [kv_heads, T, width] each."""
        self.entries[layer, 0, :, self._live : self._live + keys.shape[1]] = keys
        self.entries[layer, 1, :, self._live : self._live + keys.shape[1]] = values

    def attend(self, layer: int, q: Tensor, live: int, more: int) -> Tensor:
        """Attention of queries [heads, T, width] to the last `live` live entries and to `more` entries after them."""
        keys, values = self.entries[layer, :, :, max(0, self._live - live) : self._live + more]
        return _attend(q, keys, values, None)

    def branching(self, paths: Tensor, window: int) -> tuple[Rotation, Tensor]:
        """The rotation of tokens of a tree after the live entries, and which entries each sees, [T, capacity].

        Each sees the last `window` tokens. `paths` uint8 [T, MOST_ROWS] leads to them, see `rows.branches_of`.
        """
        cos, sin = self.rotations
        at = self._live + (paths != paths[:, -1:]).sum(1)
        entries = torch.arange(self.capacity, device=cos.device)
        in_window = (entries < self._live) & (entries > at[:, None] - window)
        return (cos[at], sin[at]), in_window.scatter_(1, paths.long() + self._live, True)

    def put_branching(self, layer: int, keys: Tensor, values: Tensor, paths: Tensor) -> None:
        """Write the entries of these tokens, [kv_heads, T, width] each."""
        slots = paths[:, -1].long() + self._live
        self.entries[layer, 0].index_copy_(1, slots, keys)
        self.entries[layer, 1].index_copy_(1, slots, values)

    def attend_branching(self, layer: int, q: Tensor, seen: Tensor) -> Tensor:
        """Attention of queries [heads, T, width] to the entries that each of them sees, [T, capacity]."""
        keys, values = self.entries[layer]
        return _attend(q, keys, values, seen.repeat(len(q) // len(keys), 1))

    @torch.inference_mode()
    def clear(self) -> None:
        """Set all to zeros. Masked entries are read too, and a weight of zero does not undo a stray infinity."""
        self.entries.zero_()


class DeviceCache(HeadCache):
    """A cache whose number of live entries is on the device, so that passes over it can be captured."""

    def __init__(self, head: LayeredHead, capacity: int, like: Tensor) -> None:
        super().__init__(head, capacity, like)
        self._positions = torch.arange(capacity, device=like.device)
        self._live = torch.zeros(1, dtype=torch.long, device=like.device)

    def seek(self, live: int) -> None:
        self._live.fill_(live)

    def rotation(self, count: int) -> Rotation:
        cos, sin = self.rotations
        positions = self._next(count)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        positions = self._next(keys.shape[1])
        self.entries[layer, 0].index_copy_(1, positions, keys)
        self.entries[layer, 1].index_copy_(1, positions, values)

    def attend(self, layer: int, q: Tensor, live: int, more: int) -> Tensor:
        keys, values = self.entries[layer]
        seen = (self._positions >= self._live - live) & (self._positions < self._live + more)
        return _attend(q, keys, values, seen[None])

    def _next(self, count: int) -> Tensor:
        return self._live + self._positions[:count]


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of queries [heads, T, width] to the keys [kv_heads, S, width], or only to the `seen` ones,
    [1, S] or a row for each of the grouped queries.

    The query heads that share a key head become queries of that head, so no key or value is copied.
    """
    kv_heads, _, width = keys.shape
    grouped = q.reshape(1, kv_heads, -1, width)
    attended = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=seen)
    return attended.reshape(q.shape)  # on a GPU the heads may come out as the inner dimension: no view
