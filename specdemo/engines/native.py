"""The fused path on a CPU, with one call of `native.c` for each pass.

In a small model, torch's overhead for the small operations takes as long as the products.

The logits of a token are the same bits in every pass, for every type of weights, whatever the length of the pass and
whether or not its rows branch. So greedy text is the same to the last bit with and without a draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import byref, c_long, c_uint64, c_void_p, pointer
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..system.progress import check_stopped
from . import layout
from .cpu import library
from .cpu.library import PackedLinear, address, address_of_rows, as_floats, check_room
from .families import Scales
from .fused import FusedRunner, SharedPasses, hidden_states, round_up
from .layout import FusedModel
from .linear import Linear, Norm, gated_gelu, gelu
from .ropes import Rope
from .rows import MOST_ROWS, ancestors_of
from .runner import ANY_ROWS, Runner

MOST_AT_ONCE = 256  # tokens of a prompt in one call, since the buffers of a pass grow with them


class TreeMask:
    """Rows that are no chain. They follow the first `base` tokens of the cache, and see all of these.

    `ancestors` are the rows that each of them sees, itself included, see `rows.ancestors_of`.
    """

    def __init__(self, base: int, ancestors: Sequence[int]) -> None:
        self.base, self.ancestors = base, ancestors

    def described(self, start: int, count: int) -> library.Tree:
        """The `count` rows from slot `start` on as a structure of the C library."""
        words = self.ancestors[start - self.base :][:count]
        assert len(words) == count, "each row says what it sees"
        return library.Tree(self.base, (c_uint64 * count)(*words))


@dataclass(frozen=True, slots=True)
class NativeRows:
    """The rows of a pass that belong to one sequence: `count` tokens, at the slots of its cache from `start` on."""

    cache: NativeCache
    start: int
    count: int
    tree: TreeMask | None = None

    def described(self) -> library.Rows:
        """As a structure of the C library.

        Raises:
            ValueError: the cache has no room for them.
        """
        cache, start, count, tree = self.cache, self.start, self.count, self.tree
        if start + count > cache.capacity:
            raise ValueError(f"The cache has room for {cache.capacity} tokens; {count} do not fit after {start}.")
        return library.Rows(pointer(cache.described), start, count, tree and pointer(tree.described(start, count)))


class NativeLayers:
    """Decoder layers as structures of the C library."""

    def __init__(
        self,
        layers: Sequence[layout.Layer],
        heads: int,
        kv_heads: int,
        width: int,
        scales: Scales | None = None,
        second_input_norm: Norm | None = None,
        bidirectional: bool = False,
        normed: bool = False,
    ) -> None:
        """The library must have packed all weights, and all layers have the same attention and activation.

        Args:
            scales: None for those of Llama.
            second_input_norm: the norm of a second input. Queries, keys and values are then made of it and x.
            bidirectional: the tokens of a pass see each other, and the window before the pass.
            normed: the inputs of each layer are normed already, so its attention norm is left out.
        """
        assert kv_heads > 0, "C divides by them"
        assert heads % kv_heads == 0, "heads share keys evenly"
        assert len({layer.activate for layer in layers}) == 1, "C asks the first layer"
        products = [_packed(one) for layer in layers for one in layer.products]
        assert len({one.library.dtype for one in products}) == 1, "all are packed for the same type"
        self.library = max((one.library for one in products), key=lambda library: library.quantized)
        self.hidden = _packed(layers[0].out).shape[0]
        self.depth, self.kv_heads, self.width = len(layers), kv_heads, width
        assert width % (2 * self.library.step) == 0, "half a head is whole blocks"
        self._takes_second_input = second_input_norm is not None
        for layer in layers:
            out, qkv = _packed(layer.out), _packed(layer.qkv)
            assert qkv.sizes[:2] == (heads + 2 * kv_heads, width), "the parts of qkv are heads"
            assert qkv.sizes[2] == self.hidden * (1 + self._takes_second_input), "it reads what the layers write"
            assert out.sizes[1:] == (self.hidden, heads * width), "it reads all heads"
        self._held: list[Tensor | PackedLinear] = []  # the structures hold their addresses
        described = [self._layer(layer, second_input_norm, normed) for layer in layers]
        self._layers = (library.Layer * self.depth)(*described)
        scales, head_norms = scales or Scales(width**-0.5), layers[0].head_norms
        self._described = library.Model(
            self._layers,
            self.hidden,
            heads,
            kv_heads,
            width,
            scales.attention,
            scales.score_cap,
            scales.residual,
            gelu=layers[0].activate in (gelu, gated_gelu),
            all_heads=head_norms is not None and head_norms[0].weight.numel() > width,
            bidirectional=bidirectional,
        )

    def _layer(self, layer: layout.Layer, second_input_norm: Norm | None, normed: bool) -> library.Layer:
        first = second_input_norm, None if normed else layer.attention_norm
        norms = *first, *(layer.head_norms or (None, None)), layer.out_norm, layer.mlp_norm, layer.down_norm
        assert layer.window >= 0, "C would look for keys behind the cache"
        ends = {(_packed(up).sizes[2], _packed(down).sizes[1]) for up, down in layer.mlps}
        assert ends == {(self.hidden, self.hidden)}, "an MLP reads and writes the residual stream"
        between = {(*_packed(up).sizes[:2], _packed(down).sizes[2]) for up, down in layer.mlps}
        assert len(between) == 1, "experts are alike"
        parts, *inner = between.pop()
        assert parts == (1 if layer.activate is gelu else 2), "there is a gate or none"
        assert len({*inner}) == 1, "down reads what gate and up write"
        assert layer.router is None or 0 < layer.router.used <= len(layer.mlps), "C would look for other experts"
        router, up, down = layer.router, self.products(layer.up), self.products(layer.down)
        return library.Layer(
            *map(self.norm, norms),
            self.product(layer.qkv),
            self.product(layer.out),
            self.product(router.product if router else None),
            up,
            down,
            layer.window,
            -1 if layer.rope is None else layer.rope,
            *((router.used, router.normed) if router else (0, False)),
        )

    def norm(self, norm: Norm | None) -> library.Norm:
        if norm is None:
            return library.Norm(None, None, 0.0)
        weight, bias = as_floats(norm.weight), None if norm.bias is None else as_floats(norm.bias)
        self._held += [weight] if bias is None else [weight, bias]
        return library.Norm(address(weight), address(bias), norm.eps)

    def products(self, products: Sequence[Linear]) -> Any:
        """The products of the MLP or of each expert as an array."""
        return (library.Linear * len(products))(*map(self.product, products))

    def product(self, product: Linear | None) -> library.Linear:
        if product is None:
            return library.Linear()
        packed = _packed(product)
        self._held.append(packed)
        return packed.described

    def run(
        self,
        x: Tensor,
        rows: Sequence[NativeRows],
        outputs: Mapping[int, Tensor] = MappingProxyType({}),
        second_input: Tensor | None = None,
        kv_only: bool = False,
    ) -> int:
        """Run the layers over x [T, hidden] float32, in place. Returns how many experts were read, those of all layers.

        The T rows are those of one or several sequences, one after the other. With `kv_only` every layer reads x
        itself, and writes its keys and values into the caches but computes nothing else.

        Args:
            outputs: tensors [T, hidden] float32 by layer, into which the outputs of these layers are written.
        Raises:
            ValueError: a cache has no room for its rows, or a tensor has another shape or type.
        """
        inputs, others = (
            None if given is None else address_of_rows(given, torch.float32, self.hidden) for given in (x, second_input)
        )
        if (0 if second_input is None else len(second_input)) != (len(x) if self._takes_second_input else 0):
            raise ValueError("These layers read a second input of as many rows as x, or none.")
        if len(x) != sum(of_one.count for of_one in rows):
            raise ValueError(f"The rows of the sequences are not the {len(x)} of x.")
        if any(len(output) != len(x) for output in outputs.values()):
            raise ValueError(f"The outputs of a layer have as many rows as x, which are {len(x)}.")
        described = (library.Rows * len(rows))(*(of_one.described() for of_one in rows))
        copies = (c_void_p * self.depth)()
        for layer, output in outputs.items():
            copies[layer] = address_of_rows(output, torch.float32, self.hidden)
        read = c_long()
        done = self.library.functions.run_layers(
            byref(self._described),
            self.depth,
            copies,
            inputs,
            others,
            described,
            len(rows),
            kv_only,
            torch.get_num_threads(),
            byref(read),
        )
        check_room(done)
        return read.value


def _packed(product: Linear) -> PackedLinear:
    assert isinstance(product.multiply, PackedLinear)
    return product.multiply


class NativeHead:
    """The final norm and the output layer as structures of the C library."""

    def __init__(self, layers: NativeLayers, norm: Norm, product: Linear) -> None:
        self._norm, self._product = layers.norm(norm), _packed(product)
        self._layers = layers  # holds the tensors of the norm

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of T tokens: [T, hidden] -> [T, V], both float32."""
        logits = x.new_empty(len(x), self._product.shape[0])
        self._product.multiply(self._norm, address_of_rows(x, torch.float32, self._product.shape[1]), len(x), logits)
        return logits


