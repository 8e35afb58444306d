"""The training of a block head: blocks are put at random positions of the text, and all their outputs are compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..drafters.heads.networks import BlockHead, rotation
from .states import Text

ANCHORS = 96  # blocks in a row of text


def block_outputs(head: BlockHead, text: Text, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each of `steps` positions: outputs [N, hidden], and row and column of the token before their prediction."""
    rows, columns = text.tokens.shape
    device = text.tokens.device
    anchor = torch.randint(1, columns, (rows, ANCHORS), device=device)  # columns of the pending tokens
    step = torch.arange(steps + 1, device=device)
    at = anchor[..., None] + step[:-1]  # columns of the tokens before those to be drafted, [rows, ANCHORS, steps]
    inside = at < columns
    at = at.clamp(max=columns - 1)
    row = torch.arange(rows, device=device)[:, None]
    begin = text.begin[row, anchor]
    inside &= (text.begin[row[..., None], at] == begin[..., None]) & (begin < anchor)[..., None]
    by_block = rotation(text.place[row, anchor][..., None] + step, head.shape.width)
    by_text = rotation(text.place, head.shape.width)

    column = torch.arange(columns, device=device)
    seen = (column < anchor[..., None]) & (column >= begin[..., None])  # [rows, ANCHORS, columns]
    hidden = ~seen.repeat_interleave(steps + 1, 1)[:, None]  # [rows, 1, ANCHORS * (steps + 1), columns]
    g = head.fused(text.states)
    x = head.block(text.embedded[row, anchor], g[row, anchor - 1], steps)  # [rows, ANCHORS, steps + 1, hidden]
    group, scale = head.shape.heads // head.shape.kv_heads, head.shape.width**-0.5
    for layer in head.decoder_layers():
        q = layer.query(x, by_block) * scale  # [rows, ANCHORS, heads, steps + 1, width]
        k, v = (part.repeat_interleave(group, 2) for part in layer.keys_values(x, by_block, context=False))
        text_k, text_v = (part.repeat_interleave(group, 1) for part in layer.keys_values(g, by_text, context=True))
        flat = q.transpose(1, 2).flatten(2, 3)  # [rows, heads, ANCHORS * (steps + 1), width]
        scores = (flat @ text_k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        own = (q @ k.transpose(-1, -2)).transpose(1, 2).flatten(2, 3)  # [..., ANCHORS * (steps + 1), steps + 1]
        weights = torch.cat([scores, own], -1).softmax(-1).to(v.dtype)
        from_text = (weights[..., :columns] @ text_v).unflatten(2, (ANCHORS, steps + 1)).transpose(1, 2)
        from_block = weights[..., columns:].unflatten(2, (ANCHORS, steps + 1)).transpose(1, 2) @ v
        x = layer.finish(x, from_text + from_block)
    for place in range(steps):
        of_row, of_block = torch.nonzero(inside[..., place], as_tuple=True)
        yield x[of_row, of_block, place + 1], of_row, at[of_row, of_block, place]
