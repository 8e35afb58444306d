"""The weights of a known model, rearranged so that a pass needs few operations.

One product computes queries, keys and values, and another gate and up. `linear.Linear.of` chooses how each is stored.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..system.hardware import compute_dtype
from .linear import Linear, Norm, Step, gelu, packs_on_one_core, swiglu, upcast

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Weights = Mapping[str, Tensor]  # by the names that transformers gives them

LEAST_ROWS = 4  # of packed bfloat16 products: fewer take longer, and oneDNN splits long sums of one row differently
MOST_AT_ONCE = 4  # layers that are packed at a time: each takes memory and threads
LLAMAS = {"llama", "qwen2", "qwen3", "smollm3"}
# Models with a running state that a pass of any length can go on from; others may not be able to.
HYBRIDS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "falcon_h1", "granitemoehybrid"}
HYBRIDS |= {"olmo_hybrid"}
RUNNING = {"linear_attention", "conv"}  # types of layers that have such a state instead of keys and values
ROPES = {"default", "linear", "llama3", "yarn"}  # rotations whose angles never depend on the length of the text


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `head_norms` scale queries and keys before the rotation (Qwen3 has them); `rotated` says
    whether there is a rotation (some layers of SmolLM3 have none)."""

    attention_norm: Norm
    qkv: Linear
    head_norms: tuple[Norm, Norm] | None
    rotated: bool
    out: Linear
    mlp_norm: Norm
    up: Linear
    activate: Step
    down: Linear


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding (Su et al., arXiv 2104.09864) whose angles do not depend on the length of the text.

    `frequencies` float32 [width / 2] are radians per position. `scale` multiplies cosines and sines (YaRN).
    """

    frequencies: Tensor
    scale: float = 1.0

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first `length` positions, float32 [length, width / 2] each."""
        angles = torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    @classmethod
    def of(cls, config: PreTrainedConfig, device: torch.device) -> Rope:
        """The rotation of a model that `knows` accepts: frequencies theta ** -(2 i / width), or rescaled ones."""
        kind, width = _rope_type(config), head_width(config)
        if kind == "default":
            frequencies = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
            return cls(frequencies.to(device))
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config)
        return cls(frequencies.float().to(device), scale)


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A model's weights, rearranged for `FusedRunner`. Made once, shared by every run.

    Positions enter in one of two ways: `positions` [context, hidden] are added to the embeddings (GPT-2), or queries
    and keys are rotated (`rope`). With `bit_exact`, passes are padded as `fused` describes.
    """

    layers: tuple[Layer, ...]
    embedding: Tensor
    positions: Tensor | None
    rope: Rope | None
    norm: Norm
    head: Linear
    vocab_size: int
    heads: int
    kv_heads: int
    width: int
    bit_exact: bool = True

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype | None = None) -> FusedModel:
        """Rearrange the weights of a model that `knows` accepts.

        Args:
            dtype: the type to store them in, if the model has another.
        """
        rotary = getattr(model.base_model, "rotary_emb", None)
        rope = Rope(rotary.inv_freq.float(), rotary.attention_scaling) if rotary else None
        weights = dict(model.named_parameters(remove_duplicate=False))
        return cls.of_weights(model.config, StoredAs(weights, dtype) if dtype else weights, rope)

    @classmethod
    def of_weights(cls, config: PreTrainedConfig, weights: Weights, rope: Rope | None) -> FusedModel:
        """Rearrange weights that have transformers' names."""
        return _gpt2(config, weights) if config.model_type == "gpt2" else _llama(config, weights, rope)

    def first_layers(self, count: int) -> FusedModel:
        """A model of the first layers, with the same norm and head. No weight is copied."""
        return replace(self, layers=self.layers[:count])

    @property
    def least_rows(self) -> int:
        """The fewest rows of a pass. A shorter one is padded with copies of its last row."""
        packed = self.dtype == torch.bfloat16 and self.embedding.device.type == "cpu"
        return LEAST_ROWS if packed and self.bit_exact else 1

    @property
    def exact_products(self) -> bool:
        """Whether a row of a product has the same bits whatever the other rows are, see `fused.MOST_ROWS`."""
        return self.least_rows > 1 and self.head.weight is None

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in. Its weights may be stored in a smaller one."""
        return compute_dtype(self.embedding.dtype, self.embedding.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, without positions: [T] -> [T, hidden]."""
        return F.embedding(ids, self.embedding).to(self.dtype)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the first `length` positions, each [length, 1, width].

        With them `x * cos + swap_halves(x) * sin` is the rotary embedding.
        """
        assert self.rope is not None
        cos, sin = (part[:, None].to(self.dtype) for part in self.rope.rotation(length))  # [length, 1, width / 2]
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def knows(config: PreTrainedConfig) -> bool:
    """Whether the fused path computes the same as transformers' forward for a model with this configuration.

    Quantized weights are excluded: they are packed, or need scales that only transformers' forward knows. So is the
    text part of a larger model, whose weights have other names.
    """
    if config.get_text_config() is not config or getattr(config, "quantization_config", None):
        return False
    if config.model_type == "gpt2":
        scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        plain = not config.reorder_and_upcast_attn and not config.add_cross_attention
        return config.activation_function == "gelu_new" and scaled and plain
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    plain = config.model_type in LLAMAS and layer_types == {"full_attention"}
    return plain and config.hidden_act == "silu" and (_rope_type(config) in ROPES or has_equal_factors(config))


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether `hybrid.HybridRunner` runs a model with this configuration."""
    return config.get_text_config().model_type in HYBRIDS


