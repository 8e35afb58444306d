"""Layer skip: the target drafts for itself with its first layers (Elhoushi et al., arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runners import Runner
from ..types import Draft, Settings
from .base import Drafter, draw

if TYPE_CHECKING:
    from ..models import Loaded


class LayerSkip(Drafter):
    """Draws K tokens from the first layers of the target, with the target's own norm and head.

    Those layers' keys and values of the text are in the target's cache already, so there is nothing
    to prefill or to catch up. The verification goes on where they ended: no layer reads a token twice.
    """

    description = (
        "The target's own first layers draft for it. Needs no second model; helps only targets trained for it."
    )
    reads_ahead = True

    def __init__(self, runner: Runner, layers: int, settings: Settings, noise: torch.Generator) -> None:
        self.target, self.layers, self.settings, self.noise = runner, layers, settings, noise

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        return None if loaded.skip_layers else "this preset names no layer to stop at"

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> LayerSkip:
        assert loaded.skip_layers is not None
        return cls(runner, loaded.skip_layers, settings, noise)

    def propose(self, context: Sequence[int], k: int) -> Draft:
        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            return self.target.read_ahead(drawn[-1].tolist() if drawn else context[-1:], self.layers)

        draft = draw(next_logits, k, self.settings, self.noise)
        return replace(draft, token_ids=[int(id) for id in draft.token_ids])  # what was read ahead is known by them
