"""The operations of a captured pass, in Triton: the functions of `ops.py`, a launch or two each.

A layer has a dozen small operations around its products. On a fast GPU each takes longer to launch than to run, so
most of them are fused into a product here. Sums are float32.

The order of a row's sums depends only on the shape of the weights, and attention cuts the context into chunks that
depend only on the capacity. A row reads the keys and values of its branch from wherever they lie; a chain is a branch
whose tokens lie one after the other, and has the same compiled kernels. So a token's logits are the same bits whatever
else a pass reads, and text is the same with and without a draft.

From compute capability 9.0 on the programs of a kernel take their places as soon as those of the one before have done
most of their work (programmatic dependent launch). They request their first weights, which no kernel writes, and wait.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float32
from triton.language.extra import cuda

from .. import ops
from ..linear import Norm
from ..rows import MOST_ROWS
from .products import NARROW, ROWS, _wait, chosen_product, launched_on, plus, product
from .routing import choose

__all__ = ["attend", "choose", "chosen_product", "placed", "plus", "product", "usable", "write_kv"]

EXACT = APART = True  # see `ops`
KEY_BYTES, WIDE = 256, 256  # bytes of a column of the keys that a program reads at a time, of heads of up to so many
WIDE_KEY_BYTES = 64  # bytes, and of wider ones, of which shared memory and registers hold fewer
MOST_AHEAD = 2**14  # bytes of a step's keys: of more Triton copies one step ahead, not two, so that 99 KB hold them
PER_WARP = 128  # columns of `_combine`
LEAST_CHUNK, MOST_CHUNKS = 128, 32
UNIT = tl.constexpr(ops.UNIT)  # the compiler, which knows it, reads 16 bytes at a time
LINE = tl.constexpr(MOST_ROWS)  # numbers of a path
SUMMED = tl.constexpr(1024)  # numbers that `_write_kv` squares at a time
NOTHING = tl.constexpr(-1e30)  # a logit whose weight is 0; minus infinity less itself would be NaN


def usable(width: int) -> bool:
    """Whether the kernels can run heads of this width: a power of two that the matrix units take."""
    return width in (16, 32, 64, 128, 256)


class RowPaths(NamedTuple):
    """The arguments of `ops.placed`."""

    starts: Tensor
    caches: Tensor
    paths: Tensor
    depths: Tensor


def placed(where: Tensor, paths: Tensor, depths: Tensor, capacity: int, apart: bool = False) -> RowPaths:
    return RowPaths(where[0], where[1], paths, depths)


def write_kv(
    qkv: Tensor,
    head_norms: tuple[Norm, Norm] | None,
    rotation: tuple[Tensor, ...] | None,
    keys: Tensor,
    values: Tensor,
    rows: RowPaths,
) -> Tensor:
    (count, _), (kv_heads, capacity, width) = qkv.shape, keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    q = qkv.new_empty(count, heads, width)
    cos, sin, *growth = rotation or (qkv, qkv)
    q_weight, k_weight = (norm.weight for norm in head_norms) if head_norms else (qkv, qkv)
    _write_kv[(count, heads + 2 * kv_heads)](
        qkv,
        q,
        keys,
        values,
        cos,
        sin,
        growth[0] if growth else qkv,
        q_weight,
        k_weight,
        rows.starts,
        rows.caches,
        rows.paths,
        rows.depths,
        capacity,
        head_norms[0].eps if head_norms else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        NORMED=head_norms is not None,
        TOGETHER=head_norms is not None and len(q_weight) != width,
        ROTATED=rotation is not None,
        GROWING=bool(growth),
        SOON=heads * width <= NARROW,
        num_warps=1,
        **launched_on(qkv.device),
    )
    return q


@triton.jit
def _write_kv(  # type: ignore[no-untyped-def]
    qkv,
    queries,
    keys,
    values,
    cos,
    sin,
    growth,
    q_weight,
    k_weight,
    starts,
    caches,
    paths,
    depths,
    capacity,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROTATED: tl.constexpr,
    GROWING: tl.constexpr,
    SOON: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    start, depth = tl.load(starts + token), tl.load(depths + token)
    slot, position = start + tl.load(paths + token * LINE + depth), start + depth
    cache = tl.load(caches + token) * UNIT
    if EARLY:
        _wait(SOON)
    if EARLY and not SOON:
        cuda.gdc_launch_dependents()
    low = tl.arange(0, HALF)
    high = HALF + low
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    if head >= HEADS + KV_HEADS:
        target = values + cache + ((head - HEADS - KV_HEADS) * capacity + slot) * 2 * HALF
        tl.store(target + low, tl.load(source + low))
        tl.store(target + high, tl.load(source + high))
    else:
        a, b = tl.load(source + low).to(tl.float32), tl.load(source + high).to(tl.float32)
        if NORMED:
            if TOGETHER:  # with the other heads of the token
                first = qkv + token * (HEADS + 2 * KV_HEADS) * 2 * HALF
                if head < HEADS:
                    square = _mean_square(first, HEADS * 2 * HALF)
                else:
                    square = _mean_square(first + HEADS * 2 * HALF, KV_HEADS * 2 * HALF)
                q_weight += head * 2 * HALF
                k_weight += (head - HEADS) * 2 * HALF
            else:
                square = (tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF)
            scale = tl.rsqrt(square + eps)
            if head < HEADS:
                a *= tl.load(q_weight + low).to(tl.float32) * scale
                b *= tl.load(q_weight + high).to(tl.float32) * scale
            else:
                a *= tl.load(k_weight + low).to(tl.float32) * scale
                b *= tl.load(k_weight + high).to(tl.float32) * scale
        if ROTATED:
            angle = position * 2 * HALF
            turned = a * tl.load(cos + angle + low).to(tl.float32) + b * tl.load(sin + angle + low).to(tl.float32)
            b = b * tl.load(cos + angle + high).to(tl.float32) + a * tl.load(sin + angle + high).to(tl.float32)
            a = turned
        a, b = a.to(qkv.dtype.element_ty), b.to(qkv.dtype.element_ty)
        if head < HEADS:
            if GROWING:
                scale = tl.load(growth + position).to(tl.float32)
                a, b = (a.to(tl.float32) * scale).to(a.dtype), (b.to(tl.float32) * scale).to(b.dtype)
            tl.store(queries + (token * HEADS + head) * 2 * HALF + low, a)
            tl.store(queries + (token * HEADS + head) * 2 * HALF + high, b)
        else:
            target = keys + cache + ((head - HEADS) * capacity + slot) * 2 * HALF
            tl.store(target + low, a)
            tl.store(target + high, b)


@triton.jit
def _mean_square(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mean of the squares of `SIZE` numbers."""
    squares = tl.zeros([SUMMED], tl.float32)
    for begin in range(0, SIZE, SUMMED):
        index = begin + tl.arange(0, SUMMED)
        some = tl.load(x + index, mask=index < SIZE, other=0).to(tl.float32)
        squares += some * some
    return tl.sum(squares, 0) / SIZE


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: RowPaths,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """See `ops.attend`. A program attends to one chunk of the context, for the heads of one token that share its keys.

    `_combine` adds the chunks up.
    """
    (count, heads, width), (kv_heads, capacity, _) = q.shape, keys.shape
    group = heads // kv_heads
    chunk = max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(capacity, MOST_CHUNKS)))
    chunks = triton.cdiv(capacity, chunk)
    at_once = min(keys_at_once(width, q.element_size()), chunk)
    found = q.new_empty(chunks, count * heads, width, dtype=float32)
    peak, weight = q.new_empty(2, chunks, count * heads, dtype=float32)
    _attend[(kv_heads * triton.cdiv(group, ROWS), count, chunks)](
        q,
        keys,
        values,
        *rows,
        found,
        peak,
        weight,
        capacity,
        width**-0.5 if scale is None else scale,
        HEADS=heads,
        GROUP=group,
        WIDTH=width,
        CHUNK=chunk,
        ROWS=ROWS,
        KEYS=at_once,
        WINDOW=window,
        CAP=cap,
        SOON=heads * width <= NARROW,
        num_stages=3 if at_once * width * q.element_size() <= MOST_AHEAD else 2,
        **launched_on(q.device),
    )
    out = q.new_empty(count, heads * width)
    _combine[(count, heads)](
        found,
        peak,
        weight,
        rows.starts,
        rows.depths,
        out,
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        WINDOW=window,
        SOON=heads * width <= NARROW,
        num_warps=max(1, width // PER_WARP),
        **launched_on(q.device),
    )
    return out


def keys_at_once(width: int, size: int) -> int:
    """The keys that a program of `_attend` reads at a time, of heads of this width and numbers of `size` bytes."""
    return (KEY_BYTES if width * size <= WIDE else WIDE_KEY_BYTES) // size


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    starts,
    caches,
    paths,
    depths,
    found,
    peak,
    weight,
    capacity,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SOON: tl.constexpr,
    EARLY: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head, token, begin = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2) * CHUNK
    start = tl.load(starts + token).to(tl.int32)
    end = start + tl.load(depths + token).to(tl.int32) + 1
    if EARLY:
        _wait(SOON)
    if _is_read(begin, end, CHUNK, WINDOW):
        head = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)  # of those that share this key head
        inside, column = (head < GROUP)[:, None], tl.arange(0, WIDTH)
        at = token * HEADS + kv_head * GROUP + head
        query = tl.load(q + at[:, None] * WIDTH + column[None, :], mask=inside, other=0)
        first = kv_head.to(tl.int64) * capacity * WIDTH + tl.load(caches + token) * UNIT
        most = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        for offset in range(0, CHUNK, KEYS):  # a step in which no key is seen gets the weight 0 of `fade`
            index = begin + offset + tl.arange(0, KEYS)
            seen = index < end
            if WINDOW:
                seen = seen & (index >= end - WINDOW)
            slot = tl.load(paths + token * LINE + index - start, mask=seen & (index >= start), other=0)
            slot = tl.where(index < start, index, start + slot)
            key = tl.load(keys + first + slot[None, :] * WIDTH + column[:, None], mask=seen[None, :], other=0)
            logits = tl.dot(query, key, input_precision="ieee") * scale
            if CAP > 0:
                logits = (2 * tl.sigmoid(2 / CAP * logits) - 1) * CAP  # the hyperbolic tangent
            logits = tl.where(seen[None, :], logits, NOTHING)
            higher = tl.maximum(most, tl.max(logits, 1))
            share = tl.exp(logits - higher[:, None])
            fade = tl.exp(most - higher)
            value = tl.load(values + first + slot[:, None] * WIDTH + column[None, :], mask=seen[:, None], other=0)
            sums = sums * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            total = total * fade + tl.sum(share, 1)
            most = higher
        if EARLY and not SOON:
            cuda.gdc_launch_dependents()
        at += tl.program_id(2) * tl.num_programs(1) * HEADS
        tl.store(found + at[:, None] * WIDTH + column[None, :], sums, mask=inside)
        tl.store(peak + at, most, mask=head < GROUP)
        tl.store(weight + at, total, mask=head < GROUP)


