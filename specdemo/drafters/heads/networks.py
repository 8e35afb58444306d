"""The networks of the trained heads. Their parameters' names are those of the files (`files`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engines import ops
from ...engines.families import OUTPUT
from ...engines.ropes import Rope
from ...errors import BadInput
from .published import EMBEDDING, OFFSETS, PublishedHead, tensors_of
from .shapes import ALL, EACH, NONE, HeadShape, rope_of

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [..., T, width] each
QueriesKeysValues = tuple[Tensor, Tensor, Tensor]


def doubled(cos: Tensor, sin: Tensor) -> Rotation:
    """Cosines and sines [..., width / 2] for both halves of a query or key, the sines with their signs."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate queries or keys [..., heads, T, width]."""
    cos, sin = (part.to(x.dtype).unsqueeze(-3) for part in by)
    return ops.rotate(x, cos, sin)


class HeadLayer(nn.Module):
    """A decoder layer of a head without its attention, which needs the cache of a backend."""

    parts: dict[str, int]  # of linear layers by name, see `Linear.of`
    qkv: nn.Linear
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None

    def attention_inputs(self, x: Tensor, second: Tensor | None, by: Rotation, outputs: int) -> QueriesKeysValues:
        """The queries of the last `outputs` of T tokens, [..., heads, outputs, width], and the keys and values of
        all, [..., kv_heads, T, width] each. `x` and the second input are [..., T, hidden]."""
        raise NotImplementedError

    def add_rest(self, shape: HeadShape) -> None:
        """Make the norms of queries and keys, if there are any, and what follows the attention."""
        norms = [nn.RMSNorm(shape.width, shape.eps) if shape.head_norms else None for _ in "qk"]
        self.q_norm, self.k_norm = norms
        self.parts = {"qkv": shape.heads + 2 * shape.kv_heads, "gate_up": 2}
        self.out = nn.Linear(shape.heads * shape.width, shape.hidden, bias=shape.out_bias)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output projection and a gated MLP, both residual: [..., T, hidden] and [..., heads, T, width] ->
        [..., T, hidden]."""
        x = x + self.projected(attended)
        return x + self.mlp(self.mlp_norm(x))

    def projected(self, attended: Tensor) -> Tensor:
        """[..., heads, T, width] -> [..., T, hidden]"""
        projected: Tensor = self.out(attended.transpose(-2, -3).flatten(-2))
        return projected

    def mlp(self, normed: Tensor) -> Tensor:
        gate, up = self.gate_up(normed).chunk(2, -1)
        added: Tensor = self.down(F.silu(gate) * up)
        return added

    def join(self) -> None:
        """Make `qkv` of the layers of queries, keys and values where they are apart. The C library needs it."""


class Head(nn.Module):
    """A small network that drafts from the target's own hidden states.

    Its embedding and its output layer are rows of the target's (`ReadyHead`), neither trained nor stored, but a
    published head may have its own.
    """

    kind: ClassVar[str]
    shape: Any  # `HeadShape` or `MedusaShape`
    token_ids: Tensor  # [V'], the target's tokens that it can draft, the most frequent ones, in rising order
    state_norm: nn.Parameter | None
    norm: nn.RMSNorm  # before the output layer
    own_embedding: Tensor | None = None  # [V, hidden]
    own_output: Tensor | None = None  # [V', hidden]
    place_outputs: Sequence[Tensor] = ()  # [V', hidden] of each place of a draft, where they differ
    in_library: bool = True  # the C library can run its layers

    def __init__(self, shape: Any, state_norms: int = 1) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("token_ids", torch.arange(shape.draft_vocab))
        weight = nn.Parameter(torch.ones(state_norms, shape.states // state_norms)) if state_norms else None
        self.register_parameter("state_norm", weight)
        self.before: nn.Module | None = None  # of the bigram term, if there is one
        self.after: nn.Module | None = None

    @classmethod
    def shape_from(cls, fields: dict[str, Any]) -> Any:
        fields.pop("blocks", None)  # older files have it, when a medusa head had such sizes too
        return HeadShape(**fields)

    @classmethod
    def of_published(cls, published: PublishedHead) -> Any:
        """A head of the tensors of a published one, which keep their number types."""
        raise NotImplementedError

    def decoder_layers(self) -> Sequence[HeadLayer]:
        return ()

    def fused(self, states: Tensor) -> Tensor:
        """One vector from the target's hidden states of a token, [..., states] -> [..., hidden]."""
        if self.state_norm is None:
            return states
        states = states.unflatten(-1, self.state_norm.shape)
        normed: Tensor = F.rms_norm(states, self.state_norm.shape[1:], None, self.shape.eps) * self.state_norm
        return normed.flatten(-2)

    def add_bigrams(self, shape: Any) -> None:
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

    @classmethod
    def of_published(cls, published: PublishedHead) -> Any:
        shape, take = published.shape(), published.take
        with torch.device("meta"):
            head = cls(shape)
        weights = {"token_ids": torch.arange(shape.draft_vocab)}
        sizes = {name: weight.shape for name, weight in head.state_dict().items()}
        for name, parts in tensors_of(cls.kind, shape).items():
            taken = [take(key, *wanted) for key, wanted in parts.items()]
            weights[name] = (torch.cat(taken) if len(taken) > 1 else taken[0]).view(sizes[name])
        other_width, fewer = shape.target_hidden != shape.hidden, shape.draft_vocab != shape.vocab_size
        if other_width or EMBEDDING in published.left:
            head.own_embedding = take(EMBEDDING, shape.vocab_size, shape.hidden)
        if other_width or fewer or OUTPUT in published.left:
            head.own_output = take(OUTPUT, shape.draft_vocab, shape.hidden)
        if fewer or OFFSETS in published.left:
            ids = weights["token_ids"] + take(OFFSETS, shape.draft_vocab).long()
            order = ids.argsort()
            weights["token_ids"] = ids = ids[order]
            if int(ids[0]) < 0 or int(ids[-1]) >= shape.vocab_size or not (ids.diff() > 0).all():
                raise BadInput(
                    f"{published.name} has a table {OFFSETS} that names {len(ids.unique())} different tokens from "
                    f"{int(ids[0])} to {int(ids[-1])}, but it should name {shape.draft_vocab} of {shape.vocab_size}."
                )
            if head.own_output is not None and not (order.diff() > 0).all():
                head.own_output = head.own_output[order]
                if "after.weight" in weights:
                    weights["after.weight"] = weights["after.weight"][order]
        head.load_state_dict(weights, assign=True)
        return head.requires_grad_(False)

    @cached_property
    def rope(self) -> Rope:
        return rope_of(self.shape)

    def fused(self, states: Tensor) -> Tensor:
        fused: Tensor = self.fuse(super().fused(states))
        return fused if self.fused_norm is None else self.fused_norm(fused)

    def entering(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input of the first layer, from x [..., T, hidden]; `dtype` is the type that the head computes in."""
        return x


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

    def entering(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.hidden_norm(x.to(dtype)) if self.shape.normed_residual else x

    def attention_inputs(self, x: Tensor, second: Tensor | None, by: Rotation, outputs: int) -> QueriesKeysValues:
        """See `HeadLayer`; `x` are hidden states, `second` the embeddings of the tokens that follow."""
        assert second is not None
        shape = self.shape
        x = x if shape.normed_residual else self.hidden_norm(x)
        both = torch.cat([self.token_norm(second), x], -1)
        by_head = self.qkv(both).unflatten(-1, (-1, shape.width)).transpose(-2, -3)
        qk, v = by_head.split([shape.heads + shape.kv_heads, shape.kv_heads], -3)
        if self.q_norm and self.k_norm:
            q, k = qk.split([shape.heads, shape.kv_heads], -3)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], -3)
        q, k = rotate(qk, by).split([shape.heads, shape.kv_heads], -3)
        return q[..., q.shape[-2] - outputs :, :], k, v


class BlockLayer(HeadLayer):
    """A decoder layer that reads one input. In a block head the context is the target's fused hidden states."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.q = nn.Linear(shape.hidden, shape.heads * shape.width, bias=shape.qkv_bias)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_heads * shape.width, bias=shape.qkv_bias)
        self.add_rest(shape)

    def join(self) -> None:
        with torch.device("meta"):
            self.qkv = nn.Linear(self.q.in_features, self.q.out_features + self.kv.out_features, self.shape.qkv_bias)
        both, other = self.q.state_dict(), self.kv.state_dict()
        self.qkv.load_state_dict({name: torch.cat([both[name], other[name]]) for name in both}, assign=True)

    def query(self, normed: Tensor, by: Rotation) -> Tensor:
        """[..., T, hidden] -> [..., heads, T, width]"""
        q = self.q(normed).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3)
        return rotate(self.q_norm(q) if self.q_norm else q, by)

    def keys_values(self, normed: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        """Of block tokens or of the context's fused states, [..., T, hidden] -> twice [..., kv_heads, T, width]."""
        k, v = self.kv(normed).unflatten(-1, (-1, self.shape.width)).transpose(-2, -3).chunk(2, -3)
        return rotate(self.k_norm(k) if self.k_norm else k, by), v

    def attention_inputs(self, x: Tensor, second: Tensor | None, by: Rotation, outputs: int) -> QueriesKeysValues:
        """See `HeadLayer`. There is no second input. All tokens have an output (a block) or none (the context)."""
        normed = self.attention_norm(x) if outputs or self.shape.normed_context else x
        return (self.query(normed, by) if outputs else x[..., :0, :]), *self.keys_values(normed, by)


class BlockConvolution(nn.Module):
    """Two convolutions over the tokens of a block, one before and one after a part of a layer (DFlash 2).

    Each token has kernels of its own, which are a linear function of its normed input. Token i becomes
    sum_t (base[t, c] + delta[i, t, g(c)]) * x[i - t, c] in channel c, whose group is g(c).
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.taps, self.group = shape.conv_taps, shape.conv_group
        self.base = nn.Parameter(torch.zeros(2, self.taps, shape.hidden))
        self.deltas = nn.Linear(shape.hidden, 2 * self.taps * (shape.hidden // self.group), bias=False)

    def kernels(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels before and after the part, [..., T, hidden] -> [..., T, taps, hidden] each."""
        deltas = self.deltas(normed).unflatten(-1, (2, self.taps, -1, 1))
        before, after = (self.base.unflatten(-1, (-1, self.group)) + deltas).flatten(-2).unbind(-3)
        return before, after


def convolved(x: Tensor, kernels: Tensor) -> Tensor:
    """A block [..., T, hidden] by the kernels [..., T, taps, hidden] of its tokens. What comes before it is 0."""
    out = kernels[..., 0, :] * x
    for tap in range(1, kernels.shape[-2]):
        out = out + kernels[..., tap, :] * F.pad(x, (0, 0, tap, -tap))
    return out


class ConvolvedLayer(BlockLayer):
    """A layer of DFlash 2, with convolutions around its attention and its MLP. They do not read the context."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = BlockConvolution(shape), BlockConvolution(shape)

    def attention_inputs(self, x: Tensor, second: Tensor | None, by: Rotation, outputs: int) -> QueriesKeysValues:
        if not outputs:
            return super().attention_inputs(x, second, by, outputs)
        normed = self.attention_norm(x)
        normed = convolved(normed, self.attention_conv.kernels(normed)[0])
        return self.query(normed, by), *self.keys_values(normed, by)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The kernels after the attention are computed again: a layer keeps nothing between its two calls."""
        x = x + convolved(self.projected(attended), self.attention_conv.kernels(self.attention_norm(x))[1])
        normed = self.mlp_norm(x)
        before, after = self.mlp_conv.kernels(normed)
        return x + convolved(self.mlp(convolved(normed, before)), after)


class CandidateSelector(nn.Module):
    """Draws each place of a block from its likeliest tokens, by the token before (DFlash 2).

    After the token p, the candidate c of a place with the normed output h has the logit
    unary[c] + <A[p] * gate(h), B[c]>, where unary[c] is the output layer's. No other token can be drawn.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.count, self.vocab_size = shape.candidates, shape.vocab_size
        self.before = nn.Embedding(shape.vocab_size, shape.selector_rank)  # A
        self.after = nn.Embedding(shape.vocab_size, shape.selector_rank)  # B
        self.gate = nn.Linear(shape.hidden, shape.selector_rank, bias=False)

    def candidates(self, logits: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of k places, from logits [k, V] and normed outputs [k, hidden]: the largest logits [k, count], their tokens,
        and the gates [k, rank]."""
        largest = logits.float().topk(self.count, -1)
        return largest.values, largest.indices, self.gate(normed)

    def logits(self, unary: Tensor, tokens: Tensor, gate: Tensor, previous: Tensor) -> Tensor:
        """The logits of one place [T, V], from a row of each of the `candidates` and T tokens before it [T]."""
        wanted = self.before(previous) * gate  # [T, rank]
        scores = unary + (self.after(tokens) @ wanted[..., None]).squeeze(-1)
        return scores.new_full((len(scores), self.vocab_size), -torch.inf).scatter_(1, tokens.expand_as(scores), scores)


class BlockHead(LayeredHead):
    """All K tokens in one pass of a shallow network, in the manner of DFlash (arXiv 2602.06036).

    A block is the pending token and K positions to be filled, which begin as the target's last hidden state, or as a
    mask token. They are filled together, so none knows what was drawn for another. `bigram_bias` makes up for the
    nearest one: it adds a term of low rank to the logits once the previous token is drawn. DSpark (arXiv 2607.05147)
    has such a term too. In DFlash 2 a `CandidateSelector` does that, and a convolution lets each position see those
    before it.
    """

    kind = "block"
    bidirectional = True
    blank: nn.Parameter | None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        # What tells a position to be filled from a token.
        blank = nn.Parameter(torch.zeros(shape.hidden)) if shape.mask_token is None else None
        self.register_parameter("blank", blank)
        layer = ConvolvedLayer if shape.conv_taps else BlockLayer
        self.in_library = not shape.conv_taps
        self.layers = nn.ModuleList(layer(shape) for _ in range(shape.depth))
        self.add_bigrams(shape)
        self.selector = CandidateSelector(shape) if shape.candidates else None

    def decoder_layers(self) -> Sequence[BlockLayer]:
        return cast("Sequence[BlockLayer]", self.layers)

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """The embedded pending token and k positions to be filled, [..., hidden] twice -> [..., k + 1, hidden].

        `last` is the fused state of the token before the pending one.
        """
        assert self.blank is not None
        blanks = (last + self.blank)[..., None, :].expand(*last.shape[:-1], k, last.shape[-1])
        return torch.cat([pending[..., None, :].to(blanks.dtype), blanks], -2)
