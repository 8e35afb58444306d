"""From the configuration of a published head to the sizes of our network.

Layers are numbered in two ways. In EAGLE's and speculators' formats n is an index of transformers' `hidden_states`,
which is the output of layer n - 1. In z-lab's, as here, n is the layer itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...engines.layout import ROPES
from ...types import MAX_K, BadInput
from .formats import Config, Format
from .networks import rope_of
from .shapes import ALL, ALL_TOKENS, EACH, NONE, ROPE_THETA, HeadShape

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a head must fit: the target's vocabulary V, hidden size and number of layers.

    `final_norm` are the weight [hidden] and the epsilon of its final RMS norm, where that is known.
    """

    vocab_size: int
    hidden: int
    layers: int
    final_norm: tuple[Tensor, float] | None = None


@dataclass(frozen=True, slots=True)
class ShapeReader:
    """Reads the configuration of one head for a target; `name` is what messages call the head."""

    name: str
    format: Format
    config: Config
    target: TargetSizes

    @property
    def layer(self) -> Config:
        return (self.config.get("transformer_layer_config") or {}) if self.format.nested else self.config

    @property
    def block(self) -> Config:
        """The configuration of its blocks. z-lab keeps some settings in a table, in newer files more of them."""
        return {**self.config, **(self.config.get("dflash_config") or {})}

    def shape(self, tensors: Collection[str]) -> HeadShape:
        """The sizes of the head. The names of its `tensors` tell which biases and norms its attention has.

        Raises:
            BadInput: it was made for another target, or has something that the networks here do not have.
        """
        layer, hidden, vocab_size = self.layer, self._whole("hidden_size"), self._whole("vocab_size")
        theirs = self.config.get("target_hidden_size") or hidden
        if (vocab_size, theirs) != (self.target.vocab_size, self.target.hidden):
            raise BadInput(
                f"{self.name} was trained for a target of {vocab_size} tokens and hidden size {theirs}, "
                f"but this one has {self.target.vocab_size} and {self.target.hidden}."
            )
        if (activation := layer.get("hidden_act") or "silu") != "silu":
            raise BadInput(f"{self.name} has the activation {activation!r}; only 'silu' is read here.")
        heads, depth = self._whole("num_attention_heads"), self._whole("num_hidden_layers", 1)
        kv_heads, width = self._whole("num_key_value_heads", heads), self._whole("head_dim", hidden // heads)
        if heads % kv_heads or width % 2:
            raise BadInput(
                f"{self.name} has {heads} heads for queries, {kv_heads} for keys and a head_dim of {width}: the second "
                "must divide the first, and the third must be even."
            )
        windows = self._windows(depth)
        shape = HeadShape(
            vocab_size=vocab_size,
            hidden=hidden,
            target_hidden=theirs,
            state_layers=self._state_layers(),
            draft_vocab=self._whole("draft_vocab_size", vocab_size, self.config),
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            mlp=self._whole("intermediate_size"),
            eps=layer.get("rms_norm_eps") or 1e-6,
            window=max(windows),
            layer_windows=windows,
            rope=self._rope(),
            qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
            out_bias="layers.0.self_attn.o_proj.bias" in tensors,
            head_norms="layers.0.self_attn.q_norm.weight" in tensors,
        )
        try:
            rope_of(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unread_rotation() from error
        return self._eagle(shape) if self.format.kind == "eagle" else self._blocks(shape)

    def _eagle(self, shape: HeadShape) -> HeadShape:
        """Fill in what differs between variants of EAGLE-3; EAGLE 3.1 is `fc_norm` and `norm_output`."""
        config = self.config
        if shape.depth != 1:
            raise BadInput(f"{self.name} has {shape.depth} decoder layers; EAGLE heads of one layer are read here.")
        return replace(
            shape,
            state_norms=EACH if config.get("fc_norm") else ALL if config.get("norm_before_fc") else NONE,
            normed_residual=bool(config.get("norm_before_residual")),
            normed_feedback=bool(config.get("norm_output")),
        )

    def _blocks(self, shape: HeadShape) -> HeadShape:
        """Fill in what differs between DFlash and DSpark."""
        block, spark = self.block, self.format.method == "dspark"
        size, mask = block.get("block_size"), block.get("mask_token_id")
        if not isinstance(size, int) or size < 2 or not isinstance(mask, int) or not 0 <= mask < shape.vocab_size:
            raise BadInput(
                f"{self.name} needs a block_size of 2 or more and a mask_token_id below {shape.vocab_size}, "
                f"but its configuration has {size!r} and {mask!r}."
            )
        slides = shape.window != ALL_TOKENS or len(set(shape.windows)) > 1
        causal_slides = self.format.nested and slides and not block.get("sliding_window_non_causal")
        if block.get("causal") or block.get("is_causal") or causal_slides:
            raise BadInput(f"{self.name} has layers in which a block is causal; those are not read here.")
        if spark and (markov := block.get("markov_head_type") or "vanilla") != "vanilla":
            raise BadInput(f"{self.name} has a Markov head of the type {markov!r}; only 'vanilla' is read here.")
        rank = block.get("markov_rank", 256 if self.format.nested else 0) if spark else 0
        # SpecForge's DSpark, which names itself in `dflash_config`, drafts after the anchor as DFlash does.
        from_anchor = spark and "projector_type" not in (self.config.get("dflash_config") or {})
        return replace(
            shape,
            state_norms=NONE,
            fused_norm=True,
            block_size=min(size, MAX_K + 1),
            mask_token=mask,
            from_anchor=bool(block.get("sample_from_anchor", from_anchor)),
            normed_context=False,
            rank=rank,
            bigram_table=bool(rank),
        )

    def _state_layers(self) -> tuple[int, ...]:
        config, count = self.config, self.target.layers
        ahead = 1  # the stated numbers minus those of the layers
        if self.format.kind == "eagle":
            ids = config.get("eagle_aux_hidden_state_layer_ids")
            if not ids and (ids := (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")):
                ahead = 0
            ids = ids or [2, count // 2, count - 3]
        elif self.format.nested:
            ids = config.get("aux_hidden_state_layer_ids")
        else:
            ids, ahead = self.block.get("target_layer_ids") or self._spread(), 0
            stated = config.get("num_target_layers")
            if stated not in (None, count):
                raise BadInput(f"{self.name} was trained for a target of {stated} layers, but this one has {count}.")
        if not ids or not all(isinstance(number, int) and 0 <= number - ahead < count for number in ids):
            raise BadInput(
                f"{self.name} reads the target's hidden states {ids}, but this target has those from {ahead} to "
                f"{count + ahead - 1}."
            )
        return tuple(number - ahead for number in ids)

    def _spread(self) -> list[int]:
        """The layers of a DFlash head that names none: as many as its own, evenly from 1 to the third from the end."""
        own, last = self._whole("num_hidden_layers", 1), self.target.layers - 3
        return [self.target.layers // 2] if own == 1 else [round(1 + i * (last - 1) / (own - 1)) for i in range(own)]

    def _windows(self, depth: int) -> tuple[int, ...]:
        types, window = self.layer.get("layer_types") or [FULL] * depth, self.layer.get("sliding_window") or 0
        if len(types) != depth or not set(types) <= {FULL, SLIDING} or (SLIDING in types and not window):
            raise BadInput(
                f"{self.name} has {depth} decoder layers, but its layer_types are {types} and its sliding_window is "
                f"{window!r}."
            )
        return tuple(int(window) if kind == SLIDING else ALL_TOKENS for kind in types)

    def _rope(self) -> dict[str, Any]:
        """The rotation, in transformers' newer fields. The default of `rope_theta` is 10000, as in EAGLE."""
        stated = self._stated_rotation()
        rope = {name: value for name, value in stated.items() if name != "type"}
        rope["rope_type"] = stated.get("rope_type") or stated.get("type") or "default"
        if rope["rope_type"] not in ROPES or rope.get("partial_rotary_factor") not in (None, 1.0):
            raise self._unread_rotation()
        rope.setdefault("rope_theta", float(self.layer.get("rope_theta") or ROPE_THETA))
        return rope

    def _stated_rotation(self) -> Config:
        return self.layer.get("rope_parameters") or self.layer.get("rope_scaling") or {}

    def _unread_rotation(self) -> BadInput:
        stated = json.dumps(self._stated_rotation())
        return BadInput(f"{self.name} rotates its keys in a way that is not read here: {stated}.")

    def _whole(self, name: str, usual: int = 0, config: Config | None = None) -> int:
        value = (config or self.layer).get(name) or usual
        if not isinstance(value, int) or value < 1:
            raise BadInput(f"{self.name} has no whole number {name} in its configuration: {value!r}.")
        return value
