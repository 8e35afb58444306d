"""The library of `native.c`: its products, what it refuses, and how it is built. `test_logits` has its passes."""

from __future__ import annotations

import copy
import logging
import math
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from specdemo.decoding import noise
from specdemo.engines import choose, linear, native
from specdemo.engines.cpu import library
from specdemo.engines.cpu.library import PackedLinear, library_for
from specdemo.system import compiled, hardware
from specdemo.system.hardware import compute_dtype
from tests.harness.doubles import MODEL_VOCAB
from tests.harness.engines import native_runner, tiny_model
from tests.harness.models import model_of

from ..sentences import refuses, tells

DECODING = Path(noise.__file__).parent
MACH_O = bytes.fromhex("cffaedfe")  # how a library of macOS begins
PROMPT = [5, 9, 2, 33, 17, 60, 0, 8]
CPU = torch.device("cpu")
PASSES = ([4], [7, 7, 1], [0], list(range(17)))


@pytest.fixture(params=[1, 2, 6])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ["llama, 6 heads of 20", "qwen3, 4 heads of 128", "gpt2, 4 heads of 32", "mixtral"])
def test_logits_are_the_same_bits_whatever_the_number_of_threads(name, threads, weights_dtype):
    """More of them than cores and than parts of the work, too. The last pass is over a tree of 64 rows."""
    runner, tree = native_runner(model_of(name).to(weights_dtype), 120), [(row - 1) // 2 for row in range(64)]
    ids = [(11 * row + 3) % MODEL_VOCAB for row in range(64)]
    logits = []
    for count in (1, threads):
        torch.set_num_threads(count)
        logits.append([runner.prefill(PROMPT), *map(runner.forward, PASSES), runner.forward(ids, tree)])
    assert all(map(torch.equal, *logits))


def test_a_prompt_that_is_read_in_parts_gives_the_same_bits(monkeypatch):
    runner = native_runner(tiny_model("llama"), 64)
    runner.capture_hidden_states([0, 2])
    logits, states = runner.prefill(PROMPT), runner.hidden_states
    monkeypatch.setattr(native, "MOST_AT_ONCE", 3)
    assert torch.equal(runner.prefill(PROMPT), logits)
    assert runner.hidden_states is not None
    assert states is not None
    assert torch.equal(runner.hidden_states, states)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_float32_strays_hardly_further_from_float64_than_transformers_does(architecture, scale):
    """Scores far apart, and activations too, are where an approximate exponential would show."""
    model = copy.deepcopy(tiny_model(architecture))
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "c_attn" in name or "up_proj" in name or "c_fc" in name:
            parameter.data *= scale
    ids = torch.randint(MODEL_VOCAB, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    by_transformers = [choose.runner_maker(one, eager=True)[1](200) for one in (copy.deepcopy(model).double(), model)]
    runners = [by_transformers[0], native_runner(model, 200), by_transformers[1]]
    logits = []
    for runner in runners:
        runner.prefill(ids[:1])
        logits.append(torch.cat([runner.forward(ids[i : i + 5]) for i in range(1, 200, 5)]).double())
    ours, theirs = ((rows - logits[0]).abs().median() for rows in logits[1:])
    assert ours < 2 * theirs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("shape", "parts"), [((1, 2), 1), ((31, 64), 1), ((33, 46), 3), ((100, 576), 1), ((128, 64), 2)]
)
def test_products_of_every_length(shape, parts, biased, weights_dtype, threads):
    dtype = weights_dtype
    functions, computed = library_for(dtype), compute_dtype(dtype, CPU)
    if functions is None:
        pytest.skip("no C library here")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(*shape, generator=generator).to(dtype), torch.randn(shape[0], generator=generator)
    multiply = PackedLinear(functions, weight, bias.to(computed) if biased else None, parts)
    for rows in (*range(1, 21), 40):
        x = torch.randn(rows, shape[1], generator=generator).to(computed)
        wanted = x.double() @ weight.double().T + (bias.to(computed).double() if biased else 0)
        rounds = computed == torch.bfloat16
        near: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if rounds else {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(multiply(x).double(), wanted, **near)
        assert multiply(x).dtype == computed
        assert torch.equal(multiply(x[-1:]), multiply(x)[-1:])
    assert torch.equal(multiply(x.view(2, 20, -1)), multiply(x).view(2, 20, -1))
    assert torch.equal(multiply(x.T.contiguous().T), multiply(x))


@pytest.fixture
def rounding():
    """The library whose inputs and outputs are bfloat16."""
    functions = library_for(torch.bfloat16)
    if functions is None or compute_dtype(torch.bfloat16, CPU) != torch.bfloat16:
        pytest.skip("no C library here")
    return functions


def test_half_precision_rounds_to_the_nearest_even_number(rounding):
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(64, generator=generator)
    bias[:8] = 1 + torch.arange(1, 16, 2) / 256  # beside nothing, each lies halfway between two numbers
    multiply = PackedLinear(rounding, torch.eye(64).bfloat16(), bias)
    x = torch.randn(9, 64, generator=generator).bfloat16()
    x[0] = 0
    assert torch.equal(multiply(x), (x.float() + bias).bfloat16())


def test_nothing_finite_becomes_none_in_a_pass():
    """Real models have a channel of tens of thousands after some layers."""
    model = copy.deepcopy(tiny_model("llama")).bfloat16()
    model.model.embed_tokens.weight.data[:, 7] = 30_000
    runner = native_runner(model, 16)
    assert runner.prefill(PROMPT).isfinite().all()


def test_a_guess_whose_values_are_no_numbers_leaves_those_before_it_as_they_are(weights_dtype):
    """In the same pass, and in a later one after the guess was rejected."""
    model, guess = copy.deepcopy(tiny_model("llama")), 1
    model.get_input_embeddings().weight.data[guess] = math.nan
    for done in range(1, len(PROMPT)):
        right, runner = (native_runner(model, 16, weights_dtype) for _ in range(2))
        right.prefill(PROMPT[:done])
        runner.prefill(PROMPT[:done])
        expected = right.forward([PROMPT[done]])[0]
        assert torch.equal(runner.forward([PROMPT[done], guess])[0], expected)
        runner.rollback(done)
        assert torch.equal(runner.forward([PROMPT[done]])[0], expected)


def test_what_is_no_row_of_the_weights_size_and_type_is_refused(weights_dtype):
    functions = library_for(weights_dtype)
    if functions is None:
        pytest.skip("no C library here")
    multiply = PackedLinear(functions, torch.randn(40, 24).to(weights_dtype), None)
    assert multiply(torch.empty(0, 24, dtype=multiply.dtype)).shape == (0, 40)
    for wrong in (torch.ones(2, 12, dtype=multiply.dtype), torch.ones(2, 24, dtype=torch.float64)):
        with refuses(ValueError, "24"):
            multiply(wrong)


def test_a_pass_beyond_the_cache_is_refused():
    runner = native_runner(tiny_model("llama"), 60)
    runner.prefill(PROMPT)
    layers, cache = runner.together.layers, runner._cache
    assert isinstance(cache, native.NativeCache)
    layers.run(torch.ones(1, 32), [native.NativeRows(cache, cache.capacity - 1, 1)])
    with refuses(ValueError, f"{cache.capacity} 2 {cache.capacity - 1}."):
        layers.run(torch.ones(2, 32), [native.NativeRows(cache, cache.capacity - 1, 2)])
    with refuses(ValueError, "32 (2, 16)"):
        layers.run(torch.ones(2, 16), [native.NativeRows(cache, 0, 2)])
    with refuses(ValueError, "second x,"):
        layers.run(torch.ones(2, 32), [native.NativeRows(cache, 0, 2)], second_input=torch.ones(2, 32))
    with refuses(ValueError, "outputs x, 2."):
        layers.run(torch.ones(2, 32), [native.NativeRows(cache, 0, 2)], {0: torch.ones(1, 32)})
    with refuses(ValueError, "32 (2, 16)"):
        layers.run(torch.ones(2, 32), [native.NativeRows(cache, 0, 2)], {0: torch.ones(2, 16)})
    with refuses(ValueError, f"60 {len(PROMPT)}; 53"):
        runner.forward([1] * 53)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001])
