"""Prompt lookup where the text repeats itself, another drafter where it does not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..decoding.answer import Answer
from ..decoding.drafter import Drafter, DrafterParts, ModelDrafter
from ..decoding.rule import Rule
from ..engines.runner import Runner, Wanted
from ..types import Draft
from .heads.block import Block
from .heads.eagle import Eagle
from .ngram import Ngram
from .prompt_lookup import PromptLookup
from .tree import merged


class LookupFirst(ModelDrafter):
    """Drafts chains that are wholly copies or wholly the other drafter's, so their probabilities stay exact."""

    branches = True
    elsewhere: ClassVar[type[Drafter]]

    def __init__(self, lookup: PromptLookup, other: Drafter) -> None:
        self.lookup, self.other = lookup, other

    @classmethod
    def unavailable_reason(cls, parts: DrafterParts) -> str | None:
        return cls.elsewhere.unavailable_reason(parts)

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> LookupFirst:
        return cls(PromptLookup(), cls.elsewhere.build(parts, runner, rule))

    @property
    def drafts_on(self) -> torch.device | None:
        return self.other.drafts_on

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self.lookup.reset(prompt_ids)
        self.other.reset(prompt_ids)

    def drafting(self, context: Sequence[int], k: int, depth: int | None = None) -> Generator[Wanted, Tensor, Draft]:
        """Up to half of a tree holds copies. They may be wrong, so the other drafter fills the rest."""
        if depth is None:
            copied = self.lookup.propose(context, k)
            return copied if copied.token_ids else (yield from self.other.drafting(context, k))
        copied = self.lookup.propose_tree(context, max(1, k // 2), depth)
        left = k - len(copied.token_ids)
        return merged(copied, (yield from self.other.drafting(context, left, depth))) if left else copied

    @property
    def sources(self) -> Sequence[Drafter]:
        return [self.lookup, *self.other.sources]

    def draft_source(self, context: Sequence[int]) -> Drafter:
        return self.lookup if self.lookup.match(context) is not None else self.other.draft_source(context)

    def observe(self, answer: Answer) -> None:
        self.other.observe(answer)  # in every round: a head reads the states of all tokens

    def release(self) -> None:
        self.other.release()


class LookupNgram(LookupFirst):
    name = "lookup-ngram"
    elsewhere = Ngram


class LookupBlock(LookupFirst):
    name = "lookup-block"
    elsewhere = Block
    parallel_drafting = True  # and a copy is nearly free


class LookupEagle(LookupFirst):
    name = "lookup-eagle"
    elsewhere = Eagle
