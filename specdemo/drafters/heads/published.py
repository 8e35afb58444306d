"""Reads published heads into our networks. Fields of `HeadShape` say how the formats differ.

The tensors of a decoder layer have transformers' names. EAGLE-3 calls its only layer `midlayer`; the others use
`layers.N`. `tensors_of` is the one table of names and shapes, for reading and for writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...types import MAX_K, BadInput, reason
from .formats import Config, Format, format_of, head_name, read_config
from .networks import BlockHead, EagleHead, Head, LayeredHead, MedusaHead
from .published_shape import ShapeReader, TargetSizes
from .shapes import EACH, NONE, HeadShape, MedusaShape

H = TypeVar("H", bound=Head)
L = TypeVar("L", bound=LayeredHead)
Sizes = tuple[int, ...]
Table = dict[str, dict[str, Sizes]]

KINDS: dict[str, type[Head]] = {kind.kind: kind for kind in (EagleHead, BlockHead, MedusaHead)}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WHOLE = WEIGHTS, "medusa_lm_head.safetensors"  # names of files that hold all tensors
PICKLES = "pytorch_model.bin", "medusa_lm_head.pt"  # the only file of many EAGLE-3 and Medusa heads
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
EMBEDDING, OUTPUT, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
# Tensors for training or for other uses of a head, or that can be computed.
UNUSED = ("t2d", "verifier_norm.", "verifier_lm_head.", "confidence_head.", "rotary_emb.")
DAMAGED = (OSError, SafetensorError, UnpicklingError, EOFError, ValueError, KeyError, RuntimeError, AttributeError)


def check_config(folder: Path, kind: type[Head], target: TargetSizes) -> Format:
    """Check the configuration of the head in a folder and return its format. No weights are read.

    Raises:
        BadInput: it cannot be read, is of another kind, or says that it was made for a target of other sizes.
    """
    name, config = head_name(folder), read_config(folder)
    found = format_of(config, name)
    if found.kind != kind.kind:
        raise BadInput(f"{name} is {found.name}, which drafts as {found.kind} and not as {kind.kind}.")
    if found.method != "medusa":  # its configuration states no sizes
        ShapeReader(name, found, config, target).shape(())
    return found


def check_published(folder: Path, kind: type[Head], target: TargetSizes) -> None:
    """Refuse what `load_published` would refuse, without reading the weights."""
    _read(folder, kind, target, weights=False)


def load_published(folder: Path, kind: type[H], target: TargetSizes) -> H:
    """Read the head in a folder, for a target. Its weights keep their number types.

    Raises:
        BadInput: it cannot be read, is damaged or unusual, or was made for a target of other sizes. The message is one
            sentence, with both shapes if a shape is wrong.
    """
    return _read(folder, kind, target)


def _read(folder: Path, kind: type[H], target: TargetSizes, weights: bool = True) -> H:
    """The head in a folder; without `weights` its tensors are on the device meta."""
    found, name, config = check_config(folder, kind, target), head_name(folder), read_config(folder)
    tensors = {_plain(key): tensor for key, tensor in _read_tensors(folder, name).items()}
    if not weights:
        tensors = {key: tensor if key == OFFSETS else tensor.to("meta") for key, tensor in tensors.items()}
    taker = Taker(name, tensors)
    if found.method == "medusa":
        head = cast(H, _medusa(taker, config, target))
    else:
        head = _assembled(taker, cast(Any, kind), ShapeReader(name, found, config, target).shape(tensors))
    taker.check_empty()
    return head


def tensors_of(kind: type[LayeredHead], shape: HeadShape) -> Table:
    """The published names and shapes of the tensors that each weight of a head is concatenated from, by the name of
    the weight here."""
    hidden, states, layers = shape.hidden, shape.states, len(shape.state_layers)
    table: Table = {"fuse.weight": {"fc.weight": (hidden, states)}, "norm.weight": {"norm.weight": (hidden,)}}
    if shape.state_norms != NONE:
        each: dict[str, Sizes] = {f"fc_norm.{index}.weight": (states // layers,) for index in range(layers)}
        table["state_norm"] = each if shape.state_norms == EACH else {"input_norm.weight": (states,)}
    if shape.fused_norm:
        table["fused_norm.weight"] = {"hidden_norm.weight": (hidden,)}
    if kind.kind == "eagle":
        table["token_norm.weight"] = {"layers.0.input_layernorm.weight": (hidden,)}
        table["hidden_norm.weight"] = {"layers.0.hidden_norm.weight": (hidden,)}
        return table | _layer(shape, "", "layers.0.", ("qkv",), 2 * hidden)
    for prefix in (f"layers.{index}." for index in range(shape.depth)):
        table[f"{prefix}attention_norm.weight"] = {f"{prefix}input_layernorm.weight": (hidden,)}
        table |= _layer(shape, prefix, prefix, ("q", "kv"), hidden)
    if shape.rank:
        table["before.weight"] = {"markov_head.markov_w1.weight": (shape.vocab_size, shape.rank)}
        table["after.weight"] = {"markov_head.markov_w2.weight": (shape.draft_vocab, shape.rank)}
    return table


def _layer(shape: HeadShape, ours: str, theirs: str, projections: tuple[str, ...], inner: int) -> Table:
    """The rows that both kinds of decoder layers share. Each of our `projections` joins those of its letters."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.width, shape.kv_heads * shape.width
    rows = {"q": queries, "k": keys, "v": keys}
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
    table: Table = {}
    for name in projections:
        table[f"{ours}{name}.weight"] = {f"{attention}{part}_proj.weight": (rows[part], inner) for part in name}
        if shape.qkv_bias:
            table[f"{ours}{name}.bias"] = {f"{attention}{part}_proj.bias": (rows[part],) for part in name}
    if shape.head_norms:
        table |= {f"{ours}{part}_norm.weight": {f"{attention}{part}_norm.weight": (shape.width,)} for part in "qk"}
    table[f"{ours}out.weight"] = {f"{attention}o_proj.weight": (hidden, queries)}
    if shape.out_bias:
        table[f"{ours}out.bias"] = {f"{attention}o_proj.bias": (hidden,)}
    table[f"{ours}mlp_norm.weight"] = {f"{theirs}post_attention_layernorm.weight": (hidden,)}
    table[f"{ours}gate_up.weight"] = {f"{mlp}{part}_proj.weight": (shape.mlp, hidden) for part in ("gate", "up")}
    table[f"{ours}down.weight"] = {f"{mlp}down_proj.weight": (hidden, shape.mlp)}
    return table


