"""What each kind of head puts out where it is trained: for each position of a draft, all outputs at once.

Every function yields for each of `steps` positions: outputs [N, hidden], and row and column of the token before their
prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specdemo.drafters.heads.medusa import MedusaHead
from specdemo.drafters.heads.networks import BlockHead, EagleHead, Rotation, doubled
from specdemo.drafters.heads.shapes import frequencies

from .states import Text, same_conversation

Outputs = Iterator[tuple[Tensor, Tensor, Tensor]]
ANCHORS = 96  # blocks in a row of text


def rotation(positions: Tensor, width: int) -> Rotation:
    """The rotation of positions [..., T], as `HeadShape` has it by default."""
    angles = positions[..., None].float() * frequencies(width, positions.device)
    return doubled(angles.cos(), angles.sin())


def eagle_outputs(head: EagleHead, text: Text, steps: int) -> Outputs:
    """An EAGLE head continues the target's hidden states, then its own, for several steps.

    Training-time test (EAGLE-3, arXiv 2503.01840): in step j the head reads its own output of step j - 1 in place of
    the target's hidden state, as it will when it drafts. Step j pairs the head's input for column t with the token of
    column t + j, and predicts the token after that.
    """
    columns = text.tokens.shape[1]
    group, scale = head.shape.heads // head.shape.kv_heads, head.shape.width**-0.5
    hidden = ~same_conversation(text.begin)[:, None]  # [rows, 1, columns, columns]
    first: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of later steps, which only the same column sees
    x = head.fused(text.states)
    for step in range(1, steps + 1):
        by = rotation(text.place + step - 1, head.shape.width)
        q, k, v = head.attention_inputs(x, text.embedded.roll(-step, 1), by, columns)
        q = q * scale
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [rows, heads, columns, width]
        if first is None:
            first = k, v
        else:
            own.append((k, v))
        scores = (q @ first[0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        own_scores = [(q * key).sum(-1, keepdim=True) for key, _ in own]  # [rows, heads, columns, 1]
        weights = torch.cat([scores, *own_scores], -1).softmax(-1).to(v.dtype)
        attended = weights[..., :columns] @ first[1]
        for place, (_, value) in enumerate(own, start=columns):
            attended = attended + weights[..., place, None] * value
        x = head.finish(x, attended)
        row, column = torch.nonzero(text.begin[:, step:] == text.begin[:, : columns - step], as_tuple=True)
        yield x[row, column], row, column + step


def block_outputs(head: BlockHead, text: Text, steps: int) -> Outputs:
    """The blocks of a block head are put at random positions of the text."""
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
        norm = layer.attention_norm
        q = layer.query(norm(x), by_block) * scale  # [rows, ANCHORS, heads, steps + 1, width]
        k, v = (part.repeat_interleave(group, 2) for part in layer.keys_values(norm(x), by_block))
        text_k, text_v = (part.repeat_interleave(group, 1) for part in layer.keys_values(norm(g), by_text))
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


def medusa_outputs(head: MedusaHead, text: Text, steps: int) -> Outputs:
    """Each place of a Medusa head learns the target's distribution so many tokens further on."""
    pending = text.embedded.roll(-1, 1)
    for ahead, x in enumerate(head.guesses(pending, head.fused(text.states))[:steps], start=1):
        row, column = torch.nonzero(text.begin[:, ahead:] == text.begin[:, :-ahead], as_tuple=True)
        yield x[row, column], row, column + ahead


OUTPUTS: dict[str, Callable[[Any, Text, int], Outputs]] = {
    "eagle": eagle_outputs,
    "block": block_outputs,
    "medusa": medusa_outputs,
}
