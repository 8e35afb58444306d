"""No drafter: the target alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Draft
from .base import Drafter


class NoDrafter(Drafter):
    """Every draft is empty, so every round is plain decoding (K = 0)."""

    description = "No speculation: the target alone."

    def propose(self, context: Sequence[int], k: int) -> Draft:
        return Draft()
