"""Whether a Mac runs a model faster on its CPU or on Apple's GPU, by an estimate for a pass over one token.

On either a pass takes as long as its weights take to be read. On the GPU, transformers' own forward launches its
operations one by one, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from ..engines.choose import dtype_in_range
from ..engines.memory_rate import LEAST_BYTES, READS, memory_rate
from ..formats import byte_size
from ..system.device import seconds_of
from ..system.hardware import choose_dtype
from .checkpoint import Checkpoint
from .sizes import share_read, weight_bytes

CPU, APPLE_GPU = torch.device("cpu"), torch.device("mps", 0)
OPERATIONS = 40  # of a layer of a Llama, besides views; families with more norms have more
LAUNCHES = 200  # that are timed at once
CHOICE = (
    "It runs on {where}: by estimate a pass takes {cpu:.1f} ms on the CPU, to read {size}, and {gpu:.1f} ms on the "
    "Apple GPU, {launches:.1f} ms of them to launch {operations:,} operations."
)


def choose_on_mac(on_cpu: Checkpoint, dtype: str | None) -> tuple[torch.device, str | None]:
    """The faster device for a target, and a sentence that says why; None where there is no memory to measure with.

    Args:
        dtype: the one that was asked for, see `choose_dtype`.
    """
    cpu_rate, gpu_rate, launch = speeds()
    if cpu_rate is None or gpu_rate is None:
        return CPU, None
    on_gpu = replace(on_cpu, dtype=dtype_in_range(choose_dtype(dtype, APPLE_GPU), [on_cpu.config]), size=None)
    sizes = [weight_bytes(found) * share_read(found.config) for found in (on_cpu, on_gpu)]
    operations = OPERATIONS * on_cpu.config.get_text_config().num_hidden_layers
    cpu, launches = 1000 * sizes[0] / cpu_rate, 1000 * launch * operations  # ms
    gpu = 1000 * sizes[1] / gpu_rate + launches
    device, where = (APPLE_GPU, "the Apple GPU") if gpu < cpu else (CPU, "the CPU")
    size = byte_size(round(sizes[0]))
    return device, CHOICE.format(where=where, cpu=cpu, size=size, gpu=gpu, launches=launches, operations=operations)


@cache
def speeds() -> tuple[float | None, float | None, float]:
    """Bytes per second of the CPU and of the GPU, see `memory_rate`, and seconds of a launch on the GPU."""
    return memory_rate(CPU, LEAST_BYTES), memory_rate(APPLE_GPU, LEAST_BYTES), launch_seconds(APPLE_GPU)


@torch.inference_mode()
def launch_seconds(device: torch.device) -> float:
    """Seconds of an operation that has next to nothing to do.

    It is a small linear layer: with what Python does for its module, it takes as long as the mean operation of a pass
    (on a CPU, 40 of them took 0.14 ms, and a layer of a tiny Llama 0.12 ms).
    """
    linear, row = torch.nn.Linear(8, 8).to(device), torch.ones(1, 8, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            linear(row)

    return min(seconds_of(device, launch) for _ in range(READS)) / LAUNCHES
