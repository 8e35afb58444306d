"""What runs the layers of a head over one text: torch's operations, or the C library for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engines.cpu.library import PackedLinear
from ...engines.layout import Layer, Linear, swiglu
from ...engines.native import NativeCache, NativeHead, NativeLayers, NativeRows, TreeMask
from ...engines.ropes import Rope
from ...engines.rows import ancestors_of, branches_of
from ...system.device import to_device
from .networks import EagleHead, LayeredHead, doubled


class Placed(NamedTuple):
    """Where the T tokens of a pass stand: slices, or tensors [T] in captured passes and in trees."""

    entries: Any  # that they write
    positions: Any  # by which they are rotated
    paths: Tensor | None = None  # [T, MOST_ROWS], the entries that the tokens of a tree see after the live ones


class TorchBackend:
    """The layers of a head with the cache of one text, by torch's operations.

    Keys and values are in `entries` [depth, 2, kv_heads, capacity, width]. The first ones are live (see `heads`).

    If passes are captured, the number of live entries is on the device. The shapes of all operations are then the same
    at every length of the text, and attention reads the whole cache through a mask.
    """

    def __init__(
        self, head: LayeredHead, logits: Callable[[Tensor], Tensor], capacity: int, like: Tensor, captured: bool
    ) -> None:
        """`logits` gives those of outputs. The cache has the type and is on the device of `like`."""
        shape, rope = head.shape, Rope(head.rope.frequencies.to(like.device), head.rope.scale)
        self.head, self.logits = head, logits
        self.capacity, self.dtype, self.captured = capacity, like.dtype, captured
        self.entries = like.new_zeros(shape.depth, 2, shape.kv_heads, capacity, shape.width)
        cos, sin = doubled(*rope.rotation(capacity))
        self._rotations = cos.to(like), sin.to(like)
        self._all = torch.arange(capacity, device=like.device)
        self._live: Any = self._all.new_zeros(1) if captured else 0

    def seek(self, live: int) -> None:
        """Make the first `live` entries the live ones; the next `run` overwrites those after them."""
        if self.captured:
            self._live.fill_(live)
        else:
            self._live = live

    def advance(self, count: int) -> None:
        """Make the next `count` entries live too; a `run` has written them."""
        self._live += count

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget the text. Masked entries are read too, and a weight of zero does not undo a stray infinity."""
        self.entries.zero_()

    def state(self) -> tuple[Tensor, ...]:
        """What `advance` changes, if it is on a device."""
        return (self._live,) if self.captured else ()

    def rows(self, parents: Sequence[int], count: int) -> Tensor:
        """The `rows` of `run` for the last `count` tokens of a tree with these `parents` (`engines.rows`)."""
        return to_device(branches_of(parents)[len(parents) - count : len(parents)], self.entries.device)

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int, rows: Tensor | None = None) -> Tensor:
        """Read T tokens [T, hidden] after the live entries. Returns the outputs of the last of them, [outputs, hidden].

        Entries of all T tokens are written; none becomes live. Those of a token without an output are made of `x` in
        every layer, so in a head of several layers all tokens have outputs or none.

        Args:
            second_input: [T, hidden] if the layers read one.
            rows: how the tokens follow each other in a tree (see `rows`); None if they are a chain. All tokens of a
                tree have outputs.
        """
        head, placed = self.head, self._place(len(x), rows)
        by = self._rotations[0][placed.positions], self._rotations[1][placed.positions]
        x = head.entering(x, self.dtype)
        for index, layer in enumerate(head.decoder_layers()):
            q, k, v = layer.attention_inputs(x, second_input, by, outputs)
            self.write(index, k, v, placed)
            if outputs:
                x = layer.finish(x[len(x) - outputs :], self._attend(index, q, placed, len(x)))
        return x[len(x) - outputs :]

    def _place(self, count: int, rows: Tensor | None) -> Placed:
        """Place the next `count` tokens after the live entries; `rows` uint8 [T, MOST_ROWS] are their paths."""
        live = self._live
        if rows is not None:
            paths = rows.long() + live
            return Placed(paths[:, -1], live + (rows != rows[:, -1:]).sum(1), paths)
        entries = live + self._all[:count] if self.captured else slice(live, live + count)
        return Placed(entries, entries)

    def write(self, layer: int, keys: Tensor, values: Tensor, placed: Placed) -> None:
        """Write the entries of tokens, [kv_heads, T, width] each."""
        self.entries[layer, 0][:, placed.entries] = keys
        self.entries[layer, 1][:, placed.entries] = values

    def _attend(self, layer: int, q: Tensor, placed: Placed, count: int) -> Tensor:
        """Attention of queries [heads, outputs, width] of the last of `count` tokens to what they see in a layer."""
        (keys, values), live, window = self.entries[layer], self._live, self.head.shape.windows[layer]
        outputs, sharing, bidirectional = q.shape[-2], len(q) // len(keys), self.head.bidirectional
        # If the tokens of a pass see each other, the window ends before the pass, else with the first of the outputs.
        before = window if bidirectional else window - 1 - (count - outputs)
        read = slice(None)  # of the cache
        if not self.captured and placed.paths is None:
            read = slice(max(0, live - before), live + count)
        keys, values, places = keys[:, read], values[:, read], self._all[read]
        seen: Tensor | None = None
        if placed.paths is not None:
            seen = (places < live) & (places > placed.positions[:, None] - window)
            seen = seen.scatter_(1, placed.paths, True).repeat(sharing, 1)
        elif outputs > 1 and not bidirectional:
            own = live + self._all[count - outputs : count, None]
            seen = ((places <= own) & (places > own - window)).repeat(sharing, 1)
        elif self.captured:
            seen = ((places >= live - before) & (places < live + count))[None]
        # The query heads that share a key head become queries of that head, so no key or value is copied.
        grouped = q.reshape(1, len(keys), -1, q.shape[-1])
        attended = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=seen)
        return attended.reshape(q.shape)  # on a GPU the heads may come out as the inner dimension: no view


