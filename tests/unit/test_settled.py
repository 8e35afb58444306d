"""Models whose logits depend on where a pass ends: a run settles on what its last possible position gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdemo.drafters.none import NoDrafter
from specdemo.engines.choose import runner_maker
from specdemo.engines.families import DEPENDS_ON_LENGTH
from specdemo.engines.runner import Runner
from specdemo.engines.settled import settled
from specdemo.errors import BadInput
from specdemo.settings import Settings
from tests.harness import models
from tests.harness.doubles import ids_of, oracle
from tests.harness.models import LONG, SWITCH, run_by
from tests.harness.texts import decode, generated, plain_text

from ..sentences import refuses

# Those that transformers' `dynamic_rope_update` changes with the length, and one that changes a scale as well.
KINDS = ("longrope", "longrope, two scales", "dynamic")
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32] * 2
K = 4


@cache
def model_of(kind: str) -> PreTrainedModel:
    """A model that is less sure of its tokens than rounding can change, and more than the angles can."""
    model = models.model_of(kind, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so that a token looks at few places
            if any(part in name for part in ("qkv_proj", "q_proj", "k_proj")):
                weight.mul_(2)
    return model


def by_transformers(model: PreTrainedModel, capacity: int) -> Runner:
    return runner_maker(model, eager=True)[1](capacity)


def alone(model: PreTrainedModel, prompt: Sequence[int], settings: Settings) -> list[int]:
    return plain_text(by_transformers(model, len(prompt) + settings.max_new_tokens), prompt, settings)


def drafted(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], settings: Settings) -> list[int]:
    """With a draft that knows the text."""
    runner = by_transformers(model, len(prompt) + settings.max_new_tokens)
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
        decode(by_transformers(model, len(PROMPT) + count), NoDrafter(), PROMPT, Settings(max_new_tokens=count))
        for count in lengths
    ]
    events: list[list[Any]] = [[] for _ in runs]
    for _ in range(max(lengths) + 1):
        for run, seen in zip(runs, events, strict=True):
            seen += [event for event in [next(run, None)] if event is not None]
    assert [ids_of(seen) for seen in events] == apart
    assert apart[0] != apart[1][:30]


@pytest.mark.parametrize("engine", ["native", "fused", "graph"])
def test_a_run_settles_on_its_angles_by_every_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides of the switch, drafted or not; `test_logits` has the logits."""
    model, texts = model_of("longrope"), []
    runner = run_by(engine, model, monkeypatch)
    for capacity in (SWITCH, SWITCH + 1):
        for temperature in (0.0, 0.8):
            settings = Settings(k=K, temperature=temperature, seed=3, max_new_tokens=capacity - len(PROMPT))
            texts.append(plain_text(runner(capacity), PROMPT, settings))
            draft = oracle([*PROMPT, *texts[-1]])
            assert ids_of(list(decode(runner(capacity), draft, PROMPT, settings))) == texts[-1]
            assert texts[-1] == alone(model, PROMPT, settings)
    assert texts[0] != texts[2][:-1]


def test_other_models_stay_as_they_are() -> None:
    model = models.model_of("phi3")
    assert settled(model, 10**6) is model


def test_factors_that_are_those_of_any_length_settle_nothing() -> None:
    """As of a Llama 3 from a GGUF file, which can draft trees."""
    model = models.model_of("llama", head_dim=16, rope_parameters={**LONG, "long_factor": LONG["short_factor"]})
    assert settled(model, 200) is model
    assert by_transformers(model, 200).cannot_branch is None


def test_a_settled_model_shares_the_weights_and_leaves_the_model_as_it_was() -> None:
    model = model_of("longrope")
    before = generated(model, PROMPT, 30)
    long = settled(model, 200)
    assert {weight.data_ptr() for weight in long.parameters()} == {weight.data_ptr() for weight in model.parameters()}
    generated(long, PROMPT, 30)
    assert generated(model, PROMPT, 30) == before


def test_a_tree_is_refused_where_its_rows_could_pass_for_a_longer_text() -> None:
    runner = by_transformers(model_of("dynamic"), 80)
    runner.prefill(PROMPT)
    with refuses(BadInput, DEPENDS_ON_LENGTH):
        runner.forward([5, 6, 7], parents=[-1, 0, 0])
