"""Forced drafts: what a grammar forces is drafted for nothing, and another drafter drafts where it forces nothing."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ..decoding.answer import Answer
from ..decoding.constraint import Constraint
from ..decoding.drafter import Drafter, ModelDrafter
from ..engines.runner import Wanted
from ..types import Draft


class ForcedFirst(ModelDrafter):
    """Drafts the tokens that only one text can satisfy, up to K; where there are none, another drafter drafts.

    A draft is wholly forced or wholly the other drafter's: most drafters cannot go on after tokens that the target has
    not read. Forced tokens are chosen, not drawn (q = 1); nearly all have p = 1, see `decoding.constraint`. A forced
    draft is a chain where trees are asked for too.
    K = auto learns about forced drafts by their own name.
    """

    name = "forced"
    branches = parallel_drafting = True

    def __init__(self, constraint: Constraint, other: Drafter) -> None:
        self.constraint, self.other = constraint, other
        self._forced: tuple[int, list[int]] = 0, []  # for a text of this length

    @property
    def reads_alone(self) -> bool:
        return self.other.reads_alone

    @reads_alone.setter
    def reads_alone(self, alone: bool) -> None:
        self.other.reads_alone = alone

    @property
    def drafts_on(self) -> torch.device | None:
        return self.other.drafts_on

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self._forced = 0, []
        self.other.reset(prompt_ids)

    def forced(self, context: Sequence[int]) -> list[int]:
        """See `Constraint.forced`; it is asked once for each round."""
        if self._forced[0] != len(context):
            self._forced = len(context), self.constraint.forced()
        return self._forced[1]

    @property
    def sources(self) -> Sequence[Drafter]:
        return [self, *self.other.sources]

    def draft_source(self, context: Sequence[int]) -> Drafter:
        return self if self.forced(context) else self.other.draft_source(context)

    def drafting(self, context: Sequence[int], k: int, depth: int | None = None) -> Generator[Wanted, Tensor, Draft]:
        if forced := self.forced(context):
            return Draft(forced[: k if depth is None else min(k, depth)])
        return (yield from self.other.drafting(context, k, depth))

    def observe(self, answer: Answer) -> None:
        self.other.observe(answer)  # in every round: a head reads the states of all tokens

    def release(self) -> None:
        self.other.release()
