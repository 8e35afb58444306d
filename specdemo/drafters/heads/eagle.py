"""EAGLE: a one-layer head that continues the target's own hidden states (Li et al., arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...engines.gpu.graph import Capture, CapturedFunction
from ...types import Draft
from ..chain import NextLogits
from ..tree import Named, grow_by_depth
from .backends import HeadBackend
from .drafter import HeadDrafter
from .networks import EagleHead
from .ready import HeadPasses, ReadyHead


class EaglePasses(HeadPasses[EagleHead]):
    """The first pass of a draft reads what the target has read since, the others the head's own last output."""

    def __init__(self, ready: ReadyHead[EagleHead], backend: HeadBackend) -> None:
        super().__init__(ready, backend)
        self.output = ready.zeros(1, ready.head.shape.hidden, dtype=backend.dtype)
        self.first: Callable[[Tensor, Tensor], Tensor] = self._first
        self.next: Callable[[Tensor], Tensor] = self._next

    def begin(self, states: Tensor, tokens: Tensor, k: int) -> NextLogits:
        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            return self.next(drawn[-1]) if drawn else self.first(states, tokens)

        return next_logits

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        both = self.states_and_tokens()
        self.first = CapturedFunction(self._first, capture, both)
        self.next = CapturedFunction(self._next, capture, [both[-1][1:]])

    def _first(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Read T states of the target [T, layers * hidden] with the tokens that follow them [T]."""
        return self._read(self.ready.head.fused(states), tokens)

    def _next(self, token: Tensor) -> Tensor:
        """Read the output of the pass before with the token that was drawn from its logits, [1]."""
        return self._read(self.output, token)

    def _read(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The logits after the last of T pairs, [1, V']; the entries of all become live."""
        output = self.backend.run(x, self.ready.embed(tokens), outputs=1)
        self.output.copy_(self.feedback(output))
        self.backend.advance(len(tokens))
        return self.backend.logits(output)

    def feedback(self, output: Tensor) -> Tensor:
        """What the next pass reads of the outputs of this one, [T, hidden]."""
        head = self.ready.head
        return head.norm(output.to(self.ready.dtype)) if head.shape.normed_feedback else output


class Eagle(HeadDrafter):
    """Draws K tokens one after another from the head.

    The head's cache holds one entry for each token the target has read. Entries of drafted tokens, made of the
    head's own outputs, lie behind them and are overwritten by the target's states as soon as those are known.
    """

    name = "eagle"
    network = EagleHead
    passes = EaglePasses

    @torch.inference_mode()
    def propose_tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        """One pass for each depth: a token reads the output of its parent, and sees the entries of its ancestors."""
        passes, states, tokens = self._unread_with(context)
        assert isinstance(passes, EaglePasses)
        logits = passes.begin(states, tokens, 1)(())
        outputs = {-1: passes.output}
        words = {-1: 0}
        ancestors: list[int] = []

        def read(named: Named, following: list[int]) -> Tensor:
            x = torch.cat([outputs[named.parents[node]] for node in following])
            for node in following:
                words[node] = words[named.parents[node]] | 1 << len(ancestors)
                ancestors.append(words[node])
            embedded = self.ready.embed([named.token_ids[node] for node in following])
            y = passes.backend.branch(x, embedded, ancestors)
            outputs.update(zip(following, passes.feedback(y).split(1), strict=True))
            return passes.backend.logits(y)

        known = self.ready.token_ids
        return grow_by_depth(logits, read, nodes, depth, self.rule, len(context), known, self.stop_below)
