"""How large a model is, and whether it fits: the devices of a preset's models and their memory, before any download or
release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any

import psutil
import torch
from gguf import GGMLQuantizationType

from ..engines.choose import SHARE
from ..engines.families import FAMILIES, attending_layers, expert_count, head_width, is_hybrid, key_heads, knows
from ..engines.quantized import READERS, bits_kept
from ..engines.ropes import rotation_bytes
from ..errors import BadInput
from ..formats import byte_size
from ..system.hardware import compute_dtype, free_memory
from .checkpoint import Checkpoint
from .configuration import context_of, empty_model
from .gguf import WHOLE, Header
from .store import LoadError
from .weights import bits_of, shapes

# Of a GPU besides the weights, in an estimate: the keys and values of so many tokens of each model, for both lanes and
# for slots that are captured again.
TOKENS = 4096
OF_A_TEXT = 2048  # tokens, in the estimate of main memory for caches
WORK_SPACE = 2**29  # bytes of a GPU for libraries and captured passes
LOOKED_UP = tuple({family.embedding.partition(".")[2] for family in FAMILIES.values()})
OF_EXPERTS = ".experts."  # in the names of their weights
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"  # tensors of a GGUF file


# A model ----------------------------------------------------------------------------------------------------


def sizes_of(config: Any) -> dict[str, int]:
    """How many numbers each weight of a causal language model has, by its name. Tied embeddings are listed once."""
    if knows(config):
        return {name: prod(shape) for name, shape in shapes(config).items()}
    return {name: weight.numel() for name, weight in empty_model(config).named_parameters()}


def numbers_of(config: Any) -> int:
    return sum(sizes_of(config).values())


def share_read(config: Any, sizes: Mapping[str, int] | None = None) -> float:
    """The share of its weights that a pass over one token reads.

    It reads one row of the input embeddings, unless they are the output embeddings too, and of the experts of a layer
    those that the token is sent to. A pass over more tokens reads up to as many experts for each.

    Args:
        sizes: bytes of the weights by their names; None if all numbers have the same type.
    """
    text, (count, used) = config.get_text_config(), _experts(config)
    sizes, sent, read = sizes or sizes_of(config), used / count if count else 1.0, 0.0
    for name, size in sizes.items():
        looked_up = name.endswith(LOOKED_UP) and not text.tie_word_embeddings
        read += size / text.vocab_size if looked_up else size * (sent if OF_EXPERTS in name else 1.0)
    return read / sum(sizes.values())


def experts_of(config: Any, size: int) -> dict[str, int]:
    """How many experts a layer has (`count`), how many a token uses (`used`), and the `bytes` of all; empty if no layer
    has some.

    Args:
        size: bytes of all weights.
    """
    (count, used), sizes = _experts(config), sizes_of(config)
    share = sum(numbers for name, numbers in sizes.items() if OF_EXPERTS in name) / sum(sizes.values())
    return {"count": count, "used": used, "bytes": round(size * share)} if count and share else {}


def _experts(config: Any) -> tuple[int, int]:
    text = config.get_text_config()
    count, used = expert_count(text), getattr(text, "num_experts_per_tok", None)
    return (count, used) if count and used else (0, 0)


def keys_and_values(config: Any) -> int:
    """How many numbers the keys and values of a token have."""
    return sum(2 * key_heads(layer) * head_width(layer) for layer in attending_layers(config))


def weight_bytes(model: Checkpoint) -> int:
    return numbers_of(model.config) * _bits(model.config, model.dtype) // 8 if model.size is None else model.size


def least_memory(model: Checkpoint) -> float:
    """Bytes of main memory for its weights if most are on the disk: embeddings, and a layer at a time."""
    if getattr(model.config, "quantization_config", None):
        return inf  # packed weights cannot be brought one by one
    text = model.config.get_text_config()
    table = text.vocab_size * text.hidden_size * model.dtype.itemsize
    return 2 * table + 2 * weight_bytes(model) / text.num_hidden_layers


def share_drafting(model: Checkpoint) -> float:
    """The share of its layers that may draft, with their own cache."""
    return model.skip_layers / float(model.config.get_text_config().num_hidden_layers)


def cache_bytes(model: Checkpoint) -> int:
    """Bytes of its keys and values on a GPU, and of its running states."""
    row = keys_and_values(model.config) * model.dtype.itemsize
    return int((row * TOKENS + _running_states(model)) * (1 + share_drafting(model)))


def laid_out_bytes(model: Checkpoint) -> int:
    """Bytes of its weights once they are laid out."""
    text, numbers = model.config.get_text_config(), numbers_of(model.config)
    if model.engine != "eager" and model.device.type == "cpu" and text.tie_word_embeddings:
        numbers += text.vocab_size * text.hidden_size  # one for input rows, one laid out for the output
    return numbers * _bits(model.config, model.dtype) // 8 if model.size is None else model.size


def text_bytes(model: Checkpoint, lanes: int) -> int:
    """Bytes of the caches of so many runs at the same time, with texts of `OF_A_TEXT` tokens or the model's context."""
    computed = compute_dtype(model.dtype, model.device)
    row = keys_and_values(model.config) * computed.itemsize + rotation_bytes(model.config, model.engine, computed)
    text = row * min(OF_A_TEXT, context_of(model.config)) + _running_states(model)
    return int(text * (lanes + share_drafting(model)))


