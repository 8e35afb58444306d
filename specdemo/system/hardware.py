"""The device and the number type to run on, and facts about this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from ..errors import BadInput
from ..settings import check_dtype_name
from .cpu_level import SWITCH, level

INSTRUCTIONS = {  # for vectors: what a CPU needs for each, as torch names it. C has a header for each.
    "avx512": ("avx512_f", "avx512_bw"),
    "avx2": ("avx2", "fma3", "f16c"),
    "neon": ("neon",),
}
C_SWITCH = "SPECDEMO_NATIVE"  # an environment variable; 0 turns the C libraries off
CPU_INFO, CGROUP = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup")  # of Linux
CONTAINERS = (  # of cgroup 2 and 1: a container's limit, its usage, and how much of that is cached files
    ("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)
# The types that stand for the one that a file has, with inputs of products in 8 and in 16 bits.
STORED = AS_STORED, STORED_16 = torch.uint8, torch.uint16
QUANTIZED = {  # of the weights, on a CPU
    "int8": torch.qint8,
    "int4": torch.quint4x2,
    "stored": AS_STORED,
    "stored16": STORED_16,
}
UNQUANTIZED = torch.float16  # of the weights beside quantized ones: a CPU computes in float32 with these
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, **QUANTIZED}


def choose_device(name: str | None) -> torch.device:
    """The device with this name; for None or "auto" a GPU if there is one.

    The chosen GPU becomes torch's current one, which Triton's kernels run on. Attention by cuDNN is turned off there.
    """
    device = _device(name)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        # cuDNN plans again for every length of a text, reportedly for tenths of a second.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_devices(name: str | None) -> tuple[torch.device, torch.device | None]:
    """The device of the target, and that of its draft model where two are named, as in "cuda,cpu"."""
    target, _, draft = (name or "auto").partition(",")
    return choose_device(target), _device(draft) if draft else None


def _device(name: str | None) -> torch.device:
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps", 0)
    if device.type == "mps":
        raise BadInput("This machine has no Apple GPU that PyTorch can use.")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"There is no device called {name!r}. Choose one of: auto, cpu, cuda, cuda:0, mps.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput("This machine has no NVIDIA or AMD GPU that PyTorch can use.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"There is no GPU number {device.index}: this machine has {torch.cuda.device_count()}.")
    return torch.device("cpu") if device.type == "cpu" else device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The number type with this name; for None or "auto" the fastest on this device."""
    if name is not None and name != "auto":
        check_dtype_name(name)
        return DTYPES[name]
    if device.type == "mps":
        return torch.float16  # the first of them have no instructions for bfloat16
    if device.type == "cuda":
        # Older GPUs emulate bfloat16, slowly.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # Where the CPU only widens weights, float16 is no faster than bfloat16, and some weights are too large for it.
    return torch.bfloat16 if cpu_multiplies_bf16() or cpu_widens_weights() else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which `choose_dtype` knows a type."""
    return next(name for name, one in DTYPES.items() if one == dtype)


def unquantized(dtype: torch.dtype) -> torch.dtype:
    """The type of the weights that stay unquantized in a model with weights of this type."""
    return UNQUANTIZED if dtype in QUANTIZED.values() else dtype


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that a model with weights of this type computes in.

    On a CPU float16 only stores weights, and everything is computed in float32: a pass takes most of its time to read
    the weights, and float16 halves them. So does bfloat16 on a CPU that widens weights and has no products of it.
    With quantized weights everything is computed in float32, too.
    """
    dtype = unquantized(dtype)
    if device.type != "cpu" or dtype.itemsize != 2:
        return dtype
    stored_only = dtype == torch.float16 or (cpu_widens_weights() and not cpu_multiplies_bf16())
    return torch.float32 if stored_only else dtype


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16 products. Without them bfloat16 is slower than float32."""
    of_arm = cpu_has("bf16") and builds_c()  # for `native.c`: torch's own products were not measured
    return cpu_has("amx_bf16") or cpu_has("avx512_bf16") or of_arm


def cpu_widens_weights() -> bool:
    """Whether products with float32 inputs can widen 16-bit weights: by `native.c`, or in torch by FBGEMM."""
    return has_fbgemm() or (cpu_instructions() == "neon" and builds_c())


def has_fbgemm() -> bool:
    return quantized_engine() in ("x86", "fbgemm") and cpu_has("avx2")


def cpu_attends_alike() -> bool:
    """Whether torch's attention in bfloat16 sums in the same order in every pass, as measured.

    It does not on Intel's CPUs since Sapphire Rapids where a virtual machine hides their AMX.
    """
    return cpu_has("amx_bf16") or not cpu_has("avx512_fp16")


def cpu_has(feature: str) -> bool:
    """Whether the CPU has a feature, by torch's name for it."""
    return bool(_capabilities().get(feature)) and not feature.startswith(level().hidden)


