"""Which device and number type to run on: what was asked for, or what this machine is measured to be good at."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

import psutil
import torch
from torch import Tensor

from .types import BadInput

CPU_INFO, CGROUP = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup")  # of Linux
CONTAINERS = (  # of cgroup 2 and 1: what a container may take, what it has, and how much of that are files to drop
    ("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    (
        *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        ("total_active_file", "total_inactive_file"),
    ),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(asked: str | None) -> torch.device:
    """The device of that name; for None or "auto" the best there is.

    What is asked of a GPU without naming one, as Triton's kernels are, goes to the one that was chosen last. Attention
    by cuDNN is turned off there.

    Raises:
        BadInput: no such device, or this machine does not have it.
    """
    device = _device(asked)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        # It plans anew for every length of a text, reportedly for tenths of a second.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _device(asked: str | None) -> torch.device:
    if asked in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(asked))
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "mps":  # sampling and the accept test need double precision
        raise BadInput("There is no support for Apple's GPUs yet: they have no double precision. Use the CPU.")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"There is no device called {asked!r}. Choose one of: auto, cpu, cuda, cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput("This machine has no NVIDIA or AMD GPU that PyTorch can use.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"There is no GPU number {device.index}: this machine has {torch.cuda.device_count()}.")
    return torch.device("cpu") if device.type == "cpu" else device


def choose_dtype(asked: str | None, device: torch.device) -> torch.dtype:
    """The number type of that name; for None or "auto" the one that this device multiplies fast.

    Raises:
        BadInput: no such number type.
    """
    if asked not in (None, "auto"):
        if asked not in DTYPES:
            raise BadInput(f"There is no dtype called {asked!r}. Choose one of: auto, {', '.join(DTYPES)}.")
        return DTYPES[asked]
    if device.type == "cuda":
        # Older GPUs emulate bfloat16, slowly.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if cpu_multiplies_bf16():
        return torch.bfloat16
    return torch.float16 if cpu_reads_float16() else torch.float32


def arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model with weights of this type computes in. On a CPU float16 only stores weights, rounded to it once,
    and the rest is float32: that halves what a pass must read, which is what it takes most of its time for."""
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16 products; without them it is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def cpu_reads_float16() -> bool:
    """Whether torch multiplies float32 by weights that it keeps in float16 (FBGEMM), measured on x86 CPUs only."""
    return quantized_engine() in ("x86", "fbgemm") and bool(torch.cpu.get_capabilities().get("avx2"))


def quantized_engine() -> str:
    """What torch multiplies by weights of few bits with: by default "x86", which is FBGEMM, on CPUs that it is for."""
    return str(torch.backends.quantized.engine)


def sent(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Token ids, or a tensor, on a device. A GPU is not waited for: it gets them when it has done what came before."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # from other memory a copy waits
    return tensor.to(device, non_blocking=True)


Moment: TypeAlias = "float | torch.cuda.Event"


def moment(device: torch.device) -> Moment:
    """Now, as a device sees it: a GPU works behind, and gets there when it has done what was asked of it so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """From one moment to another of the same device, which has done everything before the second."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000
    assert not isinstance(end, torch.cuda.Event)
    return end - begin


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """What some work takes on a device's own clock, from when it is asked for until it is done; waits for it."""
    begin = moment(device)
    work()
    end = moment(device)
    wait(device)
    return seconds_between(begin, end)


def wait(device: torch.device) -> None:
    """Until a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> int:
    """Bytes of main memory that can be had: of what the machine has free, as much as a container is allowed."""
    free = int(psutil.virtual_memory().available)
    for limit, usage, stat, files in CONTAINERS:
        with suppress(OSError, ValueError, KeyError):  # another kind of cgroup, or none; or its limit is called max
            facts = dict(line.split() for line in (CGROUP / stat).read_text().splitlines())
            taken = int((CGROUP / usage).read_text()) - sum(int(facts[name]) for name in files)
            free = min(free, int((CGROUP / limit).read_text()) - taken)
    return max(free, 0)


def device_name(device: torch.device) -> str:
    """What the maker calls the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def cpu_name() -> str:
    """What the maker calls the CPU."""
    return _cpu_info(CPU_INFO).get("model name") or platform.processor() or platform.machine()


def cpu_model() -> str | None:
    """The CPU's generation in its maker's numbers, where that can be read: on virtual machines the name tells less."""
    info = _cpu_info(CPU_INFO)
    numbers = [f"{name} {info[name]}" for name in ("cpu family", "model", "stepping") if name in info]
    return ", ".join(numbers) or None


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, in the words of the Linux kernel; nothing where that cannot be read."""
    return frozenset(_cpu_info(CPU_INFO).get("flags", "").split())


@cache
def _cpu_info(file: Path) -> Mapping[str, str]:
    """What the system tells of the CPU; of its last core, if they differ. Where there are many, it takes a while."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
