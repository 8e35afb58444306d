"""The fused decode path against the transformers forward."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.runners import Runner
from specdemo.runners.eager import EagerRunner
from specdemo.runners.fused import FusedModel, FusedRunner, knows

from .toys import MODEL_VOCAB, tiny_model

PROMPT = [5, 9, 2, 33, 17, 60, 0, 8]
KNOWN = ("llama", "qwen3")


def pair(architecture: str, capacity: int = 64) -> tuple[FusedRunner, EagerRunner]:
    model = tiny_model(architecture)
    return FusedRunner(FusedModel.of(model), capacity), EagerRunner(model, capacity)


@pytest.mark.parametrize("architecture", KNOWN)
def test_every_pass_gives_the_logits_of_transformers(architecture):
    fused, eager = pair(architecture)
    torch.testing.assert_close(fused.prefill(PROMPT), eager.prefill(PROMPT))
    for ids in ([4], [7, 7, 1], [0], list(range(17))):
        torch.testing.assert_close(fused.forward(ids), eager.forward(ids))
        assert fused.length == eager.length


@pytest.mark.parametrize("architecture", KNOWN)
def test_rolled_back_entries_leave_no_trace(architecture):
    fused, eager = pair(architecture)
    fused.prefill(PROMPT)
    fused.forward([1, 2, 3, 4, 5])
    fused.rollback(len(PROMPT) + 1)
    eager.prefill([*PROMPT, 1])
    torch.testing.assert_close(fused.forward([50, 51]), eager.forward([50, 51]))


@pytest.mark.parametrize("architecture", KNOWN)
def test_the_first_layers_share_the_cache_and_leave_it_as_it_was(architecture):
    fused, eager = pair(architecture)
    logits = [runner.prefill(PROMPT) for runner in (fused, eager)]
    early = [runner.first_layers(2) for runner in (fused, eager)]
    for ids in ([3], [4], [5, 6]):
        torch.testing.assert_close(early[0].forward(ids), early[1].forward(ids))
    early[0].rollback(len(PROMPT))
    early[1].rollback(len(PROMPT))
    torch.testing.assert_close(fused.forward([3, 4]), eager.forward([3, 4]))
    torch.testing.assert_close(*logits)


def test_a_pass_that_does_not_fit_is_refused_before_it_is_run():
    fused, _ = pair("llama", capacity=len(PROMPT) + 1)
    fused.prefill(PROMPT)
    with pytest.raises(ValueError, match=f"room for {len(PROMPT) + 1} tokens"):
        fused.forward([1, 2])
    assert fused.length == len(PROMPT)


def test_a_released_runner_can_be_used_again():
    fused, eager = pair("llama")
    fused.prefill([1, 2, 3])
    fused.release()
    assert fused.length == 0
    torch.testing.assert_close(fused.prefill(PROMPT), eager.prefill(PROMPT))


@pytest.mark.parametrize("architecture", KNOWN)
def test_bfloat16_strays_no_further_from_float32_than_transformers_does(architecture):
    exact = tiny_model(architecture)
    rough = type(exact)(exact.config).eval()
    rough.load_state_dict(exact.state_dict())
    rough = rough.bfloat16()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MODEL_VOCAB, (200,), generator=generator).tolist()
    runners: list[Runner] = [EagerRunner(exact, 200), FusedRunner(FusedModel.of(rough), 200), EagerRunner(rough, 200)]
    logits = []
    for runner in runners:
        runner.prefill(ids[:1])
        logits.append(torch.cat([runner.forward(ids[i : i + 5]) for i in range(1, 200, 5)]).float())
    ours, theirs = ((rows - logits[0]).square().mean().sqrt() for rows in logits[1:])
    assert ours < 1.25 * theirs


def test_biases_are_kept():
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    config.attention_bias = config.mlp_bias = True
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    ids = [1, 2, 3, 4]
    fused, eager = FusedRunner(FusedModel.of(model), 8), EagerRunner(model, 8)
    torch.testing.assert_close(fused.prefill(ids), eager.prefill(ids))


def test_only_what_is_computed_exactly_is_known():
    assert all(knows(tiny_model(architecture)) for architecture in KNOWN)
    assert not knows(tiny_model("gpt2"))
    config = tiny_model("llama").config.to_dict()
    for change in (
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ):
        assert not knows(LlamaForCausalLM(LlamaConfig.from_dict({**config, **change})))
