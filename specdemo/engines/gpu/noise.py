"""The exponential race of `decoding/noise.py` in Triton: the same integers, the same tokens beyond a margin of 1e-6."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, BLOCKS = 1024, 8  # tokens of a step, and steps of one program


def prepare(size: int, device: torch.device) -> None:
    """Compile `race` for a vocabulary of `size` tokens."""
    probs, keys = torch.ones(1, size, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for ids in (None, torch.arange(size, device=device)):
        race(probs, keys, ids)


def race(probs: Tensor, keys: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`noise.draw` for probabilities float32 [T, V], keys int64 [T] and the tokens int64 [V], None for all."""
    (rows, size), parts = probs.shape, triton.cdiv(probs.shape[1], BLOCK * BLOCKS)
    times = torch.empty(2, rows, parts, dtype=torch.float64, device=probs.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=probs.device)
    own = ids is not None
    _race[(rows, parts)](
        probs.contiguous(),
        keys,
        ids if own else tokens,
        times,
        tokens,
        size,
        rows * parts,
        OWN_IDS=own,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS,
    )
    best, part = times[0].min(-1)  # the first part on a tie: the lowest ids
    others = times[0].scatter(-1, part[:, None], torch.inf)
    second = torch.minimum(others.amin(-1), times[1].gather(-1, part[:, None])[:, 0])
    token = tokens.gather(-1, part[:, None])[:, 0]
    bad = (tokens < 0).any(-1) | best.isinf()
    return token.masked_fill(bad, -1), (second / best).log()


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


# The keys of a row may lie anywhere among others. Without this there would be several kernels, for one and more rows.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["keys"])
def _race(  # type: ignore[no-untyped-def]
    probs,
    keys,
    ids,
    times,
    tokens,
    size,
    parts,
    OWN_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    best = tl.full((), float("inf"), tl.float64)
    second = tl.full((), float("inf"), tl.float64)
    token = tl.full((), 0, tl.int64)
    bad = tl.full((), 0, tl.int32)
    for step in range(BLOCKS):
        columns = (part * BLOCKS + step) * BLOCK + tl.arange(0, BLOCK)
        p = tl.load(probs + row.to(tl.int64) * size + columns, mask=columns < size, other=0.0)
        names = tl.load(ids + columns, mask=columns < size, other=0) if OWN_IDS else columns
        bad += tl.sum((~(p < float("inf"))).to(tl.int32), 0)
        x = _mix(key + (names + 1).to(tl.uint64) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64))
        u = ((x >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
        # -log1p(-u): for small u a series, since 1 - u has too few digits.
        e = tl.where(u < 1e-5, u * (1.0 + u * (0.5 + u / 3.0)), -tl.log(1.0 - u))
        time = tl.where(p > 0, e / tl.where(p > 0, p, 1.0).to(tl.float64), float("inf"))
        least = tl.min(time, 0)
        place = tl.min(tl.where(time == least, columns, 2147483647), 0)
        next_best = tl.min(tl.where(columns == place, float("inf"), time), 0)
        second = tl.minimum(tl.maximum(best, least), tl.minimum(second, next_best))
        token = tl.where(least < best, place.to(tl.int64), token)
        best = tl.minimum(best, least)
    out = row * tl.num_programs(1) + part
    tl.store(times + out, best)
    tl.store(times + parts + out, second)
    tl.store(tokens + out, tl.where(bad > 0, -1, token))
