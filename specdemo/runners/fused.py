"""The Llama family's decode path with as few operations as it needs.

The same arithmetic as the transformers forward, on preallocated keys and values, with query, key and value
in one product and gate and up in another, no module calls, and no mask or copy of grouped heads where none
is needed. On a CPU the weights are packed for oneDNN once: unpacked, they are rearranged on every call, which
costs as much again as the product itself.

A pass of a few tokens is laid out so that a token's logits do not depend on how many are read with it: packed
products of `LEAST_ROWS` to `MOST_ROWS` rows have that property (measured), and attention gets it from queries padded
to `LEAST_ROWS` and keys padded to a multiple of `KEYS`, which fixes the order of its sums. So greedy text is the same
with and without a draft to the last bit, in bfloat16 too, while K < `MOST_ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from . import check_fits

Linear = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]

PACKED = {torch.bfloat16, torch.float32}
PACKED_FOR = 1  # rows of input that oneDNN lays the weights out for; measured to serve 1 to 17 equally well
FAMILIES = {"llama", "qwen2", "qwen3"}
LEAST_ROWS, MOST_ROWS = 3, 9
KEYS = 128
LONG = 1024
ROPES = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on the length of the text


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `head_norms` scale queries and keys before the rotation (Qwen3 has them)."""

    attention_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A model's weights, rearranged for `FusedRunner`. Made once, shared by every run."""

    source: PreTrainedModel
    layers: tuple[Layer, ...]
    embedding: Tensor
    norm: Tensor
    head: Linear
    heads: int
    kv_heads: int
    width: int
    eps: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedModel:
        """Rearrange the weights of a model that `knows` says yes to."""
        config, base = model.config.get_text_config(), cast(Any, model.base_model)
        return cls(
            source=model,
            layers=tuple(_layer(layer) for layer in base.layers),
            embedding=base.embed_tokens.weight.detach(),
            norm=base.norm.weight.detach(),
            head=linear(model.get_output_embeddings()),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=base.layers[0].self_attn.head_dim,
            eps=config.rms_norm_eps,
        )

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
    layer_types = set(getattr(config, "layer_types", None) or {"full_attention"})
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    placed = {parameter.device for parameter in model.parameters()}
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and layer_types == {"full_attention"}
        and rope in ROPES
        and len(placed) == 1
    )


