"""Chooses the devices of a preset's models and checks their memory, before any download or release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from ..engines.choose import SHARE
from ..errors import BadInput
from ..system.hardware import free_memory
from .sizes import ModelPart
from .store import LoadError

WORK_SPACE = 2**29  # bytes of a GPU for libraries and captured passes


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
