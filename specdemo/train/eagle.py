"""The training of an EAGLE head: it continues the target's hidden states, then its own, for several steps.

Training-time test (EAGLE-3, arXiv 2503.01840): in step j the head reads its own output of step j - 1 in place of the
target's hidden state, as it will when it drafts. Its output is compared with the target's distribution j tokens later.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..drafters.heads.networks import EagleHead, rotation
from .states import Text, same_conversation


def eagle_outputs(head: EagleHead, text: Text, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each of `steps` positions: outputs [N, hidden], and row and column of the token before their prediction.

    Step j pairs the head's input for column t with the token of column t + j, and predicts the token after that.
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
