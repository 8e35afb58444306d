"""The experts of a layer as files have them, while transformers joins their matrices to two weights.

In published checkpoints each matrix is a tensor. In GGUF files the gates of a layer are one, and so are the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.families import EXPERTS_DOWN, EXPERTS_UP
from ..engines.quantized import READERS, Quantized, Weight, of_blocks

PUBLISHED = re.compile(r"(.*layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
OF_UP, OF_DOWN = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}, {"down_proj": 0, "w2": 0}  # w: Mixtral's names
OF_GGUF = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")

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


def joint_name_of_gguf(tensor: str) -> str:
    """The name in transformers of the weight that a tensor of a GGUF file is a part of; empty if it has no experts."""
    found = OF_GGUF.fullmatch(tensor)
    return f"model.layers.{found[1]}.{EXPERTS_DOWN if found[2] == 'down' else EXPERTS_UP}" if found else ""


def experts_of_gguf(tensors: Sequence[Any], dtype: torch.dtype) -> tuple[Weight, tuple[int, ...]]:
    """The joint weight of tensors of `gguf.GGUFReader`, those of the gates and then of the others, and its shape.

    It stays quantized, [experts * outer, inner], if all of them are of the same type of `quantized.READERS`.
    """
    from gguf import dequantize

    tensors = sorted(tensors, key=lambda tensor: "gate" not in tensor.name)
    kinds, count = {tensor.tensor_type.name for tensor in tensors}, len(tensors[0].data)
    if len(kinds) == 1 and kinds <= READERS.keys():
        (kind,) = kinds
        halves = [of_blocks(tensor.data.reshape(-1, tensor.data.shape[-1]), kind).parts() for tensor in tensors]
        by_expert = {name: [half[name].unflatten(0, (count, -1)) for half in halves] for name in halves[0]}
        joint = Quantized(**{name: torch.cat(parts, 1).flatten(0, 1) for name, parts in by_expert.items()})
        return joint, (count, len(joint) // count, joint.shape[1])
    numbers = [torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).to(dtype) for tensor in tensors]
    whole = torch.cat(numbers, 1)
    return whole, tuple(whole.shape)
