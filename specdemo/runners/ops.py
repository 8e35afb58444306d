"""The operations of a captured pass, in torch. `kernels.py` has the same functions in Triton.

Each is a function of buffers whose shapes never change: how many tokens are live is read from `start` [1] int64 on
the device, so that the same operations serve every length of a text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import Norm, Product, swiglu

__all__ = ["attend", "place", "product", "rotate", "swiglu"]


def product(step: Product, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None) -> Tensor:
    """A product of T rows, which are normed first, and to which something is added."""
    x = norm(x) if norm else x
    return step(x) if plus is None else step(x) + plus


def place(
    qkv: Tensor,
    head_norms: tuple[Norm, Norm] | None,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
) -> Tensor:
    """Norm and rotate the queries and keys of T tokens by head, and put keys and values behind the live ones.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * width].
        rotation: cosines and signed sines, see `FusedModel.rotation`.
        keys, values: [kv_heads, capacity, width], written in place.
    Returns:
        the queries, [T, heads, width].
    """
    (count, _), (kv_heads, _, width) = qkv.shape, keys.shape
    places = start + torch.arange(count, device=qkv.device)
    by_head = qkv.view(count, -1, width)
    q, k, v = by_head.split([by_head.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if head_norms:
        q, k = head_norms[0](q), head_norms[1](k)
    if rotation:
        cos, sin = (part.index_select(0, places) for part in rotation)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys.index_copy_(1, places, k.transpose(0, 1))
    values.index_copy_(1, places, v.transpose(0, 1))
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding, with cosines and signed sines."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def attend(q: Tensor, keys: Tensor, values: Tensor, start: Tensor) -> Tensor:
    """Attention of T queries [T, heads, width] that stand behind `start` others, themselves already among the keys.

    The query heads that share a key head are laid behind each other as its queries: nothing is copied for them.

    Returns:
        [T, heads * width].
    """
    (count, heads, width), (kv_heads, capacity, _) = q.shape, keys.shape
    places = start + torch.arange(count, device=q.device)
    seen = torch.arange(capacity, device=q.device) <= places[:, None]  # [T, capacity]
    group = heads // kv_heads
    q = q.view(count, kv_heads, group, width).permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, width)
    out = F.scaled_dot_product_attention(q, keys[None], values[None], attn_mask=seen.repeat(group, 1))
    # On a GPU the key heads may come out as the inner dimension: then they cannot be viewed as one with their groups.
    return out.view(kv_heads, group, count, width).permute(2, 0, 1, 3).reshape(count, heads * width)
