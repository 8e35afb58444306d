"""Published heads: their configurations and tensors, as `networks` and `medusa` take them.

The tensors of a decoder layer have the names of most families. EAGLE-3 calls its only layer `midlayer`, and P-EAGLE may
call its first so; the others use `layers.N`. `tensors_of` is the one table of names and shapes, for reading and for
writing.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...engines.families import DOWN, GATE_UP, HEAD_NORMS, OUT, QKV, Family
from ...errors import BadInput
from ...formats import reason
from ...system.weight_map import files_in
from .published_shape import ShapeReader, TargetSizes, format_of, head_name, read_config
from .shapes import EACH, NONE, HeadShape

LAYER = Family()
Sizes = tuple[int, ...]
Table = dict[str, dict[str, Sizes]]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WHOLE = WEIGHTS, "medusa_lm_head.safetensors"  # names of files that hold all tensors
PICKLES = "pytorch_model.bin", "medusa_lm_head.pt"  # the only file of many EAGLE-3 and Medusa heads
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
EMBEDDING, OFFSETS = "embed_tokens.weight", "d2t"
MASK_HIDDEN = "mask_hidden"  # of P-EAGLE: what stands for the states of the target at the places after the first
# Tensors for training or for other uses of a head, or that can be computed.
UNUSED = ("t2d", "verifier_norm.", "verifier_lm_head.", "confidence_head.", "rotary_emb.")
DAMAGED = (OSError, SafetensorError, UnpicklingError, EOFError, ValueError, KeyError, RuntimeError, AttributeError)


class PublishedHead:
    """A head in a folder, while it is read for a target. Its tensors are taken one by one and checked."""

    def __init__(self, folder: Path, kind: str, target: TargetSizes) -> None:
        """Check the configuration. No tensor is read."""
        self.folder, self.target = folder, target
        self.name, self.config = head_name(folder), read_config(folder)
        self.format, self.left = format_of(self.config, self.name), dict[str, Tensor]()
        if self.format.kind != kind:
            raise BadInput(f"{self.name} is {self.format.name}, which drafts as {self.format.kind} and not as {kind}.")
        if self.format.layers:  # else the configuration states no sizes
            self.shape()

    def shape(self) -> HeadShape:
        """The sizes of the head, if it has decoder layers. Some are known from the names of tensors."""
        return ShapeReader(self.name, self.format, self.config, self.target).shape(self.left)

    def open(self, weights: bool = True) -> PublishedHead:
        """Map the files of the tensors into memory. Without `weights` all but the table of tokens are on meta."""
        for key, tensor in self._tensors().items():
            plain = key.removeprefix("logit_head.").removeprefix("medusa_head.")  # which only some files have
            plain = f"layers.0.{plain.removeprefix('midlayer.')}" if plain.startswith("midlayer.") else plain
            if not plain.startswith(UNUSED):
                one = tensor.flatten() if plain == MASK_HIDDEN else tensor  # some files give it axes of length 1
                self.left[plain] = one if weights or plain == OFFSETS else one.to("meta")
        return self

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors in the folder. Of a pickle torch loads tensors only, and runs no code."""
        folder = self.folder
        try:
            for path in filter(Path.is_file, (folder / file for file in WHOLE)):
                return load_file(path)
            if (folder / INDEX).is_file():
                parts = files_in(folder / INDEX)
                return {key: tensor for part in parts for key, tensor in load_file(folder / part).items()}
            for path in filter(Path.is_file, (folder / file for file in PICKLES)):
                read = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                return {key: tensor for key, tensor in read.items() if isinstance(tensor, Tensor)}
        except DAMAGED as error:
            raise BadInput(f"{self.name} cannot be read: {reason(error)}.") from error
        raise BadInput(f"{self.name} has no weights: its folder has neither {WEIGHTS} nor {PICKLES[0]}.")

    def take(self, key: str, *wanted: int) -> Tensor:
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
        """Refuse tensors that were not taken."""
        for key, tensor in self.left.items():
            raise BadInput(
                f"{self.name} has the tensor {key} of shape {list(tensor.shape)}, which is not known here: it may "
                "compute something else."
            )


