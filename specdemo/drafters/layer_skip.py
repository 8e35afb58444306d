"""Layer skip: the target drafts for itself with its first layers (Elhoushi et al., arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..runners import Runner
from ..types import Draft, Settings
from .base import Drafter
from .draft_model import draw_chain

if TYPE_CHECKING:
    from ..models import Loaded


class LayerSkip(Drafter):
    """Draws K tokens from the first layers of the target, with the target's own norm and head.

    Those layers' keys and values of the text are in the target's cache already, so there is nothing
    to prefill or to catch up. The draft's entries are written behind them and rolled back before the
    verification writes the same places for all layers.
    """

    description = (
        "The target's own first layers draft for it. Needs no second model; helps only targets trained for it."
    )

    def __init__(self, runner: Runner, layers: int, settings: Settings, noise: torch.Generator) -> None:
        self.target, self.layers, self.settings, self.noise = runner, layers, settings, noise
        self._early: Runner | None = None

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        return None if loaded.skip_layers else "this preset names no layer to stop at"

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> LayerSkip:
        assert loaded.skip_layers is not None
        return cls(runner, loaded.skip_layers, settings, noise)

    def propose(self, context: Sequence[int], k: int) -> Draft:
        if self._early is None:  # the target's cache exists once it has read the prompt
            self._early = self.target.first_layers(self.layers)
        length = self.target.length
        draft = draw_chain(self._early, context[-1:], k, self.target.vocab_size, self.settings, self.noise)
        self._early.rollback(length)
        return draft

    def release(self) -> None:
        self._early = None
