"""Layer skip: the target drafts for itself with its first layers (Elhoushi et al., arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..decoding.drafter import Drafter, DrafterParts
from ..decoding.rule import Rule
from ..engines.runner import Runner
from ..types import Draft
from .chain import draw_chain


class LayerSkip(Drafter):
    """Draws K tokens from the first layers of the target, with the target's own norm and head.

    Those layers' keys and values of the text are in the target's cache already, so there is nothing
    to prefill or to catch up. The verification goes on where they ended: no layer reads a token twice.
    """

    name = "layer-skip"
    uses_early_exit = True

    def __init__(self, runner: Runner, layers: int, rule: Rule) -> None:
        self.target, self.layers, self.rule = runner, layers, rule

    @classmethod
    def unavailable_reason(cls, parts: DrafterParts) -> str | None:
        return None if parts.skip_layers else "this preset names no layer to stop at"

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> LayerSkip:
        assert parts.skip_layers is not None
        return cls(runner, parts.skip_layers, rule)

    def propose(self, context: Sequence[int], k: int) -> Draft:
        def next_logits(drawn: Sequence[Tensor]) -> Tensor:
            return self.target.early_exit_forward(drawn[-1].tolist() if drawn else context[-1:], self.layers)

        draft = draw_chain(next_logits, k, self.rule, len(context), stop_below=self.stop_below)
        return replace(draft, token_ids=[int(id) for id in draft.token_ids])  # what was read ahead is known by them
