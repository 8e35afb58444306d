"""Reads the tensors of a GGUF file as the weights of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, dequantize, get_tensor_name_map
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS as PROCESSORS
from transformers.modeling_gguf_pytorch_utils import TensorProcessor

from ..engines.families import EXPERTS_DOWN, EXPERTS_UP
from ..engines.named_weights import narrowed
from ..engines.quantized import AT_ONCE, READERS, Quantized, Weight, of_blocks
from .checkpoint import check_whole
from .gguf import ALWAYS, LONG, SHORT, Header
from .store import LoadError
from .weights import SEPARATOR

NARROW = {"F16": torch.float16, "BF16": torch.bfloat16}  # types of tensors that are kept as they are
NUMPY = {"F32": np.float32, "F16": np.float16}  # others are blocks of bytes
OF_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
Rows = NDArray[np.int64] | slice  # which rows of a tensor, in their order


class Stored(NamedTuple):
    """A tensor of a GGUF file as it is stored. `shape` is that of its numbers."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: NDArray[Any]  # [..., numbers or bytes of a row]

    @property
    def numbers(self) -> NDArray[np.float32]:
        return dequantize(self.raw, self.kind)


def tensors_of(path: Path, header: Header) -> dict[str, Stored]:
    """The tensors of a GGUF file, which are read when they are looked at."""
    content, found = np.memmap(path, mode="r"), dict[str, Stored]()
    for name, kind in header.kinds.items():
        shape, (begin, size) = header.shapes[name][::-1], header.span(name)
        stored_in = GGMLQuantizationType(kind)
        raw = content[begin : begin + size].view(NUMPY.get(stored_in.name, np.uint8))
        found[name] = Stored(name, stored_in, shape, raw.reshape(*shape[:-1], -1))
    return found


