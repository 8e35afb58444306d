"""A block head: all K tokens in one pass of a shallow network, in the manner of DFlash (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..runners.graph import Capture, Replayed
from ..types import MAX_K, Draft
from .head import Head, HeadDrafter, HeadPasses, Parts, ReadyHead, Shape
from .head_cache import WINDOW, HeadCache, NativeHeadCache, Rotation, rotate

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

    def parts(self) -> Parts:
        """The layer taken apart."""
        qkv = torch.cat([self.q.weight, self.kv.weight])
        return Parts(self.attention_norm, qkv, self.out.weight, self.mlp_norm, self.gate_up.weight, self.down.weight)

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
    mutual = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blank = nn.Parameter(torch.zeros(shape.hidden))  # what tells a place from a token
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.depth))
        self.before = nn.Linear(shape.hidden, RANK, bias=False)
        self.after = nn.Linear(RANK, shape.draft_vocab, bias=False)

    def parts(self) -> list[Parts]:
        return [layer.parts() for layer in self.layers if isinstance(layer, BlockLayer)]

    def block(self, pending: Tensor, last: Tensor, k: int) -> Tensor:
        """The embedded pending token and k places, [..., hidden] twice -> [..., k + 1, hidden].

        `last` is the fused state of the token before the pending one.
        """
        places = (last + self.blank)[..., None, :].expand(*last.shape[:-1], k, last.shape[-1])
        return torch.cat([pending[..., None, :].to(places.dtype), places], -2)

    def follow(self, previous: Tensor) -> Tensor:
        """What the token before adds to the logits, from its embedding: [..., hidden] -> [..., draft_vocab]."""
        return self.after(self.before(previous))


class BlockPasses(HeadPasses):
    """The passes of a run: over what the target has read since, and over a block behind that."""

    def __init__(self, ready: ReadyHead, cache: HeadCache | NativeHeadCache) -> None:
        super().__init__(ready, cache)
        # The fused state of the last token read.
        self.last = torch.zeros(ready.head.shape.hidden, dtype=ready.dtype, device=ready.embedding.device)
        self.read: Callable[[Tensor], None] = self._read
        self.block: Callable[[Tensor, int], Tensor] = self._block

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        both = self.states_and_tokens()
        token = both[-1][1]
        self.read = Replayed(self._read, capture, [(states,) for states, _ in both])
        self.block = Replayed(self._block, capture, [(token, k) for k in range(MAX_K, 0, -1)])

    def _read(self, states: Tensor) -> None:
        """Keep entries, in each layer, of T states of the target, [T, layers * hidden]."""
        head, cache, count = self.ready.head, self.cache, len(states)
        assert isinstance(head, BlockHead)
        assert isinstance(cache, HeadCache)
        g, by = head.fused(states), cache.rotation(count)
        for place, layer in enumerate(head.layers):
            assert isinstance(layer, BlockLayer)
            cache.put(place, *layer.keys_values(g, by))
        cache.advance(count)
        self.last.copy_(g[-1])

    def _block(self, pending: Tensor, k: int) -> Tensor:
        """The logits of k places behind the pending token [1]: [k, draft_vocab]."""
        head, cache = self.ready.head, self.cache
        assert isinstance(head, BlockHead)
        assert isinstance(cache, HeadCache)
        x = head.block(self.ready.embed(pending)[0], self.last, k)  # [k + 1, hidden]
        by = cache.rotation(k + 1)
        for place, layer in enumerate(head.layers):
            assert isinstance(layer, BlockLayer)
            cache.put(place, *layer.keys_values(x, by))
            x = layer.finish(x, cache.attend(place, layer.query(x, by), WINDOW, k + 1))
        return self.ready.logits(x[1:])


class NativeBlockPasses(BlockPasses):
    """The same by the library for CPUs."""

    def _read(self, states: Tensor) -> None:
        cache, g = self.cache, self.ready.head.fused(states)
        assert isinstance(cache, NativeHeadCache)
        assert self.ready.native is not None
        self.ready.native[0].run(g.float(), cache, cache.length, entries=True)
        cache.advance(len(states))
        self.last.copy_(g[-1])

    def _block(self, pending: Tensor, k: int) -> Tensor:
        head, cache = self.ready.head, self.cache
        assert isinstance(head, BlockHead)
        assert isinstance(cache, NativeHeadCache)
        assert self.ready.native is not None
        layers, logits = self.ready.native
        x = head.block(self.ready.embed(pending)[0], self.last, k).to(torch.float32, copy=True)  # [k + 1, hidden]
        layers.run(x, cache, cache.length)
        return logits(x[1:])


class Block(HeadDrafter):
    """Draws K tokens from one pass of the head.

    Each layer's cache holds a key and a value for each token the target has read, made of the target's states. Those
    of a block lie behind them and are overwritten by the next.
    """

    description = "A trained head that drafts all K tokens in one pass. Cheaper than eagle, and a little less apt."
    kind = BlockHead
    passes_kind = BlockPasses
    native_kind = NativeBlockPasses
    at_once = True

    def chain(self, passes: HeadPasses, states: Tensor, tokens: Tensor, k: int) -> Draft:
        assert isinstance(passes, BlockPasses)
        pending = tokens[-1:]
        passes.read(states)
        logits = passes.block(pending, k)

        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            place, before = len(drawn), self.ready.embed(drawn[-1] if drawn else pending)
            return logits[place : place + 1] + self.ready.head.follow(before)

        return self.draw(next_logits, k)
