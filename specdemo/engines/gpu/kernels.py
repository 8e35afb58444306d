"""The operations of a captured pass, in Triton: the functions of `ops.py`, a launch or two each.

A layer has a dozen small operations around its products. On a fast GPU each takes longer to launch than to run, so
most of them are fused into a product here. Sums are float32.

The order of a row's sums depends only on the shape of the weights, and attention cuts the context into chunks that
depend only on the capacity. A row of a tree reads the keys and values of its branch from wherever they lie, and adds
them up like those of a chain. So a token's logits are the same bits whatever else a pass reads, and greedy text is the
same with and without a draft.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float16, float32

from .. import ops
from ..linear import Linear, Norm
from ..rows import MOST_ROWS

ROWS = 16  # rows of a program: the least that the matrix units take
GATED = 1024  # numbers of a row that a program gates
COLUMNS, MANY = 16, 8192  # columns of a product that a program computes; twice that for a product of more than MANY
STEP_BYTES = 512  # bytes of a row of the weights that a program reads at a time,
PARTS = 4  # in parts that are summed side by side, one warp each, so that none waits for another
STAGES, WIDE_STAGES = 5, 4  # steps in flight: as many as leave room for three programs on a processor of an H100
KEY_BYTES = 128  # bytes of a column of the keys that a program reads at a time
LEAST_CHUNK, MOST_CHUNKS = 128, 32
UNIT = tl.constexpr(ops.UNIT)  # the compiler, which knows it, reads 16 bytes at a time
LINE = tl.constexpr(MOST_ROWS)  # numbers of a path
NOTHING = tl.constexpr(-1e30)  # a logit whose weight is 0; minus infinity less itself would be NaN


def usable(width: int) -> bool:
    """Whether the kernels can run heads of this width: a power of two that the matrix units take."""
    return width in (16, 32, 64, 128)


def product(step: Linear, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None) -> Tensor:
    """See `ops.product`. Every program computes some columns, with all of their sums."""
    assert step.weight is not None, "nothing is packed on a GPU"
    if norm is not None and (norm.bias is not None or x.dtype == float16):  # float16 may overflow without the scale
        x, norm = norm(x), None
    (count, _), (outer, inner) = x.shape, step.weight.shape
    out = x.new_empty(count, outer)
    columns, stages = (COLUMNS, STAGES) if outer <= MANY else (2 * COLUMNS, WIDE_STAGES)
    size = min(STEP_BYTES // x.element_size(), max(16, triton.next_power_of_2(inner)))
    _product[(triton.cdiv(count, ROWS), triton.cdiv(outer, columns))](
        *(x, step.weight, x if step.bias is None else step.bias, norm.weight if norm else x),
        *(x if plus is None else plus, out, count, outer, norm.eps if norm else 0.0),
        INNER=inner,
        NORMED=norm is not None,
        BIASED=step.bias is not None,
        ADDED=plus is not None,
        ROWS=ROWS,
        COLUMNS=columns,
        STEP=size,
        PARTS=min(PARTS, size // 16),
        num_stages=stages,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    norm,
    plus,
    out,
    count,
    outer,
    eps,
    INNER: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
):
    # Rows run fastest: programs that read the same weights follow each other, so they find them in the cache.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, PARTS)[:, None] * (STEP // PARTS) + tl.arange(0, STEP // PARTS)[None, :]
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([PARTS, ROWS, ROWS], tl.float32)
    for begin in range(0, INNER, STEP):
        index = begin + step
        valid = index < INNER
        at, inside = row[None, :, None] * INNER + index[:, None, :], (row < count)[None, :, None] & valid[:, None, :]
        some = tl.load(x + at, mask=inside, other=0)
        part = tl.load(
            weight + column[None, None, :].to(tl.int64) * INNER + index[:, :, None],
            mask=(column < outer)[None, None, :] & valid[:, :, None],
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
    sums = tl.sum(sums, 0)
    if NORMED:
        diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
        square = tl.sum(tl.where(diagonal, tl.sum(squares, 0), 0), 1)
        sums *= tl.rsqrt(square / INNER + eps)[:, None]
    if BIASED:
        sums += tl.load(bias + column, mask=column < outer, other=0).to(tl.float32)[None, :]
    at, inside = row[:, None] * outer + column[None, :], (row < count)[:, None] & (column < outer)[None, :]
    if ADDED:
        sums = sums.to(x.dtype.element_ty).to(tl.float32) + tl.load(plus + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def swiglu(x: Tensor) -> Tensor:
    """See `linear.swiglu`. A launch of its own: else each program of the product that reads it would compute it."""
    count, inner = len(x), x.shape[1] // 2
    out = x.new_empty(count, inner)
    _swiglu[(count, triton.cdiv(inner, GATED))](x, out, INNER=inner, STEP=GATED)
    return out


@triton.jit
def _swiglu(x, out, INNER: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    row, index = tl.program_id(0), tl.program_id(1) * STEP + tl.arange(0, STEP)
    valid = index < INNER
    gate = tl.load(x + row * 2 * INNER + index, mask=valid, other=0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + index, mask=valid, other=0).to(tl.float32)
    tl.store(out + row * INNER + index, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=valid)


class Placed(NamedTuple):
    """The arguments of `ops.placed`. A chain has no paths and depths, and its kernels read none."""

    starts: Tensor
    caches: Tensor
    paths: Tensor | None
    depths: Tensor | None
    together: bool


def placed(where: Tensor, branches: Tensor | None, count: int, capacity: int, together: bool = False) -> Placed:
    """See `ops.placed`."""
    paths, depths = (None, None) if branches is None else (branches[:-1], branches[-1])
    return Placed(where[0], where[1], paths, depths, together)


def write_kv(
    qkv: Tensor,
    head_norms: tuple[Norm, Norm] | None,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    rows: Placed,
) -> Tensor:
    """See `ops.write_kv`."""
    (count, _), (kv_heads, capacity, width) = qkv.shape, keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    q = qkv.new_empty(count, heads, width)
    cos, sin = rotation or (qkv, qkv)
    q_weight, k_weight = (norm.weight for norm in head_norms) if head_norms else (qkv, qkv)
    _write_kv[(count, heads + 2 * kv_heads)](
        *(qkv, q, keys, values, cos, sin, q_weight, k_weight, rows.starts, rows.caches, rows.depths, capacity),
        head_norms[0].eps if head_norms else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        NORMED=head_norms is not None,
        ROTATED=rotation is not None,
        BRANCHING=rows.depths is not None,
        num_warps=1,
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
    q_weight,
    k_weight,
    starts,
    caches,
    depths,
    capacity,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    BRANCHING: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + token)
    slot = start + token
    position = start + tl.load(depths + token) if BRANCHING else slot
    cache = tl.load(caches + token) * UNIT
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
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
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
            tl.store(queries + (token * HEADS + head) * 2 * HALF + low, a)
            tl.store(queries + (token * HEADS + head) * 2 * HALF + high, b)
        else:
            target = keys + cache + ((head - HEADS) * capacity + slot) * 2 * HALF
            tl.store(target + low, a)
            tl.store(target + high, b)


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Placed) -> Tensor:
    """See `ops.attend`. A program attends to one chunk of the context; `_combine` adds the chunks up.

    All rows of a program are of one sequence. Where there are several, it has those of one token.
    """
    (count, heads, width), (kv_heads, capacity, _) = q.shape, keys.shape
    group = heads // kv_heads
    chunk = max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(capacity, MOST_CHUNKS)))
    chunks = triton.cdiv(capacity, chunk)
    found = q.new_empty(chunks, count * heads, width, dtype=float32)
    peak, weight = q.new_empty(2, chunks, count * heads, dtype=float32)
    size = max(size for size in range(1, ROWS + 1) if group % size == 0) if rows.together else ROWS
    _attend[(kv_heads, triton.cdiv(count * group, size), chunks)](
        *(q, keys, values, *rows[:-1], found, peak, weight, count, size, capacity, width**-0.5),
        HEADS=heads,
        GROUP=group,
        WIDTH=width,
        CHUNK=chunk,
        ROWS=ROWS,
        KEYS=KEY_BYTES // q.element_size(),
        BRANCHING=rows.depths is not None,
    )
    out = q.new_empty(count, heads * width)
    _combine[(count * heads,)](
        *(found, peak, weight, rows.starts, out, count),
        HEADS=heads,
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
    )
    return out


@triton.jit(do_not_specialize=["count", "size"])
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
    count,
    size,
    capacity,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BRANCHING: tl.constexpr,
):
    kv_head, block, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tl.arange(0, ROWS)
    row = block * size + place  # a query: a token and one of the heads that share this key head
    token = row // GROUP
    one, last = block * size // GROUP, tl.minimum((block * size + size - 1) // GROUP, count - 1)  # tokens
    inside = (place < size) & (token < count)
    live = tl.load(starts + one).to(tl.int32)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, live + last + 1)
    if begin < end:
        column = tl.arange(0, WIDTH)
        at = token * HEADS + kv_head * GROUP + row % GROUP
        query = tl.load(q + at[:, None] * WIDTH + column[None, :], mask=inside[:, None], other=0)
        first = kv_head.to(tl.int64) * capacity * WIDTH + tl.load(caches + one) * UNIT
        most = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        # In a tree, first the steps over the cache, which all tokens see alike. What a row adds up before it has seen a
        # key gets the weight 0 as soon as it sees one.
        if BRANCHING:
            end = begin + tl.maximum(live - begin, 0) // KEYS * KEYS
        for offset in range(0, CHUNK, KEYS):
            index = begin + offset + tl.arange(0, KEYS)
            valid = index < end
            seen = valid[None, :] if BRANCHING else index[None, :] <= live + token[:, None]
            most, total, sums = _step(
                query, keys + first, values + first, index, valid, seen, scale, most, total, sums, WIDTH
            )
        if BRANCHING:  # then the tokens of this block one by one
            for further in range(0, (ROWS - 1) // GROUP + 2):
                each = one + further
                if each <= last:
                    own, reach = token == each, live + tl.load(depths + each).to(tl.int32) + 1
                    for offset in range(0, CHUNK, KEYS):
                        step = begin + offset
                        if (step >= end) & (step < reach):
                            index = step + tl.arange(0, KEYS)
                            valid = index < reach
                            behind = tl.load(paths + each * LINE + index - live, mask=valid & (index >= live), other=0)
                            slot = tl.where(index < live, index, live + behind)
                            new_most, new_total, new_sums = _step(
                                *(query, keys + first, values + first, slot, valid, valid[None, :], scale),
                                *(most, total, sums, WIDTH),
                            )
                            most, total = tl.where(own, new_most, most), tl.where(own, new_total, total)
                            sums = tl.where(own[:, None], new_sums, sums)
        at += chunk * count * HEADS
        tl.store(found + at[:, None] * WIDTH + column[None, :], sums, mask=inside[:, None])
        tl.store(peak + at, most, mask=inside)
        tl.store(weight + at, total, mask=inside)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    query, keys, values, slot, valid, seen, scale, most, total, sums, WIDTH: tl.constexpr
):
    """Add the `valid` ones of some slots to what was attended to before."""
    column = tl.arange(0, WIDTH)
    key = tl.load(keys + slot[None, :] * WIDTH + column[:, None], mask=valid[None, :], other=0)
    logits = tl.dot(query, key, input_precision="ieee") * scale
    logits = tl.where(seen, logits, NOTHING)
    higher = tl.maximum(most, tl.max(logits, 1))
    share = tl.exp(logits - higher[:, None])
    fade = tl.exp(most - higher)
    value = tl.load(values + slot[:, None] * WIDTH + column[None, :], mask=valid[:, None], other=0)
    sums = sums * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
    return higher, total * fade + tl.sum(share, 1), sums


@triton.jit(do_not_specialize=["count"])
def _combine(  # type: ignore[no-untyped-def]
    found,
    peak,
    weight,
    starts,
    out,
    count,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    at = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    used = chunk * CHUNK <= tl.load(starts + at // HEADS).to(tl.int32) + at // HEADS  # the others were not written
    row = chunk * count * HEADS + at
    peaks = tl.load(peak + row, mask=used, other=NOTHING)
    share = tl.exp(peaks - tl.max(peaks, 0))
    total = tl.sum(share * tl.load(weight + row, mask=used, other=0), 0)
    column = tl.arange(0, WIDTH)
    parts = tl.load(found + row[:, None] * WIDTH + column[None, :], mask=used[:, None], other=0)
    answer = tl.sum(parts * share[:, None], 0) / total
    tl.store(out + at * WIDTH + column, answer.to(out.dtype.element_ty))
