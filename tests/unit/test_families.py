"""The families that the engines know: what is said of each is what its runners do. `test_logits` has their logits."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specdemo.engines.choose import engine_of, is_exact, runner_maker, runner_of_weights
from specdemo.engines.families import FAMILIES, Family
from specdemo.engines.ropes import rotation_bytes
from specdemo.errors import BadInput
from specdemo.models.preset_models import check_dtype, check_quantizes
from specdemo.models.weights import StoredWeights, shapes
from specdemo.system.hardware import QUANTIZED
from tests.harness import models
from tests.harness.models import choose_engine, config_of, model_of, run_by

HOW_IT_WORKS = Path(__file__).parents[2] / "docs" / "how-it-works.md"


@pytest.fixture(params=models.FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(request.param)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.qint8, torch.quint4x2])
@pytest.mark.parametrize("name", models.MODELS)
def test_the_engine_that_is_expected_is_the_one_that_loads(
    name: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By family and type. It is decided before there are weights, as is whether rows are exact."""
    config, device = config_of(name), torch.device("cpu")
    try:
        check_quantizes(config, dtype)
        check_dtype(dtype, device)
    except BadInput:
        return
    if not compiled:
        if dtype in QUANTIZED.values():
            return
        choose_engine("fused", monkeypatch)
    expected = engine_of(config, dtype, device)
    engine, make = runner_maker(model_of(name), dtype=dtype)
    assert engine == expected
    assert (make(8).exact_rows > 0) == is_exact(expected, config, dtype, device)


@torch.inference_mode()
def test_float16_weights_keep_the_range_of_large_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16 ends at 65504. Gemma's activations go beyond; sums and the residual stream are float32."""
    model: Any = model_of("gemma3")
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight.fill_(6e4)
    ids = list(range(1, 30))
    states = model(torch.tensor([ids]), output_hidden_states=True)
    assert max(float(state.abs().max()) for state in states.hidden_states[:-1]) > 65504
    runner = run_by("native", model, monkeypatch, torch.float16)(64)
    halves = run_by("native", model.half().float(), monkeypatch)(64)
    torch.testing.assert_close(runner.prefill(ids), halves.prefill(ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", ["native", "fused"])
@pytest.mark.parametrize("name", ["mistral", "ministral3", "gemma3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotations_of_a_run_take_what_is_told(
    name: str, engine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    runner: Any = run_by(engine, model, monkeypatch, dtype)(64)
    runner.prefill([1, 2, 3])
    cache = runner._cache
    tables = [cache._query_scales, *cache._rotations] if engine == "native" else [*chain(*cache.rotations)]
    positions = cache.capacity if engine == "native" else len(tables[0])
    taken = sum(table.nbytes for table in tables if table is not None)
    assert taken == positions * rotation_bytes(model.config, engine, runner.model.dtype)


def test_the_weights_of_a_file_are_those_of_transformers(model: PreTrainedModel) -> None:
    theirs = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes(model.config) == theirs


@torch.inference_mode()
def test_a_family_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A made-up one, whose modules are those of Qwen3: its weights in a file, its passes and its trees."""
    model, device, ids = model_of("qwen3"), torch.device("cpu"), list(range(1, 10))
    model.config.model_type = "made_up"
    wanted = model(torch.tensor([ids])).logits[0, -1:]
    assert engine_of(model.config, torch.float32, device) == "eager"
    assert run_by("eager", model, monkeypatch)(16).cannot_branch is not None
    monkeypatch.setitem(FAMILIES, "made_up", Family(normed_heads="head", branches=True))
    save_file({name: weight.clone() for name, weight in model.named_parameters()}, tmp_path / "model.safetensors")
    weights = StoredWeights.of([tmp_path / "model.safetensors"], model.config, torch.float32, device)
    assert weights is not None
    assert engine_of(model.config, torch.float32, device) in {"native", "fused"}
    of_the_file = runner_of_weights(model.config, weights, device, 1)[1](16)
    for runner in (of_the_file, *(run_by(engine, model, monkeypatch)(16) for engine in ("fused", "eager"))):
        assert runner.cannot_branch is None
        torch.testing.assert_close(runner.prefill(ids), wanted, rtol=1e-4, atol=1e-4)


def test_every_family_has_an_engine_and_a_line_in_the_docs() -> None:
    for name in models.FAMILIES:
        assert engine_of(config_of(name), torch.float32, torch.device("cpu")) in {"native", "fused"}
    lines = re.findall(r"^\| (`.*`) \| native or fused \| (.*) \|$", HOW_IT_WORKS.read_text(encoding="utf-8"), re.M)
    assert all(on_gpu.startswith("graph") for _, on_gpu in lines)
    assert {kind for kinds, _ in lines for kind in re.findall(r"`(\w+)`", kinds)} == {
        kind for kind, family in FAMILIES.items() if family.fused
    }
