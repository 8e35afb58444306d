"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.decoding.events import Event, emitted_tokens
from specdemo.decoding.rule import Rule
from specdemo.drafters.prompt_lookup import PromptLookup
from specdemo.drafters.tree import grow_by_depth
from specdemo.engines.gpu.graph import Graphs
from specdemo.engines.passes import alone
from specdemo.tokens import Draft
from tests.harness.classes import FusedModel
from tools.bench.models import Pair, captured, first_layers

VOCAB = 512
EXACT, ROUGH = 1e-4, 2e-2  # the largest relative errors: in float32, in 16 bits


# What makes families other than Llama, in models so small; windows end within a text.
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOWS = {"layer_types": KINDS, "sliding_window": 12}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
GROWING = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.4,
    "original_max_position_embeddings": 8,
}
GRANITE = {
    **{"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 5.0},
    **{"attention_bias": True, "mlp_bias": True},
}
SWITCH = 80  # tokens; a longer text has other angles
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH},
    **{"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 6.0, 9.0, 12.0, 18.0, 24.0]},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
OTHER: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH},
    "mistral": {"sliding_window": 12},
    "ministral": WINDOWS,
    "ministral3": {"rope_parameters": GROWING},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {**WINDOWS, "rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 40},
    "olmo3": WINDOWS,
    "granite": GRANITE,
}


def tiny(family: str, device: torch.device, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model of four layers in float32. Its weights are large: no rounding error changes its greedy text."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": vocab}
    wide = {"intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    kind, fields = "phi3" if family == "longrope" else family, {**wide, **OTHER.get(family, {})}
    config = AutoConfig.for_model(kind, **sizes, **ids, **fields)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # else it is zero
                weight.normal_(0, 0.2)
    return model.eval().to(device)


def graphs_of(model: PreTrainedModel) -> Graphs:
    return captured(FusedModel.of(model))


def pair_of(target: PreTrainedModel) -> Pair:
    """A target with its own first two layers as its draft model."""
    return Pair(target, graphs_of(target), graphs_of(first_layers(target, 2)))


def text_of(events: Iterable[Event]) -> list[int]:
    """The emitted token ids."""
    return [token.id for event in events for token in emitted_tokens(event)]


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """|ours - truth| / |truth|; infinite where a number is NaN."""
    error = float((ours.double() - truth.double()).norm() / truth.double().norm())
    return error if error == error else float("inf")


class Copying(PromptLookup):
    """Prompt lookup that copies the beginning where it finds nothing: in a random text hardly anything comes twice."""

    def match(self, context: Sequence[int]) -> int | None:
        return super().match(context) or 0


def tree_of_host(
    table: Tensor, first: Tensor, nodes: int, depth: int, rule: Rule, position: int, *limits: Any
) -> Draft:
    """The tree that the host grows of the same logits, `first` [1, V] after the text."""
    return alone(
        grow_by_depth(first, lambda token_ids, _: table[token_ids], nodes, depth, rule, position, None, *limits)
    )
