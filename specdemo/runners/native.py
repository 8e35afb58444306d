"""The fused decode path on a CPU with every pass in one call, of `native.c`: to ask torch for each of its small
operations takes as long as the products of a small model.

A token's logits are the same bits however many tokens are read with it, whatever type the weights have: so greedy text
is the same with and without a draft to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from itertools import chain, pairwise

import torch
from torch import Tensor

from . import layout, library
from .fused import FusedRunner, round_up
from .layout import FusedModel, Norm, Product, Rope, gelu, swiglu
from .library import Multiply, address, address_of_rows, as_floats

MOST_AT_ONCE = 256  # tokens of a prompt: what lies between the layers takes memory


class NativeLayers:
    """Decoder layers as the library sees them."""

    def __init__(
        self,
        layers: Sequence[layout.Layer],
        heads: int,
        kv_heads: int,
        width: int,
        beside_norm: Norm | None = None,
        window: int = 0,
        mutual: bool = False,
    ) -> None:
        """All products must be the library's, see `can_run`.

        Args:
            beside_norm: of what is read beside the input, which makes the layers' queries, keys and values with it.
            window: how many tokens are looked at; 0 stands for all.
            mutual: the tokens of a pass see those behind them too, and the window is what lies before the pass.
        """
        out, qkv = _multiply(layers[0].out), _multiply(layers[0].qkv)
        assert qkv.sizes[0] == heads + 2 * kv_heads, "every head has its queries, or its keys, or its values"
        self.library, self.hidden = out.library, out.shape[0]
        self.depth, self.kv_heads, self.width = len(layers), kv_heads, width
        self._reads_beside = beside_norm is not None
        self._held: list[Tensor | Multiply] = []  # the addresses below are theirs
        self._layers = (library.Layer * self.depth)(*(self._layer(layer, beside_norm) for layer in layers))
        self._described = library.Model(self._layers, self.hidden, heads, kv_heads, width, window, mutual)

    def _layer(self, layer: layout.Layer, beside_norm: Norm | None) -> library.Layer:
        norms = beside_norm, layer.attention_norm, *(layer.head_norms or (None, None)), layer.mlp_norm
        products = map(self.product, (layer.qkv, layer.out, layer.up, layer.down))
        return library.Layer(*map(self.norm, norms), *products, layer.rotated)

    def norm(self, norm: Norm | None) -> library.Norm:
        """As the library sees it."""
        if norm is None:
            return library.Norm(None, None, 0.0)
        weight, bias = as_floats(norm.weight), None if norm.bias is None else as_floats(norm.bias)
        self._held += [weight] if bias is None else [weight, bias]
        return library.Norm(address(weight), address(bias), norm.eps)

    def product(self, product: Product) -> library.Product:
        """As the library sees it."""
        multiply = _multiply(product)
        self._held.append(multiply)
        return multiply.described

    def run(
        self,
        x: Tensor,
        cache: NativeCache,
        start: int,
        layers: tuple[int, int] | None = None,
        beside: Tensor | None = None,
        entries: bool = False,
    ) -> None:
        """Take T tokens [T, hidden] float32 that stand at `start` from the first to before the last of these layers.

        In place. With `entries` every layer gets x itself, and only puts keys and values into the cache.

        Raises:
            ValueError: the cache has no room for them, or they are other tensors.
        """
        rows, others = (
            None if given is None else address_of_rows(given, torch.float32, self.hidden) for given in (x, beside)
        )
        if (0 if beside is None else len(beside)) != (len(x) if self._reads_beside else 0):
            raise ValueError("Beside every token lies another row, if these layers read any.")
        if start + len(x) > cache.capacity:
            raise ValueError(f"The cache has {cache.capacity} places; {len(x)} tokens do not fit behind {start}.")
        done = self.library.functions.run_layers(
            *(byref(self._described), *(layers or (0, self.depth))),
            *(rows, others, len(x), byref(cache.described), start, entries, torch.get_num_threads()),
        )
        _check(done)


def can_run(layers: Sequence[layout.Layer], head: Product, width: int) -> bool:
    """Whether the library knows layers like these, which must be alike, and multiplies by all of their weights.

    `Product.of` sees to the latter where it can, and is given the parts: heads, and gate and up.
    """
    products = [(layer.qkv, layer.out, layer.up, layer.down) for layer in layers]
    if not all(isinstance(product.multiply, Multiply) for product in [head, *chain(*products)]):
        return False
    sizes = {tuple(_multiply(product).sizes for product in of_layer) for of_layer in products}
    activations = {layer.activate for layer in layers}
    if len(sizes) > 1 or activations not in ({swiglu}, {gelu}):
        return False
    (qkv, _, up, down), gated = sizes.pop(), activations == {swiglu}
    divided = qkv[1] == width and up[:2] == (2 if gated else 1, down[2])
    return divided and width % (2 * _multiply(head).library.step) == 0


def _multiply(product: Product) -> Multiply:
    assert isinstance(product.multiply, Multiply)
    return product.multiply


class NativeHead:
    """A norm and a product behind it, as the library sees them."""

    def __init__(self, layers: NativeLayers, norm: Norm, product: Product) -> None:
        self._library, (self._outer, self._inner) = layers.library, _multiply(product).shape
        self._norm, self._product = layers.norm(norm), layers.product(product)
        self._layers = layers  # which holds the weights

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of T tokens [T, hidden] float32, [T, V] float32."""
        logits = x.new_empty(len(x), self._outer)
        done = self._library.functions.run_head(
            *(
                byref(self._norm),
                byref(self._product),
                address_of_rows(x, torch.float32, self._inner),
                len(x),
                logits.data_ptr(),
            ),
            torch.get_num_threads(),
        )
        _check(done)
        return logits