def read_weights(
    name: str,
    tensors: Mapping[str, Stored],
    architecture: str,
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    """The weights of a GGUF file by the model's names, or as stored the tensors of those that are quantized, and the
    others as `narrowed`.

    transformers' tables say how the rows of a tensor are ordered.

    Args:
        name: of the file, for the message.
        architecture: llama.cpp's name for it.
        dtype: the type of the weights; None is as stored.
        progress: is called with the part of the tensors that is done.
    Raises:
        LoadError: naming what is missing or has another shape.
    """
    found, shapes = dict[str, Tensor](), dict[str, Sequence[int]]()
    wanted, known = dict(model.named_parameters()), model.state_dict()
    processor = PROCESSORS.get(architecture, TensorProcessor)(model.config.to_dict())
    names = names_of_weights(model, architecture, processor)
    experts, untaken = dict[str, list[Stored]](), list[str]()

    def processed(numbers: NDArray[np.float32], tensor: str) -> tuple[str, NDArray[np.float32]]:
        """The name of a weight, empty if there is none, and its numbers, in the order of the model."""
        aside = dict[str, Tensor]()
        made = processor.process(numbers, tensor, tensor_key_mapping=names, parsed_parameters={"tensors": aside})
        if made.name is None:  # then it was put there
            ((weight, there),) = aside.items()
            return weight, there.numpy()
        return names.get(made.name, ""), made.weights

    def keep(weight: str, numbers: Weight, shape: Sequence[int]) -> None:
        shapes[weight] = shape
        if isinstance(numbers, Quantized):
            found.update({f"{weight}{SEPARATOR}{part}": of_part for part, of_part in numbers.parts().items()})
        else:
            found[weight] = numbers

    for done, tensor in enumerate(tensors.values()):
        progress(done / len(tensors))
        if (joint := joint_name(tensor.name)) in wanted:
            experts.setdefault(joint, []).append(tensor)
            continue
        weight, numbered = processed(_numbered(tensor.shape), tensor.name)
        if weight not in known:
            untaken.append(tensor.name)
            continue
        numbers: Weight
        if (rows := _rows(numbered, tensor.shape)) is None:
            plain = torch.from_numpy(np.array(processed(tensor.numbers, tensor.name)[1]))
            numbers = narrowed(plain) if dtype is None else plain.to(dtype)
        elif dtype is None and tensor.kind.name in READERS:
            numbers = of_blocks(tensor.raw[rows], tensor.kind.name)
        else:
            numbers = numbers_of(tensor.raw[rows], tensor.kind, dtype)
        keep(weight, numbers, numbers.shape)
    check_taken(name, untaken)
    for joint, halves in experts.items():
        keep(joint, *_experts(halves, dtype))
    both = ((weight, shape, known[weight].shape) for weight, shape in shapes.items())
    unlike = [(weight, shape, right) for weight, shape, right in both if tuple(shape) != right]
    check_whole(name, wanted.keys() - shapes.keys(), unlike)
    return found


def names_of_weights(model: PreTrainedModel, architecture: str, processor: TensorProcessor) -> dict[str, str]:
    """The model's weights by the names of tensors of a GGUF file, by gguf's table."""
    kind = next(one for one, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table, found = get_tensor_name_map(kind, model.config.num_hidden_layers), dict[str, str]()
    for weight in map(processor.preprocess_name, model.state_dict()):
        stem, dot, end = weight.rpartition(".")
        if end not in ("weight", "bias"):
            stem, dot, end = weight, "", ""
        tensor = table.get_name(stem) or table.get_name(stem.partition(".")[2])  # Bloom's lack the first part
        if tensor is None:
            processor.perform_fallback_tensor_mapping(found, dot + end, "", weight)
        else:
            found.setdefault(tensor + dot + end, weight)
    return found


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


def numbers_of(raw: NDArray[Any], kind: GGMLQuantizationType, dtype: torch.dtype | None) -> Tensor:
    """The numbers of a tensor that a GGUF file stores as `raw`, in a type; for None as `narrowed`.

    They are read a few rows at a time, since gguf makes float32 of them.
    """
    rows, whole = max(1, AT_ONCE * len(raw) // raw.nbytes), None
    read_as = dtype or NARROW.get(kind.name, torch.float32)
    for start in range(0, len(raw), rows):
        piece = torch.from_numpy(np.array(dequantize(raw[start : start + rows], kind)))
        if whole is None:
            whole = piece.new_empty(len(raw), *piece.shape[1:], dtype=read_as)
        whole[start : start + rows] = piece
    assert whole is not None, "a tensor has rows"
    return narrowed(whole) if dtype is None else whole


# Experts, whose gates a GGUF file has as one tensor of a layer, and so the others -----------------------------------


def joint_name(tensor: str) -> str:
    """The name in transformers of the weight that a tensor is a part of; empty if it has no experts."""
    found = OF_EXPERTS.fullmatch(tensor)
    return f"model.layers.{found[1]}.{EXPERTS_DOWN if found[2] == 'down' else EXPERTS_UP}" if found else ""


def _experts(tensors: Sequence[Stored], dtype: torch.dtype | None) -> tuple[Weight, tuple[int, ...]]:
    """The joint weight of tensors, those of the gates and then of the others, and its shape.

    As stored it stays quantized, [experts * outer, inner], if all of them are of the same type of `READERS`.
    """
    tensors = sorted(tensors, key=lambda tensor: "gate" not in tensor.name)
    kinds, count = {tensor.kind.name for tensor in tensors}, len(tensors[0].raw)
    if dtype is None and len(kinds) == 1 and kinds <= READERS.keys():
        (kind,) = kinds
        halves = [of_blocks(tensor.raw.reshape(-1, tensor.raw.shape[-1]), kind).parts() for tensor in tensors]
        by_expert = {name: [half[name].unflatten(0, (count, -1)) for half in halves] for name in halves[0]}
        joint = Quantized(**{name: torch.cat(parts, 1).flatten(0, 1) for name, parts in by_expert.items()})
        return joint, (count, len(joint) // count, joint.shape[1])
    whole = torch.cat([numbers_of(tensor.raw, tensor.kind, dtype) for tensor in tensors], 1)
    return whole, tuple(whole.shape)
