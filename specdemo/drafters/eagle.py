"""EAGLE: a one-layer head that continues the target's own hidden states (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..types import Draft
from .head import WINDOW, Head, HeadDrafter, Rotation, Shape, attend, rotate


class EagleHead(Head):
    """One decoder layer over pairs of (the target's state of a token, the embedding of the next token).

    Its output stands for the target's state one token further on: it gives the logits of the token after, and
    takes the state's place in the next pair, whose own state the target has not computed yet.
    """

    kind = "eagle"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        inner = (shape.heads + 2 * shape.kv_heads) * shape.width
        self.token_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.qkv = nn.Linear(2 * shape.hidden, inner, bias=False)
        self.out = nn.Linear(shape.heads * shape.width, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def attention_inputs(self, g: Tensor, tokens: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, keys, and values of T pairs, [..., T, hidden] twice -> [..., heads, T, width] each."""
        shape = self.shape
        both = torch.cat([self.token_norm(tokens), self.hidden_norm(g)], -1)
        by_head = self.qkv(both).unflatten(-1, (-1, shape.width)).transpose(-2, -3)
        qk, v = by_head.split([shape.heads + shape.kv_heads, shape.kv_heads], -3)
        q, k = rotate(qk, by).split([shape.heads, shape.kv_heads], -3)
        return q, k, v

    def finish(self, g: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: [..., T, hidden] and [..., heads, T, width] -> [..., T, hidden]."""
        x = g + self.out(attended.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Eagle(HeadDrafter):
    """Draws K tokens one after another from the head.

    The head's cache holds one entry for each token the target has read. Entries of drafted tokens, made of the
    head's own outputs, lie behind them and are overwritten by the target's states as soon as those are known.
    """

    description = "A trained head that reads the target's hidden states. Good guesses; each costs a thin layer."
    kind = EagleHead

    def new_cache(self, states: Tensor, capacity: int) -> Tensor:
        shape = self.ready.head.shape
        return states.new_empty(2, shape.kv_heads, capacity, shape.width)

    def chain(self, states: Tensor, start: int, tokens: Sequence[int], k: int) -> Draft:
        x = self._read(self.ready.head.fused(states), tokens, start)
        last = start + len(tokens) - 1

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            nonlocal x
            if drawn:
                x = self._read(x, drawn[-1], last + len(drawn))
            return self.ready.logits(x)

        return self.draw(next_logits, k)

    def _read(self, g: Tensor, tokens: Sequence[int] | Tensor, start: int) -> Tensor:
        """The head's output for the last of T pairs, [1, hidden]; entries of all are kept, from place `start` on."""
        head, end = self.ready.head, start + len(tokens)
        assert isinstance(head, EagleHead)
        q, k, v = head.attention_inputs(g, self.ready.embed(tokens), self.rotation_of(start, end))
        keys, values = self._cache
        keys[:, start:end], values[:, start:end] = k, v
        first = max(0, end - WINDOW)
        return head.finish(g[-1:], attend(q[:, -1:], keys[:, first:end], values[:, first:end]))
