"""A block head: all K tokens in one pass of a shallow network, in the manner of DFlash (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..types import Draft
from .head import WINDOW, Head, HeadDrafter, Rotation, Shape, attend, rotate

RANK = 64  # of the bigram term


class BlockLayer(nn.Module):
    """A decoder layer whose tokens see each other, and the target's fused states of the text before them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.q = nn.Linear(shape.hidden, shape.heads * shape.width, bias=False)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_heads * shape.width, bias=False)
        self.out = nn.Linear(shape.heads * shape.width, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def query(self, x: Tensor, by: Rotation) -> Tensor:
        """[..., T, hidden] -> [..., heads, T, width]"""
        q = self.q(self.attention_norm(x)).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3)
        return rotate(q, by)

    def keys_values(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        """Of block tokens or of fused states, [..., T, hidden] -> twice [..., kv_heads, T, width]."""
        both = self.kv(self.attention_norm(x)).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3)
        k, v = both.chunk(2, -3)
        return rotate(k, by), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: [..., T, hidden] and [..., heads, T, width] -> [..., T, hidden]."""
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class BlockHead(Head):
    """A block is the pending token and K places to be filled, which begin as the target's last state.

    The places are filled together, so none knows what was drawn for another. `follow` makes up for the nearest of
    them: a bigram term of low rank that is added to the logits once the token before is drawn.
    """

    kind = "block"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blank = nn.Parameter(torch.zeros(shape.hidden))  # what tells a place from a token
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.depth))
        self.before = nn.Linear(shape.hidden, RANK, bias=False)
        self.after = nn.Linear(RANK, shape.draft_vocab, bias=False)

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """The embedded pending token and k places, [..., hidden] twice -> [..., k + 1, hidden].

        `last` is the fused state of the token before the pending one.
        """
        places = (last + self.blank)[..., None, :].expand(*last.shape[:-1], k, last.shape[-1])
        return torch.cat([pending[..., None, :].to(places.dtype), places], -2)

    def follow(self, previous: Tensor) -> Tensor:
        """What the token before adds to the logits, from its embedding: [..., hidden] -> [..., draft_vocab]."""
        return self.after(self.before(previous))


class Block(HeadDrafter):
    """Draws K tokens from one pass of the head.

    Each layer's cache holds a key and a value for each token the target has read, made of the target's states.
    """

    description = "A trained head that drafts all K tokens in one pass. Cheaper than eagle, and a little less apt."
    kind = BlockHead
    at_once = True

    def new_cache(self, states: Tensor, capacity: int) -> Tensor:
        shape = self.ready.head.shape
        return states.new_empty(shape.depth, 2, shape.kv_heads, capacity, shape.width)

    def chain(self, states: Tensor, start: int, tokens: Sequence[int], k: int) -> Draft:
        head, end = self.ready.head, start + len(states)
        assert isinstance(head, BlockHead)
        first = max(0, end - WINDOW)
        g = head.fused(states)
        x = head.block(self.ready.embed(tokens[-1:])[0], g[-1], k)  # [k + 1, hidden]
        of_text, of_block = self.rotation_of(start, end), self.rotation_of(end, end + k + 1)
        for layer, (keys, values) in zip(head.layers, self._cache, strict=True):
            assert isinstance(layer, BlockLayer)
            keys[:, start:end], values[:, start:end] = layer.keys_values(g, of_text)
            own_k, own_v = layer.keys_values(x, of_block)
            k_all, v_all = torch.cat([keys[:, first:end], own_k], 1), torch.cat([values[:, first:end], own_v], 1)
            x = layer.finish(x, attend(layer.query(x, of_block), k_all, v_all))
        logits = self.ready.logits(x[1:])  # [k, draft_vocab]

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            place = len(drawn)
            return logits[place : place + 1] + head.follow(self.ready.embed(drawn[-1] if drawn else tokens[-1:]))

        return self.draw(next_logits, k)
