"""Forced drafts: what a grammar forces is drafted for nothing, and another drafter drafts where it forces nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ..decoding.constraint import Constraint
from ..decoding.drafter import CHAIN, Drafter, DraftOptions, Proposal
from ..decoding.either import Either
from ..tokens import Draft


class Forced(Drafter):
    """Drafts tokens where the grammar allows only one text. They are chosen, not drawn (q = 1); nearly all have p = 1,
    see `decoding.constraint`. The draft is a chain where trees are asked for too."""

    name = "forced"

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._tokens: tuple[int, list[int]] = 0, []  # for a text of this length: they are asked for once in a round

    def tokens(self, context: Sequence[int]) -> list[int]:
        """See `Constraint.forced`."""
        if self._tokens[0] != len(context):
            self._tokens = len(context), self.constraint.forced()
        return self._tokens[1]

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        return Draft(self.tokens(context)[: k if options.depth is None else min(k, options.depth)])


class ForcedFirst(Either):
    """Drafts that are wholly forced or wholly the other drafter's: most drafters cannot go on after tokens that the
    target has not read."""

    first: Forced

    def __init__(self, constraint: Constraint, other: Drafter) -> None:
        super().__init__(Forced(constraint), other)

    def choice(self, context: Sequence[int]) -> Drafter:
        return self.first if self.first.tokens(context) else self.other

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Proposal:
        return self.choice(context).propose(context, k, options)
