"""The fused decode path on machines of other kinds, and its parts. `test_logits` has its passes."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdemo.decoding.batch import read_together
from specdemo.engines import fused as fused_module
from specdemo.engines import layout, linear
from specdemo.engines.choose import runner_maker
from specdemo.engines.families import knows
from specdemo.engines.fused import MOST_ROWS, Cache, FusedRunner, Rows, SharedPasses
from specdemo.engines.linear import Linear, Norm
from specdemo.engines.ropes import Rope
from specdemo.engines.runner import Pass
from specdemo.system import cpu_level, hardware
from specdemo.system.hardware import choose_dtype, cpu_attends_alike, cpu_multiplies_bf16, has_fbgemm
from tests.harness.classes import FusedModel
from tests.harness.engines import tiny_model
from tests.harness.models import rounded, run_by


@pytest.fixture(autouse=True)
def without_library(monkeypatch):
    """As on a machine without a compiler."""
    monkeypatch.setattr(linear, "library_for", lambda dtype: None)


PROMPT = [5, 9, 2, 33, 17, 60, 0, 8]
KNOWN = ("llama", "qwen3", "smollm3", "gpt2")


def both(model: PreTrainedModel, patch: pytest.MonkeyPatch, dtype: torch.dtype | None = None) -> list[Any]:
    """Runners of the fused path and of transformers."""
    return [run_by("fused", model, patch, dtype)(64), run_by("eager", model, patch)(64)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_fbgemm", [True, False])
@pytest.mark.parametrize("architecture", KNOWN)
def test_weights_that_are_widened_are_rounded_once_and_everything_else_is_float32(
    architecture, by_fbgemm, dtype, monkeypatch
):
    monkeypatch.setenv(cpu_level.SWITCH, "avx2")
    if by_fbgemm and not has_fbgemm():
        pytest.skip("torch has no such products here")
    monkeypatch.setattr(linear, "has_fbgemm", lambda: by_fbgemm)
    monkeypatch.setitem(linear.LEAST_PACKED, torch.float32, 0)  # these models are small
    model = tiny_model(architecture)
    fused, plain = both(model, monkeypatch, dtype)
    _, eager = both(rounded(copy.deepcopy(model), dtype), monkeypatch)
    assert fused.exact_rows == 0
    for runner in (fused, eager):
        runner.capture_hidden_states([2])
    logits = fused.prefill(PROMPT)
    torch.testing.assert_close(logits, eager.prefill(PROMPT))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, plain.prefill(PROMPT))
    for ids in ([4], [7, 7, 1], [0], list(range(17))):
        torch.testing.assert_close(fused.forward(ids), eager.forward(ids))
        torch.testing.assert_close(fused.hidden_states, eager.hidden_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "at_once"), [(torch.float16, layout.MOST_AT_ONCE), (torch.float32, 1)])
def test_a_machine_of_many_cores_lays_out_no_more_layers_at_a_time(dtype, at_once, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    busy: list[int] = []
    most = 0

    def layer(place):
        nonlocal most
        busy.append(place)
        most = max(most, len(busy))
        time.sleep(0.01)
        busy.remove(place)
        return place

    layers, head = layout._packed(layer, range(12), torch.ones(4, 3, dtype=dtype), Linear.of)
    assert layers == tuple(range(12))
    assert torch.equal(head(torch.ones(1, 3)), torch.full((1, 4), 3.0))
    assert most == at_once


@pytest.mark.skipif(not has_fbgemm(), reason="torch has no such products here")
@pytest.mark.parametrize(("shape", "packed"), [((512, 512), True), ((511, 512), False)])
@pytest.mark.parametrize("biased", [True, False])
def test_float16_products_of_every_length(shape, packed, biased):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(*shape, generator=generator).half(), torch.randn(shape[0], generator=generator)
    product = Linear.of(weight, bias if biased else None)
    assert (product.bias is not None) == biased
    with torch.inference_mode(), torch.profiler.profile() as profile:
        for rows in range(1, 20):
            x = torch.randn(rows, shape[1], generator=generator)
            wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
            torch.testing.assert_close(product(x).double(), wanted, rtol=1e-5, atol=1e-4)
    called = {event.key for event in profile.key_averages()}
    assert ("quantized::linear_dynamic_fp16" in called) == packed


def test_bfloat16_beyond_the_range_of_float16_is_not_packed_as_float16(monkeypatch):
    monkeypatch.setenv(cpu_level.SWITCH, "avx2")
    monkeypatch.setitem(linear.LEAST_PACKED, torch.float32, 0)
    weight, x = torch.randn(40, 24).bfloat16(), torch.randn(3, 24)
    weight[3, 4] = 7e4
    torch.testing.assert_close(Linear.of(weight, None)(x), F.linear(x, weight.float()))


@pytest.mark.skipif(not cpu_multiplies_bf16(), reason="such weights are widened here")
@pytest.mark.parametrize("packable", [True, False])
def test_products_of_bfloat16_are_packed_where_onednn_can(packable, monkeypatch):
    if not packable:
        monkeypatch.setattr(linear, "can_pack", lambda dtype: False)
    elif not linear.can_pack(torch.bfloat16):
        pytest.skip("this is such a CPU")
    x, weight, bias = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(5).bfloat16()
    product = Linear.of(weight, bias)
    assert (product.weight is None) == packable
    torch.testing.assert_close(product(x), F.linear(x, weight, bias))


@pytest.fixture
def without_onednn(monkeypatch):
    """As on a Mac without a compiler, whose torch has neither oneDNN nor any of its operators, nor FBGEMM."""
    monkeypatch.setattr(hardware, "c_compiler", lambda: None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.setattr(hardware, "_capabilities", lambda: {"neon": True, "bf16": True})
    monkeypatch.setattr(hardware, "quantized_engine", lambda: "qnnpack")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nothing_is_packed_without_onednn(dtype, without_onednn):
    """With fakes of what a torch without oneDNN says and has."""
    assert not linear.can_pack(dtype)


def test_only_bfloat16_asks_whether_onednn_has_instructions_for_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for has in (True, False):
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_is_mkldnn_bf16_supported=lambda has=has: has))
        assert linear.can_pack(torch.bfloat16) == has
        assert linear.can_pack(torch.float32)


@pytest.mark.parametrize("architecture", KNOWN)
@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float16"])
def test_a_model_is_laid_out_and_run_without_onednn(architecture, asked, without_onednn, monkeypatch):
    """With fakes of what a torch without oneDNN says and has: what a Mac takes by itself, and what can be asked of it.

    Its weights count as large, as those of the default preset are.
    """
    monkeypatch.setattr(linear, "LEAST_PACKED", dict.fromkeys(linear.LEAST_PACKED, 0))
    dtype = choose_dtype(asked, torch.device("cpu"))
    assert asked != "auto" or dtype == torch.float32
    fused, eager = both(rounded(copy.deepcopy(tiny_model(architecture)), dtype), monkeypatch, dtype)
    rough: dict[str, Any] = {"atol": 0.3, "rtol": 0.1} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(fused.prefill(PROMPT).float(), eager.prefill(PROMPT), **rough)
    torch.testing.assert_close(fused.forward([7, 7, 1]).float(), eager.forward([7, 7, 1]), **rough)


@pytest.mark.parametrize("architecture", KNOWN)
@pytest.mark.parametrize("grouped", [True, False])
def test_a_prompt_is_read_the_same_where_attention_takes_no_groups(architecture, grouped, monkeypatch):
    """As on a GPU without flash attention, by a fake: there every query head gets its own copy of its keys."""
    asked = []
    attention = F.scaled_dot_product_attention

    def watched(q, keys, values, **options):
        asked.append((options.get("enable_gqa"), q.shape[1] == keys.shape[1] == values.shape[1]))
        return attention(q, keys, values, **options)

    monkeypatch.setattr(fused_module, "attends_in_groups", lambda *asked: grouped)
    fused, eager = both(tiny_model(architecture), monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", watched)
        logits = fused.prefill(list(range(20)))
    torch.testing.assert_close(logits, eager.prefill(list(range(20))))
    shared = fused.model.heads > fused.model.kv_heads
    assert set(asked) == {(grouped, not (grouped and shared))}
    torch.testing.assert_close(fused.forward([1, 2]), eager.forward([1, 2]))


def test_products_that_are_not_packed_are_not_exact(monkeypatch):
    monkeypatch.setattr(linear, "can_pack", lambda dtype: False)
    assert run_by("fused", copy.deepcopy(tiny_model("llama")).bfloat16(), monkeypatch)(64).exact_rows == 0


def test_where_a_pass_is_exact_up_to_some_rows_no_more_are_read_in_one(monkeypatch):
    """By an engine that says so. A pass that is longer in itself is read as it is alone."""
    monkeypatch.setattr(FusedModel, "exact_products", True)
    monkeypatch.setattr("specdemo.engines.fused.cpu_attends_alike", lambda: True)
    read, rows = FusedRunner.run, []

    def watched(self, x, *more):
        rows.append(len(x))
        return read(self, x, *more)

    monkeypatch.setattr(FusedRunner, "run", watched)
    shared = SharedPasses(FusedModel.of(tiny_model("llama")))
    runners = [FusedRunner(shared.model, 64, shared) for _ in range(6)]
    assert runners[0].exact_rows == MOST_ROWS == 9
    for runner in runners:
        runner.prefill(PROMPT)
    rows.clear()
    counts = [4, 5, 1, 12, 3, 7]
    logits = read_together([Pass(runner, [1] * count) for runner, count in zip(runners, counts, strict=True)])
    assert [len(each) for each in logits] == counts
    assert rows == [9, 1, 12, 3, 7]


@pytest.mark.skipif(
    not (cpu_multiplies_bf16() and cpu_attends_alike()), reason="the order of sums was measured where bfloat16 is fast"
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (28, 4), (22, 2), (12, 12), (32, 1)])
def test_in_bfloat16_attention_to_a_token_is_the_same_bits_in_every_pass(heads, kv_heads):
    """Where a sum is cut up in another way, about one bit in a hundred thousand shows it: so there are many here."""
    width, longest = 64, 640
    sizes = {"num_hidden_layers": 1, "hidden_size": width * heads, "intermediate_size": 8, "vocab_size": 8}
    config = AutoConfig.for_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes)
    runner = FusedRunner(FusedModel.of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)), longest)
    generator, cache = torch.Generator().manual_seed(0), Cache(runner.model, 8)

    def random(*shape):
        return torch.randn(*shape, width, generator=generator).bfloat16()

    for start in range(20, 600, 6):
        keys, values, qk = map(random, (kv_heads, kv_heads, MOST_ROWS), (longest, longest, heads + kv_heads))

        def attended(begin, end, start=start, keys=keys, values=values, qk=qk):
            mask = runner._mask(Rows(cache, start + begin, end - begin, None), torch.bfloat16, 0)
            read = mask.shape[1]
            return runner._attend(qk[begin:end], keys[:, :read], values[:, :read], mask)

        alone = torch.cat([attended(place, place + 1) for place in range(MOST_ROWS)])
        for count in range(2, MOST_ROWS + 1):
            assert torch.equal(attended(0, count), alone[:count]), (start, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(576,), (3, 64)])
def test_an_rms_norm_is_one_whatever_stands_out_in_a_row(dtype, shape):
    """Real models have a channel of tens of thousands after some layers."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype)
    norm = Norm.of(weight, None, 1e-5)
    assert (norm.mirrored is not None) == (dtype != torch.float32)
    for rows in (1, 5, 17, 18):
        x = torch.randn(rows, *shape, generator=generator).to(dtype)
        for outlier in (0.0, 1.0, 250.0, 25_000.0):
            x[0, ..., 7] = outlier
            wanted = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
            torch.testing.assert_close(norm(x).double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            assert torch.equal(norm(x[:1]), norm(x[: min(rows, 17)])[:1])


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_angles_made_of_the_configuration_are_those_of_transformers(kind):
    config = copy.deepcopy(tiny_model("llama").config)
    config.rope_parameters = {"rope_theta": 500.0, "rope_type": kind, **ROPES[kind]}
    by_transformers = AutoModelForCausalLM.from_config(config).model.rotary_emb
    ours = Rope.of(config, torch.device("cpu"))
    assert torch.equal(ours.frequencies, by_transformers.inv_freq.float())
    assert ours.scale == by_transformers.attention_scaling
    assert (ours.scale != 1) == (kind == "yarn")


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("gpt2", {"add_cross_attention": True}),
    ],
)
def test_only_what_is_computed_exactly_is_known(architecture, change):
    model = tiny_model(architecture)
    assert knows(model.config)
    config = type(model.config).from_dict({**model.config.to_dict(), **change})
    assert not knows(config)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8"])
@pytest.mark.parametrize("architecture", KNOWN)
def test_quantized_weights_are_left_to_transformers(architecture, method):
    config = copy.deepcopy(tiny_model(architecture).config)
    config.quantization_config = {"quant_method": method}
    assert not knows(config)
    model = copy.copy(tiny_model(architecture))
    model.config = config
    assert runner_maker(model)[0] == "eager"
    config.quantization_config = None
    assert knows(config)


def test_a_model_for_pictures_and_text_is_left_to_transformers():
    """Its configuration holds that of the text model, and its weights have other names."""
    text = copy.deepcopy(tiny_model("llama").config)
    whole = PreTrainedConfig()
    whole.get_text_config = lambda *_, **__: text
    assert knows(text)
    assert not knows(whole)
