"""The products of a captured pass and what is added to its rows, in Triton. See `kernels`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, float16, float32
from triton.language.extra import cuda

from ..linear import Linear, Norm

ROWS = 16  # rows of a program: the least that the matrix units take
LARGE = 2**23  # a product of more weights than these computes twice as many rows in a program, if there are so many
FEW, FEW_STAGES = 8, 5  # columns of a product that a program computes, and steps in flight: of a product of up to
NARROW = 2048  # so many columns, where more programs share the work,
MANY, MANY_STAGES = 32, 4  # and of others
STEP_BYTES = 512  # bytes of a row of the weights that a program reads at a time,
PARTS = 4  # in parts that are summed side by side, one warp each, so that none waits for another
MOST_WARPS, PER_WARP = 8, 512  # of `_plus`, and numbers for each
EARLY_FROM = (9, 0)  # the compute capability from which on kernels start early


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_FROM


def launched_on(device: torch.device) -> dict[str, Any]:
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def product(
    step: Linear, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None, gated: bool = False
) -> Tensor:
    """See `ops.product`. Every program computes some columns, with all of their sums."""
    assert step.weight is not None, "nothing is packed on a GPU"
    return _multiplied(step.weight, x, norm, gated, bias=step.bias, plus=plus)


def chosen_product(weights: Tensor, x: Tensor, chosen: Tensor, norm: Norm | None = None, gated: bool = False) -> Tensor:
    """See `ops.chosen_product`. Every program computes some columns of one row, by one of the row's experts.

    So a pass has the same programs whatever is chosen, and a row the same sums whatever other rows choose. Rows that
    share an expert each read it, but at the same time, so mostly from the L2 cache.
    """
    return _multiplied(weights[0], x, norm, gated, chosen=chosen)


def _multiplied(
    weight: Tensor,
    x: Tensor,
    norm: Norm | None,
    gated: bool,
    bias: Tensor | None = None,
    plus: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """The result of `_product`. With `chosen` this is the weight of the first expert, which the others follow."""
    if norm is not None and (norm.bias is not None or x.dtype == float16):  # float16 may overflow without the scale
        x, norm = norm(x), None
    (outer, inner), lines = weight.shape, x.shape[:-1] if chosen is None else chosen.shape
    count, used = lines.numel(), 1 if chosen is None else lines[1]
    columns, stages = (FEW, FEW_STAGES) if outer * used <= NARROW else (MANY, MANY_STAGES)
    large = chosen is None and weight.numel() > LARGE and x.dtype != float32
    rows = 2 * ROWS if large and count > ROWS else ROWS
    size = min(STEP_BYTES // x.element_size(), max(16, triton.next_power_of_2(inner)))
    if gated:
        outer //= 2
    out = x.new_empty(*lines, outer)
    programs = triton.cdiv(count, rows) if chosen is None else count, triton.cdiv(outer, columns // (1 + gated))
    _product[programs](
        x,
        weight,
        x if bias is None else bias,
        norm.weight if norm else x,
        x if plus is None else plus,
        x if chosen is None else chosen,
        out,
        count,
        outer,
        norm.eps if norm else 0.0,
        INNER=inner,
        NORMED=norm is not None,
        BIASED=bias is not None,
        ADDED=plus is not None,
        GATED=gated,
        CHOSEN=chosen is not None,
        SHARE=count * inner // x.numel(),
        ROWS=rows,
        COLUMNS=columns,
        STEP=size,
        PARTS=min(PARTS, size // 16),
        num_stages=stages,
        **launched_on(x.device),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    norm,
    plus,
    chosen,
    out,
    count,
    outer,
    eps,
    INNER: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    CHOSEN: tl.constexpr,  # by rows of the result, each of one expert, of which so many
    SHARE: tl.constexpr,  # share a row of x
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Rows run fastest: programs that read the same weights follow each other, so they find them in the cache.
    if CHOSEN:
        row, there = tl.program_id(0) + tl.arange(0, ROWS), tl.arange(0, ROWS) == 0
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = row < count
    source = row // SHARE
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS  # columns of the result
    place = tl.arange(0, COLUMNS)
    column = tl.program_id(1) * OWN + place % OWN
    own, line = column < outer, column + place // OWN * outer  # the lines of the gates come first, then the others
    if EARLY:
        if not CHOSEN:
            _request(weight, line, own, INNER, STEP)
        cuda.gdc_wait()
    if CHOSEN:
        lines = outer * 2 if GATED else outer  # of an expert
        weight += tl.load(chosen + tl.program_id(0)).to(tl.int64) * lines * INNER
    step = tl.arange(0, PARTS)[:, None] * (STEP // PARTS) + tl.arange(0, STEP // PARTS)[None, :]
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([PARTS, ROWS, ROWS], tl.float32)
    for begin in range(0, INNER, STEP):
        index = begin + step
        valid = index < INNER
        at, inside = source[None, :, None] * INNER + index[:, None, :], there[None, :, None] & valid[:, None, :]
        some = tl.load(x + at, mask=inside, other=0)
        part = tl.load(
            weight + line[None, None, :].to(tl.int64) * INNER + index[:, :, None],
            mask=own[None, None, :] & valid[:, :, None],
            other=0,
        )
        if NORMED:  # the scale of a row is known and applied after the loop
            # A row's sum of squares is an entry of the diagonal of rows @ rows.T. The matrix units compute that, though
            # only the diagonal is used: tl.sum(some * some) would be a second reader of `some`, for which Triton stores
            # it in shared memory such that eight reads of the matrix units wait for each other (bank conflicts).
            squares += tl.dot(some, tl.permute(some, (0, 2, 1)), input_precision="ieee")
            scales = tl.load(norm + index, mask=valid, other=0).to(tl.float32)
            some = (some.to(tl.float32) * scales[:, None, :]).to(x.dtype.element_ty)
        sums += tl.dot(some, part, input_precision="ieee")
    if EARLY:
        cuda.gdc_launch_dependents()
    sums = tl.sum(sums, 0)
    if NORMED:
        diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
        square = tl.sum(tl.where(diagonal, tl.sum(squares, 0), 0), 1)
        sums *= tl.rsqrt(square / INNER + eps)[:, None]
    if BIASED:
        sums += tl.load(bias + line, mask=own, other=0).to(tl.float32)[None, :]
    if GATED:
        sums = sums.to(x.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(sums, [ROWS, 2, OWN]), (0, 2, 1)))
        sums = gate * tl.sigmoid(gate) * up
        column = tl.program_id(1) * OWN + tl.arange(0, OWN)
    at, inside = row[:, None] * outer + column[None, :], there[:, None] & (column < outer)[None, :]
    if ADDED:
        sums = sums.to(x.dtype.element_ty).to(tl.float32) + tl.load(plus + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _request(weight, line, own, INNER: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fetch what the first step reads of some lines of the weights into the L2 cache, without waiting for it."""
    index = tl.arange(0, 4)[:, None] * (STEP // 4)  # as many lines of the cache
    at = weight + line[None, :].to(tl.int64) * INNER + index
    address = tl.where(own[None, :] & (index < INNER), at, weight).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [address], tl.int32, is_pure=False, pack=1)


