"""Medusa: all K tokens from one hidden state, by a head without decoder layers (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..chain import NextLogits
from .drafter import HeadDrafter
from .networks import MedusaHead
from .ready import HeadPasses


class MedusaPasses(HeadPasses):
    """A few products over the target's last state. Nothing is kept of the text."""

    def begin(self, states: Tensor, tokens: Tensor, k: int) -> NextLogits:
        return self.with_bigrams(self.guess(states[-1:], tokens[-1:], k), tokens[-1:])

    def calls(self) -> dict[str, Sequence[tuple[Any, ...]]]:
        one, longest = self.states_and_tokens()[-1], self.ready.head.shape.places
        return {"guess": [(*one, k) for k in range(longest, 0, -1)]}

    def guess(self, state: Tensor, pending: Tensor, k: int) -> Tensor:
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
