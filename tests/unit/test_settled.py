"""Models whose logits depend on where a pass ends: a run settles on what its last possible position gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.drafters.none import NoDrafter
from specdemo.engines import ops
from specdemo.engines.cpu.library import library_for
from specdemo.engines.eager import EagerRunner
from specdemo.engines.families import knows
from specdemo.engines.fused import FusedRunner
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import GraphRunner, Graphs
from specdemo.engines.layout import FusedModel
from specdemo.engines.native import NativeRunner, native_model
from specdemo.engines.runner import CannotBranch, check_branches
from specdemo.engines.settled import settled
from specdemo.types import Settings

from .toys import MODEL_VOCAB, decode, generated, ids_of, oracle, plain_text, recorded

needs_native = pytest.mark.skipif(library_for(torch.float32) is None, reason="no gcc, or a CPU without AVX2")
SWITCH = 64
WIDTH = 8  # of a head
LONG = {"original_max_position_embeddings": SWITCH, "short_factor": [1.0] * 4, "long_factor": [3.0, 6.0, 12.0, 24.0]}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Those that transformers' `dynamic_rope_update` changes with the length, and one that changes a scale as well.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG},
            "original_max_position_embeddings": SWITCH,
        },
    ),
    "longrope, two scales": (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                **LONG,
                "short_mscale": 1.0,
                "long_mscale": 3.0,
            },
            **MOE,
        },
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
            "max_position_embeddings": SWITCH,
        },
    ),
}
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32] * 2
K = 4
TINY = {"vocab_size": MODEL_VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH}


@cache
def model_of(kind: str) -> PreTrainedModel:
    """A random model that is less sure of its tokens than rounding can change, and more than the angles can."""
    family, rope = KINDS[kind]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.3}
    config = AutoConfig.for_model(family, **TINY, **ids, **{"max_position_embeddings": 256, **rope})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():  # so that a token looks at few places
                if any(part in name for part in ("qkv_proj", "q_proj", "k_proj")):
                    weight.mul_(4)
        return model


def alone(model: PreTrainedModel, prompt: Sequence[int], settings: Settings) -> list[int]:
    return plain_text(EagerRunner(model, len(prompt) + settings.max_new_tokens), prompt, settings)


def drafted(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], settings: Settings) -> list[int]:
    """With a draft that knows the text."""
    runner = EagerRunner(model, len(prompt) + settings.max_new_tokens)
    return ids_of(list(decode(runner, oracle([*prompt, *text]), prompt, settings)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("new_tokens", [SWITCH - len(PROMPT), 70], ids=["before the switch", "across it"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_draft_changes_no_text_on_either_side_of_the_switch(kind: str, new_tokens: int) -> None:
    model = model_of(kind)
    for seed in range(3):
        prompt = PROMPT[seed + 1 :]  # so that the switch falls inside a pass
        settings = Settings(k=K, temperature=0.8 * (seed > 0), seed=seed, max_new_tokens=new_tokens)
        text = alone(model, prompt, settings)
        assert len(text) == new_tokens
        assert drafted(model, prompt, text, settings) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_on_one_side_of_the_switch_is_that_of_generate(kind: str) -> None:
    model, many = model_of(kind), PROMPT * 3
    short = Settings(max_new_tokens=SWITCH - len(PROMPT))
    assert alone(model, PROMPT, short) == generated(model, PROMPT, short.max_new_tokens)
    assert len(many) > SWITCH
    if kind == "dynamic":  # `generate` goes on with another base for every token
        return
    text = alone(model, many, Settings(max_new_tokens=40))
    assert text == generated(model, many, 40)
    assert len(set(text)) > 8


def test_a_run_that_can_get_long_is_one_long_text_from_its_first_token_on() -> None:
    model = model_of("longrope")
    text = alone(model, PROMPT, Settings(max_new_tokens=60))
    assert text == generated(settled(model, SWITCH + 1), PROMPT, 60)
    assert text[:40] != alone(model, PROMPT, Settings(max_new_tokens=40))  # this run cannot get so long


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_different_lengths_go_on_beside_each_other(kind: str) -> None:
    model = model_of(kind)
    lengths = 30, 45, 60
    apart = [alone(model, PROMPT, Settings(max_new_tokens=count)) for count in lengths]
    runs = [
        decode(EagerRunner(model, len(PROMPT) + count), NoDrafter(), PROMPT, Settings(max_new_tokens=count))
        for count in lengths
    ]
    events: list[list[Any]] = [[] for _ in runs]
    for _ in range(max(lengths) + 1):
        for run, seen in zip(runs, events, strict=True):
            seen += [event for event in [next(run, None)] if event is not None]
    assert [ids_of(seen) for seen in events] == apart
    assert apart[0] != apart[1][:30]


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "fused", "graph"])
@torch.inference_mode()
def test_the_fused_engines_rotate_by_the_angles_that_a_run_settled_on(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides of the switch, drafted or not; a tree, whose cache is longer, is refused."""
    model = model_of("longrope")
    shared = FusedModel.of(model)
    native = native_model(shared) if engine == "native" else None
    assert native is not None or engine != "native"
    monkeypatch.setattr(graph, "ROOM", 128)  # a slot that would hold both runs
    graphs = Graphs(shared, ops, recorded, 1) if engine == "graph" else None

    def runner(capacity: int) -> FusedRunner:
        if graphs:
            return GraphRunner(graphs, capacity)
        return NativeRunner(native, capacity) if native else FusedRunner(shared, capacity)

    assert knows(model.config)
    texts = []
    for capacity in (SWITCH, SWITCH + 1):
        reference, ours = EagerRunner(model, capacity), runner(capacity)
        reference.prefill(PROMPT), ours.prefill(PROMPT)
        more = [(5 * i) % MODEL_VOCAB for i in range(SWITCH - len(PROMPT))]
        wanted = reference.forward(more)
        torch.testing.assert_close(ours.forward(more), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        for temperature in (0.0, 0.8):
            settings = Settings(k=K, temperature=temperature, seed=3, max_new_tokens=capacity - len(PROMPT))
            texts.append(plain_text(runner(capacity), PROMPT, settings))
            draft = oracle([*PROMPT, *texts[-1]])
            assert ids_of(list(decode(runner(capacity), draft, PROMPT, settings))) == texts[-1]
            assert texts[-1] == alone(model, PROMPT, settings)
    assert texts[0] != texts[2][:-1]
    with pytest.raises(CannotBranch, match="its rotary embedding depends on how long the text can get"):
        check_branches(runner(SWITCH))


def test_other_models_stay_as_they_are() -> None:
    family, _ = KINDS["longrope"]
    config = AutoConfig.for_model(family, hidden_size=32, intermediate_size=48, num_hidden_layers=1, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert settled(model, 10**6) is model


def test_factors_that_are_those_of_any_length_settle_nothing() -> None:
    """As of a Llama 3 from a GGUF file, which can draft trees."""
    factors = {**LONG, "long_factor": LONG["short_factor"]}
    config = AutoConfig.for_model(
        "llama", **TINY, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors}
    )
    model = AutoModelForCausalLM.from_config(config)
    assert settled(model, 200) is model
    assert EagerRunner(model, 200).cannot_branch is None


def test_a_settled_model_shares_the_weights_and_leaves_the_model_as_it_was() -> None:
    model = model_of("longrope")
    before = generated(model, PROMPT, 30)
    long = settled(model, 200)
    assert {weight.data_ptr() for weight in long.parameters()} == {weight.data_ptr() for weight in model.parameters()}
    generated(long, PROMPT, 30)
    assert generated(model, PROMPT, 30) == before


def test_a_tree_is_refused_where_its_rows_could_pass_for_a_longer_text() -> None:
    runner = EagerRunner(model_of("dynamic"), 80)
    runner.prefill(PROMPT)
    with pytest.raises(CannotBranch, match="its rotary embedding depends on how long the text can get"):
        runner.forward([5, 6, 7], parents=[-1, 0, 0])
