"""Finds the multi-token-prediction (MTP) layer that a checkpoint brings beside its model, and opens it.

transformers has such layers (`MtpModel`) and ignores them when it opens a model. Its own way to open them asks the hub
for the files again, and knows only some of the families.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from ..decoding.parts import DrafterParts
from ..engines.families import LAYERS, family_of
from .checkpoint import Checkpoint
from .errors import wrap_load_errors
from .opened import check_whole
from .store import LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel

    from ..drafters.mtp import MtpHead

ANY = re.compile(r"(^|\.)mtp\.|\.eh_proj\.weight$")  # in the names of the tensors of all families that have such layers
# Its own embeddings, by their names in `MtpModel`. Often they are copies of the target's, or the target's are used.
OWN = {"embed_tokens": "embed_tokens.weight", "shared_head": "shared_head.head.weight"}


def find_mtp(
    target: Checkpoint,
    files: Sequence[Path],
    engine: str,
    placement: Mapping[str, int],
    open_model: Callable[[], PreTrainedModel],
) -> Callable[[], MtpHead] | str:
    """What opens the MTP layer of a target, or why there is none to draft with, in words."""
    config = target.config
    text = config.get_text_config(decoder=True)
    place, names = family_of(text).mtp, dict(_names(files))
    if not any(map(ANY.search, names)):
        return DrafterParts.open_mtp
    if place is None or engine != "eager":
        return f"this preset has a target of the type {text.model_type}, whose MTP layers are not read here"
    from transformers.modeling_layers import MtpModel

    if not hasattr(MtpModel, "get_weight_conversions"):
        return f"MTP layers need a newer transformers than {transformers.__version__}"
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        return "this preset has a quantized target, and MTP layers are read only of others"
    if len(placement) > 1:
        return "this preset has a target that lies on several devices, and MTP layers are read only of others"
    layers = "mtp.layers" if place == "apart" else LAYERS
    numbered = re.compile(rf"^{re.escape(layers)}\.(\d+)\.")
    numbers = {int(found[1]) for found in map(numbered.match, names) if found}
    first = 0 if place == "apart" else text.num_hidden_layers
    if further := sorted(number for number in numbers if number > first):
        return f"this preset has a target with {len(further) + 1} MTP layers, and only a single one is read here"
    prefix = "mtp." if place == "apart" else f"{layers}.{first}."
    mine = {name: file for name, file in names.items() if name.startswith(prefix)}
    own = {part: (name, mine.pop(name)) for part, last in OWN.items() if (name := prefix + last) in mine}
    return partial(_open, target.source, open_model, mine, own)


def _names(files: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            yield from ((name, path) for name in file.keys())  # noqa: SIM118


def _open(
    source: object,
    open_model: Callable[[], PreTrainedModel],
    names: Mapping[str, Path],
    own: Mapping[str, tuple[str, Path]],
) -> MtpHead:
    """Open the layer whose tensors have these `names` in these files.

    Args:
        own: the names and files of its own embeddings, see `OWN`.
    Raises:
        LoadError: weights are missing, have another shape or are not known. The message names them.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_layers import MtpModel
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import ContextManagers

    from ..drafters.mtp import MtpHead

    model = open_model()
    with wrap_load_errors(source), ExitStack() as stack:
        described, files = _described(model), {*names.values(), *(path for _, path in own.values())}
        with ContextManagers(MtpModel.get_init_context(model.dtype, False, False, None)):  # without memory
            layer = MtpModel(described, 1)
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in files}
        found, _ = convert_and_load_state_dict_in_model(
            layer,
            {name: opened[path].get_slice(name) for name, path in names.items()},
            LoadStateDictConfig(
                weight_mapping=layer.get_weight_conversions(described),
                device_map={"": model.device},
                dtype=model.dtype,
                dtype_plan=model._get_dtype_plan(model.dtype),
                ignore_mismatched_sizes=True,
            ),
        )
        layer.tie_with_main_model(model)
        embeddings = {part: opened[path].get_tensor(name) for part, (name, path) in own.items()}
        pairs = [(part, weight.shape, getattr(layer, part).weight.shape) for part, weight in embeddings.items()]
        unlike = [*found.mismatched_keys, *((part, there, wanted) for part, there, wanted in pairs if there != wanted)]
        missing = [name for name in found.missing_keys if not name.startswith(tuple(OWN))]
        check_whole(f"The MTP layer of {source}", missing, unlike)
        if found.unexpected_keys:
            raise LoadError(f"The MTP layer of {source} has a weight that is not known: {min(found.unexpected_keys)}.")
        for part, weight in embeddings.items():
            _use_own(layer, part, weight)
    decoder = model.get_decoder()
    return MtpHead(layer.eval(), decoder.norm, len(decoder.layers))


def _use_own(layer: MtpModel, part: str, weight: Tensor) -> None:
    """Give a layer an embedding of its own, unless it is a copy of the target's."""
    shared = getattr(layer, part)
    weight = weight.to(shared.weight)
    if not torch.equal(weight, shared.weight):
        own = copy.copy(shared)
        own._parameters = {**shared._parameters, "weight": Parameter(weight, requires_grad=False)}
        setattr(layer, part, own)


def _described(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with a configuration that describes its MTP layer: full attention, with experts if there are any.

    Only some families have that in their own.
    """
    described = copy.copy(model)
    described.config = copy.deepcopy(model.config)
    text = described.config.get_text_config(decoder=True)
    text.num_mtp_layers, text.mtp_layer_types, text.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    return described
