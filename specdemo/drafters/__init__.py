"""Drafters by name: the one list that the page, the command line, the benches and the tests read."""

from __future__ import annotations

from .base import Drafter
from .block import Block
from .draft_model import DraftModel
from .eagle import Eagle
from .layer_skip import LayerSkip
from .lookup_first import LookupBlock, LookupEagle, LookupNgram
from .ngram import Ngram
from .none import NoDrafter
from .prompt_lookup import PromptLookup

DRAFTERS: dict[str, type[Drafter]] = {
    "none": NoDrafter,
    "prompt-lookup": PromptLookup,
    "ngram": Ngram,
    "lookup-ngram": LookupNgram,
    "eagle": Eagle,
    "block": Block,
    "lookup-block": LookupBlock,
    "lookup-eagle": LookupEagle,
    "draft-model": DraftModel,
    "layer-skip": LayerSkip,
}

__all__ = ["DRAFTERS", "Drafter"]
