"""The parts of a layer: a linear map whose weight is stored for a few rows of input, and a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..system.hardware import compute_dtype, has_fbgemm
from .cpu.library import Library, PackedLinear, library_for
from .quantized import Quantized, Weight

Step = Callable[[Tensor], Tensor]  # [T, in] -> [T, out], row by row

# The size from which a weight is packed, by the type of its inputs: for a smaller one the call takes more time than
# packing saves.
LEAST_PACKED = {torch.bfloat16: 0, torch.float32: 2**18}
PACKED_FOR = 1  # the rows of input that oneDNN packs weights for; measured to be as good for 1 to 17
FEW_ROWS = 17  # the most rows of a round; with more a mirrored norm is slower than a plain one


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last axis: layer norm, or RMS norm without a bias.

    On a CPU torch computes an RMS norm of 16-bit numbers in eight operations. Three give the same: the mean of [x, -x]
    is 0, so the first half of its layer norm is the RMS norm of x. For a few rows that takes half to three quarters of
    the time. `mirrored` [2 * width] is the weight of that layer norm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    mirrored: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """A norm, mirrored where that is faster."""
        mirrors = bias is None and weight.device.type == "cpu" and weight.dtype.itemsize == 2
        return cls(weight, bias, eps, torch.cat([weight, weight]) if mirrors else None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dtype != x.dtype:
            return Norm(self.weight, self.bias, self.eps)(x.to(self.weight.dtype)).to(x.dtype)
        if self.mirrored is not None and len(x) <= FEW_ROWS:
            both = F.layer_norm(torch.cat([x, -x], -1), self.mirrored.shape, self.mirrored, None, self.eps)
            return both[..., : x.shape[-1]]
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias: [T, in] -> [T, out]. `weight` [out, in] is None where `multiply` holds a packed copy."""

    weight: Tensor | None
    bias: Tensor | None
    multiply: Step

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    @classmethod
    def of(cls, weight: Weight | Sequence[Weight], bias: Tensor | None, parts: int = 1) -> Linear:
        """Store a weight [out, in] such that products with a few rows are fast here, in the first way that can be had.

        ==========  ==================================  ====================  =================
        stored by   which weights                       needs                 as
        ==========  ==================================  ====================  =================
        in_blocks   of any size, quantized too          a C compiler          blocks of columns
        in_halves   large, widened, in float16's range  FBGEMM                packed float16
        by_onednn   large                               oneDNN                packed
        in_columns  small, float32, wide                nothing               columns
        unpacked    any other, and all on a GPU         nothing               it is
        ==========  ==================================  ====================  =================

        A weight is large if it has at least `LEAST_PACKED` numbers, and widened if its inputs have more bits
        (`compute_dtype`). If neither of the first two applies to one that is widened, it becomes float32.

        Args:
            weight: one or, if one of them is quantized, several with whole parts each; only `in_blocks` has these.
            parts: the number of groups of outputs of the same size, such as heads.
        """
        if not isinstance(weight, Tensor):
            weights = [weight] if isinstance(weight, Quantized) else weight
            library = library_for(weights[0].dtype, quantized=True)
            assert library is not None, "checked when the type was chosen"
            return cls.in_blocks(library, weights, bias, parts)
        (outer, inner), on_cpu = weight.shape, weight.device.type == "cpu"
        library = library_for(weight.dtype) if on_cpu else None
        if library and inner % library.step == 0:
            return cls.in_blocks(library, [weight.detach()], bias, parts)
        computed = compute_dtype(weight.dtype, weight.device)
        large = on_cpu and weight.numel() >= LEAST_PACKED.get(computed, math.inf)
        if large and is_widened(weight) and has_fbgemm() and weight.half().isfinite().all():
            return cls.in_halves(weight, bias)
        weight = upcast(weight)
        if large and can_pack(weight.dtype):
            return cls.by_onednn(weight, bias)
        small = on_cpu and weight.dtype == torch.float32 and not large
        return cls.in_columns(weight, bias) if small and outer >= inner else cls.unpacked(weight, bias)

    @classmethod
    def in_blocks(cls, library: Library, weights: Sequence[Weight], bias: Tensor | None, parts: int) -> Linear:
        return cls(None, bias, PackedLinear(library, weights, bias, parts))

    @classmethod
    def in_halves(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        """Torch multiplies by unpacked weights of 16 bits, too, but packs them in every call, which takes as long as
        the product itself. Numbers below float16's range change by less than 2**-25."""
        halves = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        multiply = torch.ops.quantized.linear_dynamic_fp16
        return cls(None, bias, lambda x: multiply(x, halves))

    @classmethod
    def by_onednn(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        """What torch.compile calls for a frozen linear layer; there is no public name for it."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        multiply = torch.ops.mkldnn._linear_pointwise
        return cls(None, bias, lambda x: multiply(x, packed, bias, "none", [], ""))

    @classmethod
    def in_columns(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        """For a few rows of input this is up to twice as fast as with contiguous rows of the weight."""
        columns = weight.T.contiguous().T
        return cls(None, bias, lambda x: F.linear(x, columns, bias))

    @classmethod
    def unpacked(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        return cls(weight, bias, lambda x: F.linear(x, weight, bias))


def stacked(steps: Sequence[Linear]) -> Tensor:
    """The weights of several maps as one tensor, [count, out, in]. It is no copy: on a GPU those of the experts of a
    layer are parts of one weight, one after the other."""
    weights = [step.weight for step in steps if step.weight is not None]
    first, begin = weights[0], weights[0].data_ptr()
    parts = range(begin, begin + len(steps) * first.nbytes, first.nbytes)
    assert [weight.data_ptr() for weight in weights] == [*parts], "they are no parts of one weight"
    return first.as_strided((len(steps), *first.shape), (first.numel(), *first.stride()))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type on this CPU. For bfloat16 it needs AVX-512 or AVX-NE-CONVERT."""
    if not torch.backends.mkldnn.is_available():  # as on Macs, where torch lacks oneDNN's operators too
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packs_on_one_core(weight: Tensor) -> bool:
    """Whether `Linear.of` may pack this weight by FBGEMM, which uses one core for a weight."""
    return is_widened(weight) and not library_for(weight.dtype)


def is_widened(weight: Tensor) -> bool:
    """Whether a weight is stored in fewer bits than its inputs; only on a CPU."""
    return weight.dtype != compute_dtype(weight.dtype, weight.device)


def upcast(weight: Tensor) -> Tensor:
    """A weight in the type that the model computes in (`compute_dtype`)."""
    return weight.detach().to(compute_dtype(weight.dtype, weight.device))


gelu = partial(F.gelu, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2 * inner] -> [T, inner]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gated_gelu(x: Tensor) -> Tensor:
    """gelu(gate) * up, [T, 2 * inner] -> [T, inner]."""
    gate, up = x.chunk(2, -1)
    return gelu(gate) * up
