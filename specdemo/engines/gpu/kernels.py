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

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, float16, float32
from triton.language.extra import cuda

from .. import ops
from ..linear import Linear, Norm
from ..rows import MOST_ROWS

ROWS = 16  # rows of a program: the least that the matrix units take
LARGE = 2**23  # a product of more weights than these computes twice as many rows in a program, if there are so many
FEW, FEW_STAGES = 8, 5  # columns of a product that a program computes, and steps in flight: of a product of up to
NARROW = 2048  # so many columns, where more programs share the work,
MANY, MANY_STAGES = 32, 4  # and of others
STEP_BYTES = 512  # bytes of a row of the weights that a program reads at a time,
PARTS = 4  # in parts that are summed side by side, one warp each, so that none waits for another
KEY_BYTES = 256  # bytes of a column of the keys that a program reads at a time
LEAST_CHUNK, MOST_CHUNKS = 128, 32
EARLY_FROM = (9, 0)  # the compute capability
UNIT = tl.constexpr(ops.UNIT)  # the compiler, which knows it, reads 16 bytes at a time
LINE = tl.constexpr(MOST_ROWS)  # numbers of a path
NOTHING = tl.constexpr(-1e30)  # a logit whose weight is 0; minus infinity less itself would be NaN


def usable(width: int) -> bool:
    """Whether the kernels can run heads of this width: a power of two that the matrix units take."""
    return width in (16, 32, 64, 128)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_FROM


