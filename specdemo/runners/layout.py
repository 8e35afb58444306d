"""The weights of a known model, rearranged so that a pass needs few operations.

Query, key and value come from one product, and gate and up from another. On a CPU the weights are packed for
oneDNN once: unpacked, they are rearranged on every call, which costs as much again as the product itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Step = Callable[[Tensor], Tensor]  # [T, in] -> [T, out], each row by itself

LEAST_PACKED = {torch.bfloat16: 0, torch.float32: 2**18}  # with fewer weights, the longer call costs more than it saves
PACKED_FOR = 1  # rows of input that oneDNN lays the weights out for; measured to serve 1 to 17 equally well
LEAST_ROWS, LONG = 3, 1024
LLAMAS = {"llama", "qwen2", "qwen3", "smollm3"}
ROPES = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on the length of the text


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last axis: layer norm, or RMS norm where there is no bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Product:
    """x @ weight.T + bias, for a weight [out, in]; it is None where it was packed for `multiply`."""

    weight: Tensor | None
    bias: Tensor | None
    multiply: Step

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Product:
        """Packed where that is faster."""
        packs = weight.numel() >= LEAST_PACKED.get(weight.dtype, math.inf) and torch.backends.mkldnn.is_available()
        if not packs or weight.device.type != "cpu":
            return cls(weight, bias, lambda x: F.linear(x, weight, bias))
        # What torch.compile calls for a frozen linear layer; there is no public name for it.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        multiply = torch.ops.mkldnn._linear_pointwise

        def packed_product(x: Tensor) -> Tensor:
            if len(x) == 1 and x.shape[1] > LONG:  # the sums of a single long row are cut up differently
                return multiply(x.expand(LEAST_ROWS, -1), packed, bias, "none", [], "")[:1]
            return multiply(x, packed, bias, "none", [], "")

        return cls(None, bias, packed_product)


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
class FusedModel:
    """A model's weights, rearranged for `FusedRunner`. Made once, shared by every run.

    A token's place is told by the `positions` added to its embedding (GPT-2, [context, hidden]) or, where there
    are none, by rotating queries and keys.
    """

    source: PreTrainedModel
    layers: tuple[Layer, ...]
    embedding: Tensor
    positions: Tensor | None
    norm: Norm
    head: Product
    heads: int
    kv_heads: int
    width: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedModel:
        """Rearrange the weights of a model that `knows` says yes to."""
        return _gpt2(model) if model.config.model_type == "gpt2" else _llama(model)

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the first `length` positions, each [length, 1, width].

        With them `x * cos + swap_halves(x) * sin` is the rotary embedding (Su et al., arXiv 2104.09864).
        """
        places = torch.arange(length, device=self.embedding.device)[None]
        cos, sin = self.source.base_model.rotary_emb(self.embedding, places)  # [1, length, width]
        sign = torch.ones_like(sin[0])
        sign[:, : self.width // 2] = -1
        return cos[0, :, None], (sin[0] * sign)[:, None]


def knows(model: PreTrainedModel) -> bool:
    """Whether the fused path computes exactly what this model's own forward does."""
    config = model.config.get_text_config()
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return False
    if config.model_type == "gpt2":
        scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        plain = not config.reorder_and_upcast_attn and not config.add_cross_attention
        return config.activation_function == "gelu_new" and scaled and plain
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    plain = config.model_type in LLAMAS and layer_types == {"full_attention"}
    return plain and config.hidden_act == "silu" and rope in ROPES


def _llama(model: PreTrainedModel) -> FusedModel:
    config, base = model.config.get_text_config(), cast(Any, model.base_model)

    def norm(module: nn.Module) -> Norm:
        return Norm(cast(Tensor, module.weight).detach(), None, config.rms_norm_eps)

    def rearranged(layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            attention_norm=norm(layer.input_layernorm),
            qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms=(norm(attention.q_norm), norm(attention.k_norm)) if hasattr(attention, "q_norm") else None,
            rotated=bool(getattr(attention, "use_rope", True)),
            out=linear(attention.o_proj),
            mlp_norm=norm(layer.post_attention_layernorm),
            up=linear(mlp.gate_proj, mlp.up_proj),
            activate=swiglu,
            down=linear(mlp.down_proj),
        )

    return FusedModel(
        source=model,
        layers=tuple(rearranged(layer) for layer in base.layers),
        embedding=base.embed_tokens.weight.detach(),
        positions=None,
        norm=norm(base.norm),
        head=linear(model.get_output_embeddings()),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        width=base.layers[0].self_attn.head_dim,
    )


def _gpt2(model: PreTrainedModel) -> FusedModel:
    config, base = model.config, cast(Any, model.base_model)

    def norm(module: nn.LayerNorm) -> Norm:
        return Norm(module.weight.detach(), module.bias.detach(), module.eps)

    def product(module: Any) -> Product:  # GPT-2 keeps its weights as [in, out]
        return Product.of(module.weight.detach().T.contiguous(), module.bias.detach())

    def rearranged(layer: Any) -> Layer:
        return Layer(
            attention_norm=norm(layer.ln_1),
            qkv=product(layer.attn.c_attn),
            head_norms=None,
            rotated=False,
            out=product(layer.attn.c_proj),
            mlp_norm=norm(layer.ln_2),
            up=product(layer.mlp.c_fc),
            activate=partial(F.gelu, approximate="tanh"),
            down=product(layer.mlp.c_proj),
        )

    return FusedModel(
        source=model,
        layers=tuple(rearranged(layer) for layer in base.h),
        embedding=base.wte.weight.detach(),
        positions=base.wpe.weight.detach(),
        norm=norm(base.ln_f),
        head=linear(model.get_output_embeddings()),
        heads=config.n_head,
        kv_heads=config.n_head,
        width=config.n_embd // config.n_head,
    )


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2 * inner] -> [T, inner]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def linear(*modules: nn.Linear) -> Product:
    """One product for linear modules that read the same input; their outputs follow each other.

    On a GPU the modules' own weights become parts of the joint one, so that memory holds them once.
    """
    weights = [module.weight.detach() for module in modules]
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if weight.device.type != "cpu":
        for module, part in zip(modules, weight.split([len(w) for w in weights]), strict=True):
            module.weight.data = part
    return Product.of(weight, torch.cat(biases) if biases else None)
