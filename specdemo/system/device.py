"""Numbers to and from a device, and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor


def to_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Token ids or a tensor on a device.

    A copy to a CUDA GPU does not block: the GPU makes it after its earlier work. A copy to the CPU blocks, or it
    would be read too early.
    """
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # a copy from other memory would block
    return tensor.to(device, non_blocking=device.type == "cuda")


def packed(*parts: Tensor | None) -> Tensor:
    """Vectors as one, float64, so that one transfer brings them to the host; None is empty."""
    return torch.cat([part.double() for part in parts if part is not None])


def unpacked(vector: Tensor, *sizes: int) -> list[list[float]]:
    """Vectors of these sizes that were `packed`, as lists: on a GPU the only wait of a round."""
    numbers, ends = vector.tolist(), [*accumulate(sizes)]
    return [numbers[end - size : end] for size, end in zip(sizes, ends, strict=True)]


Timestamp: TypeAlias = "float | torch.cuda.Event"


def timestamp(device: torch.device) -> Timestamp:
    """The current time of a device. That of a GPU is when it has finished all work launched so far."""
    if device.type == "mps":
        torch.mps.synchronize()
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_seconds(begin: Timestamp, end: Timestamp) -> float:
    """Seconds between two timestamps of the same device. Waits until the device has reached the second one."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        if not end.query():  # nobody has waited for a GPU that drafted nothing in this round
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    assert not isinstance(end, torch.cuda.Event)
    return end - begin


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that some work takes on a device, measured by the device's clock. Waits for the work."""
    begin = timestamp(device)
    work()
    return elapsed_seconds(begin, timestamp(device))
