"""Reads the safetensors files of models that the fused runners know, without transformers' models."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ..engines.families import EXPERTS_DOWN, EXPERTS_UP, ROUTER, family_of, head_width, mixture
from ..engines.named_weights import stored_as
from ..engines.quantized import Quantized, Weight
from ..system.hardware import AS_STORED, QUANTIZED
from ..system.weight_map import files_in, weights_file
from .configuration import text_name
from .experts import JointExperts, joint_name
from .store import LoadError

Shapes = dict[str, tuple[int, ...]]
INDEX = ".index.json"  # the end of the name of the list of files, if there are several
HEAD = "lm_head.weight"
# The weights that a runner always keeps unchanged.
KEPT = {"model.embed_tokens.weight", HEAD, "transformer.wte.weight", "transformer.wpe.weight"}


def shapes(config: PreTrainedConfig) -> Shapes:
    """The shapes of the weights of a model that `families.knows`, by transformers' names. A tied head is left out."""
    layers, layer, others = _gpt2(config) if family_of(config).layout == "gpt2" else _of_family(config)
    head = {} if config.tie_word_embeddings else {HEAD: (config.vocab_size, config.hidden_size)}
    every = ((index, {**layer, **_mlp(config, index)}) for index in range(config.num_hidden_layers))
    return {**others, **{f"{layers}.{i}.{name}": of_layer[name] for i, of_layer in every for name in of_layer}, **head}


def _of_family(config: PreTrainedConfig) -> tuple[str, Shapes, Shapes]:
    """The name of the layers, the weights of a layer but for those of `_mlp`, and the weights outside of the layers."""
    family, hidden = family_of(config), config.hidden_size
    queries, keys = (heads * head_width(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    of_qkv = [queries, keys, keys] if len(family.qkv) > 1 else [queries + 2 * keys]
    products: Shapes = {f"self_attn.{name}": (size, hidden) for name, size in zip(family.qkv, of_qkv, strict=True)}
    products["self_attn.o_proj"] = hidden, queries
    layer = _linear(config, products)
    norms = family.attention_norm, family.out_norm, family.mlp_norm, family.down_norm
    layer |= {f"{name}.weight": (hidden,) for name in norms if name}
    if family.normed_heads:
        sizes = (queries, keys) if family.normed_heads == "all" else (head_width(config),) * 2
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", sizes, strict=True)}
    others: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return "model.layers", layer, others


def _mlp(config: PreTrainedConfig, index: int) -> Shapes:
    """The weights of the MLP of a layer, or of its router and its experts."""
    if family_of(config).layout == "gpt2":
        return {}
    hidden, experts = config.hidden_size, mixture(config, index)
    if experts is not None:
        size, inner = experts.count, experts.inner
        up, down = (size, 2 * inner, hidden), (size, hidden, inner)
        return {ROUTER: (size, hidden), EXPERTS_UP: up, EXPERTS_DOWN: down}
    up_names, inner = family_of(config).up, config.intermediate_size
    products: Shapes = {f"mlp.{name}": (2 * inner // len(up_names), hidden) for name in up_names}
    return _linear(config, {**products, "mlp.down_proj": (hidden, inner)})


def _linear(config: PreTrainedConfig, products: Shapes) -> Shapes:
    """The weights and biases of products of a layer."""
    family = family_of(config)
    weights: Shapes = {f"{name}.weight": shape for name, shape in products.items()}
    return weights | {f"{name}.bias": products[name][:1] for name in products if family.has_bias(config, name)}


def _gpt2(config: PreTrainedConfig) -> tuple[str, Shapes, Shapes]:
    """As `_of_family`. GPT-2 keeps its weights as [in, out]."""
    hidden, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    products: Shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    layer: Shapes = {f"{name}.weight": shape for name, shape in products.items()}
    layer |= {f"{name}.bias": shape[1:] for name, shape in products.items()}
    layer |= {f"{name}.{part}": (hidden,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    others: Shapes = {f"transformer.ln_f.{part}": (hidden,) for part in ("weight", "bias")}
    others |= {"transformer.wte.weight": (config.vocab_size, hidden)}
    others |= {"transformer.wpe.weight": (config.n_positions, hidden)}
    return "transformer.h", layer, others


def bits_of(dtype: torch.dtype, dimensions: int = 2) -> int:
    """Bits of a number of a weight that is kept in this type. Those of a file's own type are not known before."""
    if dtype in QUANTIZED.values() and dimensions == 1:
        return 32
    return {torch.qint8: 9, torch.quint4x2: 5, AS_STORED: 16}.get(dtype, 8 * dtype.itemsize)


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
            of_ours: the files were written by `converted`, so that as stored some may be quantized.
        """
        stored = cls(shapes(config), dtype, device)
        gpt2 = family_of(config).layout == "gpt2"
        prefix, table = ("transformer.", "transformer.wte.weight") if gpt2 else ("model.", "model.embed_tokens.weight")
        known = {**stored.shapes, HEAD: stored.shapes[table]}
        experts: dict[str, JointExperts] = {}
        for path in files:
            file = safe_open(path, framework="pt", device=str(device))
            names = [name for name in sorted(file.keys()) if SEPARATOR not in name or (of_ours and dtype == AS_STORED)]
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
        if HEAD not in stored.shapes and HEAD in stored._files:
            if table not in stored._files:
                stored._files[table] = stored._files.pop(HEAD)
            elif _are_equal(stored[table], stored[HEAD]):
                del stored._files[HEAD], stored._kept[HEAD]
            else:
                stored.shapes = known
        return stored if stored._files.keys() == stored.shapes.keys() else None

    def __getitem__(self, name: str) -> Weight:
        if name in self._kept:
            return self._kept[name]
        file, there = self._files[name]
        if len(there) > 1:
            weight: Weight = Quantized(**{one.partition(SEPARATOR)[2]: file.get_tensor(one) for one in there})
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
        inner = shape[1] * (8 if first.get_dtype() == "I32" else 2)
        of_experts = len(self.shapes.get(name, ())) == 3  # which are one below the other
        return (self.shapes[name][0], shape[0] // self.shapes[name][0], inner) if of_experts else (shape[0], inner)

    def _size(self, name: str) -> int:
        file, there = self._files[name]
        if len(there) > 1:
            return sum(file.get_tensor(one).nbytes for one in there)
        return prod(self.shapes[name]) * bits_of(self.dtype, len(self.shapes[name])) // 8

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
