"""The fused decode path on a CPU with every pass in one call: what `native.c` does, a dozen operations a layer, cost
as much to ask torch for as a small model's products take.

A token's logits are the same bits however many tokens are read with it, whatever the weights are stored in: so greedy
text is the same with and without a draft to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from itertools import pairwise

import torch
from torch import Tensor

from . import layout, library
from .fused import FusedRunner, round_up
from .layout import FusedModel, swiglu
from .library import Library, Multiply, address, library_for

MOST_AT_ONCE = 256  # tokens of a prompt: what lies between the layers takes memory


class NativeModel:
    """A `FusedModel` as the library sees it."""

    def __init__(self, model: FusedModel, functions: Library) -> None:
        self.model, self.library = model, functions
        self._held: list[Tensor] = []  # the addresses below are theirs
        self._layers = (library.Layer * len(model.layers))(*map(self._layer, model.layers))
        self.norm, self.head = self._norm(model.norm), _product(model.head)
        self.described = library.Model(
            self._layers,
            model.embedding.shape[1],
            *(model.heads, model.kv_heads, model.width),
            model.layers[0].activate is swiglu,
        )

    def _layer(self, layer: layout.Layer) -> library.Layer:
        q_norm, k_norm = map(self._norm, layer.head_norms or (None, None))
        norms = self._norm(layer.attention_norm), q_norm, k_norm, self._norm(layer.mlp_norm)
        return library.Layer(*norms, *map(_product, (layer.qkv, layer.out, layer.up, layer.down)), layer.rotated)

    def _norm(self, norm: layout.Norm | None) -> library.Norm:
        if norm is None:
            return library.Norm(None, None, 0.0)
        weight, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
        self._held += [weight] if bias is None else [weight, bias]
        return library.Norm(address(weight), address(bias), norm.eps)


def native_model(model: FusedModel) -> NativeModel | None:
    """The same if the library multiplies all of a model's weights, which `Product.of` sees to, else None."""
    products = [model.head, *(p for layer in model.layers for p in (layer.qkv, layer.out, layer.up, layer.down))]
    functions = library_for(model.embedding.dtype)
    if functions is None or not all(isinstance(product.multiply, Multiply) for product in products):
        return None
    return NativeModel(model, functions) if model.width % (2 * functions.step) == 0 else None


def _product(product: layout.Product) -> library.Product:
    assert isinstance(product.multiply, Multiply)
    return product.multiply.described


class NativeCache:
    """Keys and values of a run as `native.c` lays them out, the first `length` tokens of them live."""

    def __init__(self, model: FusedModel, functions: Library, capacity: int) -> None:
        capacity = round_up(capacity, functions.columns)
        sizes = len(model.layers), model.kv_heads, capacity
        self._keys = torch.zeros(*sizes, model.width, dtype=model.dtype)
        self._values = torch.zeros(*sizes, round_up(model.width, functions.columns), dtype=model.dtype)
        self._angles = _cosines_and_sines(model, capacity)
        self.described = library.Cache(*map(address, (self._keys, self._values, *self._angles)), capacity)
        self.length = 0


def _cosines_and_sines(model: FusedModel, length: int) -> list[Tensor]:
    """Of the rotary embedding, float32 [length, width / 2] each; none where places are added to the embedding."""
    if model.rope is None:
        return [torch.empty(0)] * 2
    angles = torch.arange(length)[:, None] * model.rope.frequencies
    return [part * model.rope.scale for part in (angles.cos(), angles.sin())]


class NativeRunner(FusedRunner):
    """A `FusedRunner` that calls the library. What lies between the layers is float32."""

    def __init__(self, model: NativeModel, capacity: int) -> None:
        super().__init__(model.model, capacity)
        self._native = model

    def _new_cache(self) -> NativeCache:
        return NativeCache(self.model, self._native.library, self.context)

    def _embed(self, ids: Sequence[int] | Tensor, start: int) -> Tensor:
        return super()._embed(ids, start).float()

    def _logits(self, x: Tensor) -> Tensor:
        native, logits = self._native, x.new_empty(len(x), self.vocab_size)
        done = native.library.functions.run_head(
            *(byref(native.norm), byref(native.head), x.data_ptr(), len(x), logits.data_ptr()),
            torch.get_num_threads(),
        )
        _check(done)
        return logits

    def _through(self, x: Tensor, start: int, layers: range, kept: Sequence[int] = ()) -> Tensor:
        """See `FusedRunner`; x is changed in place. Stops behind each of the `kept` layers to keep what comes out."""
        stops = sorted({layers.start, *(place + 1 for place in kept), layers.stop})
        outputs: dict[int, Tensor] = {}
        for first, last in pairwise(stops):
            for begin in range(0, len(x), MOST_AT_ONCE):
                self._run(x[begin : begin + MOST_AT_ONCE], start + begin, first, last)
            if last - 1 in kept:
                outputs[last - 1] = x.to(self.model.dtype, copy=True)
        if kept:
            self.states = torch.cat([outputs[place] for place in kept], -1)
        return x

    def _run(self, x: Tensor, start: int, first: int, last: int) -> None:
        native, cache = self._native, self._cache
        assert isinstance(cache, NativeCache), "prefill comes first"
        done = native.library.functions.run_layers(
            *(byref(native.described), first, last, x.data_ptr(), len(x)),
            *(byref(cache.described), start, torch.get_num_threads()),
        )
        _check(done)


def _check(done: int) -> None:
    if not done:
        raise MemoryError("There is no memory left for what lies between the layers.")