class NativeBackend:
    """The same as `TorchBackend`, by the C library for CPUs. What lies between the layers is float32."""

    dtype = torch.float32

    def __init__(
        self,
        head: LayeredHead,
        layers: NativeLayers,
        context: NativeLayers,  # the layers for tokens without an output
        logits: NativeHead,
        capacity: int,
        dtype: torch.dtype,  # of the cache
    ) -> None:
        self.head, self.layers, self.context, self.logits = head, layers, context, logits
        self._computed = dtype
        self.cache = NativeCache(layers, capacity, dtype, [head.rope])
        self.capacity = self.cache.capacity

    def seek(self, live: int) -> None:
        self.cache.length = live

    def advance(self, count: int) -> None:
        self.cache.length += count

    def clear(self) -> None:
        self.seek(0)  # the library reads live entries only

    def state(self) -> tuple[Tensor, ...]:
        return ()

    def rows(self, parents: Sequence[int], count: int) -> TreeMask:
        return TreeMask(self.cache.length, ancestors_of(parents))

    def run(
        self, x: Tensor, second_input: Tensor | None = None, *, outputs: int, rows: TreeMask | None = None
    ) -> Tensor:
        return self.run_all([self], [x], [second_input], outputs, rows)

    @staticmethod
    def run_all(
        backends: Sequence[Any],
        inputs: Sequence[Tensor],
        second_inputs: Sequence[Tensor | None],
        outputs: int,
        tree: TreeMask | None = None,
    ) -> Tensor:
        """`run` for several texts with as many outputs each, one text after the other. Only a single text branches."""
        first, joined = backends[0], inputs[0][:0]
        for layers, kv_only in ((first.context, True), (first.layers, False)):
            x, second, rows = list[Tensor](), list[Tensor](), list[NativeRows]()
            for backend, read, other in zip(backends, inputs, second_inputs, strict=True):
                part = slice(len(read) - outputs) if kv_only else slice(len(read) - outputs, None)
                start = backend.cache.length if tree is None else tree.base + len(tree.ancestors) - len(read)
                entered = backend.head.entering(read[part], backend._computed).float()
                if len(entered):
                    x.append(entered)
                    second += [] if other is None else [other[part].float()]
                    rows.append(NativeRows(backend.cache, start + (part.start or 0), len(entered), tree))
            if rows:
                joined = torch.cat(x)  # a copy, which the library changes in place
                layers.run(joined, rows, second_input=torch.cat(second) if second else None, kv_only=kv_only)
        return joined if outputs else joined[:0]


def native_backend(head: LayeredHead, output: Linear) -> Callable[[int, torch.dtype], NativeBackend] | None:
    """What makes a `NativeBackend` of a head that was packed (`ready`) and its output, of a capacity and the type of a
    cache; None if the library cannot run the head."""
    shape, step, eagle = head.shape, attrgetter("step"), isinstance(head, EagleHead)
    input_norm = attrgetter("hidden_norm.step" if eagle else "attention_norm.step")
    layers = [
        Layer(
            attention_norm=input_norm(layer),
            qkv=step(layer.qkv),
            head_norms=(step(layer.q_norm), step(layer.k_norm)) if layer.q_norm and layer.k_norm else None,
            rope=0,
            out=step(layer.out),
            mlp_norm=step(layer.mlp_norm),
            up=(step(layer.gate_up),),
            activate=swiglu,
            down=(step(layer.down),),
            window=window,
        )
        for layer, window in zip(head.decoder_layers(), shape.windows, strict=False)
    ]
    products = [output, *(product for layer in layers for product in layer.products)]
    libraries = [one.multiply.library for one in products if isinstance(one.multiply, PackedLinear)]
    if len(libraries) < len(products) or not libraries[0].has_blocks_for(shape.width, ()):
        return None
    made = partial(
        NativeLayers,
        layers,
        *(shape.heads, shape.kv_heads, shape.width),
        second_input_norm=step(head.token_norm) if eagle else None,
        bidirectional=head.bidirectional,
    )
    native = made(normed=shape.normed_residual)
    context = native if shape.normed_context else made(normed=True)
    return partial(NativeBackend, head, native, context, NativeHead(native, step(head.norm), output))
