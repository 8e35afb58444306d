"""Layer skip: the target drafts for itself with its first layers (Elhoushi et al., arXiv 2404.16710)."""

from __future__ import annotations

from functools import partial

from ..decoding.drafter import Needs
from ..decoding.parts import DrafterParts
from ..decoding.rule import Rule
from ..engines.runner import Runner
from .draft_model import DraftModel


class LayerSkip(DraftModel):
    """A draft model that is the first layers of the target, with the target's own norm and head.

    It shares the target's weights and has a cache of its own. So it can be captured on a GPU like any model, but the
    target's pass over a draft computes the first layers again. The paper's does not.
    """

    name = "layer-skip"

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        return Needs(None if parts.skip_layers else "this preset names no layer to stop at")

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> DraftModel:
        assert parts.skip_layers is not None
        return cls.with_runner(partial(runner.first_layers, parts.skip_layers), runner, rule)
