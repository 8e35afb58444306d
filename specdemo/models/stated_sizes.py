"""Refuses sizes that no model has. Lists and memory are made by them, and C reads as far as they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..engines.families import SLIDING, expert_count, knows, layer_kinds, mixtures

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST, MOST_LAYERS, MOST_TOKENS = 2**24, 1000, 2**31
LAYERS = {"num_hidden_layers", "n_layer", "n_layers"}
TOKENS = {"max_position_embeddings", "n_positions", "sliding_window"}
POSITIVE = {"vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "head_dim"}
POSITIVE |= {"num_attention_heads", "n_head", "num_key_value_heads", "moe_intermediate_size", "decoder_sparse_step"}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"}
OR_0 = {*EXPERTS, "sliding_window", "intermediate_size", "moe_intermediate_size"}  # where there are none


def wrong_sizes(value: Any, least: int, most: int) -> Iterator[Any]:
    """What a stated size, or the sizes of each layer, has out of range; a size need not be stated."""
    for size in [] if value is None else value if isinstance(value, list) else [value]:
        if type(size) is not int or not least <= size <= most:
            yield size


def check_sizes(stated: Mapping[str, Any]) -> None:
    """Refuse a size that is out of range, by the file with a configuration: transformers makes lists by some.

    Raises:
        ValueError: naming the field.
    """
    for name in (*LAYERS, *TOKENS, *POSITIVE, *EXPERTS):
        most = MOST_LAYERS if name in LAYERS else MOST_TOKENS if name in TOKENS else MOST
        least = 0 if name in OR_0 else 1
        for size in wrong_sizes(stated.get(name), least, most):
            said = f"{name} = {size!r}, which must be a whole number from {least} to {most}"
            raise ValueError(f"its configuration has {said}")
    if not isinstance(kind := stated.get("rope_type") or "", str):
        raise ValueError(f"its configuration has rope_type = {kind!r}, which is no name")
    if not isinstance(base := stated.get("rope_theta") or 1, (int, float)) or not base > 0:
        raise ValueError(f"its configuration has rope_theta = {base!r}, which must be a number above 0")
    for part in stated.values():
        if isinstance(part, Mapping):  # such as the text model of a model for pictures and text
            check_sizes(part)


def check_together(config: PreTrainedConfig) -> None:
    """Refuse sizes that do not go together.

    Raises:
        ValueError: naming them.
    """
    text = config.get_text_config(decoder=True)
    heads, keys, used = (
        getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
    )
    count = expert_count(text)
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        raise ValueError(f"its configuration has num_key_value_heads = {keys}, which does not divide {heads} heads")
    if isinstance(used, int) and used > count > 0:
        raise ValueError(f"its configuration has num_experts_per_tok = {used}, but a layer has {count} experts")
    if not knows(text):
        return
    if len(layer_kinds(text)) != text.num_hidden_layers:
        raise ValueError(f"its configuration has {text.num_hidden_layers} layers, but {len(layer_kinds(text))} types")
    if SLIDING in layer_kinds(text) and not text.sliding_window:
        raise ValueError("its configuration has layers with a window, but sliding_window is not stated")
    if any(of_layer.used < 1 for of_layer in mixtures(text)):
        raise ValueError("its configuration has experts, but num_experts_per_tok is 0")
    if not getattr(text, "head_dim", None) and text.hidden_size % heads:
        raise ValueError(f"its configuration has hidden_size = {text.hidden_size}, which {heads} heads do not divide")
