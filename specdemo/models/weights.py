"""Reads the safetensors files of models that the fused runners know, without transformers' models."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import CDLL, c_int, c_size_t, c_void_p
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from ..engines.cpu.library import library_for
from ..engines.families import (
    EXPERTS_DOWN,
    EXPERTS_UP,
    FAMILIES,
    HEAD_NORMS,
    OUTPUT,
    ROUTER,
    family_of,
    head_width,
    inner_size,
    key_heads,
    mixture,
)
from ..engines.named_weights import stored_as
from ..engines.quantized import GROUP, Precise, Quantized, Weight
from ..system.hardware import QUANTIZED, STORED, STORED_16
from ..system.weight_map import files_in, weights_file
from .configuration import text_name
from .experts import JointExperts, joint_name
from .store import LoadError

Shapes = dict[str, tuple[int, ...]]
INDEX = ".index.json"  # the end of the name of the list of files, if there are several
# The weights that a runner always keeps unchanged.
KEPT = {OUTPUT, *(name for family in FAMILIES.values() for name in (family.embedding, family.positions) if name)}


def shapes(config: PreTrainedConfig) -> Shapes:
    """The shapes of the weights of a model that `families.knows`, by transformers' names. A tied head is left out."""
    family, table = family_of(config), (config.vocab_size, config.hidden_size)
    found: Shapes = {family.embedding: table, **_norm(config, family.norm, config.hidden_size)}
    if not config.tie_word_embeddings:
        found[OUTPUT] = table
    if family.positions:
        found[family.positions] = config.max_position_embeddings, config.hidden_size
    for index in range(config.num_hidden_layers):
        of_layer = {**_attention(config), **_mlp(config, index)}
        found |= {f"{family.layers}.{index}.{name}": shape for name, shape in of_layer.items()}
    return found


def _attention(config: PreTrainedConfig) -> Shapes:
    """The weights of a layer but for those of `_mlp`."""
    family, hidden, width = family_of(config), config.hidden_size, head_width(config)
    queries, keys = config.num_attention_heads * width, key_heads(config) * width
    of_qkv = [queries, keys, keys] if len(family.qkv) > 1 else [queries + 2 * keys]
    products: Shapes = {name: (size, hidden) for name, size in zip(family.qkv, of_qkv, strict=True)}
    layer = _linear(config, {**products, family.out: (hidden, queries)})
    for name in (family.attention_norm, family.out_norm, family.mlp_norm, family.down_norm):
        layer |= _norm(config, name, hidden) if name else {}
    if family.normed_heads:
        sizes = (queries, keys) if family.normed_heads == "all" else (width, width)
        layer |= {f"{name}.weight": (size,) for name, size in zip(HEAD_NORMS, sizes, strict=True)}
    return layer


def _mlp(config: PreTrainedConfig, index: int) -> Shapes:
    """The weights of the MLP of a layer, or of its router and its experts."""
    family, hidden, experts = family_of(config), config.hidden_size, mixture(config, index)
    if experts is not None:
        size, inner = experts.count, experts.inner
        return {ROUTER: (size, hidden), EXPERTS_UP: (size, 2 * inner, hidden), EXPERTS_DOWN: (size, hidden, inner)}
    inner = inner_size(config)
    outer = (2 if family.gated else 1) * inner // len(family.up)
    return _linear(config, {**dict.fromkeys(family.up, (outer, hidden)), family.down: (hidden, inner)})


def _linear(config: PreTrainedConfig, products: Shapes) -> Shapes:
    """The weights and biases of products of a layer, whose shapes are [out, in]."""
    family = family_of(config)
    weights: Shapes = {f"{name}.weight": shape[:: -1 if family.transposed else 1] for name, shape in products.items()}
    return weights | {f"{name}.bias": products[name][:1] for name in products if family.has_bias(config, name)}


def _norm(config: PreTrainedConfig, name: str, size: int) -> Shapes:
    return {f"{name}.{part}": (size,) for part in (("weight", "bias") if family_of(config).centred else ("weight",))}


def bits_of(dtype: torch.dtype, shape: Sequence[int] = (GROUP, GROUP)) -> int:
    """Bits of a number of a weight that is kept in this type. Those of a file's own type are not known before."""
    if dtype in QUANTIZED.values() and (len(shape) == 1 or shape[-1] % GROUP):
        return 32 if len(shape) == 1 else 16
    return {torch.qint8: 9, torch.quint4x2: 5, **dict.fromkeys(STORED, 16)}.get(dtype, 8 * dtype.itemsize)


def weights_files(file: Callable[[str], Path | None], variant: str | None = None) -> list[Path]:
    """The safetensors files with a checkpoint's weights, if any.

    Args:
        file: gives the path of a file of the checkpoint by its name, None if there is none.
        variant: part of the files' names, as in `from_pretrained`.
    Raises:
        LoadError: a file in the list of files is missing.
    """
    name = weights_file(variant)
    if (whole := file(name)) is not None:
        return [whole]
    if (index := file(name + INDEX)) is None:
        return []
    paths = {part: file(part) for part in files_in(index)}
    if absent := [part for part, path in paths.items() if path is None]:
        raise LoadError(f"There is no file {absent[0]}, which {index.name} names: download the model again.")
    return [path for path in paths.values() if path is not None]


SEPARATOR = ":"  # between the name of a quantized weight and that of a tensor of `Quantized`


def have_quantized(files: Iterable[Path]) -> bool:
    """Whether safetensors files have a weight that is `Quantized`."""
    return any(SEPARATOR in name for path in files for name in sorted(safe_open(path, framework="pt").keys()))


