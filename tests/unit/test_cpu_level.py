"""Older CPUs: AVX2 only, or AVX-512 without products of bfloat16. `native.c` is built for them and run on this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from specdemo.engines.cpu.library import library_for
from specdemo.system import cpu_level, hardware
from specdemo.types import BadInput

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPT = "the cat sat"


@pytest.fixture(params=list(cpu_level.LEVELS))
def level(request: pytest.FixtureRequest, run_as: Callable[[str], None]) -> str:
    run_as(request.param)
    return str(request.param)


# What is built and chosen ------------------------------------------------------------------------------------


def test_everything_that_looks_at_the_cpu_sees_the_older_one(level: str) -> None:
    assert not hardware.cpu_multiplies_bf16()
    assert "avx512_bf16" not in hardware.cpu_flags()
    assert ("avx512f" in hardware.cpu_flags()) == (level == "avx512")
    assert f"SPECDEMO_CPU={level}" in hardware.cpu_name()


def test_the_library_has_no_instructions_that_the_older_cpu_lacks(level: str) -> None:
    library = library_for(torch.float32)
    assert library is not None
    assert library.columns == {"avx2": 16, "avx512": 32}[level]
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    command = ["objdump", "-d", library.functions._name]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("zmm" in code) == (level == "avx512")
    assert "dpbf16" not in code


def test_the_libraries_in_torch_are_told(run_as: Callable[[str], None]) -> None:
    """In a process of its own, since they ask once. What somebody set stays."""
    run_as("avx2")
    names = *cpu_level.LEVELS["avx2"].environment, cpu_level.SWITCH
    command = [
        sys.executable,
        "-c",
        f"import os, torch, specdemo; print(torch.backends.cpu.get_cpu_capability(), *map(os.environ.get, {names}))",
    ]
    environment = {name: value for name, value in os.environ.items() if name not in names[:-1]}
    told = subprocess.run(
        command, env={**environment, "ONEDNN_MAX_CPU_ISA": "SSE41"}, capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == ["AVX2", "avx2", "SSE41", "AVX2", "AVX2", "avx2"]


def test_another_level_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_level.SWITCH, "sse9")
    cpu_level.set_libraries()
    with pytest.raises(BadInput, match=r"^SPECDEMO_CPU is 'sse9'\. Choose one of: avx2, avx512\.$"):
        hardware.choose_dtype("auto", CPU)