def attending_layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configurations of the layers that keep keys and values of every token; some models have several."""
    text = config.get_text_config(decoder=True)
    kinds = (getattr(text, "layer_types", None) if is_hybrid(text) else None) or [""] * text.num_hidden_layers
    return [text.per_layer_config[index] for index, kind in enumerate(kinds) if kind not in RUNNING]


def key_heads(config: PreTrainedConfig) -> int:
    """The attention heads that have keys and values of their own."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _rope_type(config: PreTrainedConfig) -> str:
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def has_equal_factors(config: PreTrainedConfig) -> bool:
    """Whether long and short texts have the same LongRoPE factors, as in GGUF files."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") == "longrope" and rope.get("long_factor", 0) == rope.get("short_factor", 1)


def _llama(config: PreTrainedConfig, weights: Weights, rope: Rope | None) -> FusedModel:
    config = config.get_text_config()
    stated = config.no_rope_layers if config.model_type == "smollm3" else None  # true where there is a rotation
    rotated = stated or [True] * config.num_hidden_layers
    qkv_parts = config.num_attention_heads + 2 * config.num_key_value_heads

    def norm(name: str) -> Norm:
        return Norm.of(upcast(weights[f"{name}.weight"]), None, config.rms_norm_eps)

    def rearranged(index: int) -> Layer:
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        normed = f"{attention}.q_norm.weight" in weights
        return Layer(
            attention_norm=norm(f"{layer}.input_layernorm"),
            qkv=_joint(weights, *(f"{attention}.{name}_proj" for name in "qkv"), parts=qkv_parts),
            head_norms=(norm(f"{attention}.q_norm"), norm(f"{attention}.k_norm")) if normed else None,
            rotated=bool(rotated[index]),
            out=_joint(weights, f"{attention}.o_proj"),
            mlp_norm=norm(f"{layer}.post_attention_layernorm"),
            up=_joint(weights, f"{mlp}.gate_proj", f"{mlp}.up_proj", parts=2),
            activate=swiglu,
            down=_joint(weights, f"{mlp}.down_proj"),
        )

    embedding, output = embeddings(weights)
    layers, head = _packed(rearranged, config.num_hidden_layers, output)
    return FusedModel(
        layers=layers,
        embedding=embedding,
        positions=None,
        rope=rope,
        norm=norm("model.norm"),
        head=head,
        vocab_size=len(output),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        width=head_width(config),
    )


def head_width(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _gpt2(config: PreTrainedConfig, weights: Weights) -> FusedModel:
    def norm(name: str) -> Norm:
        weight, bias = (upcast(weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return Norm.of(weight, bias, config.layer_norm_epsilon)

    def product(name: str, parts: int = 1) -> Linear:  # GPT-2 keeps its weights as [in, out]
        return Linear.of(weights[f"{name}.weight"].detach().T.contiguous(), upcast(weights[f"{name}.bias"]), parts)

    def rearranged(index: int) -> Layer:
        layer = f"transformer.h.{index}"
        return Layer(
            attention_norm=norm(f"{layer}.ln_1"),
            qkv=product(f"{layer}.attn.c_attn", 3 * config.n_head),
            head_norms=None,
            rotated=False,
            out=product(f"{layer}.attn.c_proj"),
            mlp_norm=norm(f"{layer}.ln_2"),
            up=product(f"{layer}.mlp.c_fc"),
            activate=gelu,
            down=product(f"{layer}.mlp.c_proj"),
        )

    embedding, output = embeddings(weights)
    layers, head = _packed(rearranged, config.n_layer, output)
    return FusedModel(
        layers=layers,
        embedding=embedding,
        positions=weights["transformer.wpe.weight"].detach(),
        rope=None,
        norm=norm("transformer.ln_f"),
        head=head,
        vocab_size=len(output),
        heads=config.n_head,
        kv_heads=config.n_head,
        width=config.n_embd // config.n_head,
    )


def _packed(layer: Callable[[int], Layer], count: int, output: Tensor) -> tuple[tuple[Layer, ...], Linear]:
    """The layers and the head. Where FBGEMM packs them, several at a time, since it uses one core for a weight."""
    if not packs_on_one_core(output):
        return tuple(map(layer, range(count))), Linear.of(output, None)
    with ThreadPoolExecutor(min(MOST_AT_ONCE, torch.get_num_threads())) as threads:
        head = threads.submit(Linear.of, output, None)  # takes the longest
        return tuple(threads.map(layer, range(count))), head.result()


def final_norm_eps(config: PreTrainedConfig) -> float | None:
    """The epsilon of a model's final RMS norm; None if its norm is not like Llama's."""
    config = config.get_text_config()
    return config.rms_norm_eps if config.model_type in {*LLAMAS, "mistral"} else None


def final_norm(config: PreTrainedConfig, weights: Weights) -> tuple[Tensor, float] | None:
    """The weight [hidden] and the epsilon of a model's final RMS norm; None if its norm is not like Llama's."""
    eps, name = final_norm_eps(config), "model.norm.weight"
    return None if eps is None or name not in weights else (weights[name].detach(), eps)


def embeddings(weights: Weights) -> tuple[Tensor, Tensor]:
    """The input and the output embeddings of a known model, [V, hidden] each; one tensor if they are tied."""
    name = "model.embed_tokens.weight" if "model.embed_tokens.weight" in weights else "transformer.wte.weight"
    embedding = weights[name]
    return embedding.detach(), weights.get("lm_head.weight", embedding).detach()


def _joint(weights: Weights, *names: str, parts: int = 1) -> Linear:
    """Several linear maps of the same input as one, with their outputs concatenated.

    On a GPU the weights of the model become views of the joint weight, so that memory holds them once.
    """
    owns = [weights[f"{name}.weight"] for name in names]
    biases = [upcast(weights[f"{name}.bias"]) for name in names if f"{name}.bias" in weights]
    weight = torch.cat([own.detach() for own in owns]) if len(owns) > 1 else owns[0].detach()
    if weight.device.type != "cpu":
        for own, joint in zip(owns, weight.split([len(own) for own in owns]), strict=True):
            own.data = joint
    return Linear.of(weight, torch.cat(biases) if biases else None, parts)


class StoredAs(UserDict[str, Tensor]):
    """Weights that are converted to another number type when read, so that memory holds one type at a time."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__(weights)
        self.dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        return stored_as(self.data[name], self.dtype)


def stored_as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in another number type.

    Raises:
        ValueError: a number is too large for float16. This is checked on a CPU only.
    """
    stored = weight.to(dtype)
    if dtype == torch.float16 != weight.dtype and weight.device.type == "cpu" and stored.isinf().any():
        raise ValueError("it has weights that are too large for float16; choose another dtype, such as float32.")
    return stored
