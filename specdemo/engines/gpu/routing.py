"""The choice of experts in a captured pass, in Triton. See `kernels`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Router
from .products import _wait, launched_on

PER_WARP = 128  # experts


def choose(router: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.choose`. A program chooses the experts of a row."""
    count, experts = scores.shape
    shares = scores.new_empty(count, router.used)
    chosen = torch.empty_like(shares, dtype=torch.int32)
    block = triton.next_power_of_2(experts)
    _choose[(count,)](
        scores,
        shares,
        chosen,
        EXPERTS=experts,
        BLOCK=block,
        USED=router.used,
        RANKS=triton.next_power_of_2(router.used),
        NORMED=router.normed,
        num_warps=min(4, max(1, block // PER_WARP)),
        **launched_on(scores.device),
    )
    return shares, chosen


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scores,
    shares,
    chosen,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    USED: tl.constexpr,
    RANKS: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    row, expert, rank = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, RANKS)
    if EARLY:
        _wait(True)
    score = tl.load(scores + row * EXPERTS + expert, mask=expert < EXPERTS, other=-float("inf")).to(tl.float32)
    probs = tl.exp(score - tl.max(score, 0))
    probs = probs / tl.sum(probs, 0)
    left = tl.where(expert < EXPERTS, probs, -1)  # -1: taken
    numbers, found = tl.zeros([RANKS], tl.int32), tl.zeros([RANKS], tl.float32)
    for place in range(USED):
        # The first of the likeliest. Where probabilities are no numbers none is, but no expert is read that is not.
        best = tl.min(tl.where(left == tl.max(left, 0), expert, EXPERTS - 1), 0)
        numbers = tl.where(rank == place, best, numbers)
        found = tl.where(rank == place, tl.sum(tl.where(expert == best, probs, 0), 0), found)
        left = tl.where(expert == best, -1, left)
    if NORMED:
        found = found / tl.sum(found, 0)
    tl.store(chosen + row * USED + rank, numbers, mask=rank < USED)
    tl.store(shares + row * USED + rank, found.to(shares.dtype.element_ty), mask=rank < USED)
