"""How large a model is: its weights, the keys and values of a token, and what a pass reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from ..engines.families import attending_layers, expert_count, head_width, is_hybrid, key_heads, knows
from .checkpoint import empty_model
from .weights import bits_of, shapes

# Of a GPU besides the weights, in an estimate: the keys and values of so many tokens of each model, for both lanes and
# for slots that are captured again.
TOKENS = 4096
EMBEDDINGS = "embed_tokens.weight", "wte.weight"
OF_EXPERTS = ".experts."  # in the names of their weights


@dataclass(frozen=True, slots=True)
class Experts:
    """How many experts a layer has, how many of them a token uses, and their share of a model's weights."""

    count: int
    used: int
    share: float


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model of a preset: the name of its source, its configuration and the type of its stored weights.

    `skip_layers` is how many of its first layers may draft, and `size` the bytes of its weights where these are known.
    """

    name: str
    config: Any
    dtype: torch.dtype
    skip_layers: int = 0
    size: int | None = None

    @property
    def numbers(self) -> int:
        return sum(numbers for _, numbers in _sizes(self.config))

    def share_read(self, sizes: Mapping[str, int] | None = None) -> float:
        """The share of its weights that a pass over one token reads.

        It reads one row of the input embeddings, unless they are the output embeddings too, and of the experts of a
        layer those that the token is sent to. A pass over more tokens reads up to as many experts for each.

        Args:
            sizes: bytes of the weights by their names; None if all numbers have the same type.
        """
        text, experts = self.config.get_text_config(), self.experts
        sent = experts.used / experts.count if experts else 1.0
        sizes, read = sizes or dict(_sizes(self.config)), 0.0
        for name, size in sizes.items():
            looked_up = name.endswith(EMBEDDINGS) and not text.tie_word_embeddings
            read += size / text.vocab_size if looked_up else size * (sent if OF_EXPERTS in name else 1.0)
        return read / sum(sizes.values())

    @property
    def experts(self) -> Experts | None:
        """Those of each of its layers that has some; None if none has."""
        text = self.config.get_text_config()
        count, used = expert_count(text), getattr(text, "num_experts_per_tok", None)
        numbers = sum(numbers for name, numbers in _sizes(self.config) if OF_EXPERTS in name)
        return Experts(count, used, numbers / self.numbers) if count and used and numbers else None

    @property
    def weights(self) -> int:
        """Bytes of its weights."""
        return self.numbers * bits(self.config, self.dtype) // 8 if self.size is None else self.size

    @property
    def least(self) -> float:
        """Bytes of main memory for its weights if most are on the disk: embeddings, and a layer at a time."""
        if getattr(self.config, "quantization_config", None):
            return inf  # packed weights cannot be brought one by one
        text = self.config.get_text_config()
        table = text.vocab_size * text.hidden_size * self.dtype.itemsize
        return 2 * table + 2 * self.weights / text.num_hidden_layers

    @property
    def keys_and_values(self) -> int:
        """How many numbers the keys and values of a token have."""
        return sum(2 * key_heads(layer) * head_width(layer) for layer in attending_layers(self.config))

    @property
    def drafting(self) -> float:
        """The share of its layers that may draft, with their own cache."""
        return self.skip_layers / float(self.config.get_text_config().num_hidden_layers)

    @property
    def states(self) -> int:
        """Bytes of the running states of a run and their copy."""
        return 2 * _running_states(self.config, self.dtype) if is_hybrid(self.config) else 0

    @property
    def more(self) -> int:
        """Bytes of its keys and values on a GPU, and of its running states."""
        return int((self.keys_and_values * self.dtype.itemsize * TOKENS + self.states) * (1 + self.drafting))


def bits(config: Any, dtype: torch.dtype) -> int:
    quantized = getattr(config, "quantization_config", None)
    if not quantized:
        return bits_of(dtype)
    stated = quantized if isinstance(quantized, dict) else vars(quantized)
    return int(stated.get("bits") or stated.get("w_bit") or (4 if stated.get("load_in_4bit") else 8))


def _sizes(config: Any) -> list[tuple[str, int]]:
    """The size of each weight of a causal language model, by its name. Tied embeddings are listed once."""
    if knows(config):
        return [(name, prod(shape)) for name, shape in shapes(config).items()]
    return [(name, weight.numel()) for name, weight in empty_model(config).named_parameters()]


def _running_states(config: Any, dtype: torch.dtype) -> int:
    """Bytes of what the layers of a hybrid model keep besides keys and values.

    It differs from family to family, so a model without weights reads one token to find it. The model is in bfloat16,
    since products of experts have no other type without weights.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    from ..engines.modules import cache_argument

    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        cache = DynamicCache(config=model.config.get_text_config())
        model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{cache_argument(type(model)): cache})
    held = [states for layer in cache.layers for states in vars(layer).values() if isinstance(states, dict)]
    tensors = [state for states in held for state in states.values() if isinstance(state, torch.Tensor)]
    return sum(one.numel() * (dtype if one.dtype == torch.bfloat16 else one.dtype).itemsize for one in tensors)
