"""Reads the tensors of a GGUF file as the weights of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as tables

from ..engines.families import EXPERTS_DOWN, EXPERTS_UP, LAYERS
from ..engines.named_weights import narrowed
from ..engines.quantized import AT_ONCE, READERS, Quantized, Weight, of_blocks
from .gguf import ALWAYS, LONG, SHORT
from .opened import check_whole
from .store import LoadError
from .weights import SEPARATOR

NARROW = {"F16": torch.float16, "BF16": torch.bfloat16}  # types of tensors that are kept as they are
OF_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
Rows = NDArray[np.int64] | slice  # which rows of a tensor, in their order


def read_weights(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    """The weights of a GGUF file by the model's names, or as stored the tensors of those that are quantized, and the
    others as `narrowed`.

    transformers' tables say which weight a tensor is, and how its rows are ordered.

    Args:
        architecture: llama.cpp's name for it.
        dtype: the type of the weights; None is as stored.
        progress: is called with the part of the tensors that is done.
    Raises:
        LoadError: naming what is missing or has another shape.
    """
    found, shapes = dict[str, Tensor](), dict[str, Sequence[int]]()
    wanted, tensors = dict(model.named_parameters()), gguf.GGUFReader(str(path)).tensors
    processor, names = _processor(model, architecture), names_of_weights(model, architecture)
    experts, untaken = dict[str, list[Any]](), list[str]()

    def processed(numbers: NDArray[np.float32], tensor: Any) -> Any:
        return processor.process(numbers, tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": {}})

    def keep(name: str, weight: Weight, shape: Sequence[int]) -> None:
        shapes[name] = shape
        if isinstance(weight, Quantized):
            found.update({f"{name}{SEPARATOR}{part}": numbers for part, numbers in weight.parts().items()})
        else:
            found[name] = weight

    for done, tensor in enumerate(tensors):
        progress(done / len(tensors))
        if (name := joint_name(tensor.name)) in wanted:
            experts.setdefault(name, []).append(tensor)
            continue
        numbered = processed(_numbered(tensor.shape[::-1]), tensor)
        if (name := names.get(numbered.name, "")) not in wanted:
            untaken.append(tensor.name)
            continue
        weight: Weight
        if (rows := _rows(numbered.weights, tensor.shape[::-1])) is None:
            numbers = processed(gguf.dequantize(tensor.data, tensor.tensor_type), tensor).weights
            plain = torch.from_numpy(np.array(numbers))
            weight = narrowed(plain) if dtype is None else plain.to(dtype)
        elif dtype is None and tensor.tensor_type.name in READERS:
            weight = of_blocks(tensor.data[rows], tensor.tensor_type.name)
        else:
            weight = numbers_of(tensor.data[rows], tensor.tensor_type, dtype)
        keep(name, weight, weight.shape)
    check_taken(path.name, untaken)
    for name, halves in experts.items():
        keep(name, *_experts(halves, dtype))
    both = ((name, shape, wanted[name].shape) for name, shape in shapes.items())
    unlike = [(name, shape, right) for name, shape, right in both if tuple(shape) != right]
    check_whole(path.name, wanted.keys() - shapes.keys(), unlike)
    return found


def _processor(model: PreTrainedModel, architecture: str) -> tables.TensorProcessor:
    """Orders the rows of tensors as transformers does."""
    return tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(model.config.to_dict())


def names_of_weights(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """The model's weights by the names of tensors of a GGUF file."""
    return dict(tables.get_gguf_hf_weights_map(model, _processor(model, architecture)))


def check_taken(name: str, untaken: Iterable[str]) -> None:
    """Refuse a file with tensors that are no weight of the model: without them it would write another text."""
    configured = ALWAYS, LONG, SHORT
    if left := sorted(tensor for tensor in untaken if tensor not in configured):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise LoadError(f"{name} cannot be run here: it has weights that this model has no place for: {left[0]}{more}.")


def _numbered(shape: Sequence[int]) -> NDArray[np.float32]:
    """A tensor of this shape with the number of its row in each place. It takes the memory of one column."""
    rows = np.arange(shape[0], dtype=np.float32)
    return np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), shape)


def _rows(numbered: NDArray[np.float32], shape: Sequence[int]) -> Rows | None:
    """Which rows of a tensor make up its weight; None if more than their order changes.

    Args:
        numbered: the weight that is made of `_numbered(shape)`.
    """
    if numbered.shape != tuple(shape):
        return None
    order, in_order = numbered.reshape(len(numbered), -1)[:, 0], np.arange(len(numbered))
    if np.array_equal(order, in_order):
        return slice(None)  # takes no copy
    return order.astype(np.int64) if np.array_equal(np.sort(order), in_order) else None


def numbers_of(raw: NDArray[Any], kind: gguf.GGMLQuantizationType, dtype: torch.dtype | None) -> Tensor:
    """The numbers of a tensor that a GGUF file stores as `raw`, in a type; for None as `narrowed`.

    They are read a few rows at a time, since gguf makes float32 of them.
    """
    rows, whole = max(1, AT_ONCE * len(raw) // raw.nbytes), None
    read_as = dtype or NARROW.get(kind.name, torch.float32)
    for start in range(0, len(raw), rows):
        piece = torch.from_numpy(np.array(gguf.dequantize(raw[start : start + rows], kind)))
        if whole is None:
            whole = piece.new_empty(len(raw), *piece.shape[1:], dtype=read_as)
        whole[start : start + rows] = piece
    assert whole is not None, "a tensor has rows"
    return narrowed(whole) if dtype is None else whole


# Experts, whose gates a GGUF file has as one tensor of a layer, and so the others -----------------------------------


def joint_name(tensor: str) -> str:
    """The name in transformers of the weight that a tensor is a part of; empty if it has no experts."""
    found = OF_EXPERTS.fullmatch(tensor)
    return f"{LAYERS}.{found[1]}.{EXPERTS_DOWN if found[2] == 'down' else EXPERTS_UP}" if found else ""


def _experts(tensors: Sequence[Any], dtype: torch.dtype | None) -> tuple[Weight, tuple[int, ...]]:
    """The joint weight of tensors of `gguf.GGUFReader`, those of the gates and then of the others, and its shape.

    It stays quantized, [experts * outer, inner], if all of them are of the same type of `READERS`.
    """
    tensors = sorted(tensors, key=lambda tensor: "gate" not in tensor.name)
    kinds, count = {tensor.tensor_type.name for tensor in tensors}, len(tensors[0].data)
    if len(kinds) == 1 and kinds <= READERS.keys():
        (kind,) = kinds
        halves = [of_blocks(tensor.data.reshape(-1, tensor.data.shape[-1]), kind).parts() for tensor in tensors]
        by_expert = {name: [half[name].unflatten(0, (count, -1)) for half in halves] for name in halves[0]}
        joint = Quantized(**{name: torch.cat(parts, 1).flatten(0, 1) for name, parts in by_expert.items()})
        return joint, (count, len(joint) // count, joint.shape[1])
    whole = torch.cat([numbers_of(tensor.data, tensor.tensor_type, dtype) for tensor in tensors], 1)
    return whole, tuple(whole.shape)
