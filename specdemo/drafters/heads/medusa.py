"""Medusa: all K tokens from one hidden state, by a head without decoder layers (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...engines.gpu.graph import Capture, CapturedFunction
from ..chain import NextLogits
from .drafter import HeadDrafter
from .networks import MedusaHead
from .ready import HeadPasses, ReadyHead


class MedusaPasses(HeadPasses[MedusaHead]):
    """A few products over the target's last state. Nothing is kept of the text."""

    def __init__(self, ready: ReadyHead[MedusaHead], capacity: int, captured: bool = False) -> None:
        super().__init__(ready, capacity)
        self.guess: Callable[[Tensor, Tensor, int], Tensor] = self._guess

    def begin(self, states: Tensor, tokens: Tensor, k: int) -> NextLogits:
        return self.with_bigrams(self.guess(states[-1:], tokens[-1:], k), tokens[-1:])

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        one, longest = self.states_and_tokens()[-1], self.ready.head.shape.places
        self.guess = CapturedFunction(self._guess, capture, [(*one, k) for k in range(longest, 0, -1)])

    def _guess(self, state: Tensor, pending: Tensor, k: int) -> Tensor:
        """The logits of k places, from a state [1, hidden] and the pending token [1]: [k, V']."""
        ready = self.ready
        guesses = ready.head.guesses(ready.embed(pending), ready.head.fused(state))  # [places, 1, hidden]
        return ready.logits(guesses[:k, 0])


class Medusa(HeadDrafter):
    """Draws K tokens, one from the logits of each place of a Medusa head."""

    name = "medusa"
    network = MedusaHead
    passes = MedusaPasses
    parallel_drafting = True
