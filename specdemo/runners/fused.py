"""A decode path with as few operations as it needs, for the Llama family and GPT-2.

The same arithmetic as the transformers forward, on rearranged weights (`layout.py`) and preallocated keys and
values, with no module calls, and no mask or copy of grouped heads where none is needed.

In bfloat16 on a CPU, a pass of a few tokens is laid out so that a token's logits do not depend on how many are read
with it: packed products of `FusedModel.least_rows` to `MOST_ROWS` rows have that property (measured), and attention,
which takes `QUERIES_AT_ONCE` or a multiple, gets it from never fewer than `LEAST_QUERIES` and from keys padded as
`padded` says, which fixes the order of its sums. So greedy text is the same with and without a draft to the last bit,
while K < `MOST_ROWS`. In float32 the last bits differ, which decides nothing but an exact tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..hardware import sent
from . import check_fits, check_part
from .ahead import Ahead
from .layout import FusedModel, Layer
from .ops import rotate

MOST_ROWS = 9
QUERIES_AT_ONCE, LEAST_QUERIES = 32, 4
KEYS_AT_ONCE, LONGEST_SUM, KEY_STEP = 512, 192, 32  # see `padded`


class Entries(Protocol):
    """What a runner keeps of a text: the first `length` tokens are live."""

    length: int


class FusedRunner:
    """A `Runner` over a `FusedModel`, with a cache of `capacity` tokens, taken at the prefill."""

    def __init__(self, model: FusedModel, capacity: int) -> None:
        self.model = model
        self.context = capacity
        self.device = model.embedding.device
        self.vocab_size = model.vocab_size
        self.states: Tensor | None = None
        self._kept: tuple[int, ...] = ()
        self._ahead = Ahead()
        self._cache: Entries | None = None

    @property
    def length(self) -> int:
        return self._cache.length if self._cache else 0

    def keep_states(self, layers: Sequence[int]) -> None:
        self._kept = tuple(layers)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        self.release()
        self._cache = self._new_cache()
        return self._logits(self._read(ids)[-1:])

    @torch.inference_mode()
    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        return self._logits(self._read(ids))

    @torch.inference_mode()
    def read_ahead(self, ids: Sequence[int], layers: int) -> Tensor:
        check_part(layers, len(self.model.layers))
        check_fits(self, len(self._ahead) + len(ids))
        if layers != self._ahead.layers:
            self._ahead = Ahead(layers)
        return self._logits(self._read_ahead(ids))

    def rollback(self, length: int) -> None:
        self._ahead.clear()
        if self._cache:
            self._cache.length = min(self._cache.length, length)

    def release(self) -> None:
        self._ahead.clear()
        self._cache = self.states = None

    def _new_cache(self) -> Entries:
        return Cache(self.model, self.context)

    def _logits(self, x: Tensor) -> Tensor:
        return self.model.head(self.model.norm(self._filled(x)))[: len(x)]

    def _filled(self, x: Tensor) -> Tensor:
        """With the last row repeated, if there are fewer than the model's products take."""
        missing = self.model.least_rows - len(x)
        return torch.cat([x, x[-1:].expand(missing, -1)]) if missing > 0 else x

    def _read(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Hidden states of T more tokens after the last layer, [T, hidden]; their keys and values are kept."""
        assert self._cache is not None, "prefill comes first"
        check_fits(self, len(ids))
        start, layers = self.length, len(self.model.layers)
        self._ahead.keep_beginning_of(() if self._kept else ids)  # the states asked for may be of any layer
        if self._ahead:
            if len(unread := ids[len(self._ahead) :]):
                self._read_ahead(unread)
            x = self._through(self._ahead.states(), start, range(self._ahead.layers, layers))
            self._ahead.clear()
        else:
            x = self._through(self._embed(ids, start), start, range(layers), self._kept)
        self._cache.length = start + len(ids)
        return x

    def _read_ahead(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Hidden states of T tokens behind those already read ahead, after as many layers, [T, hidden]."""
        start = self.length + len(self._ahead)
        x = self._through(self._embed(ids, start), start, range(self._ahead.layers))
        self._ahead.add(ids, x)
        return x

    def _embed(self, ids: Sequence[int] | Tensor, start: int) -> Tensor:
        x = self.model.embed(sent(ids, self.device))
        return x if self.model.positions is None else x + self.model.positions[start : start + len(ids)]

    def _through(self, x: Tensor, start: int, layers: range, kept: Sequence[int] = ()) -> Tensor:
        """Take T tokens [T, hidden] that stand at position `start` through some layers, filling the cache.

        What rows beyond T leave in the cache is overwritten before anything looks at it.
        """
        model, cache, count = self.model, self._cache, len(x)
        assert isinstance(cache, Cache), "prefill comes first"
        x = self._filled(x)
        end = start + len(x)
        mask = self._mask(start, end, x.dtype) if start or end <= MOST_ROWS else None
        rotation = [part[start:end] for part in cache.rotation] if cache.rotation else None
        read, written = cache.by_layer(0, end if mask is None else mask.shape[1]), cache.by_layer(start, end)
        outputs: dict[int, Tensor] = {}

        for place in layers:
            layer = model.layers[place]
            qk, v = self._split(layer.qkv(layer.attention_norm(x)), layer, rotation)
            (keys, values), (new_keys, new_values) = read[place], written[place]
            new_keys.copy_(qk[:, model.heads :].transpose(0, 1))
            new_values.copy_(v.transpose(0, 1))
            x = x + layer.out(self._attend(qk, keys, values, mask))
            x = x + layer.down(layer.activate(layer.up(layer.mlp_norm(x))))
            if place in kept:
                outputs[place] = x
        if kept:
            self.states = torch.cat([outputs[place] for place in kept], -1)[:count]
        return x[:count]

    def _split(self, qkv: Tensor, layer: Layer, rotation: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        """Queries with the keys behind them, both rotated, [T, heads + kv_heads, width], and values by head."""
        model = self.model
        qk, v = qkv.view(len(qkv), -1, model.width).split([model.heads + model.kv_heads, model.kv_heads], 1)
        if layer.head_norms:
            parts = zip(layer.head_norms, qk.split([model.heads, model.kv_heads], 1), strict=True)
            qk = torch.cat([norm(part) for norm, part in parts], 1)
        if rotation and layer.rotated:
            qk = rotate(qk, *rotation)
        return qk, v

    def _attend(self, qk: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of the queries of `_split` over keys and values [kv_heads, S, width]: [T, heads * width].

        The query heads that share a key head are laid behind each other as its queries, so that no key or value
        is copied for them. A prompt is read from the first position and needs only the causal triangle (no mask).
        """
        (count, _, width), heads, kv_heads = qk.shape, self.model.heads, self.model.kv_heads
        keys, values = keys[None], values[None]
        if mask is None:
            q = qk[:, :heads].transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).reshape(count, heads * width)
        group = heads // kv_heads
        padding = len(mask) - group * count
        q = qk[:, :heads].reshape(count, kv_heads, group, width).permute(1, 2, 0, 3)
        q = q.reshape(1, kv_heads, group * count, width)
        q = F.pad(q, (0, 0, 0, padding)) if padding else q
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        out = out[0, :, : group * count].unflatten(1, (group, count))
        return out.permute(2, 0, 1, 3).reshape(count, heads * width)

    def _mask(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Minus infinity where a grouped query may not look, [group * T, keys], with more rows and keys as padding."""
        group, exact = self.model.heads // self.model.kv_heads, self.model.bit_exact
        keys = padded(end) if exact else end
        mask = torch.full((end - start, keys), -torch.inf, dtype=dtype, device=self.device).triu_(start + 1)
        in_last = group * len(mask) % QUERIES_AT_ONCE
        return F.pad(mask.repeat(group, 1), (0, 0, 0, max(0, LEAST_QUERIES - in_last) if in_last and exact else 0))


class Cache:
    """Keys and values of a run, [layers, kv_heads, capacity, width] each, the first `length` of them live."""

    def __init__(self, model: FusedModel, capacity: int) -> None:
        capacity += model.least_rows - 1  # a pass of one token writes as many
        shape = len(model.layers), model.kv_heads, padded(capacity), model.width
        self.keys, self.values = torch.zeros(2, *shape, dtype=model.dtype, device=model.embedding.device)
        self.rotation = model.rotation(capacity) if model.rope else None
        self.length = 0

    @torch.inference_mode()
    def clear(self) -> None:
        """Back to zeros: masked places are read too, and a weight of zero does not undo a stray infinity."""
        self.keys.zero_()
        self.values.zero_()
        self.length = 0

    def by_layer(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """The keys and the values of these positions in each layer, [kv_heads, end - start, width] each."""
        keys, values = self.keys[:, :, start:end].unbind(), self.values[:, :, start:end].unbind()
        return list(zip(keys, values, strict=True))


def padded(keys: int) -> int:
    """How many keys to read for so many live ones, so that no further key changes the order of a sum over these.

    The kernel takes `KEYS_AT_ONCE`, and its product with the values adds up `LONGEST_SUM` of those at once, but between
    one and two times that many in two equal halves (measured): these are padded to the whole two. Everywhere else the
    order does not depend on the number, and `KEY_STEP` only keeps odd sizes away.
    """
    before, rest = divmod(keys, KEYS_AT_ONCE)
    halved = LONGEST_SUM < rest <= 2 * LONGEST_SUM
    return before * KEYS_AT_ONCE + (2 * LONGEST_SUM if halved else round_up(rest, KEY_STEP))


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
