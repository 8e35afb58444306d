"""What a trained head keeps of a text: keys and values for each token that the target has read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runners import ops
from ..runners.native import NativeCache

if TYPE_CHECKING:
    from .head import Shape

ROPE_THETA = 10_000.0
WINDOW = 512  # tokens behind the newest one that a head looks at; it was trained on texts no longer

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [..., T, width] each


def frequencies(width: int, device: torch.device | None = None) -> Tensor:
    """Of the rotary embedding (Su et al., arXiv 2104.09864), in radians a place, [width / 2]."""
    return ROPE_THETA ** -(torch.arange(width // 2, device=device) / (width // 2))


def rotation(places: Tensor, width: int) -> Rotation:
    """Of the rotary embedding, for places [..., T]."""
    angles = places[..., None].float() * frequencies(width, places.device)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate queries or keys [..., heads, T, width]."""
    cos, sin = (part.to(x.dtype).unsqueeze(-3) for part in by)
    return ops.rotate(x, cos, sin)


class HeadCache:
    """Keys and values of each layer, `entries` [depth, 2, kv_heads, capacity, width], a number of them *live*.

    Others are put behind these, and seen there; they become live by `advance`, or are written over.
    """

    def __init__(self, shape: Shape, capacity: int, like: Tensor) -> None:
        """Of the type and on the device of `like`."""
        self.capacity = capacity
        self.entries = like.new_zeros(shape.depth, 2, shape.kv_heads, capacity, shape.width)
        cos, sin = rotation(torch.arange(capacity, device=like.device), shape.width)
        self.rotations = cos.to(like), sin.to(like)
        self._live = 0

    def go_to(self, live: int) -> None:
        """Have so many live entries."""
        self._live = live

    def advance(self, count: int) -> None:
        """Have so many more."""
        self._live += count

    def rotation(self, count: int) -> Rotation:
        """Of the next places, in the type of the entries."""
        cos, sin = self.rotations
        return cos[self._live : self._live + count], sin[self._live : self._live + count]

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write entries behind the live ones, [kv_heads, T, width] each."""
        end = self._live + keys.shape[1]
        self.entries[layer, 0, :, self._live : end] = keys
        self.entries[layer, 1, :, self._live : end] = values

    def attend(self, layer: int, q: Tensor, live: int, more: int) -> Tensor:
        """Attention of queries [heads, T, width] to as many of the last live entries and of those behind them."""
        keys, values = self.entries[layer, :, :, max(0, self._live - live) : self._live + more]
        return _attend(q, keys, values, None)

    @torch.inference_mode()
    def clear(self) -> None:
        """Back to zeros: where entries are masked they are read too."""
        self.entries.zero_()


class DeviceCache(HeadCache):
    """A cache that is told on the device how many entries are live, so that what reads it can be captured."""

    def __init__(self, shape: Shape, capacity: int, like: Tensor) -> None:
        super().__init__(shape, capacity, like)
        self._places = torch.arange(capacity, device=like.device)
        self._start = torch.zeros(1, dtype=torch.long, device=like.device)

    def go_to(self, live: int) -> None:
        self._start.fill_(live)

    def advance(self, count: int) -> None:
        self._start.add_(count)

    def rotation(self, count: int) -> Rotation:
        cos, sin = self.rotations
        places = self._next(count)
        return cos.index_select(0, places), sin.index_select(0, places)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        places = self._next(keys.shape[1])
        self.entries[layer, 0].index_copy_(1, places, keys)
        self.entries[layer, 1].index_copy_(1, places, values)

    def attend(self, layer: int, q: Tensor, live: int, more: int) -> Tensor:
        keys, values = self.entries[layer]
        seen = (self._places >= self._start - live) & (self._places < self._start + more)
        return _attend(q, keys, values, seen[None])

    def _next(self, count: int) -> Tensor:
        return self._start + self._places[:count]


class NativeHeadCache(NativeCache):
    """A cache for the library, which puts entries in it and looks at them."""

    def go_to(self, live: int) -> None:
        """Have so many live entries."""
        self.length = live

    def advance(self, count: int) -> None:
        """Have so many more."""
        self.length += count


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of queries [heads, T, width] to the keys [kv_heads, S, width], or to those that are `seen` [1, S].

    The query heads that share a key head become queries of that one: no key or value is copied for them.
    """
    kv_heads, _, width = keys.shape
    grouped = q.reshape(1, kv_heads, -1, width)
    attended = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=seen)
    return attended.reshape(q.shape)  # on a GPU the heads may come out as the inner dimension: no view
