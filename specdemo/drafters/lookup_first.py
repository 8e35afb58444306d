"""Prompt lookup where the text repeats itself, another drafter where it does not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

from torch import Tensor

from ..decoding.drafter import CHAIN, Drafter, DraftOptions, Needs, Proposal, drafted
from ..decoding.either import Either
from ..decoding.parts import DrafterParts
from ..decoding.rule import Rule
from ..engines.passes import PendingPass
from ..engines.runner import Runner
from ..tokens import Draft
from .prompt_lookup import PromptLookup
from .tree import merged


class LookupFirst(Either):
    """Drafts chains that are wholly copies or wholly the other drafter's, so their probabilities stay exact."""

    behind: ClassVar[type[Drafter]]  # what drafts where nothing is copied
    first: PromptLookup

    def __init__(self, other: Drafter) -> None:
        super().__init__(PromptLookup(), other)

    @classmethod
    def needs(cls, parts: DrafterParts) -> Needs:
        return cls.behind.needs(parts)

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> LookupFirst:
        return cls(cls.behind.build(parts, runner, rule))

    def choice(self, context: Sequence[int]) -> Drafter:
        return self.other if self.first.match(context) is None else self.first

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Proposal:
        if options.depth is not None:
            return self._tree(context, k, options)
        copied = self.first.propose(context, k, options)
        return copied if copied.token_ids else self.other.propose(context, k, options)

    def _tree(self, context: Sequence[int], nodes: int, options: DraftOptions) -> Generator[PendingPass, Tensor, Draft]:
        """Up to half of a tree holds copies. They may be wrong, so the other drafter fills the rest."""
        copied = self.first.propose(context, max(1, nodes // 2), options)
        left = nodes - len(copied.token_ids)
        return merged(copied, (yield from drafted(self.other.propose(context, left, options)))) if left else copied