def _read_tensors(folder: Path, name: str) -> Mapping[str, Tensor]:
    """All tensors in the folder. Of a pickle torch loads tensors only, and runs no code."""
    try:
        for path in filter(Path.is_file, (folder / file for file in WHOLE)):
            return load_file(path)
        if (folder / INDEX).is_file():
            parts = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            return {key: tensor for part in sorted(parts) for key, tensor in load_file(folder / part).items()}
        for path in filter(Path.is_file, (folder / file for file in PICKLES)):
            read = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return {key: tensor for key, tensor in read.items() if isinstance(tensor, Tensor)}
    except DAMAGED as error:
        raise BadInput(f"{name} cannot be read: {reason(error)}.") from error
    raise BadInput(f"{name} has no weights: its folder has neither {WEIGHTS} nor {PICKLES[0]}.")


def _plain(key: str) -> str:
    """The name of a tensor without the prefixes that only some files have."""
    key = key.removeprefix("logit_head.").removeprefix("medusa_head.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


class Taker:
    """The tensors of a head, taken one by one and checked."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self.left = {key: tensor for key, tensor in tensors.items() if not key.startswith(UNUSED)}

    def take(self, key: str, wanted: Sizes) -> Tensor:
        """The tensor of that name.

        Raises:
            BadInput: there is none, it has another shape, or is quantized.
        """
        tensor = self.left.pop(key, None)
        if tensor is None:
            raise BadInput(f"{self.name} lacks the tensor {key} of shape {list(wanted)}.")
        if tuple(tensor.shape) != wanted:
            raise BadInput(
                f"{self.name} has the tensor {key} of shape {list(tensor.shape)}, but its configuration and this "
                f"target ask for {list(wanted)}."
            )
        if tensor.dtype not in FLOATS and key != OFFSETS:
            numbers = str(tensor.dtype).removeprefix("torch.")
            raise BadInput(f"{self.name} has the tensor {key} in {numbers}, but quantized weights are not read here.")
        return tensor

    def check_empty(self) -> None:
        """Refuse tensors that were not taken.

        Raises:
            BadInput: the message names the first of them.
        """
        for key, tensor in self.left.items():
            raise BadInput(
                f"{self.name} has the tensor {key} of shape {list(tensor.shape)}, which is not known here: it may "
                "compute something else."
            )


def _assembled(taker: Taker, kind: type[L], shape: HeadShape) -> L:
    name, left, take = taker.name, taker.left, taker.take
    with torch.device("meta"):
        head = kind(shape)
    sizes = {ours: weight.shape for ours, weight in head.state_dict().items()}
    weights = {"token_ids": torch.arange(shape.draft_vocab)}
    for ours, parts in tensors_of(kind, shape).items():
        taken = [take(key, wanted) for key, wanted in parts.items()]
        weights[ours] = (torch.cat(taken) if len(taken) > 1 else taken[0]).view(sizes[ours])
    other_width, fewer = shape.target_hidden != shape.hidden, shape.draft_vocab != shape.vocab_size
    embedding = output = None
    if other_width or EMBEDDING in left:
        embedding = take(EMBEDDING, (shape.vocab_size, shape.hidden))
    if other_width or fewer or OUTPUT in left:
        output = take(OUTPUT, (shape.draft_vocab, shape.hidden))
    if fewer or OFFSETS in left:
        ids = weights["token_ids"] + take(OFFSETS, (shape.draft_vocab,)).long()
        order = ids.argsort()
        weights["token_ids"] = ids = ids[order]
        if int(ids[0]) < 0 or int(ids[-1]) >= shape.vocab_size or not (ids.diff() > 0).all():
            raise BadInput(
                f"{name} has a table {OFFSETS} that names {len(ids.unique())} different tokens from {int(ids[0])} to "
                f"{int(ids[-1])}, but it should name {shape.draft_vocab} of {shape.vocab_size}."
            )
        if output is not None and not (order.diff() > 0).all():
            output = output[order]
            if "after.weight" in weights:
                weights["after.weight"] = weights["after.weight"][order]
    head.load_state_dict(weights, assign=True)
    head.own_embedding, head.own_output = embedding, output
    return head.requires_grad_(False)


def _medusa(taker: Taker, config: Config, target: TargetSizes) -> MedusaHead:
    """A Medusa head. Place i has the tensors `i.j.linear` of its blocks j, and its output after them.

    Raises:
        BadInput: it was made for another target, or the target's final norm is not known here.
    """
    name, take = taker.name, taker.take
    stated = config.get("medusa_num_heads") or config.get("num_heads"), config.get("medusa_num_layers", 1)
    if not all(isinstance(number, int) and number > 0 for number in stated):
        raise BadInput(f"{name} needs whole numbers medusa_num_heads and medusa_num_layers, but it has {stated}.")
    if target.final_norm is None:
        raise BadInput(
            f"{name} reads the target's last state after its final norm, and this target's is not known here."
        )
    (weight, eps), hidden = target.final_norm, target.hidden
    places, blocks = min(stated[0] or 0, MAX_K), stated[1]
    last, vocab = target.layers - 1, target.vocab_size
    with torch.device("meta"):
        head = MedusaHead(MedusaShape(vocab, hidden, (last,), vocab, eps, places, blocks))
    weights = {"token_ids": torch.arange(vocab), "state_norm": weight[None]}
    for i in range(places):
        for j in range(blocks):
            weights[f"places.{i}.{j}.weight"] = take(f"{i}.{j}.linear.weight", (hidden, hidden))
            weights[f"places.{i}.{j}.bias"] = take(f"{i}.{j}.linear.bias", (hidden,))
    head.load_state_dict(weights, assign=True)
    head.place_outputs = [take(f"{i}.{blocks}.weight", (vocab, hidden)) for i in range(places)]
    return head.requires_grad_(False)
