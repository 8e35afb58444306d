"""The operations of a captured pass, in Triton: the functions of `ops.py`, a launch or two each.

Around the products of a layer lie a dozen small operations. On a fast GPU each would take longer to begin than to do,
so most are made part of the products here. Sums are in float32.

A row is summed in an order that depends on the shape of the weights alone, and attention cuts the context into chunks
that depend on the capacity alone. So a token's logits are the same bits, however many tokens are read with it, and
greedy text is the same with and without a draft.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float16, float32

from .layout import Norm, Product

ROWS = 16  # that one program takes: the least that the matrix units do
GATED = 1024  # numbers of a row that one program gates
COLUMNS, MANY = 16, 8192  # of a product that one program makes; twice that, where there are more than so many
STEP_BYTES = 512  # of a row of the weights that are taken at a time,
PARTS = 4  # in parts that are added up side by side: by one warp each, of which none then waits for another's sum
STAGES, WIDE_STAGES = 5, 4  # steps on their way, as many as let a processor of an H100 hold three programs
KEY_BYTES = 128  # of a column of the keys that are taken at a time
LEAST_CHUNK, MOST_CHUNKS = 128, 32
NOTHING = tl.constexpr(-1e30)  # a logit whose weight is 0; minus infinity less itself would not be a number


def usable(width: int) -> bool:
    """Whether heads of this width can be had: a power of two that the matrix units take."""
    return width in (16, 32, 64, 128)


def product(step: Product, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None) -> Tensor:
    """See `ops.product`. Every program takes some columns and all of the sums that make them."""
    assert step.weight is not None, "nothing is packed on a GPU"
    if norm is not None and (norm.bias is not None or x.dtype == float16):  # float16 may not hold what lacks its scale
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
    # Rows run fastest: the programs that read the same weights follow each other, while these are in the cache.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, PARTS)[:, None] * (STEP // PARTS) + tl.arange(0, STEP // PARTS)[None, :]
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([PARTS, ROWS, ROWS], tl.float32)
    for begin in range(0, INNER, STEP):
        place = begin + step
        there = place < INNER
        at, inside = row[None, :, None] * INNER + place[:, None, :], (row < count)[None, :, None] & there[:, None, :]
        some = tl.load(x + at, mask=inside, other=0)
        part = tl.load(
            weight + column[None, None, :].to(tl.int64) * INNER + place[:, :, None],
            mask=(column < outer)[None, None, :] & there[:, :, None],
            other=0,
        )
        if NORMED:  # the scale of a row is known when all of it was read; until then the sums lack it
            # The matrix units square, and then have no use for all but the diagonal: whatever else read `some` would
            # have it laid out so in shared memory that eight of their reads wait for each other.
            squares += tl.dot(some, tl.permute(some, (0, 2, 1)), input_precision="ieee")
            scales = tl.load(norm + place, mask=there, other=0).to(tl.float32)
            some = (some.to(tl.float32) * scales[:, None, :]).to(x.dtype.element_ty)
        sums += tl.dot(some, part, input_precision="ieee")
    sums = tl.sum(sums, 0)
    if NORMED:
        ones = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
        square = tl.sum(tl.where(ones, tl.sum(squares, 0), 0), 1)
        sums *= tl.rsqrt(square / INNER + eps)[:, None]
    if BIASED:
        sums += tl.load(bias + column, mask=column < outer, other=0).to(tl.float32)[None, :]
    at, inside = row[:, None] * outer + column[None, :], (row < count)[:, None] & (column < outer)[None, :]
    if ADDED:
        sums = sums.to(x.dtype.element_ty).to(tl.float32) + tl.load(plus + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def swiglu(x: Tensor) -> Tensor:
    """See `layout.swiglu`. Done once, and not by each of the programs of the product that reads it."""
    count, inner = len(x), x.shape[1] // 2
    out = x.new_empty(count, inner)
    _swiglu[(count, triton.cdiv(inner, GATED))](x, out, INNER=inner, STEP=GATED)
    return out


@triton.jit
def _swiglu(x, out, INNER: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0), tl.program_id(1) * STEP + tl.arange(0, STEP)
    there = place < INNER
    gate = tl.load(x + row * 2 * INNER + place, mask=there, other=0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + place, mask=there, other=0).to(tl.float32)
    tl.store(out + row * INNER + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=there)


def place(
    qkv: Tensor,
    head_norms: tuple[Norm, Norm] | None,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
) -> Tensor:
    """See `ops.place`."""
    (count, _), (kv_heads, capacity, width) = qkv.shape, keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    q = qkv.new_empty(count, heads, width)
    cos, sin = rotation or (qkv, qkv)
    q_weight, k_weight = (norm.weight for norm in head_norms) if head_norms else (qkv, qkv)
    _place[(count, heads + 2 * kv_heads)](
        *(qkv, q, keys, values, cos, sin, q_weight, k_weight, start, capacity),
        head_norms[0].eps if head_norms else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        NORMED=head_norms is not None,
        ROTATED=rotation is not None,
        num_warps=1,
    )
    return q


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    qkv,
    queries,
    keys,
    values,
    cos,
    sin,
    q_weight,
    k_weight,
    start,
    capacity,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(start) + token
    low = tl.arange(0, HALF)
    high = HALF + low
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    if head >= HEADS + KV_HEADS:
        target = values + ((head - HEADS - KV_HEADS) * capacity + position) * 2 * HALF
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
            target = keys + ((head - HEADS) * capacity + position) * 2 * HALF
            tl.store(target + low, a)
            tl.store(target + high, b)


def attend(q: Tensor, keys: Tensor, values: Tensor, start: Tensor) -> Tensor:
    """See `ops.attend`. Chunks of the context go to programs of their own, and what they found is put together."""
    (count, heads, width), (kv_heads, capacity, _) = q.shape, keys.shape
    group = heads // kv_heads
    chunk = max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(capacity, MOST_CHUNKS)))
    chunks = triton.cdiv(capacity, chunk)
    found = q.new_empty(chunks, count * heads, width, dtype=float32)
    peak, weight = q.new_empty(2, chunks, count * heads, dtype=float32)
    _attend[(kv_heads, triton.cdiv(count * group, ROWS), chunks)](
        *(q, keys, values, start, found, peak, weight, count, capacity, width**-0.5),
        HEADS=heads,
        GROUP=group,
        WIDTH=width,
        CHUNK=chunk,
        ROWS=ROWS,
        KEYS=KEY_BYTES // q.element_size(),
    )
    out = q.new_empty(count, heads * width)
    _combine[(count * heads,)](
        *(found, peak, weight, start, out, count),
        HEADS=heads,
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _attend(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    start,
    found,
    peak,
    weight,
    count,
    capacity,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head, block, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    live = tl.load(start).to(tl.int32)
    row = block * ROWS + tl.arange(0, ROWS)  # a query: a token and one of the heads that share this key head
    token = row // GROUP
    inside = token < count
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, live + tl.minimum((block * ROWS + ROWS - 1) // GROUP, count - 1) + 1)
    if begin < end:
        column = tl.arange(0, WIDTH)
        at = token * HEADS + kv_head * GROUP + row % GROUP
        query = tl.load(q + at[:, None] * WIDTH + column[None, :], mask=inside[:, None], other=0)
        first = kv_head.to(tl.int64) * capacity * WIDTH
        most = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        for offset in range(0, CHUNK, KEYS):
            place = begin + offset + tl.arange(0, KEYS)
            there = place < end
            key = tl.load(keys + first + place[None, :] * WIDTH + column[:, None], mask=there[None, :], other=0)
            logits = tl.dot(query, key, input_precision="ieee") * scale
            logits = tl.where(place[None, :] <= live + token[:, None], logits, NOTHING)
            higher = tl.maximum(most, tl.max(logits, 1))
            share = tl.exp(logits - higher[:, None])
            fade = tl.exp(most - higher)
            value = tl.load(values + first + place[:, None] * WIDTH + column[None, :], mask=there[:, None], other=0)
            sums = sums * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            total = total * fade + tl.sum(share, 1)
            most = higher
        at += chunk * count * HEADS
        tl.store(found + at[:, None] * WIDTH + column[None, :], sums, mask=inside[:, None])
        tl.store(peak + at, most, mask=inside)
        tl.store(weight + at, total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _combine(  # type: ignore[no-untyped-def]
    found,
    peak,
    weight,
    start,
    out,
    count,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    at = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    used = chunk * CHUNK <= tl.load(start).to(tl.int32) + at // HEADS  # the others were not written
    row = chunk * count * HEADS + at
    peaks = tl.load(peak + row, mask=used, other=NOTHING)
    share = tl.exp(peaks - tl.max(peaks, 0))
    total = tl.sum(share * tl.load(weight + row, mask=used, other=0), 0)
    column = tl.arange(0, WIDTH)
    parts = tl.load(found + row[:, None] * WIDTH + column[None, :], mask=used[:, None], other=0)
    answer = tl.sum(parts * share[:, None], 0) / total
    tl.store(out + at * WIDTH + column, answer.to(out.dtype.element_ty))
