"""The ways to write a text that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from ..racing.race import PLAIN, SPECULATIVE
from ..types import MATCH


@dataclass(frozen=True, slots=True)
class Case:
    """A way to write a text: a method, and its drafter, K and verification rule as far as it has them.

    The K of the method TREE is the number of tokens of a tree, or auto; in that of SPECULATIVE drafts are chains.
    """

    method: str
    drafter: str | None = None
    k: int | str | None = None
    rule: str | None = None


ALONE = Case(PLAIN, "none", 0, MATCH)
TREE = "tree"
OURS = (PLAIN, SPECULATIVE, TREE)
