"""EAGLE: a one-layer head that continues the target's own hidden states (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..runners.graph import Capture, Replayed
from ..types import Draft
from .head import Head, HeadDrafter, HeadPasses, Parts, ReadyHead, Shape
from .head_cache import WINDOW, HeadCache, NativeHeadCache, Rotation, rotate


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

    def parts(self) -> list[Parts]:
        behind = self.out.weight, self.mlp_norm, self.gate_up.weight, self.down.weight
        return [Parts(self.hidden_norm, self.qkv.weight, *behind)]

    def beside_norm(self) -> nn.RMSNorm:
        return self.token_norm

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


class EaglePasses(HeadPasses):
    """The passes of a run: over what the target has read since, and over the head's own last output."""

    def __init__(self, ready: ReadyHead, cache: HeadCache | NativeHeadCache) -> None:
        super().__init__(ready, cache)
        self.output = torch.zeros(1, ready.head.shape.hidden, dtype=ready.dtype, device=ready.embedding.device)
        self.first: Callable[[Tensor, Tensor], Tensor] = self._first
        self.next: Callable[[Tensor], Tensor] = self._next

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        both = self.states_and_tokens()
        self.first = Replayed(self._first, capture, both)
        self.next = Replayed(self._next, capture, [both[-1][1:]])

    def _first(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Read T states of the target [T, layers * hidden] with the tokens that follow them [T]."""
        return self._read(self.ready.head.fused(states), tokens)

    def _next(self, token: Tensor) -> Tensor:
        """Read the output of the pass before with the token that was drawn from its logits, [1]."""
        return self._read(self.output, token)

    def _read(self, g: Tensor, tokens: Tensor) -> Tensor:
        """The logits after the last of T pairs, [1, draft_vocab]; entries of all are kept."""
        head, cache, count = self.ready.head, self.cache, len(tokens)
        assert isinstance(head, EagleHead)
        assert isinstance(cache, HeadCache)
        q, k, v = head.attention_inputs(g, self.ready.embed(tokens), cache.rotation(count))
        cache.put(0, k, v)
        x = head.finish(g[-1:], cache.attend(0, q[:, -1:], WINDOW - count, count))
        cache.advance(count)
        self.output.copy_(x)
        return self.ready.logits(x)


class NativeEaglePasses(EaglePasses):
    """The same by the library for CPUs. The head's own output is float32."""

    def __init__(self, ready: ReadyHead, cache: HeadCache | NativeHeadCache) -> None:
        super().__init__(ready, cache)
        self.output = self.output.float()

    def _read(self, g: Tensor, tokens: Tensor) -> Tensor:
        cache = self.cache
        assert isinstance(cache, NativeHeadCache)
        assert self.ready.native is not None
        layers, logits = self.ready.native
        x, beside, before = g.to(torch.float32, copy=True), self.ready.embed(tokens).float(), len(tokens) - 1
        if before:  # of all but the last token only the entries are of use
            layers.run(x[:before], cache, cache.length, beside=beside[:before], entries=True)
        layers.run(x[before:], cache, cache.length + before, beside=beside[before:])
        cache.advance(len(tokens))
        self.output.copy_(x[before:])
        return logits(self.output)


class Eagle(HeadDrafter):
    """Draws K tokens one after another from the head.

    The head's cache holds one entry for each token the target has read. Entries of drafted tokens, made of the
    head's own outputs, lie behind them and are overwritten by the target's states as soon as those are known.
    """

    description = "A trained head that reads the target's hidden states. Good guesses; each costs a thin layer."
    kind = EagleHead
    passes_kind = EaglePasses
    native_kind = NativeEaglePasses

    def chain(self, passes: HeadPasses, states: Tensor, tokens: Tensor, k: int) -> Draft:
        assert isinstance(passes, EaglePasses)

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            return passes.next(drawn[-1]) if drawn else passes.first(states, tokens)

        return self.draw(next_logits, k)
