"""The kernel that grows trees, in torch's operations: what a CPU has in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from specdemo.decoding.sampling import certainty
from specdemo.drafters.captured_trees import PARENT, SHARE, VALUE, Growth
from specdemo.engines.rows import MOST_ROWS


def grown(growth: Growth, token_ids: Tensor, shares: Tensor, limits: Tensor, width: int, most_rows: int) -> Growth:
    """See `Growth.grown`."""
    table, size, each = growth.table, growth.table.shape[1], shares.shape[1]
    shares = torch.where(growth.real[:, None], shares.double(), 0)
    values = table[VALUE][growth.places][:, None] * shares
    values = torch.where(values > 0, values, 0)  # NaN too
    parts = shares, token_ids.double(), growth.places[:, None].double()
    named = torch.stack([values, *(part.expand_as(values) for part in parts)])
    both = torch.cat([table, named.flatten(1)], 1)
    both[SHARE, :1] *= certainty(shares.sum())
    order = both[VALUE].sort(descending=True, stable=True).indices  # of equal values the one named first
    columns = torch.arange(len(order), device=order.device)
    moved = torch.empty_like(order).scatter_(0, order, columns)
    order, columns = order[:size], columns[:size]
    table = both[:, order]
    table[PARENT] = moved[table[PARENT].long()].double()

    nodes, stop_below = limits
    wanted = (table[VALUE] > 0) & (columns <= nodes) & ((table[VALUE] >= stop_below) | (columns == 1))
    wanted &= order >= size
    row = torch.arange(width, device=order.device)
    count = wanted.sum(0, keepdim=True).clamp(max=width).minimum(most_rows - growth.read)
    copied = row.minimum((count - 1).clamp(min=0))
    places = (~wanted).byte().sort(stable=True).indices[copied]
    rows = (order[places] - size).clamp(min=0) // each
    slots = (growth.read + copied).clamp(max=MOST_ROWS - 1)
    return Growth(table, places, rows, row < count, slots, growth.read + count, growth.depth + 1)
