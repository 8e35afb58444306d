"""A depth of a tree in one launch instead of fifty: `Growth.grown` of `drafters/captured_trees.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...settings import MAX_NODES
from ..rows import MOST_ROWS, WIDTH

COMPARED = 2**12  # pairs of values at a time


def prepare(device: torch.device) -> None:
    """Compile `grown` for the trees of drafters that read `WIDTH` tokens at once: after the text, and after a depth."""
    table, limits = (torch.zeros(size, dtype=torch.float64, device=device) for size in ((4, MAX_NODES + 1), (2,)))
    one = torch.zeros(1, dtype=torch.long, device=device)
    for read in (1, WIDTH):
        places = one.new_zeros(read)
        ids = one.new_zeros(read, WIDTH)
        grown(table, places, places != 0, one, one, ids, ids.float(), limits, WIDTH, MOST_ROWS)


def grown(
    table: Tensor,
    places: Tensor,
    real: Tensor,
    read: Tensor,
    depth: Tensor,
    token_ids: Tensor,
    shares: Tensor,
    limits: Tensor,
    width: int,
    most_rows: int,
) -> tuple[Tensor, ...]:
    """The fields of the tree a depth later, from those of a `Growth` and the arguments of `Growth.grown`.

    `width` is a power of two. A value's place is the number of those before it, so nothing is sorted.
    """
    (_, size), children = table.shape, shares.shape[1]
    block = triton.next_power_of_2(size + len(places) * children)
    new = [table.new_empty(table.shape), *(places.new_empty(width) for _ in range(2)), real.new_empty(width)]
    new += [places.new_empty(width), torch.empty_like(read), torch.empty_like(depth)]
    _grown[(1,)](
        table,
        places,
        real,
        read,
        depth,
        token_ids.contiguous(),
        shares.contiguous(),
        limits,
        *new,
        most_rows,
        SIZE=size,
        READ=len(places),
        CHILDREN=children,
        SAME=len(shares) < len(places),
        WIDTH=width,
        SLOTS=MOST_ROWS,
        BLOCK=block,
        STEP=COMPARED // block,
        num_warps=8,
    )
    return tuple(new)


@triton.jit
def _named(  # type: ignore[no-untyped-def]
    index,
    table,
    places,
    real,
    shares,
    SIZE: tl.constexpr,
    READ: tl.constexpr,
    CHILDREN: tl.constexpr,
    SAME: tl.constexpr,
):
    """Of the tokens of a table, and of those that may follow what was read: value, share, parent and row, and where a
    share lies."""
    old = index < SIZE
    new = (index >= SIZE) & (index < SIZE + READ * CHILDREN)
    row = tl.where(new, index - SIZE, 0) // CHILDREN
    at = tl.where(new, index - SIZE, 0) % CHILDREN
    if not SAME:
        at += row * CHILDREN
    place = tl.load(places + row, mask=new, other=0)
    counts = new & (tl.load(real + row, mask=new, other=0) != 0)
    share = tl.load(shares + at, mask=counts, other=0).to(tl.float64)
    value = tl.load(table + place) * share
    value = tl.where(old, tl.load(table + index, mask=old, other=0), tl.where(value > 0, value, 0))  # NaN is 0
    share = tl.where(old, tl.load(table + SIZE + index, mask=old, other=0), share)
    parent = tl.where(old, tl.load(table + 3 * SIZE + index, mask=old, other=0).to(tl.int64), place)
    return value, share, parent, row, at


@triton.jit(do_not_specialize=["most_rows"])
def _grown(  # type: ignore[no-untyped-def]
    table,
    places,
    real,
    read,
    depth,
    token_ids,
    shares,
    limits,
    new_table,
    new_places,
    new_rows,
    new_real,
    new_slots,
    new_read,
    new_depth,
    most_rows,
    SIZE: tl.constexpr,
    READ: tl.constexpr,
    CHILDREN: tl.constexpr,
    SAME: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    index = tl.arange(0, BLOCK)
    value, share, parent, row, at = _named(index, table, places, real, shares, SIZE, READ, CHILDREN, SAME)
    value_above = tl.load(table + parent)
    rank = tl.zeros([BLOCK], tl.int32)  # how many come before a token,
    earlier = tl.zeros([BLOCK], tl.int32)  # of these, how many are new,
    moved = tl.zeros([BLOCK], tl.int32)  # and how many come before its parent
    for begin in range(0, BLOCK, STEP):
        other = begin + tl.arange(0, STEP)
        theirs, _, _, _, _ = _named(other, table, places, real, shares, SIZE, READ, CHILDREN, SAME)
        more, tie = theirs[None, :] > value[:, None], theirs[None, :] == value[:, None]
        before = more | (tie & (other[None, :] < index[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
        earlier += tl.sum((before & (other >= SIZE)[None, :]).to(tl.int32), 1)
        more, tie = theirs[None, :] > value_above[:, None], theirs[None, :] == value_above[:, None]
        moved += tl.sum((more | (tie & (other[None, :] < parent[:, None]))).to(tl.int32), 1)

    is_new = index >= SIZE
    total = tl.sum(tl.where(is_new, share, 0), 0)
    share = tl.where(index == 0, share + (total - total), share)  # NaN stays with the text
    old_id = tl.load(table + 2 * SIZE + index, mask=index < SIZE, other=0)
    token = tl.where(is_new, tl.load(token_ids + at).to(tl.float64), old_id)
    kept = rank < SIZE
    tl.store(new_table + rank, value, mask=kept)
    tl.store(new_table + SIZE + rank, share, mask=kept)
    tl.store(new_table + 2 * SIZE + rank, token, mask=kept)
    tl.store(new_table + 3 * SIZE + rank, moved.to(tl.float64), mask=kept)

    nodes, stop_below, live = tl.load(limits), tl.load(limits + 1), tl.load(read).to(tl.int32)
    wanted = is_new & (value > 0) & (rank.to(tl.float64) <= nodes) & ((value >= stop_below) | (rank == 1))
    count = tl.minimum(tl.minimum(tl.sum(wanted.to(tl.int32), 0), WIDTH), most_rows - live)
    chosen = wanted & (earlier < count)
    tl.store(new_places + earlier, rank.to(tl.int64), mask=chosen)
    tl.store(new_rows + earlier, row.to(tl.int64), mask=chosen)
    last = chosen & (earlier == count - 1)
    place = tl.arange(0, WIDTH)
    copy = place >= count
    nothing = tl.zeros([WIDTH], tl.int64)
    tl.store(new_places + place, nothing + tl.sum(tl.where(last, rank, 0), 0), mask=copy)
    tl.store(new_rows + place, nothing + tl.sum(tl.where(last, row, 0), 0), mask=copy)
    tl.store(new_real + place, place < count)
    slot = live + tl.minimum(place, tl.maximum(count - 1, 0))
    tl.store(new_slots + place, tl.minimum(slot, SLOTS - 1).to(tl.int64))
    tl.store(new_read, (live + count).to(tl.int64))
    tl.store(new_depth, tl.load(depth) + 1)
