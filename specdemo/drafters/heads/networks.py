"""The networks of the trained heads. Their parameters' names are those of the files (`files`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engines import ops
from ...engines.layout import Rope
from .shapes import ALL, EACH, NONE, ROPE_THETA, HeadShape, MedusaShape, Sizes

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [..., T, width] each


def frequencies(width: int, device: torch.device | None = None, theta: float = ROPE_THETA) -> Tensor:
    """The frequencies of the rotary embedding (Su et al., arXiv 2104.09864), in radians per position, [width / 2]."""
    return theta ** -(torch.arange(width // 2, device=device) / (width // 2))


def rope_of(shape: HeadShape) -> Rope:
    if shape.rope.get("rope_type", "default") == "default":
        return Rope(frequencies(shape.width, theta=shape.rope["rope_theta"]))
    from transformers import PreTrainedConfig  # late, since few heads rescale their frequencies

    longest = shape.rope.get("original_max_position_embeddings")
    config = PreTrainedConfig(
        rope_parameters=dict(shape.rope),
        head_dim=shape.width,
        hidden_size=shape.heads * shape.width,
        num_attention_heads=shape.heads,
        max_position_embeddings=longest,
    )
    return Rope.of(config, torch.device("cpu"))


def rotation(positions: Tensor, width: int) -> Rotation:
    """The rotation of positions [..., T] in heads that are trained here."""
    angles = positions[..., None].float() * frequencies(width, positions.device)
    return doubled(angles.cos(), angles.sin())


def doubled(cos: Tensor, sin: Tensor) -> Rotation:
    """Cosines and sines [..., width / 2] for both halves of a query or key, the sines with their signs."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate queries or keys [..., heads, T, width]."""
    cos, sin = (part.to(x.dtype).unsqueeze(-3) for part in by)
    return ops.rotate(x, cos, sin)


