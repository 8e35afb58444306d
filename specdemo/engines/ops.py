"""The operations of a captured pass, in torch. `kernels.py` has the same functions in Triton.

A captured pass can only be replayed on the same buffers, so their shapes never change. The number of tokens in the
cache and what the rows see are read from buffers too, so a pass serves texts of any length, chains and trees.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import Router, capped
from .linear import Linear, Norm, swiglu

UNIT = 16  # see `placed`
EXACT = False  # whether a row is the same bits whatever the other rows of a pass are
APART = False  # whether the rows of a pass may be of several sequences, see `placed`
PARTS = {  # of a pass, each of which either torch or a kernel computes
    "products": ("product",),
    "experts": ("choose", "chosen_product"),
    "sums": ("plus",),
    "attention": ("placed", "write_kv", "attend"),
}

__all__ = ["UNIT", "attend", "choose", "chosen_product", "placed", "plus", "product", "rotate", "write_kv"]


def partly(kernels: Any, by_torch: Collection[str]) -> Any:
    """The functions of this module by `kernels`, but for those of some of the `PARTS`."""
    if not by_torch:
        return kernels
    ours = {name: globals()[name] for part in by_torch for name in PARTS[part]}
    return SimpleNamespace(**{**vars(kernels), **ours, "EXACT": False, "APART": "attention" not in by_torch})


def product(
    step: Linear, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None, gated: bool = False
) -> Tensor:
    """step(norm(x)) + plus, [T, in] -> [T, out]; `norm` and `plus` are left out if None.

    `gated`: swiglu(step(norm(x))), [T, in] -> [T, out / 2].
    """
    x = step(norm(x) if norm else x)
    return swiglu(x) if gated else x if plus is None else x + plus


def choose(router: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and the numbers of the experts of T rows, of the scores of all: see `Router.choose`."""
    return router.choose(scores)


def chosen_product(weights: Tensor, x: Tensor, chosen: Tensor, norm: Norm | None = None, gated: bool = False) -> Tensor:
    """`product` with the experts that each of T rows chose, out of `weights` [experts, out, in].

    Torch multiplies by all experts: it has no product that reads some of them, as many each time, and copies none.

    Args:
        x: an input for all experts of a row, [T, in], or one for each of them, [T, used, in].
        chosen: the numbers of these experts, [T, used].

    Returns:
        [T, used, out], if `gated` of half as many numbers.
    """
    by_expert = F.linear(norm(x) if norm else x, weights.flatten(0, 1)).unflatten(-1, weights.shape[:2])
    by_expert = by_expert if x.dim() == 3 else by_expert[:, None]
    found = by_expert.take_along_dim(chosen[:, :, None, None], 2).squeeze(2)
    return swiglu(found) if gated else found


def plus(x: Tensor, added: Tensor, norm: Norm | None, scale: float, shares: Tensor | None = None) -> Tensor:
    """x + scale * norm(added), [T, hidden] each; there may be no norm.

    Args:
        shares: if `added` is what several experts add, [T, used, hidden], the weight of each, [T, used].
    """
    added = added if shares is None else mixed(added, shares)
    added = norm(added) if norm else added
    return x + (added if scale == 1 else added * scale)


def mixed(outputs: Tensor, shares: Tensor) -> Tensor:
    """The outputs of the experts of T rows [T, used, hidden], times their weights [T, used], added up in order."""
    total = outputs[:, 0] * shares[:, :1]
    for rank in range(1, shares.shape[1]):
        total = total + outputs[:, rank] * shares[:, rank, None]
    return total


class RowPlaces(NamedTuple):
    """Where the rows of a pass stand, and what they see.

    Attributes:
        slots: where their keys and values are written, [T] int64.
        positions: by which they are rotated, [T] int64.
        seen: the slots that each of them sees, [T, capacity] bool.
        at: the positions of the tokens in these slots, [T, capacity] int64.
    """

    slots: Tensor
    positions: Tensor
    seen: Tensor
    at: Tensor


