"""The largest logits, in C where that can be built."""

from __future__ import annotations

from ctypes import CDLL, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..system.compiled import compiled


class Largest(NamedTuple):
    """The largest logit of each row, [...]."""

    values: Tensor  # in the type of the logits
    places: Tensor  # int64
    margins: Tensor  # how far the next largest lies below it, in the type of the logits


def largest(logits: Tensor) -> Largest:
    """The largest logits, [..., V] -> [...].

    Of equal logits the first counts. NaN counts as the largest, so a row with NaN gives NaN.
    """
    functions = library_for(logits)
    if functions is None:  # `argmax` takes five times as long for bfloat16 on a CPU
        values, places = logits.max(-1)
        seconds = logits.scatter(-1, places[..., None], -torch.inf).amax(-1)
        return Largest(values, places, values - seconds)
    places = torch.empty(logits.shape[:-1], dtype=torch.long)
    values, seconds = logits.new_empty(2, *logits.shape[:-1])
    outputs = places.data_ptr(), values.data_ptr(), seconds.data_ptr()
    functions.largest(logits.data_ptr(), places.numel(), logits.shape[-1], *outputs)
    return Largest(values, places, values - seconds)


def certainty(values: Tensor) -> Tensor:
    """1 where a chosen logit is finite, NaN where it is not, [...] -> [...], without waiting for a GPU."""
    return values - values + 1


@cache
def library() -> CDLL | None:
    """The functions of `sampling.c`, None where they cannot be built. The first call may have to compile them."""
    functions = compiled(Path(__file__).with_suffix(".c"))
    if functions is not None:
        functions.largest.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p]
        functions.sample.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p]
    return functions


def library_for(rows: Tensor) -> CDLL | None:
    """The library, if it reads rows like these."""
    known = rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.is_contiguous()
    return library() if known else None
