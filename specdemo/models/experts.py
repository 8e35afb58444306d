"""The experts of a layer in published checkpoints: each matrix is a tensor, and transformers joins them to two weights.

`gguf_weights` reads those of GGUF files.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ..engines.families import DOWN, EXPERTS_DOWN, EXPERTS_UP, GATE_UP

PUBLISHED = re.compile(r"(.*layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
OF_UP = {name.rpartition(".")[2]: part for part, name in enumerate(GATE_UP)} | {"w1": 0, "w3": 1}  # w: Mixtral's names
OF_DOWN = {DOWN.rpartition(".")[2]: 0, "w2": 0}

Place = tuple[int, int]  # the number of an expert, and which part of its weight


def joint_name(name: str) -> tuple[str, Place | None]:
    """The name of a tensor of a file in transformers, and which part of that weight it is; None if it is all of it."""
    found = PUBLISHED.fullmatch(name)
    for joint, parts in ((EXPERTS_UP, OF_UP), (EXPERTS_DOWN, OF_DOWN)):
        if found and found[3] in parts:
            return found[1] + joint, (int(found[2]), parts[found[3]])
    return name.replace(".block_sparse_moe.", ".mlp."), None


class JointExperts:
    """A weight of all experts of a layer, [experts, outer, inner]. It is read as a file is: by `get_tensor`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.pieces: dict[Place, tuple[Any, str]] = {}  # the file and the name of each

    @property
    def complete(self) -> bool:
        """Whether the files have all of it, in equal parts for each expert."""
        places = {(expert, part) for expert in range(self.shape[0]) for part in range(self._parts)}
        return self.pieces.keys() == places and {self._shape(place) for place in places} == {self._part_shape}

    @property
    def _parts(self) -> int:
        return 1 + max(part for _, part in self.pieces)

    @property
    def _part_shape(self) -> tuple[int, ...]:
        return self.shape[1] // self._parts, self.shape[2]

    def _shape(self, place: Place) -> tuple[int, ...]:
        file, name = self.pieces[place]
        return tuple(file.get_slice(name).get_shape())

    def get_tensor(self, _name: str) -> Tensor:
        """All of it, in memory of its own."""
        whole: Tensor | None = None
        for (expert, part), (file, name) in self.pieces.items():
            piece = file.get_tensor(name)
            if whole is None:
                whole = piece.new_empty(self.shape[0], self._parts, *piece.shape)
            whole[expert, part] = piece
        assert whole is not None, "it is complete"
        return whole.view(self.shape)
