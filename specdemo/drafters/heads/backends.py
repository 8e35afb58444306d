"""What runs the layers of a head over one text: torch's operations, or the C library for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engines.cpu.library import PackedLinear
from ...engines.layout import Layer, Linear, Norm, swiglu
from ...engines.native import Branches, NativeCache, NativeHead, NativeLayers, Rows, can_run
from ...engines.rows import ancestors_of, branches_of
from ...system.hardware import to_device
from .cache import HeadCache
from .networks import LayeredHead


class HeadBackend(Protocol):
    """The layers of a head with the cache of one text. The first entries of the cache are live (see `heads`)."""

    capacity: int  # entries
    dtype: torch.dtype  # of what `run` returns

    def seek(self, live: int) -> None:
        """Make the first `live` entries the live ones; the next `run` overwrites those after them."""

    def advance(self, count: int) -> None:
        """Make the next `count` entries live too; a `run` has written them."""

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int) -> Tensor:
        """Read T tokens [T, hidden] after the live entries. Returns the outputs of the last of them, [outputs, hidden].

        Entries of all T tokens are written. Those of a token without an output are made of `x` in every layer, so in a
        head of several layers all tokens have outputs or none. `second_input` is [T, hidden] if the layers read one.
        """

    def rows(self, parents: Sequence[int], count: int) -> Any:
        """The `rows` of `branch` for the last `count` tokens of a tree with these `parents` (`engines.rows`)."""

    def branch(self, x: Tensor, second_input: Tensor, rows: Any) -> Tensor:
        """Read T more tokens of a tree after the live entries, as `rows` says. Returns their outputs, [T, hidden].

        Entries of all its tokens are written; none becomes live.
        """

    def logits(self, x: Tensor, /) -> Tensor:
        """Logits of the draft vocabulary, [T, hidden] -> [T, V']."""

    def clear(self) -> None: ...


class TorchBackend:
    """Torch's operations. With a `DeviceCache` its calls can be captured."""

    def __init__(self, head: LayeredHead, logits: Callable[[Tensor], Tensor], cache: HeadCache) -> None:
        self.head, self.logits, self.cache = head, logits, cache
        self.capacity, self.dtype = cache.capacity, cache.entries.dtype
        self.seek, self.advance, self.clear = cache.seek, cache.advance, cache.clear

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int) -> Tensor:
        head, cache, count = self.head, self.cache, len(x)
        by, x = cache.rotation(count), head.entering(x, self.dtype)
        for index, layer in enumerate(head.decoder_layers()):
            q, k, v = layer.attention_inputs(x, second_input, by, outputs)
            cache.put(index, k, v)
            if outputs:
                # If the tokens of a pass see each other, the window ends before the pass, else with it.
                before = head.shape.windows[index] - (0 if head.bidirectional else count)
                x = layer.finish(x[-outputs:], cache.attend(index, q, before, count))
        return x[len(x) - outputs :]

    def rows(self, parents: Sequence[int], count: int) -> Tensor:
        return to_device(branches_of(parents)[len(parents) - count : len(parents)], self.cache.entries.device)

    def branch(self, x: Tensor, second_input: Tensor, rows: Tensor) -> Tensor:
        head = self.head
        x = head.entering(x, self.dtype)
        for index, layer in enumerate(head.decoder_layers()):
            by, seen = self.cache.branching(rows, head.shape.windows[index])
            q, k, v = layer.attention_inputs(x, second_input, by, len(x))
            self.cache.put_branching(index, k, v, rows)
            x = layer.finish(x, self.cache.attend_branching(index, q, seen))
        return x


class NativeParts(NamedTuple):
    """A head for the C library. `context` are the layers for tokens without an output."""

    layers: NativeLayers
    context: NativeLayers
    logits: NativeHead


class NativeBackend:
    """The C library for CPUs. What lies between the layers is float32."""

    dtype = torch.float32

    def __init__(self, head: LayeredHead, parts: NativeParts, capacity: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the cache."""
        self.head, (self.layers, self.context, self.logits), self._computed = head, parts, dtype
        self.cache = NativeCache(self.layers, capacity, dtype, head.rope)
        self.capacity = self.cache.capacity

    def seek(self, live: int) -> None:
        self.cache.length = live

    def advance(self, count: int) -> None:
        self.cache.length += count

    def clear(self) -> None:
        self.seek(0)  # the library reads live entries only

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int) -> Tensor:
        x = self.head.entering(x, self._computed).to(torch.float32, copy=True)  # which the library changes in place
        second = None if second_input is None else second_input.float()
        kv_only, start = len(x) - outputs, self.cache.length
        if kv_only:
            part = None if second is None else second[:kv_only]
            self.context.run(x[:kv_only], [Rows(self.cache, start, kv_only)], second_input=part, kv_only=True)
        if outputs:
            part = None if second is None else second[kv_only:]
            self.layers.run(x[kv_only:], [Rows(self.cache, start + kv_only, len(x) - kv_only)], second_input=part)
        return x[kv_only:]

    def rows(self, parents: Sequence[int], count: int) -> Branches:
        return Branches(self.cache.length, ancestors_of(parents))

    def branch(self, x: Tensor, second_input: Tensor, rows: Branches) -> Tensor:
        x = self.head.entering(x, self._computed).to(torch.float32, copy=True)
        start = rows.base + len(rows.ancestors) - len(x)
        self.layers.run(x, [Rows(self.cache, start, len(x), rows)], second_input=second_input.float())
        return x


def native_parts(head: LayeredHead, output: Linear, dtype: torch.dtype) -> NativeParts | None:
    """The layers and the output of a head for the library, with weights of type `dtype`; None if it cannot run them."""
    if not isinstance(output.multiply, PackedLinear):  # then the library multiplies by no weight at all
        return None
    shape = head.shape

    def linear(weight: Tensor, parts: int = 1, bias: Tensor | None = None) -> Linear:
        return Linear.of(weight.detach().to(dtype), None if bias is None else bias.detach(), parts)

    def norm(norm: torch.nn.RMSNorm) -> Norm:
        return Norm.of(norm.weight.detach(), None, shape.eps)

    layers = [
        Layer(
            attention_norm=norm(weights.attention_norm),
            qkv=linear(weights.qkv, len(weights.qkv) // shape.width, weights.qkv_bias),
            head_norms=(norm(weights.head_norms[0]), norm(weights.head_norms[1])) if weights.head_norms else None,
            rotated=True,
            out=linear(weights.out, bias=weights.out_bias),
            mlp_norm=norm(weights.mlp_norm),
            up=linear(weights.gate_up, 2),
            activate=swiglu,
            down=linear(weights.down),
        )
        for weights in (layer.weights() for layer in head.decoder_layers())
    ]
    if not can_run(layers, output, shape.width):
        return None
    second = head.second_input_norm()
    sizes = shape.heads, shape.kv_heads, shape.width
    more = norm(second) if second else None, shape.windows[: len(layers)], head.bidirectional
    native = NativeLayers(layers, *sizes, *more, normed=shape.normed_residual)
    context = native if shape.normed_context else NativeLayers(layers, *sizes, *more, normed=True)
    return NativeParts(native, context, NativeHead(native, norm(head.norm), output))
