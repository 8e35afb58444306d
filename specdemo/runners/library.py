"""The library of `native.c`: compiled on this machine when it is first called for, once for each type of weights.

gcc is all it takes; where there is none, or the CPU is of another kind, torch's own operations run instead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn import functional as F

from ..folders import cache_folder
from ..hardware import arithmetic, cpu_flags, cpu_model
from .huge_pages import WEIGHTS

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.c")
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-Wno-psabi", "-fopenmp", "-fPIC", "-shared")
KINDS = {  # what the source calls a type of weights, and what it needs of the CPU
    torch.bfloat16: ("BFLOAT16", {"avx512f", "avx512_bf16"}),
    torch.float16: ("FLOAT16", {"avx2", "fma", "f16c"}),
    torch.float32: ("FLOAT32", {"avx2", "fma"}),
}
SWITCH = "SPECDEMO_NATIVE"  # of the environment: 0 has torch's operations run instead
PATIENCE = 120  # seconds for the compiler, which takes about one

# The structures of `native.c`, which says what they are.


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Product(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("outer", c_long), ("inner", c_long)]


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
        *((name, c_int) for name in ("gated", "mutual")),
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
    def at(cls, file: Path) -> Library:
        """Loaded from a file."""
        functions = CDLL(str(file))
        functions.run_layers.argtypes = [
            *(POINTER(Model), c_int, c_int, c_void_p, c_void_p, c_long),
            *(POINTER(Cache), c_long, c_int, c_int),
        ]
        functions.run_head.argtypes = [POINTER(Norm), POINTER(Product), c_void_p, c_long, c_void_p, c_int]
        functions.run_product.argtypes = [POINTER(Product), c_void_p, c_long, c_void_p, c_int]
        return cls(functions, *(c_int.in_dll(functions, name).value for name in ("columns", "step")))

    def laid_out(self, weight: Tensor) -> Tensor:
        """[outer, inner] -> [outer / columns, inner / step, columns, step], filled up with zeros."""
        outer, inner = weight.shape
        missing = -outer % self.columns
        filled = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        return WEIGHTS.copy(filled.view(-1, self.columns, inner // self.step, self.step).transpose(1, 2))


class Multiply:
    """x @ weight.T + bias by the library, x [..., inner]."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [outer, inner], whose inner size the library's `step` divides."""
        self.library, self.shape, self.dtype = library, weight.shape, arithmetic(weight.dtype, weight.device)
        self._weight, self._bias = library.laid_out(weight), None if bias is None else as_floats(bias)
        self.described = Product(self._weight.data_ptr(), address(self._bias), *weight.shape)

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
    if os.environ.get(SWITCH) == "0" or platform.system() != "Linux" or not needed <= cpu_flags():
        return None
    compiler = shutil.which("gcc")  # others have an OpenMP of their own
    if compiler is None:
        log.warning("There is no gcc here: torch's own operations run instead, about half as fast.")
        return None
    try:
        return Library.at(built(compiler, kind))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("The library for CPUs cannot be built: torch's own operations run instead. %s", reason)
        return None


def built(compiler: str, kind: str) -> Path:
    """The compiled library, from the cache if this compiler made it of this source on such a CPU.

    Its name ends in its checksum: loading a damaged one would end the process.

    Raises:
        OSError, SubprocessError: it cannot be compiled, or the cache cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE).stdout
    options, linked = [*OPTIONS, f"-D{kind}"], openmp()
    facts = [*options, *linked, str(cpu_model()), *sorted(cpu_flags())]
    made_of = [version, SOURCE.read_bytes(), *map(str.encode, facts)]
    name = f"native-{kind.lower()}-{hashlib.sha256(bytes(1).join(made_of)).hexdigest()[:16]}"
    folder = cache_folder()
    for file in folder.glob(f"{name}-*.so"):
        if file.name == _named(name, file).name:
            return file
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        partial = Path(scratch) / "native.so"
        command = [compiler, *options, str(SOURCE), "-o", str(partial), *linked]
        subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=PATIENCE)
        return partial.replace(folder / _named(name, partial))  # as a whole: other processes may be at it too


def _named(name: str, file: Path) -> Path:
    return Path(f"{name}-{zlib.crc32(file.read_bytes()):08x}.so")


def openmp() -> Sequence[str]:
    """The OpenMP that torch has loaded, so that the threads are the same: two sets would fight for the cores."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[-1] for line in maps if "/libgomp" in line}
    return sorted(files, key=lambda file: ("torch" not in file, file))[:1]
