"""How the rows of a pass follow each other where they are no chain.

Every row of a pass has a parent: the row that its token follows, or -1 for the cache. A row sees the cache, its
ancestors and itself. Its position is the one after its parent's, so rows with the same parent share a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_ROWS = 64  # of a pass that branches: the ancestors of a row are the bits of a word
# Captured work has a fixed number of rows. There are few of these sizes, and trees are filled up to them.
TREES = MOST_ROWS, 48, 32, 24, 17, 9
WIDTH = 8  # the most children of a token of a tree, and the most of its tokens that a drafter's pass reads


def size_of_tree(rows: int) -> int:
    """The rows of captured work for a tree of `rows`."""
    return min(size for size in TREES if size >= rows)


def ancestors_of(parents: Sequence[int]) -> list[int]:
    """The rows that each row sees, itself included, as the bits of a number: bit i stands for row i.

    Raises:
        ValueError: there are too many rows, or a parent does not come before its child.
    """
    if len(parents) > MOST_ROWS:
        raise ValueError(f"A pass that branches has at most {MOST_ROWS} rows, not {len(parents)}.")
    words: list[int] = []
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"Row {row} cannot follow row {parent}.")
        words.append((words[parent] if parent >= 0 else 0) | 1 << row)
    return words


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many ancestors each row has; see `ancestors_of`."""
    return [word.bit_count() - 1 for word in ancestors_of(parents)]


def branches_of(parents: Sequence[int]) -> Tensor:
    """What a captured pass reads of its rows, uint8 [MOST_ROWS + 1, MOST_ROWS]: the paths to them, then their depths.

    A path ends with the row itself, which is repeated up to the end of the line. Missing rows see what the last one
    sees. See `ancestors_of` for errors.
    """
    depths, paths = bytes(depths_of(parents)), list[bytes]()
    for row, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else b"") + bytes([row]))
    lines = [path.ljust(MOST_ROWS, path[-1:]) for path in paths]
    lines += lines[-1:] * (MOST_ROWS - len(lines))
    together = b"".join([*lines, depths.ljust(MOST_ROWS, depths[-1:])])
    return torch.frombuffer(bytearray(together), dtype=torch.uint8).view(MOST_ROWS + 1, MOST_ROWS)


def places(start: int, count: int, parents: Sequence[int] | None) -> slice | list[int]:
    """The positions of `count` rows after `start` tokens, as an index; without parents of a chain."""
    return slice(start, start + count) if parents is None else [start + depth for depth in depths_of(parents)]


def mask_of(parents: Sequence[int], before: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a row sees one of the `before` tokens of the cache or a row, else minus infinity, [T, before + T]."""
    words = ancestors_of(parents)
    seen = torch.tensor([[bool(word >> row & 1) for row in range(len(words))] for word in words], device=device)
    mask = torch.zeros(len(words), before + len(words), dtype=dtype, device=device)
    mask[:, before:].masked_fill_(~seen, -torch.inf)
    return mask
