"""The library of `native.c`: compiled once for each type of weights, for the kinds of CPU that it knows."""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compiled import compiled
from ..hardware import arithmetic, cpu_flags
from .huge_pages import WEIGHTS

SOURCE = Path(__file__).with_name("native.c")
KINDS = {  # what the source calls a type of weights, and what it needs of the CPU
    torch.bfloat16: ("BFLOAT16", {"avx512f", "avx512_bf16"}),
    torch.float16: ("FLOAT16", {"avx2", "fma", "f16c"}),
    torch.float32: ("FLOAT32", {"avx2", "fma"}),
}

# The structures of `native.c`, which says what they are.


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Product(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), *((name, c_long) for name in ("parts", "outer", "inner"))]


class Layer(Structure):
    _fields_ = [
        *((f"{name}_norm", Norm) for name in ("beside", "attention", "q", "k", "mlp")),
        *((name, Product) for name in ("qkv", "out", "up", "down")),
        ("rotated", c_int),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_long) for name in ("hidden", "heads", "kv_heads", "width", "window")),
        ("mutual", c_int),
    ]


class Cache(Structure):
    _fields_ = [*((name, c_void_p) for name in ("keys", "values", "cosines", "sines")), ("capacity", c_long)]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of `native.c` for weights of one type; `columns` and `step` say how these are laid out."""

    functions: CDLL
    columns: int
    step: int

    @classmethod
    def of(cls, functions: CDLL) -> Library:
        """With the types of what these take."""
        functions.run_layers.argtypes = [
            *(POINTER(Model), c_int, c_int, c_void_p, c_void_p, c_long),
            *(POINTER(Cache), c_long, c_int, c_int),
        ]
        functions.run_head.argtypes = [POINTER(Norm), POINTER(Product), c_void_p, c_long, c_void_p, c_int]
        functions.run_product.argtypes = [POINTER(Product), c_void_p, c_long, c_void_p, c_int]
        return cls(functions, *(c_int.in_dll(functions, name).value for name in ("columns", "step")))

    def laid_out(self, weight: Tensor) -> Tensor:
        """[parts, outer, inner] -> [parts * outer / columns, inner / step, columns, step].

        Each part is filled up with zeros.
        """
        _, outer, inner = weight.shape
        missing = -outer % self.columns
        filled = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        return WEIGHTS.copy(filled.view(-1, self.columns, inner // self.step, self.step).transpose(1, 2))


class Multiply:
    """x @ weight.T + bias by the library, x [..., inner]."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, parts: int = 1) -> None:
        """`weight` [outer, inner] consists of `parts` alike. The library's `step` divides its inner size."""
        self.library, self.shape, self.dtype = library, weight.shape, arithmetic(weight.dtype, weight.device)
        divided = weight.unflatten(0, (parts, -1))
        self.sizes: tuple[int, int, int] = (*divided.shape,)  # parts, outer, inner
        self._weight, self._bias = library.laid_out(divided), None if bias is None else as_floats(bias)
        self.described = Product(self._weight.data_ptr(), address(self._bias), *self.sizes)

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
    """In float32, and in one piece."""
    return tensor.detach().float().contiguous()


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers lie. Whoever passes it on keeps the tensor."""
    return None if tensor is None else tensor.data_ptr()


def address_of_rows(x: Tensor, dtype: torch.dtype, size: int) -> int:
    """Where rows [T, size] lie, which C takes on trust.

    Raises:
        ValueError: they are of another type or size, or not in one piece.
    """
    if x.dtype != dtype or x.shape != (len(x), size) or not x.is_contiguous():
        raise ValueError(f"Rows of {size} numbers of {dtype} are wanted, these are {tuple(x.shape)} of {x.dtype}.")
    return x.data_ptr()


@cache
def library_for(dtype: torch.dtype) -> Library | None:
    """The library for weights of this type, None where it cannot be had."""
    kind, needed = KINDS.get(dtype, ("", {"a type that it knows"}))
    functions = compiled(SOURCE, f"-D{kind}") if needed <= cpu_flags() else None
    return Library.of(functions) if functions else None
