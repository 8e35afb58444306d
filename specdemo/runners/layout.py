"""The weights of a known model, rearranged so that a pass needs few operations.

Query, key and value come from one product, and gate and up from another. On a CPU the weights are laid out once, for
`native.c`. Where that cannot be had they are packed for oneDNN, or float16 for FBGEMM: unpacked, they are rearranged on
every call, which costs as much again as the product itself; and small ones of float32 are laid out by columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..hardware import arithmetic, cpu_reads_float16
from .library import Multiply, library_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Weights = Mapping[str, Tensor]  # by the names that transformers gives them
Step = Callable[[Tensor], Tensor]  # [T, in] -> [T, out], each row by itself

# With fewer weights than so many the longer call costs more than it saves.
LEAST_PACKED = {torch.bfloat16: 0, torch.float16: 2**18, torch.float32: 2**18}
PACKED_FOR = 1  # rows of input that oneDNN lays the weights out for; measured to serve 1 to 17 equally well
LEAST_ROWS = 4  # of packed bfloat16 products: fewer take longer, and long sums of a single row are cut up differently
MOST_AT_ONCE = 4  # layers to lay out: each takes memory, and threads of its own for what is not packing
FEW_ROWS = 17  # as many as a round can have; more cost a mirrored norm more than a plain one
LLAMAS = {"llama", "qwen2", "qwen3", "smollm3"}
ROPES = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on the length of the text


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last axis: layer norm, or RMS norm where there is no bias.

    On a CPU an RMS norm of 16-bit numbers is eight operations of torch's. The layer norm of x followed by -x, whose
    mean is 0, is the RMS norm of x in three, which for a few rows takes half to three quarters of the time. `mirrored`
    is the weight of that layer norm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    mirrored: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Mirrored where that is faster."""
        mirrors = bias is None and weight.device.type == "cpu" and weight.dtype.itemsize == 2
        return cls(weight, bias, eps, torch.cat([weight, weight]) if mirrors else None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.mirrored is not None and len(x) <= FEW_ROWS:
            both = F.layer_norm(torch.cat([x, -x], -1), self.mirrored.shape, self.mirrored, None, self.eps)
            return both[..., : x.shape[-1]]
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Product:
    """x @ weight.T + bias, x [T, in], for a weight [out, in]; it is None where it was laid out anew for `multiply`."""

    weight: Tensor | None
    bias: Tensor | None
    multiply: Step

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, parts: int = 1) -> Product:
        """Laid out as is fastest. The outputs are of so many `parts` alike, such as heads."""
        (outer, inner), on_cpu = weight.shape, weight.device.type == "cpu"
        library = library_for(weight.dtype) if on_cpu else None
        if library and inner % library.step == 0:
            return cls(None, bias, Multiply(library, weight.detach(), bias, parts))
        large = on_cpu and weight.numel() >= LEAST_PACKED.get(weight.dtype, math.inf)
        if large and weight.dtype == torch.float16 and cpu_reads_float16():
            halves = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
            multiply_halves = torch.ops.quantized.linear_dynamic_fp16
            return cls(None, bias, lambda x: multiply_halves(x, halves))
        weight = widened(weight)
        if large and can_pack(weight.dtype):
            # What torch.compile calls for a frozen linear layer; there is no public name for it.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
            multiply = torch.ops.mkldnn._linear_pointwise
            return cls(None, bias, lambda x: multiply(x, packed, bias, "none", [], ""))
        if on_cpu and weight.dtype == torch.float32 and not large and outer >= inner:
            # With each column in one piece, a few rows are multiplied by few wide weights up to twice as fast.
            columns = weight.T.contiguous().T
            return cls(None, bias, lambda x: F.linear(x, columns, bias))
        return cls.unpacked(weight, bias)

    @classmethod
    def unpacked(cls, weight: Tensor, bias: Tensor | None) -> Product:
        """The weight as it is, as it always is on a GPU."""
        return cls(weight, bias, lambda x: F.linear(x, weight, bias))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type on this CPU: bfloat16 needs AVX-512, or AVX-NE-CONVERT."""
    bfloat16_too = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return torch.backends.mkldnn.is_available() and (dtype != torch.bfloat16 or bool(bfloat16_too()))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `head_norms` scale queries and keys before the rotation (Qwen3 has them), and `rotated` says
    whether there is one (not in every layer of SmolLM3)."""

    attention_norm: Norm
    qkv: Product
    head_norms: tuple[Norm, Norm] | None
    rotated: bool
    out: Product
    mlp_norm: Norm
    up: Product
    activate: Step
    down: Product


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding (Su et al., arXiv 2104.09864), where its angles do not depend on the length of the text.

    `frequencies` are in radians a position, float32 [width / 2]; `scale` is what YaRN multiplies cosines and sines by.
    """

    frequencies: Tensor
    scale: float = 1.0

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first `length` positions, float32 [length, width / 2] each."""
        angles = torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    @classmethod
    def plain(cls, config: PreTrainedConfig) -> Rope:
        """theta ** -(2 i / width), for the kind of rotation that is called default."""
        width = head_width(config)
        return cls(1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width))


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A model's weights, rearranged for `FusedRunner`. Made once, shared by every run.

    A token's place is told by the `positions` added to its embedding (GPT-2, [context, hidden]) or by rotating queries
    and keys (`rope`). `bit_exact` is whether passes are laid out as `fused` says, where there is a choice.
    """

    layers: tuple[Layer, ...]
    embedding: Tensor
    positions: Tensor | None
    rope: Rope | None
    norm: Norm
    head: Product
    vocab_size: int
    heads: int
    kv_heads: int
    width: int
    bit_exact: bool = True

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype | None = None) -> FusedModel:
        """Rearrange the weights of a model with a configuration that `knows` says yes to.

        Args:
            dtype: what they are stored in, if the model has them in another type.
        """
        rotary = getattr(model.base_model, "rotary_emb", None)
        rope = Rope(rotary.inv_freq.float(), rotary.attention_scaling) if rotary else None
        weights = dict(model.named_parameters(remove_duplicate=False))
        return cls.of_weights(model.config, StoredAs(weights, dtype) if dtype else weights, rope)

    @classmethod
    def of_weights(cls, config: PreTrainedConfig, weights: Weights, rope: Rope | None) -> FusedModel:
        """The same from the weights themselves, by the names that transformers gives them."""
        return _gpt2(config, weights) if config.model_type == "gpt2" else _llama(config, weights, rope)

    @property
    def least_rows(self) -> int:
        """How few rows a pass should have: what is missing is filled up with others."""
        packed = self.embedding.dtype == torch.bfloat16 and self.embedding.device.type == "cpu"
        return LEAST_ROWS if packed and self.bit_exact else 1

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in; the weights may be stored in less."""
        return arithmetic(self.embedding.dtype, self.embedding.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Of the tokens alone, without their places: [T] -> [T, hidden]."""
        return F.embedding(ids, self.embedding).to(self.dtype)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the first `length` positions, each [length, 1, width].

        With them `x * cos + swap_halves(x) * sin` is the rotary embedding.
        """
        assert self.rope is not None
        cos, sin = (part[:, None].to(self.dtype) for part in self.rope.rotation(length))  # [length, 1, width / 2]
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def knows(config: PreTrainedConfig) -> bool:
    """Whether the fused path computes exactly what the own forward of a model with this configuration does."""
    config = config.get_text_config()
    if config.model_type == "gpt2":
        scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        plain = not config.reorder_and_upcast_attn and not config.add_cross_attention
        return config.activation_function == "gelu_new" and scaled and plain
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    plain = config.model_type in LLAMAS and layer_types == {"full_attention"}
    return plain and config.hidden_act == "silu" and _rope_type(config) in ROPES


def is_plain(config: PreTrainedConfig) -> bool:
    """Whether a model that the fused path knows can be made of configuration and weights alone."""
    plain_rope = config.model_type in LLAMAS and _rope_type(config) == "default"
    return plain_rope and "rope_theta" in (getattr(config, "rope_parameters", None) or {})


def _rope_type(config: PreTrainedConfig) -> str:
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def _llama(config: PreTrainedConfig, weights: Weights, rope: Rope | None) -> FusedModel:
    config = config.get_text_config()
    stated = config.no_rope_layers if config.model_type == "smollm3" else None  # true where there is a rotation
    rotated = stated or [True] * config.num_hidden_layers
    qkv_parts = config.num_attention_heads + 2 * config.num_key_value_heads

    def norm(name: str) -> Norm:
        return Norm.of(widened(weights[f"{name}.weight"]), None, config.rms_norm_eps)

    def rearranged(place: int) -> Layer:
        layer = f"model.layers.{place}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        normed = f"{attention}.q_norm.weight" in weights
        return Layer(
            attention_norm=norm(f"{layer}.input_layernorm"),
            qkv=_product(weights, *(f"{attention}.{name}_proj" for name in "qkv"), parts=qkv_parts),
            head_norms=(norm(f"{attention}.q_norm"), norm(f"{attention}.k_norm")) if normed else None,
            rotated=bool(rotated[place]),
            out=_product(weights, f"{attention}.o_proj"),
            mlp_norm=norm(f"{layer}.post_attention_layernorm"),
            up=_product(weights, f"{mlp}.gate_proj", f"{mlp}.up_proj", parts=2),
            activate=swiglu,
            down=_product(weights, f"{mlp}.down_proj"),
        )

    embedding, output = embeddings(weights)
    layers, head = _laid_out(rearranged, config.num_hidden_layers, output)
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
    """How many numbers wide an attention head is."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _gpt2(config: PreTrainedConfig, weights: Weights) -> FusedModel:
    def norm(name: str) -> Norm:
        weight, bias = (widened(weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return Norm.of(weight, bias, config.layer_norm_epsilon)

    def product(name: str, parts: int = 1) -> Product:  # GPT-2 keeps its weights as [in, out]
        return Product.of(weights[f"{name}.weight"].detach().T.contiguous(), widened(weights[f"{name}.bias"]), parts)

    def rearranged(place: int) -> Layer:
        layer = f"transformer.h.{place}"
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
    layers, head = _laid_out(rearranged, config.n_layer, output)
    return FusedModel(
        layers=layers,
        embedding=embedding,
        positions=widened(weights["transformer.wpe.weight"]),
        rope=None,
        norm=norm("transformer.ln_f"),
        head=head,
        vocab_size=len(output),
        heads=config.n_head,
        kv_heads=config.n_head,
        width=config.n_embd // config.n_head,
    )


def _laid_out(layer: Callable[[int], Layer], count: int, output: Tensor) -> tuple[tuple[Layer, ...], Product]:
    """The layers and the head, several at a time where FBGEMM packs them: it takes one core for a weight."""
    if output.device.type != "cpu" or output.dtype != torch.float16 or library_for(output.dtype):
        return tuple(map(layer, range(count))), Product.of(output, None)
    with ThreadPoolExecutor(min(MOST_AT_ONCE, torch.get_num_threads())) as threads:
        head = threads.submit(Product.of, output, None)  # takes the longest
        return tuple(threads.map(layer, range(count))), head.result()


def embeddings(weights: Weights) -> tuple[Tensor, Tensor]:
    """The input and the output embeddings of a known model, [V, hidden] each; they may be one and the same."""
    name = "model.embed_tokens.weight" if "model.embed_tokens.weight" in weights else "transformer.wte.weight"
    embedding = weights[name]
    return embedding.detach(), weights.get("lm_head.weight", embedding).detach()


def _product(weights: Weights, *names: str, parts: int = 1) -> Product:
    """One product for linear layers that read the same input; their outputs follow each other, `parts` alike.

    On a GPU the layers' own weights become pieces of the joint one, so that memory holds them once.
    """
    owns = [weights[f"{name}.weight"] for name in names]
    biases = [widened(weights[f"{name}.bias"]) for name in names if f"{name}.bias" in weights]
    weight = torch.cat([own.detach() for own in owns]) if len(owns) > 1 else owns[0].detach()
    if weight.device.type != "cpu":
        for own, joint in zip(owns, weight.split([len(own) for own in owns]), strict=True):
            own.data = joint
    return Product.of(weight, torch.cat(biases) if biases else None, parts)


class StoredAs(Mapping[str, Tensor]):
    """Weights in another number type, converted when they are asked for: they need no memory beside the others."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype

    def __getitem__(self, name: str) -> Tensor:
        return stored_as(self.weights[name], self.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def stored_as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in another number type.

    Raises:
        ValueError: it has numbers that are too large for float16. On a GPU this is not looked for.
    """
    stored = weight.to(dtype)
    if dtype == torch.float16 != weight.dtype and weight.device.type == "cpu" and stored.isinf().any():
        raise ValueError("it has weights that are too large for float16; choose another dtype, such as float32.")
    return stored


def widened(weight: Tensor) -> Tensor:
    """A weight as it is computed with, where nothing multiplies it as it is stored."""
    return weight.detach().to(arithmetic(weight.dtype, weight.device))


gelu = partial(F.gelu, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2 * inner] -> [T, inner]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