def tensors_of(kind: str, shape: HeadShape) -> Table:
    """The published names and shapes of the tensors that each weight of a head is concatenated from, by the name of
    the weight here."""
    hidden, states, layers = shape.hidden, shape.states, len(shape.state_layers)
    table: Table = {"fuse.weight": {"fc.weight": (hidden, states)}, "norm.weight": {"norm.weight": (hidden,)}}
    if shape.state_norms != NONE:
        each: dict[str, Sizes] = {f"fc_norm.{index}.weight": (states // layers,) for index in range(layers)}
        table["state_norm"] = each if shape.state_norms == EACH else {"input_norm.weight": (states,)}
    if shape.fused_norm:
        table["fused_norm.weight"] = {"hidden_norm.weight": (hidden,)}
    if kind != "block":
        table["token_norm.weight"] = {f"layers.0.{LAYER.attention_norm}.weight": (hidden,)}
        table["hidden_norm.weight"] = {"layers.0.hidden_norm.weight": (hidden,)}
        table |= _layer(shape, "", "layers.0.", ("qkv",), 2 * hidden)
        if kind == "eagle":
            return table
        table[MASK_HIDDEN] = {MASK_HIDDEN: (states,)}
    for prefix in (f"layers.{index}." for index in range(0 if kind == "block" else 1, shape.depth)):
        table[f"{prefix}attention_norm.weight"] = {f"{prefix}{LAYER.attention_norm}.weight": (hidden,)}
        table |= _layer(shape, prefix, prefix, ("q", "kv"), hidden)
        if taps := shape.conv_taps:
            rows = 2 * taps * (hidden // shape.conv_group)
            for conv in (f"{prefix}attention_conv.", f"{prefix}mlp_conv."):
                table[f"{conv}base"] = {f"{conv}base_kernel": (2, taps, hidden)}
                table[f"{conv}deltas.weight"] = {f"{conv}kernel_projection.weight": (rows, hidden)}
    if shape.rank:
        table["before.weight"] = {"markov_head.markov_w1.weight": (shape.vocab_size, shape.rank)}
        table["after.weight"] = {"markov_head.markov_w2.weight": (shape.draft_vocab, shape.rank)}
    if shape.candidates:
        theirs, codebook = "candidate_selector.", (shape.vocab_size, shape.selector_rank)
        table["selector.before.weight"] = {f"{theirs}predecessor_codebook": codebook}
        table["selector.after.weight"] = {f"{theirs}successor_codebook": codebook}
        table["selector.gate.weight"] = {f"{theirs}hidden_projection.weight": (shape.selector_rank, hidden)}
    return table


def _layer(shape: HeadShape, ours: str, theirs: str, projections: tuple[str, ...], inner: int) -> Table:
    """The rows that both kinds of decoder layers share. Each of our `projections` joins those of its letters."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.width, shape.kv_heads * shape.width
    rows = {"q": queries, "k": keys, "v": keys}
    names = dict(zip("qkv", QKV, strict=True))
    table: Table = {}
    for name in projections:
        table[f"{ours}{name}.weight"] = {f"{theirs}{names[part]}.weight": (rows[part], inner) for part in name}
        if shape.qkv_bias:
            table[f"{ours}{name}.bias"] = {f"{theirs}{names[part]}.bias": (rows[part],) for part in name}
    for part, norm in zip("qk", HEAD_NORMS if shape.head_norms else (), strict=False):
        table[f"{ours}{part}_norm.weight"] = {f"{theirs}{norm}.weight": (shape.width,)}
    table[f"{ours}out.weight"] = {f"{theirs}{OUT}.weight": (hidden, queries)}
    if shape.out_bias:
        table[f"{ours}out.bias"] = {f"{theirs}{OUT}.bias": (hidden,)}
    table[f"{ours}mlp_norm.weight"] = {f"{theirs}{LAYER.mlp_norm}.weight": (hidden,)}
    table[f"{ours}gate_up.weight"] = {f"{theirs}{part}.weight": (shape.mlp, hidden) for part in GATE_UP}
    table[f"{ours}down.weight"] = {f"{theirs}{DOWN}.weight": (hidden, shape.mlp)}
    return table
