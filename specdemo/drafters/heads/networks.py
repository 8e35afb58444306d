"""The networks of the trained heads. Their parameters' names are those of the files (`files`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engines import ops

ROPE_THETA = 10_000.0
RANK = 64  # of a block head's bigram term

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [..., T, width] each


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head: those of the target it reads, and its own."""

    vocab_size: int  # V, the target's
    hidden: int  # the target's hidden size, and the head's
    state_layers: tuple[int, ...]  # the target's layers whose outputs the head reads
    draft_vocab: int  # V', how many tokens it can draft
    depth: int
    heads: int
    kv_heads: int
    width: int  # of an attention head
    mlp: int
    eps: float
    window: int = 512  # how many tokens a head attends to; it is trained on texts no longer


def frequencies(width: int, device: torch.device | None = None) -> Tensor:
    """Of the rotary embedding (Su et al., arXiv 2104.09864), in radians per position, [width / 2]."""
    return ROPE_THETA ** -(torch.arange(width // 2, device=device) / (width // 2))


def rotation(positions: Tensor, width: int) -> Rotation:
    """Of the rotary embedding, for positions [..., T]."""
    angles = positions[..., None].float() * frequencies(width, positions.device)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate queries or keys [..., heads, T, width]."""
    cos, sin = (part.to(x.dtype).unsqueeze(-3) for part in by)
    return ops.rotate(x, cos, sin)


class LayerWeights(NamedTuple):
    """The norms of a decoder layer, and the weights of its linear layers, [out, in] each."""

    attention_norm: nn.RMSNorm
    qkv: Tensor
    out: Tensor
    mlp_norm: nn.RMSNorm
    gate_up: Tensor
    down: Tensor


class HeadLayer(Protocol):
    """A decoder layer of a head, without its attention: that needs the cache, which a backend has."""

    def attention_inputs(
        self, x: Tensor, second_input: Tensor | None, by: Rotation, outputs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of T tokens: queries of the last `outputs`, [..., heads, outputs, width], and keys and values of all,
        [..., kv_heads, T, width] each. `x` and `second_input` are [..., T, hidden]."""
        ...

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: [..., T, hidden] and [..., heads, T, width] -> [..., T, hidden]."""
        ...

    def weights(self) -> LayerWeights: ...


class Head(nn.Module):
    """A small network that drafts from the target's own hidden states.

    Its embedding and its output layer are rows of the target's (`ReadyHead`): they are neither trained nor stored.
    `token_ids` [V'] names the target's tokens that it can draft, the most frequent ones.
    """

    kind: ClassVar[str]
    bidirectional: ClassVar[bool] = False  # whether the tokens of a pass see those behind them
    token_ids: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("token_ids", torch.arange(shape.draft_vocab))
        self.state_norm = nn.Parameter(torch.ones(len(shape.state_layers), shape.hidden))
        self.fuse = nn.Linear(len(shape.state_layers) * shape.hidden, shape.hidden, bias=False)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    def fused(self, states: Tensor) -> Tensor:
        """One vector from the target's hidden states of a token, [..., layers * hidden] -> [..., hidden]."""
        states = states.unflatten(-1, self.state_norm.shape)
        normed = F.rms_norm(states, self.state_norm.shape[1:], None, self.shape.eps) * self.state_norm
        return self.fuse(normed.flatten(-2))

    def bigram_bias(self, previous: Tensor) -> Tensor | float:
        """What the token before adds to the logits, from its embedding [..., hidden]: [..., V'], or nothing."""
        return 0.0

    def decoder_layers(self) -> Sequence[HeadLayer]:
        raise NotImplementedError

    def second_input_norm(self) -> nn.RMSNorm | None:
        """The norm of the layers' second input, if they read one."""
        return None


class EagleHead(Head):
    """EAGLE: one decoder layer that continues the target's hidden states (Li et al., arXiv 2503.01840).

    It reads pairs of (the target's hidden state of a token, the embedding of the next token). Its output stands for
    the target's hidden state of that next token: it gives the logits of the token after, and the next pair has it
    instead of the state that the target has not computed yet.
    """

    kind = "eagle"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        inner = (shape.heads + 2 * shape.kv_heads) * shape.width
        self.token_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.qkv = nn.Linear(2 * shape.hidden, inner, bias=False)
        self.out = nn.Linear(shape.heads * shape.width, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def decoder_layers(self) -> Sequence[EagleHead]:
        return [self]

    def second_input_norm(self) -> nn.RMSNorm:
        return self.token_norm

    def weights(self) -> LayerWeights:
        rest = self.out.weight, self.mlp_norm, self.gate_up.weight, self.down.weight
        return LayerWeights(self.hidden_norm, self.qkv.weight, *rest)

    def attention_inputs(
        self, x: Tensor, second_input: Tensor | None, by: Rotation, outputs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadLayer`; `x` are hidden states, `second_input` the embeddings of the tokens that follow."""
        assert second_input is not None
        shape = self.shape
        both = torch.cat([self.token_norm(second_input), self.hidden_norm(x)], -1)
        by_head = self.qkv(both).unflatten(-1, (-1, shape.width)).transpose(-2, -3)
        qk, v = by_head.split([shape.heads + shape.kv_heads, shape.kv_heads], -3)
        q, k = rotate(qk, by).split([shape.heads, shape.kv_heads], -3)
        return q[..., q.shape[-2] - outputs :, :], k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        return _finish(self, x, attended)


class BlockLayer(nn.Module):
    """A decoder layer whose tokens see each other, and the target's fused hidden states of the text before them."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.q = nn.Linear(shape.hidden, shape.heads * shape.width, bias=False)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_heads * shape.width, bias=False)
        self.out = nn.Linear(shape.heads * shape.width, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def weights(self) -> LayerWeights:
        qkv = torch.cat([self.q.weight, self.kv.weight])
        rest = self.out.weight, self.mlp_norm, self.gate_up.weight, self.down.weight
        return LayerWeights(self.attention_norm, qkv, *rest)

    def query(self, x: Tensor, by: Rotation) -> Tensor:
        """[..., T, hidden] -> [..., heads, T, width]"""
        q = self.q(self.attention_norm(x)).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3)
        return rotate(q, by)

    def keys_values(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        """Of block tokens or of fused states, [..., T, hidden] -> twice [..., kv_heads, T, width]."""
        both = self.kv(self.attention_norm(x)).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3)
        k, v = both.chunk(2, -3)
        return rotate(k, by), v

    def attention_inputs(
        self, x: Tensor, second_input: Tensor | None, by: Rotation, outputs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadLayer`; either no token or all of them have an output, and there is no second input."""
        return (self.query(x, by) if outputs else x[..., :0, :]), *self.keys_values(x, by)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        return _finish(self, x, attended)


class BlockHead(Head):
    """All K tokens in one pass of a shallow network, in the manner of DFlash (arXiv 2602.06036).

    A block is the pending token and K positions to be filled, which begin as the target's last hidden state. They are
    filled together, so none knows what was drawn for another. `bigram_bias` makes up for the nearest of them: a term of
    low rank that is added to the logits once the token before is drawn.
    """

    kind = "block"
    bidirectional = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.blank = nn.Parameter(torch.zeros(shape.hidden))  # what tells a position to be filled from a token
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.depth))
        self.before = nn.Linear(shape.hidden, RANK, bias=False)
        self.after = nn.Linear(RANK, shape.draft_vocab, bias=False)

    def decoder_layers(self) -> Sequence[BlockLayer]:
        return cast("Sequence[BlockLayer]", self.layers)

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """The embedded pending token and k positions to be filled, [..., hidden] twice -> [..., k + 1, hidden].

        `last` is the fused state of the token before the pending one.
        """
        blanks = (last + self.blank)[..., None, :].expand(*last.shape[:-1], k, last.shape[-1])
        return torch.cat([pending[..., None, :].to(blanks.dtype), blanks], -2)

    def bigram_bias(self, previous: Tensor) -> Tensor:
        return self.after(self.before(previous))


def _finish(layer: EagleHead | BlockLayer, x: Tensor, attended: Tensor) -> Tensor:
    """What follows the attention in either kind of layer: the output projection and a gated MLP, both residual."""
    x = x + layer.out(attended.transpose(-2, -3).flatten(-2))
    gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
    return x + layer.down(F.silu(gate) * up)