def placed(where: Tensor, paths: Tensor, depths: Tensor, capacity: int, apart: bool = False) -> RowPlaces:
    """What `write_kv` and `attend` need to know of the T rows of a pass, in every layer.

    Args:
        where: for each row the number of tokens in its cache, and the distance of this cache from the one that
            `write_kv` and `attend` are given, in units of `UNIT` numbers, [2, T or more] int64.
        paths: the slots that each row sees after those tokens, from the first of these slots, its own last, uint8
            [T, MOST_ROWS]; after its end a path repeats it.
        depths: how many ancestors each row has, uint8 [T]. See `rows.branches_of`.
        apart: whether the rows may be of several sequences, chains with caches of their own. Only in Triton.
    """
    assert not apart, "torch cannot read a cache that it is not given"
    starts, slots = where[0, : len(depths)], torch.arange(capacity, device=where.device)
    paths, positions = paths + starts[:, None], depths + starts
    seen = (slots < starts[:, None]).scatter_(1, paths, True)
    along = starts[:, None] + torch.arange(paths.shape[1], device=where.device)
    at = slots.repeat(len(paths), 1).scatter_(1, paths, along.minimum(positions[:, None]))
    return RowPlaces(paths[:, -1], positions, seen, at)


def write_kv(
    qkv: Tensor,
    head_norms: tuple[Norm, Norm] | None,
    rotation: tuple[Tensor, ...] | None,
    keys: Tensor,
    values: Tensor,
    rows: RowPlaces,
) -> Tensor:
    """Norm and rotate the queries and keys of T tokens, and write their keys and values after those of the cache.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * width].
        rotation: cosines and signed sines, and what multiplies queries if they grow, see `FusedModel.rotations`.
        keys, values: [kv_heads, capacity, width], written in place.
    Returns:
        The queries, [T, heads, width].
    """
    (count, _), (kv_heads, _, width) = qkv.shape, keys.shape
    by_head = qkv.view(count, -1, width)
    q, k, v = by_head.split([by_head.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if head_norms:
        q, k = normed_heads(head_norms[0], q), normed_heads(head_norms[1], k)
    if rotation:
        cos, sin, *of_queries = (part.index_select(0, rows.positions) for part in rotation)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        for scale in of_queries:
            q = q * scale
    keys.index_copy_(1, rows.slots, k.transpose(0, 1))
    values.index_copy_(1, rows.slots, v.transpose(0, 1))
    return q


def normed_heads(norm: Norm, x: Tensor) -> Tensor:
    """The heads of T tokens [T, heads, width], normed each by itself, or all of a token together if the norm is as
    large."""
    return norm(x) if norm.weight.numel() == x.shape[-1] else norm(x.flatten(1)).view_as(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of x [T, heads, width], with cosines and signed sines [T, 1, width]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: RowPlaces,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Attention of T queries [T, heads, width] whose own keys and values are in the cache already.

    The query heads that share a key head become more queries of that head, so that no key or value is copied.

    Args:
        keys, values: [kv_heads, capacity, width].
        scale: of scores; None is width ** -0.5.
        window: how many tokens of its branch each sees, itself included; 0 is all.
        cap: of scores, see `families.Scales`.

    Returns:
        [T, heads * width].
    """
    (count, heads, width), kv_heads = q.shape, len(keys)
    group = heads // kv_heads
    q = q.view(count, kv_heads, group, width).permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, width)
    seen = rows.seen & (rows.at > rows.positions[:, None] - window) if window else rows.seen
    out = attention(q, keys[None], values[None], seen.repeat(group, 1), width**-0.5 if scale is None else scale, cap)
    # Not `view`: on a GPU the result of attention may have its key heads as the inner dimension.
    return out.view(kv_heads, group, count, width).permute(2, 0, 1, 3).reshape(count, heads * width)


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """`F.scaled_dot_product_attention` of scores that are capped unless `cap` is 0, see `families.Scales`."""
    if not cap:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    scores = capped(q @ keys.mT * scale, cap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ values
