"""Prompt lookup where the text repeats itself, another drafter where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from ..runners import Runner
from ..types import Draft, Settings, Verdict
from .base import Drafter
from .block import Block
from .eagle import Eagle
from .ngram import Ngram
from .prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from ..models import Loaded


class LookupFirst(Drafter):
    """Each draft is wholly a copy or wholly the other drafter's, so its probabilities stay exact."""

    elsewhere: ClassVar[type[Drafter]]

    def __init__(self, lookup: PromptLookup, other: Drafter) -> None:
        self.lookup, self.other = lookup, other

    @classmethod
    def missing(cls, loaded: Loaded) -> str | None:
        return cls.elsewhere.missing(loaded)

    @classmethod
    def build(cls, loaded: Loaded, runner: Runner, settings: Settings, noise: torch.Generator) -> LookupFirst:
        return cls(PromptLookup(), cls.elsewhere.build(loaded, runner, settings, noise))

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self.lookup.reset(prompt_ids)
        self.other.reset(prompt_ids)

    def propose(self, context: Sequence[int], k: int) -> Draft:
        copied = self.lookup.propose(context, k)
        return copied if copied.token_ids else self.other.propose(context, k)

    def author(self, context: Sequence[int]) -> type[Drafter]:
        return PromptLookup if self.lookup.match(context) is not None else self.other.author(context)

    def observe(self, verdict: Verdict) -> None:
        self.other.observe(verdict)  # of every round: a head follows the states of all tokens

    def release(self) -> None:
        self.other.release()


class LookupNgram(LookupFirst):
    description = "Prompt lookup where the text repeats itself, the n-gram table elsewhere. Nearly free."
    elsewhere = Ngram


class LookupBlock(LookupFirst):
    description = "Prompt lookup where the text repeats itself, the block head elsewhere."
    elsewhere = Block


class LookupEagle(LookupFirst):
    description = "Prompt lookup where the text repeats itself, the eagle head elsewhere."
    elsewhere = Eagle