def launched_on(device: torch.device) -> dict[str, Any]:
    """How kernels are launched."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def probe(x: Tensor) -> Tensor:
    """A small kernel for x [1, 16], which tells whether Triton can build one."""
    return product(Linear.unpacked(x.new_ones(16, 16), None), x)


def product(
    step: Linear, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None, gated: bool = False
) -> Tensor:
    """See `ops.product`. Every program computes some columns, with all of their sums."""
    assert step.weight is not None, "nothing is packed on a GPU"
    if norm is not None and (norm.bias is not None or x.dtype == float16):  # float16 may overflow without the scale
        x, norm = norm(x), None
    (count, _), (outer, inner) = x.shape, step.weight.shape
    columns, stages = (FEW, FEW_STAGES) if outer <= NARROW else (MANY, MANY_STAGES)
    rows = 2 * ROWS if count > ROWS and step.weight.numel() > LARGE else ROWS
    size = min(STEP_BYTES // x.element_size(), max(16, triton.next_power_of_2(inner)))
    if gated:
        outer //= 2
    out = x.new_empty(count, outer)
    _product[(triton.cdiv(count, rows), triton.cdiv(outer, columns // 2 if gated else columns))](
        *(x, step.weight, x if step.bias is None else step.bias, norm.weight if norm else x),
        *(x if plus is None else plus, out, count, outer, norm.eps if norm else 0.0),
        INNER=inner,
        NORMED=norm is not None,
        BIASED=step.bias is not None,
        ADDED=plus is not None,
        GATED=gated,
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
    out,
    count,
    outer,
    eps,
    INNER: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Rows run fastest: programs that read the same weights follow each other, so they find them in the cache.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS  # columns of the result
    place = tl.arange(0, COLUMNS)
    column = tl.program_id(1) * OWN + place % OWN
    own, line = column < outer, column + place // OWN * outer  # the lines of the gates come first, then the others
    if EARLY:
        _request(weight, line, own, INNER, STEP)
        cuda.gdc_wait()
    step = tl.arange(0, PARTS)[:, None] * (STEP // PARTS) + tl.arange(0, STEP // PARTS)[None, :]
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([PARTS, ROWS, ROWS], tl.float32)
    for begin in range(0, INNER, STEP):
        index = begin + step
        valid = index < INNER
        at, inside = row[None, :, None] * INNER + index[:, None, :], (row < count)[None, :, None] & valid[:, None, :]
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
    at, inside = row[:, None] * outer + column[None, :], (row < count)[:, None] & (column < outer)[None, :]
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


class Placed(NamedTuple):
    """The arguments of `ops.placed`."""

    starts: Tensor
    caches: Tensor
    paths: Tensor
    depths: Tensor


def placed(where: Tensor, paths: Tensor, depths: Tensor, capacity: int, apart: bool = False) -> Placed:
    """See `ops.placed`."""
    return Placed(where[0], where[1], paths, depths)


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
        *(qkv, q, keys, values, cos, sin, q_weight, k_weight),
        *(rows.starts, rows.caches, rows.paths, rows.depths, capacity, head_norms[0].eps if head_norms else 0.0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        NORMED=head_norms is not None,
        ROTATED=rotation is not None,
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
    ROTATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    start, depth = tl.load(starts + token), tl.load(depths + token)
    slot, position = start + tl.load(paths + token * LINE + depth), start + depth
    cache = tl.load(caches + token) * UNIT
    if EARLY:
        cuda.gdc_wait()
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
    """See `ops.attend`. A program attends to one chunk of the context, for the heads of one token that share its keys.

    `_combine` adds the chunks up.
    """
    (count, heads, width), (kv_heads, capacity, _) = q.shape, keys.shape
    group = heads // kv_heads
    chunk = max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(capacity, MOST_CHUNKS)))
    chunks = triton.cdiv(capacity, chunk)
    found = q.new_empty(chunks, count * heads, width, dtype=float32)
    peak, weight = q.new_empty(2, chunks, count * heads, dtype=float32)
    _attend[(kv_heads * triton.cdiv(group, ROWS), count, chunks)](
        *(q, keys, values, *rows, found, peak, weight, capacity, width**-0.5),
        HEADS=heads,
        GROUP=group,
        WIDTH=width,
        CHUNK=chunk,
        ROWS=ROWS,
        KEYS=min(KEY_BYTES // q.element_size(), chunk),
        **launched_on(q.device),
    )
    out = q.new_empty(count, heads * width)
    _combine[(count, heads)](
        *(found, peak, weight, rows.starts, rows.depths, out),
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
        **launched_on(q.device),
    )
    return out


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
    EARLY: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head, token, begin = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2) * CHUNK
    start = tl.load(starts + token).to(tl.int32)
    end = start + tl.load(depths + token).to(tl.int32) + 1
    if EARLY:
        cuda.gdc_wait()
    if begin < end:
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
            slot = tl.load(paths + token * LINE + index - start, mask=seen & (index >= start), other=0)
            slot = tl.where(index < start, index, start + slot)
            key = tl.load(keys + first + slot[None, :] * WIDTH + column[:, None], mask=seen[None, :], other=0)
            logits = tl.dot(query, key, input_precision="ieee") * scale
            logits = tl.where(seen[None, :], logits, NOTHING)
            higher = tl.maximum(most, tl.max(logits, 1))
            share = tl.exp(logits - higher[:, None])
            fade = tl.exp(most - higher)
            value = tl.load(values + first + slot[:, None] * WIDTH + column[None, :], mask=seen[:, None], other=0)
            sums = sums * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            total = total * fade + tl.sum(share, 1)
            most = higher
        if EARLY:
            cuda.gdc_launch_dependents()
        at += tl.program_id(2) * tl.num_programs(1) * HEADS
        tl.store(found + at[:, None] * WIDTH + column[None, :], sums, mask=inside)
        tl.store(peak + at, most, mask=head < GROUP)
        tl.store(weight + at, total, mask=head < GROUP)


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
    EARLY: tl.constexpr,
):
    token, queries = tl.program_id(0), tl.num_programs(0) * tl.num_programs(1)
    at = token * tl.num_programs(1) + tl.program_id(1)
    chunk = tl.arange(0, CHUNKS)
    used = chunk * CHUNK <= tl.load(starts + token) + tl.load(depths + token)  # the others were not written
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = chunk * queries + at
    peaks = tl.load(peak + row, mask=used, other=NOTHING)
    share = tl.exp(peaks - tl.max(peaks, 0))
    total = tl.sum(share * tl.load(weight + row, mask=used, other=0), 0)
    column = tl.arange(0, WIDTH)
    parts = tl.load(found + row[:, None] * WIDTH + column[None, :], mask=used[:, None], other=0)
    answer = tl.sum(parts * share[:, None], 0) / total
    tl.store(out + at * WIDTH + column, answer.to(out.dtype.element_ty))
