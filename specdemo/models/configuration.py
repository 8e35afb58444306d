"""What the configuration of a model says, and why some are refused.

Sizes are checked first: lists and memory are made by them, and C reads as far as they say. Of a model for pictures and
text the configuration is that of its text model, which stands in `text_config`, with the weights under a prefix. Where
it only reads text, the other parts do nothing, so they are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..engines.families import SLIDING, expert_count, family_of, is_hybrid, knows, layer_kinds, mixtures
from .store import LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MOST, MOST_LAYERS, MOST_TOKENS = 2**24, 1000, 2**31  # see `check_sizes`
LAYERS = {"num_hidden_layers", "n_layer", "n_layers"}
LENGTHS = {"max_position_embeddings", "n_positions", "sliding_window"}
POSITIVE = {"vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "head_dim"}
POSITIVE |= {"num_attention_heads", "n_head", "num_key_value_heads", "moe_intermediate_size", "decoder_sparse_step"}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"}
OR_0 = {*EXPERTS, "sliding_window", "intermediate_size", "moe_intermediate_size"}  # where there are none
ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}
DEFAULT_CONTEXT = 2048  # tokens, for models that state none
# The beginnings of names in such files, as written by transformers before version 5 and since, and what they become, as
# `from_pretrained` takes it.
KEY_MAPPING = {"^language_model[.]": "", "^model[.]language_model[.]": "model."}


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
    for name in (*LAYERS, *LENGTHS, *POSITIVE, *EXPERTS):
        most = MOST_LAYERS if name in LAYERS else MOST_TOKENS if name in LENGTHS else MOST
        least = 0 if name in OR_0 else 1
        for size in wrong_sizes(stated.get(name), least, most):
            raise ValueError(
                f"its configuration has {name} = {size!r}, which must be a whole number from {least} to {most}"
            )
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


def check_rolls_back(config: PreTrainedConfig, source: object) -> None:
    """Refuse an architecture that cannot read passes of any length or cannot be rolled back, by its configuration.

    Raises:
        LoadError: naming the model and what is not supported, such as layers.
    """
    text = config.get_text_config(decoder=True)
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or not getattr(text, "is_causal", True):
        raise LoadError(f"{source} is an encoder, not a causal language model: its attention sees what comes later.")
    if knows(config):  # no layer has a running state, so transformers' models need not be imported
        return
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from ..engines.modules import cache_argument

    kind = config.model_type
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise LoadError(f"{source} is not a causal language model: its type is {kind!r}.") from error
    encoder = type(config) in AutoModelForMaskedLM._model_mapping or family_of(config).encoder
    if encoder and not getattr(config, "is_decoder", False):
        raise LoadError(f"{source} is an encoder, not a causal language model: its type is {kind!r}.")
    layers = set(getattr(text, "layer_types", None) or ())
    if (model_class._is_stateful or layers - ROLLS_BACK) and not is_hybrid(config):
        kinds = ", ".join(sorted(layers - ROLLS_BACK)) or kind
        raise LoadError(
            f"{source} cannot be used for speculative decoding here: it has layers ({kinds}) whose state cannot be "
            "rolled back after a rejected guess."
        )
    if not cache_argument(model_class) or not family_of(config).parts:
        raise LoadError(
            f"{source} cannot be used for speculative decoding here: a model of the type {kind!r} does not keep keys "
            "and values from which a pass over several tokens can go on."
        )
    empty_model(config)  # a model that cannot be built fails now, not after the download


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model as transformers builds it, without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def described(place: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers has to know to open a checkpoint: its configuration, and the names of weights if it is a part.

    Args:
        place, options: arguments for `from_pretrained`.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(place, **options)
    part = text_part(config)
    return {"config": config} if part is None else {"config": part, "key_mapping": KEY_MAPPING}


def text_part(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The configuration of the text part alone; None if the model has no parts, or is needed as a whole."""
    if not family_of(config).text_alone:
        return None
    part = deepcopy(config.get_text_config(decoder=True))
    if not family_of(part).fused:
        return None
    # The whole model says this too, and files with both embeddings are read as such anyway.
    part.tie_word_embeddings = bool(part.tie_word_embeddings or config.tie_word_embeddings)
    if quantization := getattr(config, "quantization_config", None):
        part.quantization_config = quantization
    return part


def text_name(name: str) -> str:
    """The name of a weight of the text part, or of another weight, in the text model."""
    for before, after in KEY_MAPPING.items():
        name = re.sub(before, after, name)
    return name


def embedding_rows(config: PreTrainedConfig) -> int:
    """How many token ids a model can read: the rows of its embedding."""
    return int(config.get_text_config().vocab_size)


def context_of(config: PreTrainedConfig) -> int:
    """The most tokens a model was made to read at once."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT)