def _bits(config: Any, dtype: torch.dtype) -> int:
    """Of a number of its matrices."""
    quantized = getattr(config, "quantization_config", None)
    if not quantized:
        return bits_of(dtype)
    stated = quantized if isinstance(quantized, dict) else vars(quantized)
    return int(stated.get("bits") or stated.get("w_bit") or (4 if stated.get("load_in_4bit") else 8))


def _running_states(model: Checkpoint) -> int:
    """Bytes of what the layers of a hybrid model keep besides keys and values in a run, and of its copy.

    It differs from family to family, so a model without weights reads one token to find it. The model is in bfloat16,
    since products of experts have no other type without weights.
    """
    if not is_hybrid(model.config):
        return 0
    from transformers import AutoModelForCausalLM, DynamicCache

    from ..engines.modules import cache_argument

    with torch.device("meta"), torch.inference_mode():
        empty = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        cache = DynamicCache(config=empty.config.get_text_config())
        empty(torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{cache_argument(type(empty)): cache})
    held = [states for layer in cache.layers for states in vars(layer).values() if isinstance(states, dict)]
    tensors = [state for states in held for state in states.values() if isinstance(state, torch.Tensor)]
    types = (model.dtype if one.dtype == torch.bfloat16 else one.dtype for one in tensors)
    return 2 * sum(one.numel() * dtype.itemsize for one, dtype in zip(tensors, types, strict=True))


# A GGUF file that is not converted yet ----------------------------------------------------------------------


def keeps_quantized(header: Header) -> bool:
    """Whether some weights of a GGUF file can be kept as stored."""
    return header.architecture not in WHOLE and not READERS.keys().isdisjoint(_types(header).values())


