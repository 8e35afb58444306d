"""What a test of an engine found on this machine, see `self_test`."""

from __future__ import annotations

from dataclasses import dataclass

TESTED_ROWS, TESTED_TREE_ROWS = 17, 16


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Up to how many rows of a pass a row is exact.

    Attributes:
        rows: of a chain, at most `TESTED_ROWS`; 0 where none is, or where the engine claims none.
        tree_rows: the same of a tree, at most `TESTED_TREE_ROWS`.
        seconds: that the test took.
    """

    rows: int
    tree_rows: int
    seconds: float

    def exact_of(self, claimed: tuple[int, int]) -> tuple[int, int]:
        """`Runner.exact_rows` and `exact_tree_rows`: all that an engine claims if all that was tested of it is exact,
        else what is."""
        both = zip((self.rows, self.tree_rows), claimed, (TESTED_ROWS, TESTED_TREE_ROWS), strict=True)
        rows, tree_rows = (claim if found == min(claim, most) else found for found, claim, most in both)
        return rows, tree_rows