def cpu_features() -> list[str]:
    """All that torch knows of and `cpu_has`."""
    return sorted(filter(cpu_has, _capabilities()))


def cpu_instructions() -> str | None:
    """The best of `INSTRUCTIONS` that this CPU has."""
    return next((name for name, needed in INSTRUCTIONS.items() if all(map(cpu_has, needed))), None)


@cache
def _capabilities() -> Mapping[str, bool]:
    """Torch takes a few microseconds to tell them, and every pass asks."""
    return torch.cpu.get_capabilities()


def wants_c() -> bool:
    """Whether C would run here if there is a compiler: not on Windows, nor on CPUs that have none of `INSTRUCTIONS`."""
    return os.environ.get(C_SWITCH) != "0" and platform.system() != "Windows" and cpu_instructions() is not None


def builds_c() -> bool:
    return wants_c() and c_compiler() is not None


@cache
def c_compiler() -> tuple[str, ...] | None:
    """The command that the environment variable CC names; else gcc, clang, or the compiler of the package `ziglang`."""
    if named := os.environ.get("CC", "").split():
        return tuple(named)
    found = shutil.which("gcc") or shutil.which("clang")
    if found and platform.system() == "Darwin":  # without its developer tools a Mac has only files of these names
        missing = subprocess.run(["xcode-select", "--print-path"], capture_output=True, check=False).returncode
        found = None if missing else found
    if found:
        return (found,)
    return (sys.executable, "-m", "ziglang", "cc") if find_spec("ziglang") else None


def attends_in_groups(dtype: torch.dtype, device: torch.device, masked: bool) -> bool:
    """Whether torch's attention supports query heads that share a key head (`enable_gqa`) efficiently.

    On a GPU only flash attention does, which needs 16-bit numbers, compute capability 8.0, and no mask. Without it
    torch stores all scores, whose number is the square of the number of tokens.
    """
    if device.type != "cuda":
        return True
    return not masked and dtype.itemsize == 2 and torch.cuda.get_device_capability(device) >= (8, 0)


def quantized_engine() -> str:
    """Torch's backend for quantized weights. "x86", which is FBGEMM, is the default where it runs."""
    return str(torch.backends.quantized.engine)


def free_memory() -> int:
    """Free bytes of main memory, within the limit of a container."""
    free = int(psutil.virtual_memory().available)
    for limit, usage, stat, files in CONTAINERS:
        with suppress(OSError, ValueError, KeyError):  # another kind of cgroup, or none, or the limit is "max"
            facts = dict(line.split() for line in (CGROUP / stat).read_text().splitlines())
            taken = int((CGROUP / usage).read_text()) - sum(int(facts[name]) for name in files)
            free = min(free, int((CGROUP / limit).read_text()) - taken)
    return max(free, 0)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU" if device.type == "mps" else cpu_name()


def cpu_name() -> str:
    name = _cpu_info(CPU_INFO).get("model name") or platform.processor() or platform.machine()
    return f"{name} ({SWITCH}={os.environ[SWITCH]})" if level().hidden else name


def cpu_model() -> str | None:
    """Family, model and stepping of the CPU, if they can be read. On virtual machines the name says less."""
    info = _cpu_info(CPU_INFO)
    numbers = [f"{name} {info[name]}" for name in ("cpu family", "model", "stepping") if name in info]
    return ", ".join(numbers) or None


@cache
def _cpu_info(file: Path) -> Mapping[str, str]:
    """The fields of /proc/cpuinfo, of the last core if cores differ. With many cores this takes some time."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
