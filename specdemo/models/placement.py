"""Chooses the devices of a preset's models and checks their memory, before any download or release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any

import psutil
import torch

from ..engines.choose import SHARE
from ..engines.families import attending_layers, expert_count, head_width, is_hybrid, key_heads, knows
from ..system.hardware import free_memory
from ..types import BadInput
from .checkpoint import empty_model
from .store import LoadError
from .weights import bits_of, shapes

# An estimate of the GPU memory besides the weights: for each model the keys and values of TOKENS tokens (of both lanes
# and of slots that are captured again), and once WORK_SPACE bytes for libraries and captured passes.
TOKENS, WORK_SPACE = 4096, 2**29
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


@dataclass(frozen=True, slots=True)
class DevicePlan:
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


def plan(
    parts: Sequence[ModelPart],
    device: torch.device,
    held: Mapping[str, int] | None = None,
    draft_device: torch.device | None = None,
) -> DevicePlan:
    """Choose devices for the target and for the draft model, if any.

    Args:
        device: the device that was asked for. CUDA without a number means all GPUs.
        draft_device: that of the draft model, if another one was asked for it.
        held: bytes of weights on each device, by name, of a loaded preset that these models may replace.

    Raises:
        LoadError: they do not fit, even without that preset. The message says how much they need and what is free.
    """
    if len(parts) > 1 and draft_device not in (None, device):
        target, draft = plan(parts[:1], device, held), plan(parts[1:], draft_device, held)
        return replace(target, devices=target.devices + draft.devices, replaces=target.replaces or draft.replaces)
    if device.type != "cuda":
        return _in_main_memory(parts, device, held)
    numbers = range(torch.cuda.device_count()) if device.index is None else [device.index]
    free = {number: torch.cuda.mem_get_info(number)[0] for number in numbers}
    beside = _on_gpus(parts, free, whole=held is not None, split=device.index is None)
    if beside is not None:
        return beside
    if held is not None:  # all memory that torch holds on a GPU belongs to that preset
        free = {number: size + torch.cuda.memory_reserved(number) for number, size in free.items()}
        alone = _on_gpus(parts, free, whole=False, split=device.index is None)
        if alone is not None:
            return replace(alone, replaces=True)
    raise _too_large(parts, sum(_needed(part) for part in parts) + WORK_SPACE, sum(free.values()), "GPU memory")


def _in_main_memory(parts: Sequence[ModelPart], device: torch.device, held: Mapping[str, int] | None) -> DevicePlan:
    """For the CPU, and for an Apple GPU, which shares its memory."""
    devices, needed, free = (device,) * len(parts), sum(part.weights for part in parts), free_memory()
    most = free + psutil.swap_memory().free + (held or {}).get(str(device), 0)
    if needed <= most:
        return DevicePlan(devices, replaces=held is not None and needed > free * SHARE)
    target, *drafts = parts
    without_swap = free + (held or {}).get(str(device), 0)
    room = int(without_swap * SHARE) - sum(part.weights for part in drafts)
    if device.type != "cpu" or room < target.least:
        raise _too_large(parts, needed, most, "memory")
    return DevicePlan(devices, {"cpu": room}, on_disk=target.weights - room, replaces=held is not None)


def check_files(part: ModelPart, files: Sequence[Path]) -> None:
    """Refuse files that are too small for a model: transformers makes memory for what they lack before it is missed.

    Raises:
        LoadError: they have less than a bit for each of its weights.
    """
    size = sum(file.stat().st_size for file in files)
    if part.numbers > 8 * size:
        raise LoadError(
            f"{part.name} lacks weights: its configuration asks for {part.numbers:,} numbers, but its files have "
            f"{size:,} bytes."
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
            f"The keys and values of {len(lanes)} lanes of {tokens:,} tokens take {needed / 1e9:.1f} GB of memory, but "
            f"{free / 1e9:.1f} GB are free: race fewer lanes, or write fewer tokens."
        )


def _on_gpus(parts: Sequence[ModelPart], free: Mapping[int, int], whole: bool, split: bool) -> DevicePlan | None:
    """The first plan that fits: all on one GPU, each model on its own GPU, or the target on GPUs, main memory and disk.

    Args:
        whole: no model may be spread over devices.
        split: the target may be spread, unless `whole`.
    """
    target, *drafts = parts
    everything, beside = sum(map(_needed, parts)) + WORK_SPACE, sum(map(_needed, drafts)) + WORK_SPACE
    for number, size in free.items():
        if everything <= size:
            return DevicePlan((_gpu(number),) * len(parts))
    for number, size in free.items():
        others = [_gpu(other) for other in free if other != number and beside <= free[other]]
        if drafts and others and _needed(target) + WORK_SPACE <= size:
            return DevicePlan((_gpu(number), others[0]))
    if whole or not split:
        return None
    return _spread(target, drafts, free)


def _spread(target: ModelPart, drafts: Sequence[ModelPart], free: Mapping[int, int]) -> DevicePlan | None:
    """The target over all GPUs, the rest of it in main memory; the draft model on the largest GPU."""
    largest = max(free, key=free.__getitem__)
    total = sum(free.values())  # keys and values are where their layers are
    room = {number: size - target.more * size // total - WORK_SPACE for number, size in free.items()}
    room[largest] -= sum(map(_needed, drafts))
    room = {number: max(size, 0) for number, size in room.items()}
    offloaded = max(target.weights - sum(room.values()), 0)
    in_main_memory = int(free_memory() * SHARE)
    on_disk = max(offloaded - in_main_memory, 0)
    if not room[largest] or (on_disk and in_main_memory < target.least):
        return None
    first = next(number for number, size in room.items() if size)
    max_memory: dict[int | str, int] = dict(room.items())
    max_memory["cpu"] = in_main_memory  # always needed, since layers cannot be divided to fill GPUs exactly
    return DevicePlan((_gpu(first), *(_gpu(largest) for _ in drafts)), max_memory, offloaded - on_disk, on_disk)


def _needed(part: ModelPart) -> int:
    return part.weights + part.more


def _gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


def _too_large(parts: Sequence[ModelPart], needed: int, free: int, what: str) -> LoadError:
    names = " and ".join(part.name for part in parts)
    need = "needs" if len(parts) == 1 else "need"
    return LoadError(
        f"{names} {need} {needed / 1e9:.1f} GB of {what}, but {free / 1e9:.1f} GB are free. "
        "Choose a smaller preset, or run it on a machine with more."
    )


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
