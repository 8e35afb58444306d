"""The text part of a model for pictures and text, as a model of its own.

Such a checkpoint has the configuration of its text model in `text_config`, and that model's weights under a prefix.
Where it only reads text, the other parts do nothing, so they are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..engines.families import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The beginnings of names in such files, as written by transformers before version 5 and since, and what they become.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
KEY_MAPPING = {f"^{before.replace('.', '[.]')}": after for before, after in PREFIXES.items()}  # for `from_pretrained`


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
    if family_of(part).layout != "llama":
        return None
    # The whole model says this too, and files with both embeddings are read as such anyway.
    part.tie_word_embeddings = bool(part.tie_word_embeddings or config.tie_word_embeddings)
    if quantization := getattr(config, "quantization_config", None):
        part.quantization_config = quantization
    return part


def text_name(name: str) -> str:
    """The name of a weight of the text part, or of another weight, in the text model."""
    before = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return name if before is None else PREFIXES[before] + name.removeprefix(before)