def test_what_is_no_number_stays_none(bits, rounding):
    bias = torch.tensor([bits - (1 << 32) if bits >> 31 else bits], dtype=torch.int32).view(torch.float32)
    assert PackedLinear(rounding, torch.zeros(1, 2).bfloat16(), bias)(torch.ones(1, 2).bfloat16()).isnan().all()


# How it is built ---------------------------------------------------------------------------------------------

SMALL = """
#include "products.h"
const int columns = 8, step = 1, lanes = 8, paired = 1;
int run_layers(void) { return 0; }
int run_product(void) { return 1; }
void pack_columns(void) {}
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process with an empty cache."""
    if library_for(torch.float32) is None:
        pytest.skip("no C library here")
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    for known in (library_for, hardware.c_compiler):
        known.cache_clear()
    yield tmp_path / "cache"
    for known in (library_for, hardware.c_compiler):
        known.cache_clear()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_it_is_built_once_for_each_type_and_each_source(fresh, monkeypatch, tmp_path):
    """From a source without anything in it, which takes no time to compile."""

    def write(folder, header):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "native.c").write_text(SMALL, encoding="utf-8")
        (tmp_path / folder / "products.h").write_text(header, encoding="utf-8")
        monkeypatch.setattr(library, "SOURCE", tmp_path / folder / "native.c")
        library_for.cache_clear()

    write("first", "")
    assert library_for(torch.float32) is not None
    (first,) = names(fresh)
    written = (fresh / first).stat().st_mtime_ns
    library_for.cache_clear()
    assert library_for(torch.float32) is not None
    assert (fresh / first).stat().st_mtime_ns == written
    assert library_for(torch.float16) is not None
    assert len(names(fresh)) == 2
    write("second", "")  # the same in another place
    assert library_for(torch.float32) is not None
    assert len(names(fresh)) == 2
    write("second", "\n")
    assert library_for(torch.float32) is not None
    assert len(names(fresh)) == 3
    library.SOURCE.write_text(SMALL + "\n", encoding="utf-8")
    library_for.cache_clear()
    assert library_for(torch.float32) is not None
    assert len(names(fresh)) == 4