class NativeCache:
    """Keys and values of the first `length` tokens of a run, in the layout that `native.c` describes."""

    def __init__(self, layers: NativeLayers, capacity: int, dtype: torch.dtype, ropes: Sequence[Rope]) -> None:
        columns = layers.library.columns
        capacity = round_up(capacity, columns)
        sizes = layers.depth, layers.kv_heads, capacity
        self._keys = torch.zeros(*sizes, layers.width, dtype=dtype)
        self._values = torch.zeros(*sizes, round_up(layers.width, columns), dtype=dtype)
        halves = zip(*(rope.rotation(capacity) for rope in ropes), strict=True)
        self._rotations = [torch.stack(parts) for parts in halves]  # cosines, sines [ropes, capacity, width / 2]
        self._query_scales = _query_scales(ropes, capacity)
        rotations = self._rotations or (None, None)
        addresses = [*map(address, (self._keys, self._values, *rotations, self._query_scales))]
        self.described = library.Cache(*addresses, capacity)
        self.capacity, self.length = capacity, 0
        blocks = sizes[0], sizes[1], capacity // columns, layers.width // layers.library.step
        self._by_column = self._keys.view(*blocks, columns, -1)  # the places of a block are its columns
        lines = *sizes[:2], -1, capacity // layers.library.step, columns
        self._by_line = self._values.view(*lines, layers.library.step)  # the places are the lines and their numbers

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """See `FusedRunner.fill`."""
        columns, step, rest = self._by_column.shape[4], self._by_line.shape[5], self.capacity - keys.shape[2]
        keys = F.pad(keys, (0, 0, 0, rest)).unflatten(3, (-1, step)).unflatten(2, (-1, columns))
        values = F.pad(values, (0, -values.shape[3] % columns, 0, rest)).unflatten(3, (-1, columns))
        self._by_column.copy_(keys.transpose(3, 4))
        self._by_line.copy_(values.unflatten(2, (-1, step)).permute(0, 1, 4, 2, 5, 3))

    def move(self, start: int, path: Sequence[int]) -> None:
        columns, step = self._by_column.shape[4], self._by_line.shape[5]
        rows, places = torch.tensor(path) + start, torch.arange(start, start + len(path))
        keys, values = self._by_column, self._by_line
        keys[:, :, places // columns, :, places % columns] = keys[:, :, rows // columns, :, rows % columns]
        values[:, :, :, places // step, :, places % step] = values[:, :, :, rows // step, :, rows % step]


def _query_scales(ropes: Sequence[Rope], length: int) -> Tensor | None:
    """See `Rope.query_scales`: float32 [ropes, length], or None if all queries stay as they are."""
    scales = [rope.query_scales(length) for rope in ropes]
    if all(one is None for one in scales):
        return None
    return torch.stack([torch.ones(length) if one is None else one for one in scales])


class NativeModel(SharedPasses):
    """A `FusedModel` as structures of the C library. It reads the passes of several runners in one, see `Together`."""

    def __init__(self, model: FusedModel) -> None:
        super().__init__(model)
        self.layers = NativeLayers(model.layers, model.heads, model.kv_heads, model.width, model.scales)
        self.head = NativeHead(self.layers, model.norm, model.head)
        self._mixed = sum(layer.router is not None for layer in model.layers)
        self._passes, self._read = Counter[int](), Counter[int]()  # of one sequence, by their rows

    @property
    def experts_read(self) -> dict[int, float]:
        """How many experts of a layer a pass over so many rows of one sequence has read so far, in the mean."""
        return {rows: self._read[rows] / passes / self._mixed for rows, passes in self._passes.items()}

    def run(self, x: Tensor, rows: Sequence[NativeRows], captured: Collection[int]) -> dict[int, Tensor]:
        """Run all layers over x [T, hidden], in place. Returns the outputs of the captured layers, [T, hidden] each, in
        float32."""
        outputs = {layer: torch.empty_like(x) for layer in captured}
        read = self.layers.run(x, rows, outputs)
        if self._mixed and len(rows) == 1 and len(x) <= MOST_ROWS:
            self._passes[len(x)] += 1
            self._read[len(x)] += read
        return outputs


class NativeRunner(FusedRunner):
    """A `FusedRunner` that calls the C library. The residual stream is float32."""

    claimed_rows = ANY_ROWS, MOST_ROWS

    def __init__(self, model: NativeModel, capacity: int) -> None:
        super().__init__(model.model, capacity)
        self.together: NativeModel = model

    @property
    def experts_read(self) -> Mapping[int, float]:
        return self.together.experts_read

    def first_layers(self, count: int, capacity: int) -> Runner:
        return NativeRunner(self.together.first_layers(count), capacity)

    def of_ends(self) -> Callable[[int], FusedRunner]:
        return partial(NativeRunner, NativeModel(self.model.ends()))

    def rows(self, count: int, parents: Sequence[int] | None, done: int = 0) -> NativeRows:
        """The next `count` rows of the pass that has begun, of which some are `done`."""
        tree = None if parents is None else TreeMask(self._start, ancestors_of(parents))
        return NativeRows(self._cache, self._start + done, count, tree)

    def run(self, x: Tensor, rows: Sequence[Any], captured: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        return x, self.together.run(x, rows, captured)

    def _new_cache(self) -> NativeCache:
        ropes = [rope.of_run(self.context) for rope in self.model.ropes]
        return NativeCache(self.together.layers, self.context, self.model.dtype, ropes)

    def _embed(self, ids: Sequence[int] | Tensor, start: int, parents: Sequence[int] | None = None) -> Tensor:
        return super()._embed(ids, start, parents).float()

    def logits(self, x: Tensor) -> Tensor:
        return self.model.finished(self.together.head(x))

    def _read(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        x, outputs = self.begin(ids, parents), list[dict[int, Tensor]]()
        for done in range(0, len(x), MOST_AT_ONCE):
            if done:
                check_stopped()
            part = x[done : done + MOST_AT_ONCE]  # changed in place
            outputs.append(self.together.run(part, [self.rows(len(part), parents, done)], self.captured_layers))
        whole = {layer: torch.cat([part[layer] for part in outputs]) for layer in self.captured_layers}
        self.end(len(x), hidden_states(whole, self.captured_layers, self.model.dtype))
        return x
