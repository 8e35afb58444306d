"""The families that the C and fused engines know: each computes what transformers' forward does, to the same bits in
every pass, over the ends of windows."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.engines import choose, linear
from specdemo.engines.choose import expected_engine, runner_maker
from specdemo.engines.cpu.library import library_for
from specdemo.engines.families import FAMILIES, knows
from specdemo.engines.fused import MOST_ROWS, FusedRunner
from specdemo.engines.layout import FusedModel
from specdemo.engines.native import NativeRunner, native_model
from specdemo.engines.ropes import rotation_bytes
from specdemo.models.weights import shapes
from specdemo.system.hardware import QUANTIZED, cpu_multiplies_bf16

needs_native = pytest.mark.skipif(library_for(torch.float32) is None, reason="no gcc, or a CPU without AVX2")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"layer_types": KINDS, "sliding_window": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
GROWING = {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.4}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
PARTLY = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "ministral": ("ministral", WINDOWS),
    "ministral3": ("ministral3", {"rope_parameters": GROWING}),
    "ministral3 with a window": ("ministral3", {"sliding_window": 5, "rope_parameters": GROWING}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**WINDOWS, "query_pre_attn_scalar": 7}),
    "gemma2 with low caps": ("gemma2", {**WINDOWS, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}),
    "gemma3": ("gemma3_text", {**WINDOWS, "rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 40}),
    "phi3": ("phi3", {"sliding_window": None, "rope_parameters": PARTLY}),
    "phi3 with a window": ("phi3", {"sliding_window": 5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**WINDOWS, "rope_parameters": {**TWO_ROPES, "full_attention": YARN}}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "mlp_bias": True,
        },
    ),
    "glm": ("glm", {"rope_parameters": PARTLY}),
    "glm4": ("glm4", {"rope_parameters": PARTLY, "attention_bias": True}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": None}),
    "mixtral with a window": ("mixtral", {**EXPERTS, "sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "olmoe": ("olmoe", {**EXPERTS, "head_dim": 24}),
    "flex_olmo": ("flex_olmo", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe with dense layers": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
}
HOW_IT_WORKS = Path(__file__).parents[2] / "docs" / "how-it-works.md"
CHAIN, TREE = [7, 8, 9, 10, 11, 12, 13], [-1, 0, 0, 1, 3, 2, 4]


def model_of(name: str, **more: Any) -> PreTrainedModel:
    kind, fields = CASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **fields, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():  # norms begin as ones, and biases as zeros
            weight.normal_(0.3, 0.4) if weight.dim() == 1 else weight.normal_(0, 0.15)
    return model.eval()


def runner_of(
    model: PreTrainedModel, engine: str, dtype: torch.dtype = torch.float32, capacity: int = 64
) -> FusedRunner:
    fused = FusedModel.of(model, dtype)
    if engine == "fused":
        return FusedRunner(fused, capacity)
    native = native_model(fused)
    assert native is not None
    return NativeRunner(native, capacity)


def without_a_compiler(patch: pytest.MonkeyPatch) -> None:
    for module in (choose, linear):
        patch.setattr(module, "library_for", lambda dtype: None)


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(request.param)


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "fused"])
@torch.inference_mode()
def test_a_family_computes_what_transformers_does(model: PreTrainedModel, engine: str) -> None:
    ids = torch.randint(1, 61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, runner = model(torch.tensor([ids])).logits[0], runner_of(model, engine)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4 * float(logits.abs().max())}
    torch.testing.assert_close(runner.prefill(ids[:14]), logits[13:14], **close)
    for start, end in ((14, 15), (15, 22), (22, 24), (24, 40)):
        torch.testing.assert_close(runner.forward(ids[start:end]), logits[start:end], **close)
    assert knows(model.config)
    runner.rollback(20)  # a branch takes the places of a chain
    tree = runner.forward(CHAIN, TREE)
    for row in range(len(CHAIN)):
        path, above = [CHAIN[row]], TREE[row]
        while above >= 0:
            path, above = [CHAIN[above], *path], TREE[above]
        alone = model(torch.tensor([ids[:20] + path])).logits[0, -1]
        torch.testing.assert_close(tree[row], alone, **close)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *QUANTIZED.values()])
@torch.inference_mode()
def test_the_logits_of_a_token_are_the_same_bits_in_every_pass(model: PreTrainedModel, dtype: torch.dtype) -> None:
    runner, prompt = runner_of(model, "native", dtype), list(range(1, 15))
    runner.prefill(prompt)
    together = runner.forward(CHAIN)
    runner.rollback(len(prompt))
    alone = torch.cat([runner.forward([token]) for token in CHAIN])
    assert torch.equal(alone, together)
    runner.rollback(len(prompt))
    tree = runner.forward(CHAIN, TREE)
    runner.rollback(len(prompt))
    branch = runner.forward([CHAIN[row] for row in (0, 1, 3, 4, 6)])
    assert torch.equal(tree[[0, 1, 3, 4, 6]], branch)


@pytest.mark.skipif(not cpu_multiplies_bf16(), reason="such weights are widened here")
@pytest.mark.sampled(7)
@torch.inference_mode()
def test_in_bfloat16_torchs_own_products_give_the_same_bits_in_every_pass(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of as many rows as the engine says, at the ends of what its attention reads at once."""
    without_a_compiler(monkeypatch)
    runner = runner_of(model, "fused", torch.bfloat16, 600)
    if runner.exact_rows == 0:
        assert model.config.model_type == "gemma2" or not linear.can_pack(torch.bfloat16)
        return
    ids = torch.randint(1, 61, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    for start in (3, 185, 505):
        passes = []
        for rows in (1, 4, MOST_ROWS):
            runner.prefill(ids[:start])
            places = range(start, start + 2 * MOST_ROWS, rows)
            passes.append(torch.cat([runner.forward(ids[i : min(i + rows, places.stop)]) for i in places]))
        assert all(torch.equal(passes[0], one) for one in passes), start


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_report_says_of_a_family_in_bfloat16_what_its_runner_does(
    model: PreTrainedModel, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        without_a_compiler(monkeypatch)
    engine, make = runner_maker(model, dtype=torch.bfloat16)
    told = expected_engine(model.config, torch.bfloat16, torch.device("cpu"))
    assert told == (engine, make(8).exact_rows > 0)


@needs_native
@torch.inference_mode()
def test_float16_weights_keep_the_range_of_large_activations() -> None:
    """Float16 ends at 65504. Gemma's activations go beyond; sums and the residual stream are float32."""
    model = model_of("gemma3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight.fill_(6e4)
    ids = list(range(1, 30))
    states = model(torch.tensor([ids]), output_hidden_states=True)
    assert max(float(state.abs().max()) for state in states.hidden_states[:-1]) > 65504
    runner = runner_of(model, "native", torch.float16)
    halves = runner_of(model.half().float(), "native")
    torch.testing.assert_close(runner.prefill(ids), halves.prefill(ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "fused"])
@pytest.mark.parametrize("name", ["mistral", "ministral3", "gemma3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotations_of_a_run_take_what_is_told(name: str, engine: str, dtype: torch.dtype) -> None:
    model = model_of(name)
    runner: Any = runner_of(model, engine, dtype)
    runner.prefill([1, 2, 3])
    cache = runner._cache
    tables = [cache._query_scales, *cache._rotations] if engine == "native" else [*chain(*cache.rotations)]
    positions = cache.capacity if engine == "native" else len(tables[0])
    taken = sum(table.nbytes for table in tables if table is not None)
    assert taken == positions * rotation_bytes(model.config, engine, runner.model.dtype)


def test_the_weights_of_a_file_are_those_of_transformers(model: PreTrainedModel) -> None:
    theirs = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes(model.config) == theirs


def test_every_family_has_a_case_and_an_engine() -> None:
    cases = set[str]()
    for name, (kind, fields) in CASES.items():
        config = AutoConfig.for_model(kind, **{**SIZES, **fields})
        assert knows(config), name
        cases.add(kind)
        assert expected_engine(config, torch.float32, torch.device("cpu")) in {("native", True), ("fused", False)}
    elsewhere = {"llama", "smollm3", "qwen2", "qwen3"}  # test_fused and test_native
    assert cases | elsewhere == FAMILIES.keys()
    lines = re.findall(r"^\| (`.*`) \| native or fused \| (.*) \|$", HOW_IT_WORKS.read_text(encoding="utf-8"), re.M)
    assert all(on_gpu.startswith("graph") for _, on_gpu in lines)
    assert {kind for kinds, _ in lines for kind in re.findall(r"`(\w+)`", kinds)} == {*FAMILIES, "gpt2"}