AVX2 = hardware.INSTRUCTIONS["avx2"]


@pytest.mark.parametrize(
    ("system", "features", "kind"),
    [
        ("aarch64-macos", ["neon"], "-DWIDENED"),
        ("aarch64-macos", ["neon", "bf16"], "-DBFLOAT16"),
        ("x86_64-macos", AVX2, "-DWIDENED"),
    ],
)
def test_ziglang_builds_it_for_a_mac(fresh, monkeypatch, tmp_path, system, features, kind):
    pytest.importorskip("ziglang")
    monkeypatch.chdir(tmp_path)  # `--version` for another system leaves a file there
    monkeypatch.setattr(hardware, "_capabilities", lambda: dict.fromkeys(features, True))
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", system]
    for source in (library.SOURCE, DECODING / "sampling.c", DECODING / "noise.c"):
        assert compiled._built(compiler, source, [kind]).read_bytes().startswith(MACH_O)


@pytest.mark.parametrize("share", [0, 0.01, 0.15, 0.8])
def test_a_damaged_library_is_built_again(fresh, tmp_path, share):
    """Loading one that was cut off would end the process."""
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return 42; }\n", encoding="utf-8")

    def answer() -> int | None:
        functions = compiled.compiled(source)
        return None if functions is None else functions.answer()

    assert answer() == 42
    (file,) = fresh.iterdir()
    whole = file.read_bytes()
    file.unlink()  # this process has it mapped
    file.write_bytes(whole[: int(share * len(whole))])
    assert answer() == 42
    assert file.read_bytes() == whole


