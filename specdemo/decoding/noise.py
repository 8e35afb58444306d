"""Noise keyed by seed and position, and how a token is drawn with it, by an exponential race.

Every token i of the vocabulary gets an exponential variable e_i; the token with the least e_i / p_i is drawn. That
token is distributed as p. Since e depends on the seed and the position only, the drawn token is a function of (prefix,
seed, position): a drafter that draws from q with the same e often draws the target's token (Gumbel coupling, arXiv
2408.07978).

u_i = mix(key + (i + 1) * STEP) with 53 bits, inside (0, 1); e_i = -log1p(-u_i). `mix` is splitmix64's (Steele, Lea and
Flood 2014). C, torch and Triton agree on u exactly; they agree on the token wherever its margin exceeds 1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_long, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ..system.compiled import compiled
from ..system.device import to_device
from ..system.replaced import DRAWS, REPLACED

VERSION = 1  # of the noise, for traces: a change of any constant below changes every text above temperature 0
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1


def mix(x: int) -> int:
    """splitmix64's mix of a 64-bit number."""
    x = (x ^ (x >> 30)) * FIRST & MASK
    x = (x ^ (x >> 27)) * SECOND & MASK
    return x ^ (x >> 31)


def key_of(seed: int, position: int, purpose: int = 0) -> int:
    """The key of a position's noise, 64 bits.

    The seed, the purpose and the position are mixed one after the other: in a sum of seed and position two seeds would
    have the same noise, shifted. Rejection sampling passes the number of the round as the position.
    """
    key = mix(seed + STEP & MASK)
    for part in (purpose, position):
        key = mix(key + (part + 1) * STEP & MASK)
    return key


def uniform(key: int, index: int) -> float:
    """One u of a key, inside (0, 1), computed on the host."""
    return ((mix(key + (index + 1) * STEP & MASK) >> 11) + 0.5) * 2.0**-53


def uniforms(key: int | Tensor, ids: Tensor) -> Tensor:
    """u of some tokens, int64 [N] -> float64 [N], inside (0, 1); for keys int64 [T, 1] [T, N]."""
    x = (ids + 1) * signed(STEP) + (key if isinstance(key, Tensor) else signed(key))
    x = (x ^ _shifted(x, 30)) * signed(FIRST)  # int64 products wrap, as those of unsigned numbers do
    x = (x ^ _shifted(x, 27)) * signed(SECOND)
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 11).double() + 0.5) * 2.0**-53


def draw(probs: Tensor, keys: Tensor | Sequence[int], token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw a token from each row.

    Args:
        probs: [T, V], non-negative; rows may be unnormalised.
        keys: the key of each row's noise, see `key_of`; in a tensor int64 [T] they are `signed`.
        token_ids: the target's tokens that the columns stand for, rising, int64 [V] on the device of `probs`; None if
            they are all of them. A drafter with a smaller vocabulary draws with the noise of the same tokens.
    Returns:
        The columns drawn, int64 [T], -1 where no probability is above 0 or one is not finite, and their margins,
        float64 [T]: ln(p / e) of the drawn token less that of the second best, infinite where only one is possible.
    """
    if not isinstance(keys, Tensor):
        keys = to_device([signed(key) for key in keys], probs.device)
    if probs.dtype == torch.float32:
        if probs.is_cuda and find_spec("triton") and DRAWS not in REPLACED:
            from ..engines.gpu import noise

            return noise.race(probs, keys, token_ids)
        if probs.device.type == "cpu" and (functions := library()):
            probs, keys = probs.contiguous(), keys.contiguous()
            tokens, margins = torch.empty(len(keys), dtype=torch.int64), torch.empty(len(keys), dtype=torch.float64)
            names = None if token_ids is None else token_ids.data_ptr()
            found = tokens.data_ptr(), margins.data_ptr()
            functions.race(probs.data_ptr(), *probs.shape, keys.data_ptr(), names, *found)
            return tokens, margins
    ids = torch.arange(probs.shape[-1], device=probs.device) if token_ids is None else token_ids
    scores = probs.double().log() - torch.log(-torch.log1p(-uniforms(keys[:, None], ids)))  # ln(p / e)
    best, tokens = scores.max(-1)  # the lowest id on a tie
    others = scores.scatter(-1, tokens[:, None], -torch.inf).amax(-1)
    bad = ~probs.isfinite().all(-1) | (best == -torch.inf)
    return tokens.masked_fill(bad, -1), best - others


@cache
def library() -> CDLL | None:
    """The functions of `noise.c`, None where they cannot be built. The first call may have to compile them."""
    functions = compiled(Path(__file__).with_suffix(".c"))
    if functions is not None:
        functions.race.argtypes = [c_void_p, c_long, c_long, *[c_void_p] * 4]
    return functions


def signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; that of int64 would keep the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
