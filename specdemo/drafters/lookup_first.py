"""Prompt lookup where the text repeats itself, another drafter where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..decoding.drafter import Drafter, DrafterParts
from ..decoding.rule import Rule
from ..engines.runner import Runner
from ..types import Draft, Verdict
from .heads.block import Block
from .heads.eagle import Eagle
from .ngram import Ngram
from .prompt_lookup import PromptLookup
from .tree import merged


class LookupFirst(Drafter):
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

    def propose(self, context: Sequence[int], k: int) -> Draft:
        copied = self.lookup.propose(context, k)
        return copied if copied.token_ids else self.other.propose(context, k)

    def draft_source(self, context: Sequence[int]) -> Drafter:
        return self.lookup if self.lookup.match(context) is not None else self.other.draft_source(context)

    def observe(self, verdict: Verdict) -> None:
        self.other.observe(verdict)  # in every round: a head reads the states of all tokens

    def release(self) -> None:
        self.other.release()

    def propose_tree(self, context: Sequence[int], nodes: int, depth: int) -> Draft:
        """Up to half of a tree holds copies. They may be wrong, so the other drafter fills the rest."""
        copied = self.lookup.propose_tree(context, max(1, nodes // 2), depth)
        left = nodes - len(copied.token_ids)
        return merged(copied, self.other.propose_tree(context, left, depth)) if left else copied


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