def runs_without(caplog) -> str:
    """That a model runs all the same; what was said about it."""
    model = tiny_model("llama")
    with caplog.at_level(logging.WARNING):
        engine, make = choose.runner_maker(model)
    assert engine == "fused"
    _, reference = choose.runner_maker(model, eager=True)
    torch.testing.assert_close(make(16).prefill(PROMPT), reference(16).prefill(PROMPT))
    return caplog.text


def test_without_a_compiler_torchs_operations_run(fresh, monkeypatch, caplog):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    assert tells(runs_without(caplog), "no gcc slower. ziglang")


@pytest.mark.parametrize("script", ["exit 1", "echo 'no AVX512 here' >&2; exit 1", "echo 13; exit 0"])
def test_with_a_compiler_that_fails_torchs_operations_run(fresh, monkeypatch, caplog, tmp_path, script):
    compiler = tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 13 && exit 0\n{script}\n', encoding="utf-8")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    said = runs_without(caplog)
    assert tells(said, "cannot built:")
    assert ("no AVX512 here" in said) == ("AVX512" in script)
    assert names(fresh) == set()


def test_a_compiler_that_does_not_begin_says_why(fresh, monkeypatch, caplog, tmp_path):
    """As one of Xcode, before its licence is agreed to."""
    (tmp_path / "cc").write_text("echo Agree. >&2; exit 69", encoding="utf-8")
    monkeypatch.setenv("CC", f"sh {tmp_path / 'cc'}")
    assert runs_without(caplog).strip().endswith(". Agree.")


def test_a_cache_that_cannot_be_written_leaves_torchs_operations(fresh, caplog):
    fresh.parent.joinpath("cache").write_text("a file", encoding="utf-8")
    assert tells(runs_without(caplog), "cannot built:")


@pytest.mark.parametrize("change", ["switch", "system", "cpu"])
def test_other_machines_run_torchs_operations_without_a_word(fresh, monkeypatch, caplog, change):
    if change == "switch":
        monkeypatch.setenv(hardware.C_SWITCH, "0")
    elif change == "system":
        monkeypatch.setattr(hardware.platform, "system", lambda: "Windows")
    else:
        monkeypatch.setattr(hardware, "_capabilities", lambda: {"sse2": True})
    assert runs_without(caplog) == ""


def test_its_threads_are_torchs_own():
    """With two sets of threads the one would wait for cores that the other keeps busy waiting."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no Linux")
    assert library_for(torch.float32) is not None
    torch.ones(1000, 1000).sum()
    lines = maps.read_text(encoding="utf-8").splitlines()
    assert len({line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line or "/libomp" in line}) == 1


def test_a_shape_that_it_does_not_know_runs_by_torch(rounding):
    config = AutoConfig.for_model(
        "llama", hidden_size=33, num_attention_heads=1, num_key_value_heads=1, head_dim=8, intermediate_size=7
    )
    config.vocab_size, config.num_hidden_layers = MODEL_VOCAB, 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    engine, make = choose.runner_maker(model)
    assert engine == "fused"
    assert make(16).prefill(PROMPT).isfinite().all()


def test_a_product_multiplies_by_the_library_where_it_can(monkeypatch):
    weight, x = torch.randn(40, 24), torch.randn(3, 24)
    by_library = linear.Linear.of(weight, None)
    monkeypatch.setattr(linear, "library_for", lambda dtype: None)
    by_torch = linear.Linear.of(weight, None)
    assert isinstance(by_library.multiply, PackedLinear) == (library_for(torch.float32) is not None)
    assert not isinstance(by_torch.multiply, PackedLinear)
    torch.testing.assert_close(by_library(x), by_torch(x))
    torch.testing.assert_close(by_library(x), F.linear(x, weight))
    assert math.isclose(float(by_library(x)[0, 0]), float(x[0] @ weight[0]), abs_tol=1e-4)