@triton.jit
def _is_read(begin, end, CHUNK: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a chunk of the context from `begin` on has tokens that the row sees which is the last before `end`."""
    read = begin < end
    if WINDOW:
        read = read & (begin + CHUNK > end - WINDOW)
    return read


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    found,
    peak,
    weight,
    starts,
    depths,
    out,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOON: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, queries = tl.program_id(0), tl.num_programs(0) * tl.num_programs(1)
    at = token * tl.num_programs(1) + tl.program_id(1)
    chunk = tl.arange(0, CHUNKS)
    end = tl.load(starts + token) + tl.load(depths + token) + 1
    used = _is_read(chunk * CHUNK, end, CHUNK, WINDOW)  # the others were not written
    if EARLY:
        _wait(SOON)
    if EARLY and not SOON:
        cuda.gdc_launch_dependents()
    row = chunk * queries + at
    peaks = tl.load(peak + row, mask=used, other=NOTHING)
    share = tl.exp(peaks - tl.max(peaks, 0))
    total = tl.sum(share * tl.load(weight + row, mask=used, other=0), 0)
    column = tl.arange(0, WIDTH)
    parts = tl.load(found + row[:, None] * WIDTH + column[None, :], mask=used[:, None], other=0)
    answer = tl.sum(parts * share[:, None], 0) / total
    tl.store(out + at * WIDTH + column, answer.to(out.dtype.element_ty))
