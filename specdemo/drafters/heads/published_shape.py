"""From the configuration of a published head to its format and the sizes of our network."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ...engines.families import HEAD_NORMS, OUT, QKV, ROPES
from ...errors import BadInput
from ...settings import MAX_K
from .shapes import ALL, ALL_TOKENS, EACH, NONE, ROPE_THETA, HeadShape, rope_of

CONFIG = "config.json"
Config = Mapping[str, Any]
TABLES = "dflash_config", "transformer_layer_config", "speculators_config", "eagle_config"  # settings with settings
MASKS = "mask_token_id", "pard_token", "ptd_token_id"  # the settings of P-EAGLE that name its mask token, as in vLLM
FULL, SLIDING = "full_attention", "sliding_attention"
# The description of a field is what is said of a head that has another value there.
NUMBER = "has no whole number {name} in its configuration: {value!r}"
MOST, MOST_LAYERS = 2**24, 100  # no head has larger sizes or more layers
Whole = Annotated[int, Field(strict=True, ge=1, le=MOST, description=NUMBER)]
WholeOr0 = Annotated[int, Field(strict=True, ge=0, le=MOST, description=NUMBER)]


class Format(NamedTuple):
    """A format of published heads."""

    name: str
    kind: str  # of head that reads it
    method: str  # eagle3, peagle, dflash, dflash2, dspark or medusa
    layers: str = ""  # the setting that names the target's layers that the head reads
    # How much larger its numbers are than those of the layers: 1 for places in transformers' `hidden_states`, where the
    # embeddings come first.
    ahead: int = 0
    library: bool = False  # it is of the library speculators, which keeps the sizes of the decoder layers in a table
    target: str | None = None  # that the head names


FORMATS = (
    Format("speculators eagle3", "eagle", "eagle3", "eagle_aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators peagle", "p-eagle", "peagle", "eagle_aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators dflash", "block", "dflash", "aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators dflash2", "block", "dflash2", "aux_hidden_state_layer_ids", 1, library=True),
    Format("speculators dspark", "block", "dspark", "aux_hidden_state_layer_ids", 1, library=True),
    Format("DFlash", "block", "dflash", "target_layer_ids"),  # of z-lab
    Format("DFlash 2", "block", "dflash2", "target_layer_ids"),
    Format("DSpark", "block", "dspark", "target_layer_ids"),
    Format("DFlash of DeepSpec", "block", "dspark", "target_layer_ids"),  # a DSpark without its Markov head
    Format("EAGLE-3", "eagle", "eagle3", "eagle_aux_hidden_state_layer_ids", 1),  # of SafeAILab, SpecForge, AngelSlim
    Format("P-EAGLE", "p-eagle", "peagle", "eagle_aux_hidden_state_layer_ids", 1),  # of AWS, SpecForge
    Format("EAGLE-3 of DeepSpec", "eagle", "eagle3", "target_layer_ids"),
    Format("Medusa", "medusa", "medusa"),
)


def head_name(folder: Path) -> str:
    """What messages call the head in a folder, which may be one of the hub's cache."""
    in_cache = folder.parent.name == "snapshots"
    name = folder.parent.parent.name.removeprefix("models--").replace("--", "/") if in_cache else folder.name
    return f"The head {name}"


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise BadInput(f"There is no head in the folder {folder}: it has no {CONFIG}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"The file {path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise BadInput(f"The file {path} is not the configuration of a model.")
    for name, kind in {**dict.fromkeys(TABLES, dict), "architectures": list}.items():
        if not isinstance(config.get(name) or kind(), kind):
            raise BadInput(f"The file {path} has settings that are not read here: {name} is {config[name]!r}.")
    return config


def format_of(config: Config, name: str) -> Format:
    """The format of a head, from its configuration; `name` is what messages call it."""
    by_name = {found.name: found for found in FORMATS}
    if (method := config.get("speculators_model_type")) is not None:
        if f"speculators {method}" not in by_name:
            known = ", ".join(found.method for found in FORMATS if found.library)
            raise BadInput(f"{name} is of the speculators kind {method!r}, which is not read here: {known} are.")
        verifier = (config.get("speculators_config") or {}).get("verifier")
        target = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        return by_name[f"speculators {method}"]._replace(target=target)
    architectures = " ".join(map(str, config.get("architectures") or ()))
    block, found = config.get("dflash_config"), None
    if block is not None or "DFlash" in architectures or "DSpark" in architectures:
        projector = (block or {}).get("projector_type") or "dflash"
        second = "DFlash2" in architectures or "conv_kernel_size" in (block or {})
        if projector not in ("dflash", "dspark") or (second and projector != "dflash"):
            raise BadInput(
                f"{name} is of the kind {projector!r}, which is not read here: DFlash, DFlash 2 and DSpark are."
            )
        spark = projector == "dspark" or "DSpark" in architectures or "markov_rank" in config
        spark_name = "DFlash of DeepSpec" if config.get("markov_rank") == 0 else "DSpark"
        found = by_name["DFlash 2" if second else spark_name if spark else "DFlash"]
    elif "draft_vocab_size" in config or re.search("eagle3|peagle", architectures.lower()):
        masks = "peagle" in architectures.lower() or any(config.get(key) is not None for key in MASKS)
        found = by_name["P-EAGLE" if masks else "EAGLE-3 of DeepSpec" if "target_layer_ids" in config else "EAGLE-3"]
    elif "medusa_num_heads" in config or "medusa" in f"{architectures} {config.get('model_type')}".lower():
        found = by_name["Medusa"]
    if found is None:
        words = architectures or config.get("model_type") or "nothing"
        raise BadInput(
            f"{name} is no head that can be read here: its {CONFIG} is not one of EAGLE-3, P-EAGLE, DFlash, "
            f"DFlash 2, DSpark, Medusa or the library speculators; it names {words}."
        )
    return found._replace(target=config.get("target_model_name_or_path") or config.get("base_model_name_or_path"))


class PublishedConfig(BaseModel):
    """A configuration. What is null is not stated."""

    # The decoder layers, by transformers' names
    hidden_size: Whole
    vocab_size: Whole
    num_attention_heads: Whole
    intermediate_size: Whole
    num_hidden_layers: Annotated[Whole, Field(le=MOST_LAYERS, description=NUMBER)] = 1
    num_key_value_heads: WholeOr0 = 0  # or as many as those of queries
    head_dim: WholeOr0 = 0  # or the hidden size divided by the heads
    hidden_act: Literal["silu"] = Field("silu", description="has the activation {value!r}; only 'silu' is read here")
    rms_norm_eps: float = 1e-6
    layer_types: list[str] = []
    sliding_window: WholeOr0 = 0
    rope_theta: float = ROPE_THETA
    rope_parameters: dict[str, Any] = {}
    rope_scaling: dict[str, Any] = {}  # the older name
    # All methods
    target_hidden_size: WholeOr0 = 0  # or the head's
    draft_vocab_size: WholeOr0 = 0  # or the whole vocabulary
    # EAGLE-3; EAGLE 3.1 is `fc_norm` and `norm_output`
    eagle_aux_hidden_state_layer_ids: list[Any] = []
    eagle_config: dict[str, Any] = {}
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    # P-EAGLE, which may also say `mask_token_id`
    pard_token: Any = None
    ptd_token_id: Any = None
    # DFlash, DFlash 2 and DSpark
    num_target_layers: int | None = None
    aux_hidden_state_layer_ids: list[Any] = []
    target_layer_ids: list[Any] = []
    block_size: Any = None
    mask_token_id: Any = None
    causal: bool = False
    is_causal: bool = False
    sliding_window_non_causal: bool | None = None
    markov_head_type: Literal["vanilla"] = Field(
        "vanilla", description="has a Markov head of the type {value!r}; only 'vanilla' is read here"
    )
    markov_rank: WholeOr0 | None = None
    sample_from_anchor: bool | None = None
    # DFlash 2
    conv_kernel_size: Whole = 2
    conv_group_size: Whole = 16
    selector_rank: Whole = 256
    selector_top_k: Whole = 16
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a head must fit of its target."""

    vocab_size: int
    hidden: int
    layers: int
    final_norm: tuple[Tensor, float] | None = None  # weight [hidden] and epsilon of its final RMS norm, where known


class ShapeReader:
    """Reads the configuration of one head for a target; `name` is what messages call the head."""

    def __init__(self, name: str, found: Format, config: Config, target: TargetSizes) -> None:
        self.name, self.format, self.target = name, found, target
        # z-lab keeps some settings of the blocks in a table, in newer files more of them.
        tables = [config.get("dflash_config") or {}, (found.library and config.get("transformer_layer_config")) or {}]
        stated = {field: value for part in (config, *tables) for field, value in part.items() if value is not None}
        try:
            self.config = PublishedConfig.model_validate(stated)
        except ValidationError as error:
            first = error.errors()[0]
            field, value = str(first["loc"][0]), 0 if first["type"] == "missing" else first["input"]
            words = PublishedConfig.model_fields[field].description or "has a {name} that is not read here: {value!r}"
            raise BadInput(f"{name} {words.format(name=field, value=value)}.") from error
        # SpecForge's DSpark, which names itself in the table, drafts after the anchor as DFlash does.
        self._from_anchor = found.method == "dspark" and "projector_type" not in tables[0]

    def shape(self, tensors: Collection[str]) -> HeadShape:
        """The sizes of the head. The names of its `tensors` tell which biases and norms its attention has."""
        config, hidden, vocab_size = self.config, self.config.hidden_size, self.config.vocab_size
        theirs = config.target_hidden_size or hidden
        if (vocab_size, theirs) != (self.target.vocab_size, self.target.hidden):
            raise BadInput(
                f"{self.name} was trained for a target of {vocab_size} tokens and hidden size {theirs}, "
                f"but this one has {self.target.vocab_size} and {self.target.hidden}."
            )
        heads = config.num_attention_heads
        kv_heads, width = config.num_key_value_heads or heads, config.head_dim or hidden // heads
        if heads % kv_heads or width % 2:
            raise BadInput(
                f"{self.name} has {heads} heads for queries, {kv_heads} for keys and a head_dim of {width}: the second "
                "must divide the first, and the third must be even."
            )
        windows, stated = self._windows(), config.rope_parameters or config.rope_scaling
        rope = {"rope_theta": config.rope_theta, "rope_type": stated.get("type") or "default"}
        rope |= {field: value for field, value in stated.items() if field != "type" and value is not None}
        shape = HeadShape(
            vocab_size=vocab_size,
            hidden=hidden,
            target_hidden=theirs,
            state_layers=self._state_layers(),
            draft_vocab=config.draft_vocab_size or vocab_size,
            depth=config.num_hidden_layers,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            mlp=config.intermediate_size,
            eps=config.rms_norm_eps,
            window=max(windows),
            layer_windows=windows,
            rope=rope,
            qkv_bias=f"layers.0.{QKV[0]}.bias" in tensors,
            out_bias=f"layers.0.{OUT}.bias" in tensors,
            head_norms=f"layers.0.{HEAD_NORMS[0]}.weight" in tensors,
        )
        try:
            if rope["rope_type"] not in ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
                raise ValueError(rope)
            rope_of(shape)
        except (KeyError, TypeError, ValueError) as error:
            words = json.dumps(stated)
            raise BadInput(f"{self.name} rotates its keys in a way that is not read here: {words}.") from error
        return replace(shape, **(self._blocks(windows) if self.format.kind == "block" else self._eagle()))

    def _eagle(self) -> dict[str, Any]:
        """What differs between variants of EAGLE-3, P-EAGLE included."""
        config, masks = self.config, [getattr(self.config, key) for key in MASKS]
        mask = next((stated for stated in masks if stated is not None), None)
        parallel = self.format.method == "peagle"
        if parallel and not (isinstance(mask, int) and 0 <= mask < config.vocab_size):
            raise BadInput(
                f"{self.name} needs a mask token below {config.vocab_size}, but {', '.join(MASKS)} in its "
                f"configuration are {masks}."
            )
        if (depth := config.num_hidden_layers) != 1 and not parallel:
            raise BadInput(f"{self.name} has {depth} decoder layers; EAGLE heads of one layer are read here.")
        return {
            "state_norms": EACH if config.fc_norm else ALL if config.norm_before_fc else NONE,
            "normed_residual": config.norm_before_residual,
            "normed_feedback": config.norm_output,
            "mask_token": mask if parallel else None,
            "rank": 0,
        }

    def _blocks(self, windows: tuple[int, ...]) -> dict[str, Any]:
        """What differs between DFlash, DFlash 2 and DSpark."""
        config, size, mask = self.config, self.config.block_size, self.config.mask_token_id
        if not isinstance(size, int) or size < 2 or not isinstance(mask, int) or not 0 <= mask < config.vocab_size:
            raise BadInput(
                f"{self.name} needs a block_size of 2 or more and a mask_token_id below {config.vocab_size}, "
                f"but its configuration has {size!r} and {mask!r}."
            )
        second, stated = self.format.method == "dflash2", config.sliding_window_non_causal
        causal_slides = (
            self.format.library and {*windows} != {ALL_TOKENS} and not (second if stated is None else stated)
        )
        if config.causal or config.is_causal or causal_slides:
            raise BadInput(f"{self.name} has layers in which a block is causal; those are not read here.")
        usual_rank = 256 if self.format.library else 0
        rank = 0 if self.format.method != "dspark" else usual_rank if config.markov_rank is None else config.markov_rank
        return {
            "state_norms": NONE,
            "fused_norm": True,
            "block_size": min(size, MAX_K + 1),
            "mask_token": mask,
            "from_anchor": self._from_anchor if config.sample_from_anchor is None else config.sample_from_anchor,
            "normed_context": False,
            "rank": rank,
            "bigram_table": bool(rank),
            **(self._second(size) if second else {}),
        }

    def _second(self, size: int) -> dict[str, Any]:
        """What DFlash 2 has besides."""
        config, hidden, vocab_size = self.config, self.config.hidden_size, self.config.vocab_size
        taps, group, count = config.conv_kernel_size, config.conv_group_size, config.selector_top_k
        if taps > size or hidden % group or count > vocab_size:
            raise BadInput(
                f"{self.name} has kernels of {taps} tokens in groups of {group} channels and chooses from {count} "
                f"tokens: these do not fit a block of {size}, a hidden size of {hidden} and {vocab_size} tokens."
            )
        if config.draft_vocab_size not in (0, vocab_size):
            raise BadInput(
                f"{self.name} drafts {config.draft_vocab_size} of {vocab_size} tokens; DFlash 2 is read here where it "
                "drafts all of them."
            )
        scales = config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping
        if scales != (1, 1, 0):
            raise BadInput(
                f"{self.name} scales its embeddings by {scales[0]:g} and its logits by {scales[1]:g}, or caps them by "
                f"{scales[2]:g}; that is not read here."
            )
        return {"conv_taps": taps, "conv_group": group, "candidates": count, "selector_rank": config.selector_rank}

    def _state_layers(self) -> tuple[int, ...]:
        config, count, ahead = self.config, self.target.layers, self.format.ahead
        ids = getattr(config, self.format.layers)
        if self.format.kind != "block" and not ids:
            ids = config.eagle_config.get(self.format.layers)
            ahead = 0 if ids else ahead  # SpecForge's numbers there are those of the layers
            ids = ids or [2, count // 2, count - 3]
        elif self.format.kind == "block" and not self.format.library:
            if config.num_target_layers not in (None, count):
                raise BadInput(
                    f"{self.name} was trained for a target of {config.num_target_layers} layers, but this one has "
                    f"{count}."
                )
            # By default as many as the head's own, evenly from 1 to the third from the end.
            own = config.num_hidden_layers
            ids = ids or [round(1 + i * (count - 4) / (own - 1)) if own > 1 else count // 2 for i in range(own)]
        if not ids or not all(isinstance(number, int) and 0 <= number - ahead < count for number in ids):
            raise BadInput(
                f"{self.name} reads the target's hidden states {ids}, but this target has those from {ahead} to "
                f"{count + ahead - 1}."
            )
        return tuple(number - ahead for number in ids)

    def _windows(self) -> tuple[int, ...]:
        depth, window = self.config.num_hidden_layers, self.config.sliding_window
        types = self.config.layer_types or [FULL] * depth
        if len(types) != depth or not set(types) <= {FULL, SLIDING} or (SLIDING in types and not window):
            raise BadInput(
                f"{self.name} has {depth} decoder layers, but its layer_types are {types} and its sliding_window is "
                f"{window!r}."
            )
        return tuple(window if kind == SLIDING else ALL_TOKENS for kind in types)