class StoredWeights(Mapping[str, Weight]):
    """The weights of a model in safetensors files, by transformers' names.

    A weight is read when it is asked for, so that memory holds one unpacked weight at a time. The weights that a runner
    keeps unchanged (`KEPT`) are read once and copied, because a tensor that is not copied keeps the file in memory. Of
    quantized embeddings memory holds only the rows that are looked up.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.dtype, self.device = shapes, dtype, device
        in_blocks = dtype in QUANTIZED.values() or library_for(dtype) is not None  # which the C library copies
        self._copies = device.type == "cpu" and not in_blocks
        # By the name of a weight: its file, and what that has of it.
        self._files: dict[str, tuple[safe_open | JointExperts, list[str]]] = {}
        self._kept: dict[str, Weight] = {}

    @classmethod
    def of(
        cls,
        files: list[Path],
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        of_ours: bool = False,
    ) -> StoredWeights | None:
        """Open the files; None if they do not hold exactly the weights of this configuration.

        Tied embeddings are read as in transformers: either may be in the files, and if both are and differ, the model
        has both.

        Args:
            dtype: the type that the weights are converted to.
            of_ours: the files were written by `converted`, so that some weights may be quantized.
        """
        stored = cls(shapes(config), dtype, device)
        table = family_of(config).embedding
        prefix = table.partition(".")[0] + "."
        known = {**stored.shapes, OUTPUT: stored.shapes[table]}
        experts: dict[str, JointExperts] = {}
        for path in files:
            file = safe_open(path, framework="pt", device=str(device))
            kept = of_ours and dtype in QUANTIZED.values()
            names = [name for name in sorted(file.keys()) if kept or SEPARATOR not in name]
            for stated, tensors in groupby(names, lambda tensor: tensor.partition(SEPARATOR)[0]):
                name, place = joint_name(text_name(stated))
                ours = name if name in known else prefix + name  # the files of a model without its head have no prefix
                if ours in known and place is not None:
                    experts.setdefault(ours, JointExperts(known[ours])).pieces[place] = file, stated
                elif ours in known:
                    stored._files[ours] = file, [*tensors]
                    if known[ours] != stored._shape(ours):
                        return None
        if not all(of_layer.complete for of_layer in experts.values()):
            return None
        stored._files |= {name: (of_layer, [name]) for name, of_layer in experts.items()}
        if OUTPUT not in stored.shapes and OUTPUT in stored._files:
            if table not in stored._files:
                stored._files[table] = stored._files.pop(OUTPUT)
            elif _are_equal(stored[table], stored[OUTPUT]):
                del stored._files[OUTPUT], stored._kept[OUTPUT]
            else:
                stored.shapes = known
        return stored if stored._files.keys() == stored.shapes.keys() else None

    def __getitem__(self, name: str) -> Weight:
        if name in self._kept:
            return self._kept[name]
        file, there = self._files[name]
        if len(there) > 1:
            parts = {one.partition(SEPARATOR)[2]: file.get_tensor(one) for one in there}
            of_file = (Precise if self.dtype == STORED_16 else Quantized)(**parts)
            weight = stored_as(name, of_file, self.dtype)
        else:
            read: Tensor = file.get_tensor(there[0])
            weight = stored_as(name, read, self.dtype)
            if weight is read and (self._copies or name in KEPT or read.dim() == 1) and read.device.type == "cpu":
                weight = read.clone()
        if name in KEPT:
            self._kept[name] = weight
        return weight

    def _shape(self, name: str) -> tuple[int, ...]:
        file, there = self._files[name]
        assert not isinstance(file, JointExperts), "its shape is that of a configuration"
        first = file.get_slice(there[0])  # of a quantized weight the codes
        shape = tuple(first.get_shape())
        if len(there) == 1:
            return shape
        inner = shape[1] * (2 if first.get_dtype() == "U8" else 1)
        of_experts = len(self.shapes.get(name, ())) == 3  # which are one below the other
        return (self.shapes[name][0], shape[0] // self.shapes[name][0], inner) if of_experts else (shape[0], inner)

    def _size(self, name: str) -> int:
        file, there = self._files[name]
        if len(there) > 1 and self.dtype in STORED:
            return sum(file.get_tensor(one).nbytes for one in there)
        return prod(self.shapes[name]) * bits_of(self.dtype, self.shapes[name]) // 8

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each weight as it is kept."""
        return {name: self._size(name) for name in self.shapes}

    @property
    def nbytes(self) -> int:
        """Bytes of all converted weights."""
        return sum(self.sizes.values())

    def let_go(self) -> None:
        """Give back the memory that what was read of the files takes, once the weights are laid out."""
        if self.device.type != "cpu":
            return
        for file, there in self._files.values():
            if not isinstance(file, JointExperts):
                for tensor in map(file.get_tensor, there):  # a part of the file
                    give_back(tensor.data_ptr(), tensor.nbytes)

    @property
    def placement(self) -> dict[str, int]:
        """Bytes on each device."""
        return {str(self.device): self.nbytes}


def give_back(address: int, size: int) -> None:
    """Give back the whole pages of `size` bytes of a file that is mapped into memory, where this can be done.

    They are read again when they are next needed. The bytes must not have been written in memory.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        advise = CDLL(None).madvise
        advise.argtypes = [c_void_p, c_size_t, c_int]
        advise(begin, end - begin, mmap.MADV_DONTNEED)


def _are_equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    both = a.parts(), b.parts()
    return both[0].keys() == both[1].keys() and all(torch.equal(part, both[1][name]) for name, part in both[0].items())