def plus(x: Tensor, added: Tensor, norm: Norm | None, scale: float, shares: Tensor | None = None) -> Tensor:
    """See `ops.plus`. A program adds a row: torch may sum a row differently in passes of different sizes."""
    assert norm is None or norm.bias is None, "no family has such norms here"
    (count, width), out = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _plus[(count,)](
        x,
        added,
        x if shares is None else shares,
        norm.weight if norm else x,
        out,
        norm.eps if norm else 0.0,
        scale,
        USED=0 if shares is None else shares.shape[1],
        WIDTH=width,
        BLOCK=block,
        NORMED=norm is not None,
        SCALED=scale != 1,
        SOON=width <= NARROW,
        num_warps=min(MOST_WARPS, max(1, block // PER_WARP)),
        **launched_on(x.device),
    )
    return out


@triton.jit
def _plus(  # type: ignore[no-untyped-def]
    x,
    added,
    shares,
    weight,
    out,
    eps,
    scale,
    USED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    SOON: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0) * WIDTH + column, column < WIDTH
    if NORMED:
        weights = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if EARLY:
        _wait(SOON)
    if EARLY and not SOON:
        cuda.gdc_launch_dependents()
    if USED:
        more = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(USED):  # unrolled, so that no load waits for another
            place = tl.program_id(0) * USED + rank
            output = tl.load(added + place * WIDTH + column, mask=inside, other=0).to(tl.float32)
            more += output * tl.load(shares + place).to(tl.float32)
        more = more.to(x.dtype.element_ty).to(tl.float32)
    else:
        more = tl.load(added + at, mask=inside, other=0).to(tl.float32)
    if NORMED:
        more *= tl.rsqrt(tl.sum(more * more, 0) / WIDTH + eps) * weights
        more = more.to(x.dtype.element_ty).to(tl.float32)
    if SCALED:
        more = (more * scale).to(x.dtype.element_ty).to(tl.float32)
    sums = tl.load(x + at, mask=inside, other=0).to(tl.float32) + more
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _wait(SOON: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before. If SOON, the next one may take its places at once: those of a narrow model are few,
    and would else come too late; those of a wide one (measured) take room from the programs that work."""
    if SOON:
        cuda.gdc_launch_dependents()
    cuda.gdc_wait()