class HeadLayer(nn.Module):
    """A decoder layer of a head without its attention, which needs the cache of a backend."""

    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None

    def attention_inputs(
        self, x: Tensor, second_input: Tensor | None, by: Rotation, outputs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of the last `outputs` of T tokens, [..., heads, outputs, width], and the keys and values of
        all, [..., kv_heads, T, width] each. `x` and `second_input` are [..., T, hidden]."""
        raise NotImplementedError

    def add_rest(self, shape: HeadShape) -> None:
        """Make the norms of queries and keys, if there are any, and what follows the attention."""
        norms = [nn.RMSNorm(shape.width, shape.eps) if shape.head_norms else None for _ in "qk"]
        self.q_norm, self.k_norm = norms
        self.out = nn.Linear(shape.heads * shape.width, shape.hidden, bias=shape.out_bias)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output projection and a gated MLP, both residual: [..., T, hidden] and [..., heads, T, width] ->
        [..., T, hidden]."""
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def joint(self) -> tuple[nn.RMSNorm, Tensor, Tensor | None]:
        """The norm before the attention, and the weight [out, in] and bias of queries, keys and values together."""
        raise NotImplementedError


class Head(nn.Module):
    """A small network that drafts from the target's own hidden states. `norm` goes before its output layer.

    Its embedding and its output layer are rows of the target's (`ReadyHead`), neither trained nor stored. A published
    head may have its `own_embedding` [V, hidden] and `own_output` [V', hidden]. `token_ids` [V'] are the target's
    tokens that it can draft, the most frequent ones, in rising order.
    """

    kind: ClassVar[str]
    shape: Sizes
    token_ids: Tensor
    state_norm: nn.Parameter | None
    norm: nn.RMSNorm
    own_embedding: Tensor | None = None
    own_output: Tensor | None = None
    place_outputs: Sequence[Tensor] = ()  # [V', hidden] of each place of a draft, where they differ

    def __init__(self, shape: Sizes, state_norms: int = 1) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("token_ids", torch.arange(shape.draft_vocab))
        weight = nn.Parameter(torch.ones(state_norms, shape.states // state_norms)) if state_norms else None
        self.register_parameter("state_norm", weight)
        self.before: nn.Module | None = None  # of the bigram term, if there is one
        self.after: nn.Module | None = None

    @classmethod
    def shape_from(cls, fields: dict[str, Any]) -> Sizes:
        fields.pop("blocks", None)  # older files have it, when a medusa head had such sizes too
        return HeadShape(**fields)

    def fused(self, states: Tensor) -> Tensor:
        """One vector from the target's hidden states of a token, [..., states] -> [..., hidden]."""
        if self.state_norm is None:
            return states
        states = states.unflatten(-1, self.state_norm.shape)
        normed: Tensor = F.rms_norm(states, self.state_norm.shape[1:], None, self.shape.eps) * self.state_norm
        return normed.flatten(-2)

    def add_bigrams(self, shape: Sizes) -> None:
        """Make the layers of the bigram term, if there is one."""
        if shape.rank:
            if shape.bigram_table:
                self.before = nn.Embedding(shape.vocab_size, shape.rank)
            else:
                self.before = nn.Linear(shape.hidden, shape.rank, bias=False)
            self.after = nn.Linear(shape.rank, shape.draft_vocab, bias=False)

    def bigram_bias(self, previous: Tensor) -> Tensor | float:
        """What the previous token adds to the logits, [..., V'] or 0.0.

        `previous` is its embedding [..., hidden], or the token itself [...] if the bigram term has a table of tokens.
        """
        return 0.0 if self.before is None or self.after is None else self.after(self.before(previous))


class LayeredHead(Head):
    """A head with decoder layers, which keep keys and values of the text."""

    bidirectional: ClassVar[bool] = False  # whether the tokens of a pass see those after them
    shape: HeadShape

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, {EACH: len(shape.state_layers), ALL: 1, NONE: 0}[shape.state_norms])
        self.fuse = nn.Linear(shape.states, shape.hidden, bias=False)
        self.fused_norm = nn.RMSNorm(shape.hidden, shape.eps) if shape.fused_norm else None
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    @cached_property
    def rope(self) -> Rope:
        return rope_of(self.shape)

    def fused(self, states: Tensor) -> Tensor:
        fused: Tensor = self.fuse(super().fused(states))
        return fused if self.fused_norm is None else self.fused_norm(fused)

    def entering(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input of the first layer, from x [..., T, hidden]; `dtype` is the type that the head computes in."""
        return x

    def decoder_layers(self) -> Sequence[HeadLayer]:
        raise NotImplementedError

    def second_input_norm(self) -> nn.RMSNorm | None:
        """The norm of the layers' second input, if they read one."""
        return None


class EagleHead(LayeredHead, HeadLayer):
    """EAGLE: one decoder layer that continues the target's hidden states (Li et al., arXiv 2503.01840).

    It reads pairs of (the target's hidden state of a token, the embedding of the next token). Its output predicts the
    target's hidden state of that next token. It gives the logits of the token after, and goes into the next pair
    instead of the state that the target has not computed yet.
    """

    kind = "eagle"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        inner = (shape.heads + 2 * shape.kv_heads) * shape.width
        self.token_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.qkv = nn.Linear(2 * shape.hidden, inner, bias=shape.qkv_bias)
        self.add_rest(shape)

    def decoder_layers(self) -> Sequence[EagleHead]:
        return [self]

    def second_input_norm(self) -> nn.RMSNorm:
        return self.token_norm

    def entering(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.hidden_norm(x.to(dtype)) if self.shape.normed_residual else x

    def joint(self) -> tuple[nn.RMSNorm, Tensor, Tensor | None]:
        return self.hidden_norm, self.qkv.weight, self.qkv.bias

    def attention_inputs(
        self, x: Tensor, second_input: Tensor | None, by: Rotation, outputs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadLayer`; `x` are hidden states, `second_input` the embeddings of the tokens that follow."""
        assert second_input is not None
        shape = self.shape
        x = x if shape.normed_residual else self.hidden_norm(x)
        both = torch.cat([self.token_norm(second_input), x], -1)
        by_head = self.qkv(both).unflatten(-1, (-1, shape.width)).transpose(-2, -3)
        qk, v = by_head.split([shape.heads + shape.kv_heads, shape.kv_heads], -3)
        if self.q_norm and self.k_norm:
            q, k = qk.split([shape.heads, shape.kv_heads], -3)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], -3)
        q, k = rotate(qk, by).split([shape.heads, shape.kv_heads], -3)
        return q[..., q.shape[-2] - outputs :, :], k, v


class BlockLayer(HeadLayer):
    """A decoder layer whose tokens see each other and, before them, the target's fused hidden states of the text."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.q = nn.Linear(shape.hidden, shape.heads * shape.width, bias=shape.qkv_bias)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_heads * shape.width, bias=shape.qkv_bias)
        self.add_rest(shape)

    def joint(self) -> tuple[nn.RMSNorm, Tensor, Tensor | None]:
        bias = torch.cat([self.q.bias, self.kv.bias]) if self.shape.qkv_bias else None
        return self.attention_norm, torch.cat([self.q.weight, self.kv.weight]), bias

    def query(self, x: Tensor, by: Rotation) -> Tensor:
        """[..., T, hidden] -> [..., heads, T, width]"""
        q = self.q(self.attention_norm(x)).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3)
        return rotate(self.q_norm(q) if self.q_norm else q, by)

    def keys_values(self, x: Tensor, by: Rotation, context: bool) -> tuple[Tensor, Tensor]:
        """Of block tokens or of the context's fused states, [..., T, hidden] -> twice [..., kv_heads, T, width]."""
        x = self.attention_norm(x) if self.shape.normed_context or not context else x
        k, v = self.kv(x).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3).chunk(2, -3)
        return rotate(self.k_norm(k) if self.k_norm else k, by), v

    def attention_inputs(
        self, x: Tensor, second_input: Tensor | None, by: Rotation, outputs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadLayer`. There is no second input. All tokens have an output (a block) or none (the context)."""
        return (self.query(x, by) if outputs else x[..., :0, :]), *self.keys_values(x, by, context=not outputs)


class BlockHead(LayeredHead):
    """All K tokens in one pass of a shallow network, in the manner of DFlash (arXiv 2602.06036).

    A block is the pending token and K positions to be filled, which begin as the target's last hidden state, or as a
    mask token. They are filled together, so none knows what was drawn for another. `bigram_bias` makes up for the
    nearest one: it adds a term of low rank to the logits once the previous token is drawn. DSpark (arXiv 2607.05147)
    has such a term too.
    """

    kind = "block"
    bidirectional = True
    blank: nn.Parameter | None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        # What tells a position to be filled from a token.
        blank = nn.Parameter(torch.zeros(shape.hidden)) if shape.mask_token is None else None
        self.register_parameter("blank", blank)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.depth))
        self.add_bigrams(shape)

    def decoder_layers(self) -> Sequence[BlockLayer]:
        return cast("Sequence[BlockLayer]", self.layers)

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """The embedded pending token and k positions to be filled, [..., hidden] twice -> [..., k + 1, hidden].

        `last` is the fused state of the token before the pending one.
        """
        assert self.blank is not None
        blanks = (last + self.blank)[..., None, :].expand(*last.shape[:-1], k, last.shape[-1])
        return torch.cat([pending[..., None, :].to(blanks.dtype), blanks], -2)


class MedusaHead(Head):
    """Medusa (Cai et al., arXiv 2401.10774): a guess for each place of a draft, from the target's last hidden state.

    It reads nothing else of the text and keeps nothing: it has no decoder layer. Each place has residual blocks
    x + silu(W x + b), after the target's final norm, and an output of its own.

    A head trained here is smaller and knows more (in the manner of Hydra, arXiv 2402.05109). It also reads the pending
    token, and the bigram term of a block head tells a place what was drawn for the previous one. The places share the
    target's output rows, and the first half of a gated layer of `shape.mlp` features before the final norm.
    """

    kind = "medusa"
    shape: MedusaShape

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape)
        self.add_bigrams(shape)
        if shape.blocks:
            self.norm = nn.Identity()  # type: ignore[assignment]
            self.places = nn.ModuleList(
                nn.ModuleList(nn.Linear(shape.hidden, shape.hidden) for _ in range(shape.blocks))
                for _ in range(shape.places)
            )
        else:
            self.norm = nn.RMSNorm(shape.hidden, shape.eps)
            self.token_norm = nn.RMSNorm(shape.hidden, shape.eps)
            self.gate_up = nn.Linear(2 * shape.hidden, 2 * shape.mlp, bias=False)
            self.down = nn.Linear(shape.mlp, shape.places * shape.hidden, bias=False)

    @classmethod
    def shape_from(cls, fields: dict[str, Any]) -> MedusaShape:
        if "places" in fields:
            return MedusaShape(**fields)
        # Older files have the sizes of a block head without layers.
        known = {field.name: fields[field.name] for field in dataclass_fields(MedusaShape) if field.name in fields}
        return MedusaShape(places=fields["block_size"] - 1, **known)

    def guesses(self, pending: Tensor, last: Tensor) -> Tensor:
        """The output of each place for the embedded pending token and the target's state, both [..., hidden]:
        [places, ..., hidden]."""
        if not self.shape.blocks:
            gate, up = self.gate_up(torch.cat([self.token_norm(pending.to(last.dtype)), last], -1)).chunk(2, -1)
            return last + torch.stack(self.down(F.silu(gate) * up).chunk(self.shape.places, -1))
        places = []
        for blocks in self.places:
            x = last
            for block in cast(nn.ModuleList, blocks):
                x = x + F.silu(block(x))
            places.append(x)
        return torch.stack(places)
