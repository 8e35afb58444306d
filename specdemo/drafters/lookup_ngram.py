"""Prompt lookup where the text repeats itself, the n-gram table where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..runners import Runner
from ..types import Draft, Settings
from .base import Drafter
from .ngram import Ngram
from .prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from ..models import Loaded


class LookupNgram(Drafter):
    """Each draft is wholly a copy or wholly drawn from the table, so its probabilities stay exact."""

    description = "Prompt lookup where the text repeats itself, the n-gram table elsewhere. Nearly free."

    def __init__(self, lookup: PromptLookup, ngram: Ngram) -> None:
        self.lookup, self.ngram = lookup, ngram

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        return Ngram.missing(loaded)

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> LookupNgram:
        return cls(PromptLookup(), Ngram.build(loaded, runner, settings, noise))

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self.lookup.reset(prompt_ids)
        self.ngram.reset(prompt_ids)

    def propose(self, context: Sequence[int], k: int) -> Draft:
        copied = self.lookup.propose(context, k)
        return copied if copied.token_ids else self.ngram.propose(context, k)
