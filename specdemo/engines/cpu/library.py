"""The C library of `native.c`, compiled once for each type of weights that the CPU has instructions for."""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ...system.compiled import compiled
from ...system.hardware import compute_dtype, cpu_flags
from .huge_pages import WEIGHTS

SOURCE = Path(__file__).with_name("native.c")
KINDS = {  # by the types of weights and inputs: the C macro, and the CPU flags it needs
    (torch.bfloat16, torch.bfloat16): ("BFLOAT16", {"avx512f", "avx512_bf16"}),
    (torch.bfloat16, torch.float32): ("WIDENED", {"avx2", "fma"}),
    (torch.float16, torch.float32): ("FLOAT16", {"avx2", "fma", "f16c"}),
    (torch.float32, torch.float32): ("FLOAT32", {"avx2", "fma"}),
}

# The structures of `native.c`, which describes them.


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Linear(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), *((name, c_long) for name in ("parts", "outer", "inner"))]


class Layer(Structure):
    _fields_ = [
        *((f"{name}_norm", Norm) for name in ("second_input", "attention", "q", "k", "out", "mlp", "down")),
        *((name, Linear) for name in ("qkv", "out", "up", "down")),
        *((name, c_long) for name in ("window", "rope")),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_long) for name in ("hidden", "heads", "kv_heads", "width")),
        *((name, c_float) for name in ("scale", "cap", "residual")),
        *((name, c_int) for name in ("gelu", "all_heads", "bidirectional")),
    ]


class Cache(Structure):
    _fields_ = [*((name, c_void_p) for name in ("keys", "values", "cosines", "sines")), ("capacity", c_long)]


class Tree(Structure):
    _fields_ = [("base", c_long), ("ancestors", POINTER(c_uint64))]


class Rows(Structure):
    _fields_ = [("cache", POINTER(Cache)), ("start", c_long), ("count", c_long), ("tree", POINTER(Tree))]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of `native.c` for one type of weights, and the sizes of its packed blocks (`products.h`)."""

    functions: CDLL
    columns: int
    step: int
    paired: int

    @classmethod
    def of(cls, functions: CDLL) -> Library:
        functions.run_layers.argtypes = [
            *(POINTER(Model), c_int, c_int, c_void_p, c_void_p, POINTER(Rows), c_long, c_int, c_int)
        ]
        functions.run_head.argtypes = [POINTER(Norm), POINTER(Linear), c_void_p, c_long, c_void_p, c_int]
        functions.run_product.argtypes = [POINTER(Linear), c_void_p, c_long, c_void_p, c_int]
        return cls(functions, *(c_int.in_dll(functions, name).value for name in ("columns", "step", "paired")))

    def packed(self, weight: Tensor) -> Tensor:
        """Pack a weight: [parts, outer, inner] -> [parts * outer / columns, inner / step, columns, step].

        The outputs of each part are padded with zeros to whole blocks. If columns are paired, the two halves of a
        block are interleaved. `products.h` shows the layout.
        """
        _, outer, inner = weight.shape
        padding = -outer % self.columns
        filled = F.pad(weight, (0, 0, 0, padding)) if padding else weight
        blocks = filled.view(-1, self.paired, self.columns // self.paired, inner // self.step, self.step)
        return WEIGHTS.copy(blocks.permute(0, 3, 2, 1, 4))


class PackedLinear:
    """x @ weight.T + bias by the C library: [..., inner] -> [..., outer]."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, parts: int = 1) -> None:
        """`weight` [outer, inner] has `parts` of the same size. The library's `step` must divide `inner`."""
        self.library, self.shape, self.dtype = library, weight.shape, compute_dtype(weight.dtype, weight.device)
        divided = weight.unflatten(0, (parts, -1))
        self.sizes: tuple[int, int, int] = (*divided.shape,)  # parts, outer, inner
        self._weight, self._bias = library.packed(divided), None if bias is None else as_floats(bias)
        self.described = Linear(self._weight.data_ptr(), address(self._bias), *self.sizes)

    def __call__(self, x: Tensor) -> Tensor:
        outer, inner = self.shape
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(len(rows), outer)
        self.library.functions.run_product(
            *(byref(self.described), address_of_rows(rows, self.dtype, inner), len(rows), out.data_ptr()),
            torch.get_num_threads(),
        )
        return out.view(*x.shape[:-1], outer)


def as_floats(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's data. The caller must keep the tensor."""
    return None if tensor is None else tensor.data_ptr()


def address_of_rows(x: Tensor, dtype: torch.dtype, size: int) -> int:
    """The address of rows [T, size], checked because C cannot check it.

    Raises:
        ValueError: they have another type or size, or are not contiguous.
    """
    if x.dtype != dtype or x.shape != (len(x), size) or not x.is_contiguous():
        raise ValueError(f"Expected contiguous rows of {size} numbers of {dtype}, got {tuple(x.shape)} of {x.dtype}.")
    return x.data_ptr()


@cache
def library_for(dtype: torch.dtype) -> Library | None:
    """The library for weights of this type; None if this CPU or compiler cannot have it."""
    computed = compute_dtype(dtype, torch.device("cpu"))
    kind, needed = KINDS.get((dtype, computed), ("", {"a type that it knows"}))
    functions = compiled(SOURCE, f"-D{kind}") if needed <= cpu_flags() else None
    return Library.of(functions) if functions else None
