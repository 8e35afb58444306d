"""What runs the layers of a head over one text: torch's operations, or the C library for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...engines.cpu.library import PackedLinear
from ...engines.layout import Layer, Linear, Norm, Rope, swiglu
from ...engines.native import Branches, NativeCache, NativeHead, NativeLayers, can_run
from .cache import HeadCache
from .networks import Head, frequencies


class HeadBackend(Protocol):
    """The layers of a head with the cache of one text. The first entries of the cache are live (see `heads`)."""

    capacity: int  # entries
    dtype: torch.dtype  # of what `run` returns

    def seek(self, live: int) -> None:
        """Make the first `live` entries the live ones; those behind are overwritten by the next `run`."""
        ...

    def advance(self, count: int) -> None:
        """Make the next `count` entries, which a `run` has left, live too."""
        ...

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int) -> Tensor:
        """Read T tokens [T, hidden] behind the live entries; the outputs of the last of them, [outputs, hidden].

        All T leave entries. A token without an output leaves in every layer those of its own `x`, so in a head of
        several layers either none has an output or all have. `second_input` is [T, hidden] where the layers read one.
        """
        ...

    def branch(self, x: Tensor, second_input: Tensor, ancestors: Sequence[int]) -> Tensor:
        """Read T more tokens of a tree behind the live entries; their outputs, [T, hidden].

        All of its tokens leave entries, none of which becomes live. `ancestors` are those of all of them, in the order
        in which they were read, see `rows.ancestors_of`; the last T are read now.
        """
        ...

    def logits(self, x: Tensor, /) -> Tensor:
        """Of the draft vocabulary, [T, hidden] -> [T, V']."""
        ...

    def clear(self) -> None:
        """Forget the text."""
        ...


class TorchBackend:
    """Torch's operations. With a `DeviceCache` its calls can be captured."""

    def __init__(self, head: Head, logits: Callable[[Tensor], Tensor], cache: HeadCache) -> None:
        self.head, self.logits, self.cache = head, logits, cache
        self.capacity, self.dtype = cache.capacity, cache.entries.dtype
        self.seek, self.advance, self.clear = cache.seek, cache.advance, cache.clear

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int) -> Tensor:
        head, cache, count = self.head, self.cache, len(x)
        by = cache.rotation(count)
        # Where the tokens of a pass see each other, the window is what lies before the pass, else it ends with it.
        before = head.shape.window - (0 if head.bidirectional else count)
        for index, layer in enumerate(head.decoder_layers()):
            q, k, v = layer.attention_inputs(x, second_input, by, outputs)
            cache.put(index, k, v)
            if outputs:
                x = layer.finish(x[-outputs:], cache.attend(index, q, before, count))
        return x[len(x) - outputs :]

    def branch(self, x: Tensor, second_input: Tensor, ancestors: Sequence[int]) -> Tensor:
        before = len(ancestors) - len(x)
        by, seen = self.cache.branching(ancestors, before, self.head.shape.window)
        for index, layer in enumerate(self.head.decoder_layers()):
            q, k, v = layer.attention_inputs(x, second_input, by, len(x))
            self.cache.put(index, k, v, before)
            x = layer.finish(x, self.cache.attend_branching(index, q, seen))
        return x


class NativeBackend:
    """The C library for CPUs. What lies between the layers is float32."""

    dtype = torch.float32

    def __init__(self, layers: NativeLayers, logits: NativeHead, capacity: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the cache."""
        self.layers, self.logits = layers, logits
        self.cache = NativeCache(layers, capacity, dtype, Rope(frequencies(layers.width)))
        self.capacity = self.cache.capacity

    def seek(self, live: int) -> None:
        self.cache.length = live

    def advance(self, count: int) -> None:
        self.cache.length += count

    def clear(self) -> None:
        self.seek(0)  # the library reads live entries only

    def run(self, x: Tensor, second_input: Tensor | None = None, *, outputs: int) -> Tensor:
        x = x.to(torch.float32, copy=True)  # which the library changes in place
        second = None if second_input is None else second_input.float()
        kv_only, start = len(x) - outputs, self.cache.length
        if kv_only:
            part = None if second is None else second[:kv_only]
            self.layers.run(x[:kv_only], self.cache, start, second_input=part, kv_only=True)
        if outputs:
            part = None if second is None else second[kv_only:]
            self.layers.run(x[kv_only:], self.cache, start + kv_only, second_input=part)
        return x[kv_only:]

    def branch(self, x: Tensor, second_input: Tensor, ancestors: Sequence[int]) -> Tensor:
        x = x.to(torch.float32, copy=True)
        live = self.cache.length
        start = live + len(ancestors) - len(x)
        self.layers.run(x, self.cache, start, second_input=second_input.float(), tree=Branches(live, ancestors))
        return x


def native_parts(head: Head, output: Linear, dtype: torch.dtype) -> tuple[NativeLayers, NativeHead] | None:
    """The layers and the output of a head for the library, with weights of a type; None where it cannot run them."""
    if not isinstance(output.multiply, PackedLinear):  # then it multiplies by no weight at all
        return None
    shape = head.shape

    def linear(weight: Tensor, parts: int = 1) -> Linear:
        return Linear.of(weight.detach().to(dtype), None, parts)

    def norm(norm: torch.nn.RMSNorm) -> Norm:
        return Norm.of(norm.weight.detach(), None, shape.eps)

    layers = [
        Layer(
            attention_norm=norm(weights.attention_norm),
            qkv=linear(weights.qkv, len(weights.qkv) // shape.width),
            head_norms=None,
            rotated=True,
            out=linear(weights.out),
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
    native = NativeLayers(layers, *sizes, norm(second) if second else None, shape.window, head.bidirectional)
    return native, NativeHead(native, norm(head.norm), output)