def _check(done: int) -> None:
    if not done:
        raise MemoryError("There is no memory left for what lies between the layers.")


class NativeCache:
    """Keys and values of a run as `native.c` lays them out, the first `length` tokens of them live."""

    def __init__(self, layers: NativeLayers, capacity: int, dtype: torch.dtype, rope: Rope | None) -> None:
        columns = layers.library.columns
        capacity = round_up(capacity, columns)
        sizes = layers.depth, layers.kv_heads, capacity
        self._keys = torch.zeros(*sizes, layers.width, dtype=dtype)
        self._values = torch.zeros(*sizes, round_up(layers.width, columns), dtype=dtype)
        self._rotation = rope.rotation(capacity) if rope else ()
        addresses = [*map(address, (self._keys, self._values, *(self._rotation or (None, None))))]
        self.described = library.Cache(*addresses, capacity)
        self.capacity, self.length = capacity, 0


class NativeModel:
    """A `FusedModel` as the library sees it."""

    def __init__(self, model: FusedModel) -> None:
        self.fused = model
        self.layers = NativeLayers(model.layers, model.heads, model.kv_heads, model.width)
        self.head = NativeHead(self.layers, model.norm, model.head)


def native_model(model: FusedModel) -> NativeModel | None:
    """The model for the library, None where that cannot run it."""
    return NativeModel(model) if can_run(model.layers, model.head, model.width) else None


class NativeRunner(FusedRunner):
    """A `FusedRunner` that calls the library. What lies between the layers is float32."""

    def __init__(self, model: NativeModel, capacity: int) -> None:
        super().__init__(model.fused, capacity)
        self._native = model

    def _new_cache(self) -> NativeCache:
        return NativeCache(self._native.layers, self.context, self.model.dtype, self.model.rope)

    def _embed(self, ids: Sequence[int] | Tensor, start: int) -> Tensor:
        return super()._embed(ids, start).float()

    def _logits(self, x: Tensor) -> Tensor:
        return self._native.head(x)

    def _through(self, x: Tensor, start: int, layers: range, kept: Sequence[int] = ()) -> Tensor:
        """See `FusedRunner`; x is changed in place. Stops behind each of the `kept` layers to keep what comes out."""
        cache = self._cache
        assert isinstance(cache, NativeCache), "prefill comes first"
        outputs: dict[int, Tensor] = {}
        for part in pairwise(sorted({layers.start, *(place + 1 for place in kept), layers.stop})):
            for begin in range(0, len(x), MOST_AT_ONCE):
                self._native.layers.run(x[begin : begin + MOST_AT_ONCE], cache, start + begin, part)
            if (last := part[1] - 1) in kept:
                outputs[last] = x.to(self.model.dtype, copy=True)
        if kept:
            self.states = torch.cat([outputs[place] for place in kept], -1)
        return x
