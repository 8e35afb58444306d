"""No drafter: the target alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..tokens import Draft


class NoDrafter(Drafter):
    """Every draft is empty, so every round is plain decoding (K = 0)."""

    name = "none"

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        return Draft()
