"""Weights of 4 and 8 bits: those of GGUF files, and those made of other weights.

The numbers of a row come in groups that share a scale. A weight is `scale * code - low`, and codes are small integers.
llama.cpp's `ggml-quants.c` has the formulas of its types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..system.hardware import UNQUANTIZED

GROUP = 32  # numbers that share a scale and a low
NARROW = 16  # numbers that share a scale where it is a level and there are no lows
SUPER = 256  # numbers that share a unit
AT_ONCE = 1 << 20  # bytes or numbers of a weight that are converted at a time: what comes between stays in the cache

TOO_LARGE = "it has weights that are too large for float16; choose another dtype, such as float32."
KINDS = {2, 3, 4, 6, 7, 8}  # that `quantized.h` knows, see `Quantized.kind`

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A weight [outer, inner] as codes, scales and lows.

    `codes` of 8 bits are -128 to 127, int8 [outer, inner]; those of 4 bits are 0 to 15, uint8 [outer, inner / 2]. Of
    eight numbers four bytes have the first four in their low halves and the others in the high ones. `scales` and
    `lows` are float16 [outer, groups], or if there are units, levels of 8 bits, which are multiplied by the units of
    scales and of lows, float16 [outer, inner / SUPER] each. `lows` is None if all are 0; with units, codes are then -32
    to 31. The inputs of a product with it become codes of `code_bytes`.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None = None
    scale_units: Tensor | None = None
    low_units: Tensor | None = None
    code_bytes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the parts, which may come from a file, since C cannot.

        Raises:
            ValueError: one has another shape or type than the others ask for, or is missing.
        """
        if self.codes.dim() != 2 or not self.codes.numel() or self.codes.dtype not in (torch.uint8, torch.int8):
            raise ValueError("the codes of a quantized weight are no rows of 4 or 8 bits")
        outer, inner = self.shape
        levels = torch.float16 if self.scale_units is None else torch.int8 if self.lows is None else torch.uint8
        right = {  # the type of a part, and for how many numbers it has one
            "codes": (self.codes.dtype, inner // self.codes.shape[1]),
            "scales": (levels, NARROW if levels == torch.int8 else GROUP),
            "lows": (levels, GROUP),
            "scale_units": (torch.float16, SUPER),
            "low_units": (torch.float16, SUPER),
        }
        for name, part in self.parts().items():
            dtype, numbers = right[name]
            if part.dtype != dtype or part.shape != (outer, inner / numbers):
                raise ValueError(f"the {name} of a quantized weight do not go with its codes")
        if self.kind not in KINDS or (self.low_units is None) != (self.lows is None or self.scale_units is None):
            raise ValueError("a quantized weight lacks lows or units")

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def kind(self) -> int:
        """Which of the kinds of `quantized.h` it is."""
        return 1 + (self.bits == 8) + 2 * (self.lows is not None) + 4 * (self.scale_units is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights that are not quantized."""
        return UNQUANTIZED

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def __len__(self) -> int:
        return len(self.codes)

    def parts(self) -> dict[str, Tensor]:
        """Its tensors by their names."""
        named = ((name, getattr(self, name)) for name in Quantized.__slots__)
        return {name: part for name, part in named if part is not None}

    def __getitem__(self, rows: Tensor | Sequence[int] | slice) -> Quantized:
        return type(self)(**{name: part[rows] for name, part in self.parts().items()})

    def float(self) -> Tensor:
        """The weight in float32."""
        outer, inner = self.shape
        scales = _times(self.scales, self.scale_units)
        weights = self._codes().view(outer, scales.shape[1], -1) * scales[..., None]
        if self.lows is not None:
            weights = weights.view(outer, -1, GROUP) - _times(self.lows, self.low_units)[..., None]
        return weights.view(outer, inner)

    def _codes(self) -> Tensor:
        if self.bits == 8:
            return self.codes.float()
        fours = self.codes.unflatten(1, (-1, 4))
        return torch.stack([fours & 15, fours >> 4], 2).flatten(1).float()


class Precise(Quantized):
    """A weight whose products have inputs of two bytes."""

    __slots__ = ()
    code_bytes: ClassVar[int] = 2


def _times(levels: Tensor, units: Tensor | None) -> Tensor:
    """Scales or lows in float32."""
    if units is None:
        return levels.float()
    return (levels.unflatten(1, (units.shape[1], -1)).float() * units.float()[..., None]).flatten(1)


Weight: TypeAlias = Tensor | Quantized  # [outer, inner]


def rows_of(weight: Weight, ids: Tensor) -> Tensor:
    """Rows of a weight, as for embeddings: [T] -> [T, inner]."""
    return weight[ids].float() if isinstance(weight, Quantized) else F.embedding(ids, weight)


def widened(weight: Weight) -> Tensor:
    """The numbers of a weight."""
    return weight.float() if isinstance(weight, Quantized) else weight


# Those of GGUF files ------------------------------------------------------------------------------------------------


def _half(raw: Numbers) -> Numbers:
    return raw.copy().view(np.float16)[..., 0]


def _nibbles(raw: Numbers, run: int) -> Numbers:
    """[..., bytes] -> [..., 2 * bytes]: of each `run` bytes the low halves, then the high ones."""
    runs = raw.reshape(*raw.shape[:-1], -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*raw.shape[:-1], -1)


def _levels(raw: Numbers) -> tuple[Numbers, Numbers]:
    """The levels of scales and lows, 6 bits each: [..., 12] -> two of [..., 8]."""
    first, second, third = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = [first & 63, (third & 15) | (first >> 6) << 4]
    return np.concatenate(scales, -1), np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], -1)


def _fifth_bits(raw: Numbers) -> Numbers:
    """[..., 4] -> [..., 32] of 0 or 16: bit i of a little-endian number for the number i."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _q4_0(raw: Numbers) -> dict[str, Numbers]:
    scales = _half(raw[..., :2])
    return {"codes": _nibbles(raw[..., 2:], 16), "scales": scales, "lows": 8 * scales}


def _q4_1(raw: Numbers) -> dict[str, Numbers]:
    return {"codes": _nibbles(raw[..., 4:], 16), "scales": _half(raw[..., :2]), "lows": -_half(raw[..., 2:4])}


def _q5_0(raw: Numbers) -> dict[str, Numbers]:
    codes = _nibbles(raw[..., 6:], 16) | _fifth_bits(raw[..., 2:6])
    return {"codes": codes.astype(np.int8) - 16, "scales": _half(raw[..., :2])}


def _q5_1(raw: Numbers) -> dict[str, Numbers]:
    codes = _nibbles(raw[..., 8:], 16) | _fifth_bits(raw[..., 4:8])
    return {"codes": codes.astype(np.int8), "scales": _half(raw[..., :2]), "lows": -_half(raw[..., 2:4])}


def _q8_0(raw: Numbers) -> dict[str, Numbers]:
    return {"codes": raw[..., 2:].view(np.int8), "scales": _half(raw[..., :2])}


def _q4_k(raw: Numbers) -> dict[str, Numbers]:
    scales, lows = _levels(raw[..., 4:16])
    units = {"scale_units": _half(raw[..., :2]), "low_units": _half(raw[..., 2:4])}
    return {"codes": _nibbles(raw[..., 16:], 32), "scales": scales, "lows": lows, **units}


def _q5_k(raw: Numbers) -> dict[str, Numbers]:
    fifth = (raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4  # [..., groups, GROUP]
    codes = _nibbles(raw[..., 48:], 32) | fifth.reshape(*raw.shape[:-1], SUPER)
    rest = {name: part for name, part in _q4_k(raw).items() if name != "codes"}
    return {"codes": codes.astype(np.int8), **rest}


def _q6_k(raw: Numbers) -> dict[str, Numbers]:
    upper = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = _nibbles(raw[..., :128], 64) | (upper << 4).reshape(*raw.shape[:-1], SUPER)
    return {
        "codes": codes.astype(np.int8) - 32,
        "scales": raw[..., 192:208].view(np.int8),
        "scale_units": _half(raw[..., 208:210]),
    }


READERS: Mapping[str, tuple[int, int, Callable[[Numbers], dict[str, Numbers]]]] = {
    # by the names of llama.cpp: the numbers and the bytes of a block, and what reads it
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (SUPER, 144, _q4_k),
    "Q5_K": (SUPER, 176, _q5_k),
    "Q6_K": (SUPER, 210, _q6_k),
}


def of_blocks(raw: NDArray[np.uint8], kind: str) -> Quantized:
    """A weight as a GGUF file stores it, [outer, bytes of a row], in a type of `READERS`."""
    _, size, read = READERS[kind]
    rows, whole = max(1, AT_ONCE // raw.shape[1]), dict[str, Tensor]()
    for start in range(0, len(raw), rows):
        some = raw[start : start + rows]
        found = read(some.reshape(len(some), -1, size))
        found["codes"] = _packed(found["codes"].reshape(len(some), -1))
        for name, part in found.items():
            of_rows = torch.from_numpy(np.ascontiguousarray(part).reshape(len(some), -1))
            if name not in whole:
                whole[name] = of_rows.new_empty(len(raw), of_rows.shape[1])
            whole[name][start : start + rows] = of_rows
    return Quantized(**whole)


def bits_kept(kind: str) -> float:
    """Bits that a number of a type of `READERS` takes here."""
    numbers, size, _ = READERS[kind]
    return 8 * of_blocks(np.zeros((1, size), np.uint8), kind).nbytes / numbers


def _packed(codes: Numbers) -> Numbers:
    """Codes [outer, inner] of one byte as `Quantized` keeps them: those of 4 bits are unsigned."""
    if codes.dtype == np.int8:
        return np.ascontiguousarray(codes)
    eights = codes.reshape(len(codes), -1, 2, 4)
    return (eights[:, :, 0] | eights[:, :, 1] << 4).reshape(len(codes), -1)


# Those made of other weights ----------------------------------------------------------------------------------------


def quantized(weight: Weight, bits: int) -> Quantized:
    """Round a weight [outer, inner] to 4 or 8 bits, in groups of 32 as in llama.cpp's Q4_1 and Q8_0.

    Raises:
        ValueError: a number is too large for a scale.
    """
    rows = max(1, AT_ONCE // weight.shape[1])
    some = [_rounded(widened(weight[start : start + rows]), bits).parts() for start in range(0, len(weight), rows)]
    return Quantized(**{name: torch.cat([parts[name] for parts in some]) for name in some[0]})


def _rounded(weight: Tensor, bits: int) -> Quantized:
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    if bits == 8:
        scales, lows = (groups.abs().amax(-1) / 127).half(), None
    else:
        least = groups.amin(-1)
        scales, lows = ((groups.amax(-1) - least) / 15).half(), (-least).half()
    shifted = groups if lows is None else groups + lows[..., None]
    if scales.isinf().any() or (lows is not None and lows.isinf().any()):
        raise ValueError(TOO_LARGE)
    codes = (shifted / scales[..., None].float().clamp(min=torch.finfo(torch.float32).tiny)).round()
    limits = (-127, 127) if lows is None else (0, 15)
    kind = torch.int8 if lows is None else torch.uint8
    whole = codes.clamp(*limits).to(kind).flatten(1).numpy()
    return Quantized(torch.from_numpy(_packed(whole)), scales, lows)