def stored_bytes(header: Header) -> int:
    """Bytes of the weights of a GGUF file if they are kept as stored.

    Output rows are laid out for products. Rows of quantized input embeddings are read from the file one by one, and of
    others there is a copy.
    """
    types = _types(header)
    bits_of_each = {tensor: bits_kept(name) if name in READERS else 16 for tensor, name in types.items()}
    tied, copied = OUTPUT not in header.shapes, types.get(EMBEDDINGS) not in READERS
    copies = {EMBEDDINGS: tied + copied}
    return int(sum(copies.get(name, 1) * prod(header.shapes[name]) * size for name, size in bits_of_each.items()) // 8)


def _types(header: Header) -> dict[str, str]:
    """llama.cpp's names of the types of its tensors."""
    return {tensor: GGMLQuantizationType(kind).name for tensor, kind in header.kinds.items()}


# Whether they fit -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """The device of each model, the target first.

    If no GPU is large enough for the target, `max_memory` is the bytes of weights for each device, as in
    `from_pretrained`, and `offloaded` bytes are in main memory. If that is not large enough either, every pass reads
    `on_disk` bytes from the disk. `replaces` says that there is room only after the loaded preset is released.
    """

    devices: tuple[torch.device, ...]
    max_memory: Mapping[int | str, int] | None = None
    offloaded: int = 0
    on_disk: int = 0
    replaces: bool = False


def plan(models: Sequence[Checkpoint], held: Mapping[str, int] | None = None) -> _Plan:
    """Choose devices for the target and for the draft model, if any.

    Args:
        models: with the devices that were asked for. CUDA without a number means all GPUs.
        held: bytes of weights on each device, by name, of a loaded preset that these models may replace.

    Raises:
        LoadError: they do not fit, even without that preset. The message says how much they need and what is free.
    """
    device = models[0].device
    if models[-1].device != device:
        target, draft = plan(models[:1], held), plan(models[1:], held)
        return replace(target, devices=target.devices + draft.devices, replaces=target.replaces or draft.replaces)
    if device.type != "cuda":
        return _in_main_memory(models, held)
    numbers = range(torch.cuda.device_count()) if device.index is None else [device.index]
    free = {number: torch.cuda.mem_get_info(number)[0] for number in numbers}
    beside = _on_gpus(models, free, whole=held is not None, split=device.index is None)
    if beside is not None:
        return beside
    if held is not None:  # all memory that torch holds on a GPU belongs to that preset
        free = {number: size + torch.cuda.memory_reserved(number) for number, size in free.items()}
        alone = _on_gpus(models, free, whole=False, split=device.index is None)
        if alone is not None:
            return replace(alone, replaces=True)
    raise _too_large(models, sum(map(_needed, models)) + WORK_SPACE, sum(free.values()), "GPU memory")


def _in_main_memory(models: Sequence[Checkpoint], held: Mapping[str, int] | None) -> _Plan:
    """For the CPU, and for an Apple GPU, which shares its memory."""
    device, needed, free = models[0].device, sum(map(weight_bytes, models)), free_memory()
    devices = (device,) * len(models)
    most = free + psutil.swap_memory().free + (held or {}).get(str(device), 0)
    if needed <= most:
        return _Plan(devices, replaces=held is not None and needed > free * SHARE)
    target, *drafts = models
    without_swap = free + (held or {}).get(str(device), 0)
    room = int(without_swap * SHARE) - sum(map(weight_bytes, drafts))
    if device.type != "cpu" or room < least_memory(target):
        raise _too_large(models, needed, most, "memory")
    return _Plan(devices, {"cpu": room}, on_disk=weight_bytes(target) - room, replaces=held is not None)


def check_files(name: object, config: Any, files: Sequence[Path]) -> None:
    """Refuse files that are too small for a model: transformers makes memory for what they lack before it is missed.

    Raises:
        LoadError: they have less than a bit for each of its weights.
    """
    size = sum(file.stat().st_size for file in files)
    if (numbers := numbers_of(config)) > 8 * size:
        raise LoadError(
            f"{name} lacks weights: its configuration asks for {numbers:,} numbers, but its files have {size:,} bytes."
        )


def check_caches(lanes: Sequence[int], tokens: int, device: torch.device) -> None:
    """Refuse a race whose keys and values do not fit into free memory.

    Args:
        lanes: for each lane, the bytes of the keys and values of a token.
        tokens: the most tokens of a lane.
    """
    needed = sum(lanes) * tokens
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > free:
        raise BadInput(
            f"The keys and values of {len(lanes)} lanes of {tokens:,} tokens take {byte_size(needed)} of memory, but "
            f"{byte_size(free)} are free: race fewer lanes, or write fewer tokens."
        )


def _on_gpus(models: Sequence[Checkpoint], free: Mapping[int, int], whole: bool, split: bool) -> _Plan | None:
    """The first plan that fits: all on one GPU, each model on its own GPU, or the target on GPUs, main memory and disk.

    Args:
        whole: no model may be spread over devices.
        split: the target may be spread, unless `whole`.
    """
    target, *drafts = models
    everything, beside = sum(map(_needed, models)) + WORK_SPACE, sum(map(_needed, drafts)) + WORK_SPACE
    for number, size in free.items():
        if everything <= size:
            return _Plan((_gpu(number),) * len(models))
    for number, size in free.items():
        others = [_gpu(other) for other in free if other != number and beside <= free[other]]
        if drafts and others and _needed(target) + WORK_SPACE <= size:
            return _Plan((_gpu(number), others[0]))
    if whole or not split:
        return None
    return _spread(target, drafts, free)


def _spread(target: Checkpoint, drafts: Sequence[Checkpoint], free: Mapping[int, int]) -> _Plan | None:
    """The target over all GPUs, the rest of it in main memory; the draft model on the largest GPU."""
    largest = max(free, key=free.__getitem__)
    total = sum(free.values())  # keys and values are where their layers are
    room = {number: size - cache_bytes(target) * size // total - WORK_SPACE for number, size in free.items()}
    room[largest] -= sum(map(_needed, drafts))
    room = {number: max(size, 0) for number, size in room.items()}
    offloaded = max(weight_bytes(target) - sum(room.values()), 0)
    in_main_memory = int(free_memory() * SHARE)
    on_disk = max(offloaded - in_main_memory, 0)
    if not room[largest] or (on_disk and in_main_memory < least_memory(target)):
        return None
    first = next(number for number, size in room.items() if size)
    max_memory: dict[int | str, int] = dict(room.items())
    max_memory["cpu"] = in_main_memory  # always needed, since layers cannot be divided to fill GPUs exactly
    return _Plan((_gpu(first), *(_gpu(largest) for _ in drafts)), max_memory, offloaded - on_disk, on_disk)


def _needed(model: Checkpoint) -> int:
    return weight_bytes(model) + cache_bytes(model)


def _gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


def _too_large(models: Sequence[Checkpoint], needed: int, free: int, what: str) -> LoadError:
    names = " and ".join(str(model.source) for model in models)
    need = "needs" if len(models) == 1 else "need"
    return LoadError(
        f"{names} {need} {byte_size(needed)} of {what}, but {byte_size(free)} are free. "
        "Choose a smaller preset, or run it on a machine with more."
    )
