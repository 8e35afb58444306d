"""Older CPUs: AVX2 only, or AVX-512 without products of bfloat16. `native.c` is built for them and run on this one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.engines import linear
from specdemo.engines.choose import engine_of
from specdemo.engines.cpu.library import SOURCE, library_for
from specdemo.engines.runner import ANY_ROWS
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.models.sizes import laid_out_bytes
from specdemo.racing.compare import is_exact
from specdemo.racing.race import start
from specdemo.settings import Settings
from specdemo.system import compiled, cpu_level, hardware
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of, rounds_of
from tests.harness.files import full_preset
from tests.harness.models import expected, looked_at, preset_of, save, tiny

from ..sentences import refuses

CPU = torch.device("cpu")
PROMPT = "the cat sat"


@pytest.fixture(params=list(cpu_level.LEVELS))
def level(request: pytest.FixtureRequest, run_as: Callable[[str], None]) -> str:
    run_as(request.param)
    return str(request.param)


# What is built and chosen ------------------------------------------------------------------------------------


def test_everything_that_looks_at_the_cpu_sees_the_older_one(level: str) -> None:
    assert hardware.choose_dtype("auto", CPU) == torch.bfloat16
    assert hardware.compute_dtype(torch.bfloat16, CPU) == torch.float32
    assert not hardware.cpu_multiplies_bf16()
    assert not any("bf16" in feature for feature in hardware.cpu_features())
    assert hardware.cpu_instructions() == level
    assert f"SPECDEMO_CPU={level}" in hardware.cpu_name()
    assert engine_of(LlamaConfig(), torch.bfloat16, CPU) == "native"


def test_the_library_has_no_instructions_that_the_older_cpu_lacks(level: str) -> None:
    library = library_for(torch.bfloat16)
    assert library is not None
    assert library.columns == {"avx2": 16, "avx512": 32}[level]
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    command = ["objdump", "-d", library.functions._name]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("zmm" in code) == (level == "avx512")
    assert "dpbf16" not in code


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_sums_of_rows_stay_in_registers(compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each number of rows has code of its own, with an addition for every vector of sums. A loop over these would keep
    them in memory, which takes up to three times as long."""
    instructions = hardware.cpu_instructions()
    if instructions is None or shutil.which(compiler) is None or shutil.which("objdump") is None:
        pytest.skip("there is no compiler or no objdump")
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path))
    file = compiled._built([compiler], SOURCE, ["-DFLOAT32"])
    command = ["objdump", "-d", "--disassemble=sum_weights", str(file)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    vectors, rows = {"avx2": (2, 6), "avx512": (2, 9), "neon": (4, 6)}[instructions]
    assert len(re.findall("fmadd|fmla", code)) == vectors * sum(range(1, rows + 1))


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
    levels = subprocess.run(
        command, env={**environment, "ONEDNN_MAX_CPU_ISA": "SSE41"}, capture_output=True, text=True, check=True
    ).stdout
    assert levels.split() == ["AVX2", "avx2", "SSE41", "AVX2", "AVX2", "avx2"]


def test_another_level_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_level.SWITCH, "sse9")
    cpu_level.set_libraries()
    with refuses(BadInput, "'sse9'. avx2, avx512."):
        hardware.choose_dtype("auto", CPU)


# What is written ---------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(level: str, tmp_path: Path) -> Iterator[Loaded]:
    loaded = load(full_preset(tmp_path), None, "cpu")
    yield loaded
    loaded.release()


def text_of(loaded: Loaded, drafter: str, settings: Settings) -> tuple[list[int], int]:
    """The tokens of a run, and how many were drafted for it."""
    events = list(start(loaded, drafter, loaded.encode(PROMPT), settings))
    return ids_of(events), sum(len(event.drafted) for event in rounds_of(events))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whoever_drafts_the_text_is_the_targets(loaded: Loaded, temperature: float) -> None:
    assert (loaded.engine, loaded.dtype, loaded.weights_dtype) == ("native", torch.float32, torch.bfloat16)
    assert loaded.exact_rows == ANY_ROWS
    asked = Settings(k=6, temperature=temperature, max_new_tokens=40)
    plain, _ = text_of(loaded, "none", replace(asked, k=0))
    assert len(plain) > 10
    drafted = {False: 0, True: 0}
    for name in DRAFTERS:
        if name == "none" or drafter_class(name).needs(loaded.parts).missing:
            continue
        for tree in (False, True) if loaded.cannot_branch(name) is None else (False,):
            text, tokens = text_of(loaded, name, replace(asked, tree=tree))
            assert text == plain, (name, tree)
            assert is_exact(loaded.environment(), 6, tree)
            drafted[tree] += tokens
    assert min(drafted.values()) > 1000


def test_a_report_tells_what_is_loaded(level: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = tiny("llama", len(tokenizer), tie_word_embeddings=False)
    preset = preset_of(save(model, tokenizer, tmp_path / "llama"))
    found, loaded = looked_at(preset, None), load(preset, None, "cpu")
    assert expected(found) == (loaded.engine, True)
    numbers = sum(weight.numel() for weight in model.parameters())
    assert laid_out_bytes(found) == 2 * numbers == sum(loaded.placement.values())
    loaded.release()


# The range ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiles", [True, False])
def test_weights_beyond_float16_are_kept_by_what_is_chosen(
    level: str, compiles: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in bfloat16, loaded without a word about its type; with gcc and without."""
    if not compiles:
        monkeypatch.setenv(hardware.C_SWITCH, "0")
        monkeypatch.setitem(linear.LEAST_PACKED, torch.float32, 0)
        library_for.cache_clear()
    model = tiny("llama", len(tokenizer)).bfloat16()
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = -7e4
    loaded = load(preset_of(save(model, tokenizer, tmp_path / "large")), None, "cpu")
    assert loaded.engine == ("native" if compiles else "fused")
    ids = loaded.encode(PROMPT)
    logits = loaded.target_runner(32).prefill(ids)
    wanted = model.float()(torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)
    loaded.release()