class FusedRunner:
    """A `Runner` over a `FusedModel`, with a cache of `capacity` tokens, taken at the prefill."""

    def __init__(self, model: FusedModel, capacity: int, shared: FusedRunner | None = None, layers: int = 0) -> None:
        self.model = model
        self.context = capacity
        self.device = model.embedding.device
        self.vocab_size = model.source.config.get_text_config().vocab_size
        self._layers = model.layers[:layers] if layers else model.layers
        self._cache: _Cache | None = shared._cache if shared else None

    @property
    def length(self) -> int:
        return self._cache.length if self._cache else 0

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        self._cache = _Cache(self.model, self.context)
        return self._head(self._read(ids)[-1:])

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> Tensor:
        return self._head(self._read(ids))

    def rollback(self, length: int) -> None:
        if self._cache:
            self._cache.length = min(self._cache.length, length)

    def first_layers(self, count: int) -> FusedRunner:
        return FusedRunner(self.model, self.context, shared=self, layers=count)

    def release(self) -> None:
        self._cache = None

    def _head(self, x: Tensor) -> Tensor:
        return self.model.head(self._normed(x, self.model.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.model.eps)

    def _read(self, ids: Sequence[int]) -> Tensor:
        """Hidden states of T more tokens after the last layer, [T, hidden]; their keys and values are kept."""
        model, cache = self.model, self._cache
        assert cache is not None, "prefill comes first"
        check_fits(self, len(ids))
        start, end = cache.length, cache.length + len(ids)
        x = F.embedding(torch.tensor(ids, device=self.device), model.embedding)
        cos, sin = cache.cos[start:end], cache.sin[start:end]
        mask = self._mask(start, end, x.dtype) if start or len(ids) <= MOST_ROWS else None

        for place, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm))
            q, k, v = self._split(qkv, layer)
            q, k = _rotate(torch.cat([q, k], 1), cos, sin).split([model.heads, model.kv_heads], 1)
            cache.keep(place, start, k, v)
            x = x + layer.out(self._attend(q, cache.keys[place], cache.values[place], end, mask))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        cache.length = end
        return x

    def _split(self, qkv: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, each [T, heads, width]."""
        model = self.model
        heads = qkv.view(len(qkv), -1, model.width)
        q, k, v = heads.split([model.heads, model.kv_heads, model.kv_heads], 1)
        if layer.head_norms:
            q, k = self._normed(q, layer.head_norms[0]), self._normed(k, layer.head_norms[1])
        return q, k, v

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, live: int, mask: Tensor | None) -> Tensor:
        """Attention of T queries [T, heads, width] over the first `live` keys and values [kv_heads, capacity, width].

        The query heads that share a key head are laid behind each other as its queries, so that no key or value
        is copied for them. A prompt is read from the first position and needs only the causal triangle (no mask).
        """
        count, heads, width = q.shape
        keys, values = keys[None], values[None]
        if mask is None:
            q, keys, values = q.transpose(0, 1)[None], keys[:, :, :live], values[:, :, :live]
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).reshape(count, heads * width)
        group = heads // self.model.kv_heads
        rows, padded = len(mask) // group, mask.shape[1]
        q = F.pad(q, (0, 0, 0, 0, 0, rows - count)).view(rows, -1, group, width)
        q = q.permute(1, 2, 0, 3).reshape(1, -1, group * rows, width)
        out = F.scaled_dot_product_attention(q, keys[:, :, :padded], values[:, :, :padded], attn_mask=mask)
        out = out.view(-1, group, rows, width)[:, :, :count]
        return out.permute(2, 0, 1, 3).reshape(count, heads * width)

    def _mask(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Minus infinity where a grouped query may not look, [group * rows, keys], rows and keys padded."""
        places = torch.arange(_round_up(end, KEYS), device=self.device)
        queries = torch.arange(start, max(end, start + LEAST_ROWS), device=self.device).clamp(max=end - 1)
        hidden = places > queries[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill(hidden, -torch.inf)
        return mask.repeat(self.model.heads // self.model.kv_heads, 1)


class _Cache:
    """Keys and values of a run, [layers, kv_heads, capacity, width] each, the first `length` of them live."""

    def __init__(self, model: FusedModel, capacity: int) -> None:
        # Zeros, since masked places are read too, and a weight of zero does not undo a stray infinity.
        shape = len(model.layers), model.kv_heads, _round_up(capacity, KEYS), model.width
        self.keys, self.values = model.embedding.new_zeros(shape), model.embedding.new_zeros(shape)
        self.cos, self.sin = model.rotation(capacity)
        self.length = 0

    def keep(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of T tokens, [T, kv_heads, width] each, from position `start` on."""
        end = start + len(k)
        self.keys[layer, :, start:end], self.values[layer, :, start:end] = k.transpose(0, 1), v.transpose(0, 1)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach()) if normed else None,
        out=linear(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=linear(mlp.gate_proj, mlp.up_proj),
        down=linear(mlp.down_proj),
    )


def linear(*modules: torch.nn.Linear) -> Linear:
    """One product for linear modules that read the same input; their outputs follow each other."""
    weights = [module.weight.detach() for module in modules]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    bias = torch.cat(biases) if biases else None
    if weight.dtype in PACKED and weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        # What torch.compile calls for a frozen linear layer; there is no public name for it.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        multiply = torch.ops.mkldnn._linear_pointwise

        def packed_linear(x: Tensor) -> Tensor:
            if len(x) == 1 and x.shape[1] > LONG:  # the sums of a single long row are cut up differently
                return multiply(x.expand(LEAST_ROWS, -1), packed, bias, "none", [], "")[:1]
            return multiply(x, packed, bias, "none", [], "")

        return packed_linear
    return lambda x: F.linear(x, weight, bias)
