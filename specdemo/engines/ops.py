"""The operations of a captured pass, in torch. `kernels.py` has the same functions in Triton.

A captured pass can only be replayed on the same buffers, so their shapes never change. Each function reads the number
of tokens in the cache from `start` [1] int64 on the device, and serves a text of any length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear import Linear, Norm, swiglu

__all__ = ["attend", "product", "rotate", "swiglu", "write_kv"]


def product(step: Linear, x: Tensor, norm: Norm | None = None, plus: Tensor | None = None) -> Tensor:
    """step(norm(x)) + plus, [T, in] -> [T, out]; without the norm or the sum where they are None."""
    x = norm(x) if norm else x
    return step(x) if plus is None else step(x) + plus


def write_kv(
    qkv: Tensor,
    head_norms: tuple[Norm, Norm] | None,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
) -> Tensor:
    """Norm and rotate the queries and keys of T tokens, and write their keys and values at position `start`.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * width].
        rotation: cosines and signed sines, see `FusedModel.rotation`.
        keys, values: [kv_heads, capacity, width], written in place.
        start: the number of tokens in the cache, [1] int64.
    Returns:
        The queries, [T, heads, width].
    """
    (count, _), (kv_heads, _, width) = qkv.shape, keys.shape
    positions = start + torch.arange(count, device=qkv.device)
    by_head = qkv.view(count, -1, width)
    q, k, v = by_head.split([by_head.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if head_norms:
        q, k = head_norms[0](q), head_norms[1](k)
    if rotation:
        cos, sin = (part.index_select(0, positions) for part in rotation)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys.index_copy_(1, positions, k.transpose(0, 1))
    values.index_copy_(1, positions, v.transpose(0, 1))
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of x [T, heads, width], with cosines and signed sines [T, 1, width]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def attend(q: Tensor, keys: Tensor, values: Tensor, start: Tensor) -> Tensor:
    """Attention of T queries [T, heads, width] at position `start`, whose own keys and values are in the cache already.

    The query heads that share a key head become more queries of that head, so that no key or value is copied.

    Args:
        keys, values: [kv_heads, capacity, width].

    Returns:
        [T, heads * width].
    """
    (count, heads, width), (kv_heads, capacity, _) = q.shape, keys.shape
    positions = start + torch.arange(count, device=q.device)
    seen = torch.arange(capacity, device=q.device) <= positions[:, None]  # [T, capacity]
    group = heads // kv_heads
    q = q.view(count, kv_heads, group, width).permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, width)
    out = F.scaled_dot_product_attention(q, keys[None], values[None], attn_mask=seen.repeat(group, 1))
    # Not `view`: on a GPU the result of attention may have its key heads as the inner dimension.
    return out.view(kv_heads, group, count, width).permute(2, 0, 1, 3).reshape(count, heads * width)
