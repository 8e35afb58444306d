"""The C library of `native.c`, compiled once for each type of weights that the CPU has instructions for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ...system.compiled import compiled
from ...system.hardware import compute_dtype, cpu_has
from ...system.replaced import LIBRARY, REPLACED
from ..quantized import Quantized, Weight
from .huge_pages import WEIGHTS

SOURCE = Path(__file__).with_name("native.c")
KINDS = {  # by the types of weights and inputs: the C macro
    (torch.bfloat16, torch.bfloat16): "BFLOAT16",
    (torch.bfloat16, torch.float32): "WIDENED",
    (torch.float16, torch.float32): "FLOAT16",
    (torch.float32, torch.float32): "FLOAT32",
}

# The structures of `native.c`, which describes them.


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Part(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "lows", "scale_units", "low_units")),
        ("kind", c_int),
    ]


class Linear(Structure):
    _fields_ = [
        ("each", POINTER(Part)),
        ("bias", c_void_p),
        *((name, c_long) for name in ("parts", "outer", "inner")),
        ("code_bytes", c_int),
    ]


class Layer(Structure):
    _fields_ = [
        *((f"{name}_norm", Norm) for name in ("second_input", "attention", "q", "k", "out", "mlp", "down")),
        *((name, Linear) for name in ("qkv", "out", "router")),
        *((name, POINTER(Linear)) for name in ("up", "down")),
        *((name, c_long) for name in ("window", "rope", "used")),
        ("normed", c_int),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_long) for name in ("hidden", "heads", "kv_heads", "width")),
        *((name, c_float) for name in ("scale", "cap", "residual")),
        *((name, c_int) for name in ("gelu", "all_heads", "bidirectional")),
    ]


class Cache(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "cosines", "sines", "query_scales")),
        ("capacity", c_long),
    ]


class Tree(Structure):
    _fields_ = [("base", c_long), ("ancestors", POINTER(c_uint64))]


class Rows(Structure):
    _fields_ = [("cache", POINTER(Cache)), ("start", c_long), ("count", c_long), ("tree", POINTER(Tree))]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of `native.c` for one type of weights, and the sizes of its packed blocks (`products.h`). With
    `quantized` they also multiply by quantized weights."""

    functions: CDLL
    dtype: torch.dtype
    quantized: bool
    columns: int
    step: int
    lanes: int
    paired: int

    @classmethod
    def of(cls, functions: CDLL, dtype: torch.dtype, quantized: bool) -> Library:
        functions.run_layers.argtypes = [
            POINTER(Model),
            c_int,
            POINTER(c_void_p),
            c_void_p,
            c_void_p,
            POINTER(Rows),
            c_long,
            c_int,
            c_int,
            POINTER(c_long),
        ]
        functions.run_product.argtypes = [POINTER(Norm), POINTER(Linear), c_void_p, c_long, c_void_p, c_int]
        functions.pack_columns.argtypes = [c_void_p, c_long, c_long, c_int, c_void_p, c_int]
        functions.pack_columns.restype = None
        sizes = (c_int.in_dll(functions, name).value for name in ("columns", "step", "lanes", "paired"))
        return cls(functions, dtype, quantized, *sizes)

    def has_blocks_for(self, width: int, inner: Iterable[int]) -> bool:
        """Whether layers can be run whose heads have this width and whose products read so many numbers."""
        return width % (2 * self.step) == 0 and all(size % self.step == 0 for size in inner)

    def packed(self, weight: Tensor) -> Tensor:
        """Pack a weight: [outer, inner] -> [outer / columns, inner / step, columns, step].

        The outputs are padded with zeros to whole blocks. If columns are paired, those of two vectors are interleaved.
        `products.h` shows the layout.
        """
        vectors = self.columns // self.lanes // self.paired, self.paired, self.lanes
        blocks = self._padded(weight).view(-1, *vectors, weight.shape[1] // self.step, self.step)
        return WEIGHTS.copy(blocks.permute(0, 4, 1, 3, 2, 5))

    def packed_columns(self, part: Tensor) -> Tensor:
        """Pack a tensor of a quantized weight: [outer, size] -> [outer / columns, size, columns].

        The outputs are padded with zeros to whole blocks.
        """
        (outer, size), bytes_each = part.shape, part.element_size()
        packed = WEIGHTS.empty((-(-outer // self.columns), size, self.columns), part.dtype)
        whole = part.contiguous()
        places = whole.data_ptr(), outer, size, bytes_each, packed.data_ptr()
        self.functions.pack_columns(*places, torch.get_num_threads())
        return packed

    def _padded(self, weight: Tensor) -> Tensor:
        padding = -len(weight) % self.columns
        return F.pad(weight, (0, 0, 0, padding)) if padding else weight


class PackedLinear:
    """x @ weight.T + bias by the C library: [..., inner] -> [..., outer]."""

    def __init__(
        self, library: Library, weight: Tensor | Sequence[Weight], bias: Tensor | None, parts: int = 1
    ) -> None:
        """`weight` [outer, inner] has `parts` of the same size. The library's `step` must divide `inner`.

        It may be given as several weights, one after the other, each with whole parts.
        """
        weights = [weight] if isinstance(weight, Tensor) else weight
        outer, inner = sum(map(len, weights)), weights[0].shape[1]
        assert all(one.dtype == library.dtype and one.shape[1] == inner for one in weights), "C cannot check them"
        assert outer % parts == inner % library.step == 0, "parts and steps are whole"
        self.library, self.shape = library, (outer, inner)
        self.dtype = compute_dtype(library.dtype, torch.device("cpu"))
        self.sizes = parts, outer // parts, inner
        size = outer // parts
        pieces = [one[start : start + size] for one in weights for start in range(0, len(one), size)]
        self._held, self._bias = [self._packed(piece) for piece in pieces], None if bias is None else as_floats(bias)
        kinds = [piece.kind if isinstance(piece, Quantized) else 0 for piece in pieces]
        self.code_bytes = max((piece.code_bytes for piece in pieces if isinstance(piece, Quantized)), default=0)
        each = (Part * parts)(*map(self._described, self._held, kinds))
        self.described = Linear(each, address(self._bias), *self.sizes, self.code_bytes)

    def _packed(self, piece: Weight) -> dict[str, Tensor]:
        if isinstance(piece, Tensor):
            return {"codes": self.library.packed(piece)}
        parts = {**piece.parts(), "codes": piece.codes.contiguous().view(torch.int32)}  # four bytes of each output
        return {name: self.library.packed_columns(part) for name, part in parts.items()}

    def _described(self, packed: Mapping[str, Tensor], kind: int) -> Part:
        return Part(kind=kind, **{name: part.data_ptr() for name, part in packed.items()})

    def __call__(self, x: Tensor) -> Tensor:
        outer, inner = self.shape
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(len(rows), outer)
        self.multiply(None, address_of_rows(rows, self.dtype, inner), len(rows), out)
        return out.view(*x.shape[:-1], outer)

    def multiply(self, norm: Norm | None, x: int, count: int, out: Tensor) -> None:
        """out [count, outer] = the product of the rows [count, inner] at address x, normed first if there is a norm.

        Raises:
            MemoryError: there is none left.
        """
        of_norm = None if norm is None else byref(norm)
        threads = torch.get_num_threads()
        check_room(
            self.library.functions.run_product(of_norm, byref(self.described), x, count, out.data_ptr(), threads)
        )


def check_room(done: int) -> None:
    """
    Raises:
        MemoryError: a function of the library was not `done`.
    """
    if not done:
        raise MemoryError("There is not enough memory for the activations of a pass.")


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
def library_for(dtype: torch.dtype, quantized: bool = False) -> Library | None:
    """The library for weights of this type, or also for quantized ones; None if this CPU or compiler cannot have it."""
    computed = compute_dtype(dtype, torch.device("cpu"))
    kind = KINDS.get((dtype, computed))
    if kind is None or LIBRARY in REPLACED or (kind == "BFLOAT16" and not (cpu_has("avx512_bf16") or cpu_has("bf16"))):
        return None
    # gcc's order of instructions makes products of 3 to 6 rows with 4 bits 5% to 14% slower (AVX-512). On ARM its order
    # before registers are given out spills ten times as often.
    options = ["-DQUANTIZED", "-fno-schedule-insns", "-fno-schedule-insns2"] if quantized else []
    functions = compiled(SOURCE, f"-D{kind}", *options)
    return Library.of(functions, dtype, quantized) if functions else None
