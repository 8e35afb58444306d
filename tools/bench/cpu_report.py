"""What `bench cpu` runs: the tests of the native engine, then the default preset by each type of weights, on a Mac also
on Apple's GPU. It is for machines that nobody has tried yet."""

from __future__ import annotations

from dataclasses import replace

import torch

from specdemo.models.loaded import load
from specdemo.models.presets import find_preset
from specdemo.system.hardware import c_compiler, cpu_instructions

from .gpu import REPORT, self_test, texts
from .gpu_passes import Gpu, copying_rate
from .gpu_report import run_tests
from .rows import Row

TESTED = "native", "quantized", "experts", "exact_rows", "noise", "sampling"
SIZES = replace(REPORT, name="the CPU", new_tokens=24, tests=tuple(f"tests/unit/test_{name}.py" for name in TESTED))
SECONDS = 400  # for the tests
KINDS = ("cpu", "float32"), ("cpu", "bfloat16"), ("cpu", "stored"), ("mps", "float16")  # devices and types of weights
DRAFTERS = "lookup-ngram", "eagle"


def report(on: Gpu) -> None:
    """Run everything in turn. What fails is a row, and the rest goes on."""
    compiler = " ".join(c_compiler() or ["none"])
    on.add("compiler", f"{compiler}, for {cpu_instructions() or 'no instructions that the engine knows'}")
    with on.trying("memory"):
        on.add("memory", "copying, read and written", gb_per_second=copying_rate(on) / 1e9)
    with on.trying("tests"):
        run_tests(on, SECONDS)
    for device, dtype in KINDS:
        if device == "cpu" or torch.backends.mps.is_available():
            with on.trying(f"{dtype} on {device}"):
                _run_preset(on, device, dtype)


def _run_preset(on: Gpu, device: str, dtype: str) -> None:
    """What the engine finds out about itself with these weights, and texts; rows name the weights."""

    def take(row: Row) -> None:
        on.take({**row, "part": f"{row['part']}, {dtype} on {device}"})

    loaded = load(find_preset(on.sizes.preset), dtype, device)
    try:
        named = replace(on, device=loaded.device, dtype=loaded.dtype, take=take)
        self_test(named, loaded)
        texts(named, loaded, DRAFTERS)
    finally:
        loaded.release()
