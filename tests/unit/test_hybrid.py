"""Models some of whose layers keep a running state: they are run, rolled back, drafted with, and reported on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedTokenizerFast

from specdemo.engines.families import family_of, is_hybrid
from specdemo.engines.hybrid import AGAIN
from specdemo.errors import BadInput
from specdemo.models.loaded import LANES, load
from specdemo.models.report import RUNNING_STATES, report_on
from specdemo.models.sizes import laid_out_bytes, text_bytes
from specdemo.racing.race import start
from specdemo.settings import Settings
from specdemo.tokens import DraftOutcome
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of, rounds_of
from tests.harness.models import EAGER, config_of, expected, looked_at, model_of, preset_of, run_by, save
from tests.harness.texts import generated

from ..sentences import refuses, tells
from .test_by_name import tokens_of
from .test_memory import floats
from .test_runner import fresh

KINDS = [name for name in EAGER if family_of(config_of(name)).state]
EVERYDAY = "qwen3_5", "lfm2", "falcon_h1"
KINDS_IN_TURN = [pytest.param(kind, marks=() if kind in EVERYDAY else pytest.mark.slow) for kind in KINDS]
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 1, 7, 9, 32, 11, 4, 40, 41, 12, 13, 6, 30]


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> dict[str, tuple[Path, Path]]:
    """A checkpoint of every kind, and a draft model: the same with some noise."""
    folder, saved = tmp_path_factory.mktemp("hybrids"), {}
    for kind in KINDS:
        model = model_of(kind)
        target = save(model, tokenizer, folder / kind)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.03 * torch.randn_like(weight))
        saved[kind] = target, save(model, tokenizer, folder / f"{kind}-draft")
    return saved


# The runner -----------------------------------------------------------------------------------------------------


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_behind_rejected_tokens_gives_the_logits_of_a_fresh_pass(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    truth = fresh(model, TEXT)
    runner = run_by("eager", model, monkeypatch)(64)
    runner.capture_hidden_states([0])
    assert same(runner.prefill(TEXT[:4]), truth[3:4])
    junk = [50, 51, 52, 53]
    for kept in (1, 3, 0, 2, 4, 1, 2):  # they add up to more than AGAIN, so some get a pass of their own
        done = runner.length
        rows = runner.forward([*TEXT[done : done + kept], *junk])
        assert same(rows[:kept], truth[done : done + kept])
        assert runner.hidden_states is not None
        assert len(runner.hidden_states) == len(rows) == kept + len(junk)
        runner.rollback(done + kept)
        assert runner.length == done + kept
    assert runner.length == 17 > 4 + AGAIN
    runner.rollback(5)  # before what was copied last
    assert same(runner.forward(TEXT[5:]), truth[5:])
    runner.release()
    assert same(runner.prefill(TEXT[:9]), truth[8:9])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_stayed_as_the_rejected_tokens_left_it_would_be_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    runner: Any = run_by("eager", model, monkeypatch)(64)
    runner.prefill(TEXT[:6])
    runner.forward([50, 51, 52])
    runner.rollback(6)
    runner._reached = 6  # as if nothing had been read since
    assert not same(runner.forward(TEXT[6:9]), fresh(model, TEXT)[6:9])


def test_states_belong_to_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = run_by("eager", model_of("qwen3_5"), monkeypatch)(32)
    runner.prefill(TEXT[:4])
    assert tells(runner.cannot_branch, "layers state, chain")
    assert runner.exact_rows == runner.exact_tree_rows == 0
    with refuses(BadInput, f"tree {runner.cannot_branch}."):
        runner.forward([5, 6, 7], parents=[-1, 0, 0])


# Texts ----------------------------------------------------------------------------------------------------------


def outcomes(loaded: Loaded, drafter: str, settings: Settings) -> tuple[list[int], set[DraftOutcome]]:
    """A text, and what became of drafted tokens."""
    events = list(start(loaded, drafter, loaded.encode("the cat sat on the mat", raw=True), settings))
    return ids_of(events), {token.outcome for event in rounds_of(events) for token in event.drafted}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_texts_are_those_of_generate_and_of_the_target_alone(folders: dict[str, tuple[Path, Path]], kind: str) -> None:
    loaded = load(preset_of(*folders[kind], skip_layers=1), "float32", "cpu")
    assert loaded.engine == "eager"
    expected = generated(loaded.model, loaded.encode("the cat sat on the mat", raw=True), 16)
    assert len(expected) > 8
    for drafter in ("none", "draft-model", "layer-skip"):
        assert tokens_of(loaded, drafter, 16) == expected
    seen = set()
    for seed in range(2):
        settings = Settings(k=4, temperature=0.7, seed=seed, max_new_tokens=16)
        alone, _ = outcomes(loaded, "none", settings)
        drafted, became = outcomes(loaded, "draft-model", settings)
        assert drafted == alone
        seen |= became
    assert {DraftOutcome.ACCEPTED, DraftOutcome.REJECTED} <= seen
    loaded.release()


# Told and refused ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_a_report_tells_the_cost_and_the_memory(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str) -> None:
    sizes = {"intermediate_size": 1024, "max_position_embeddings": 256}
    save(model_of(kind, **sizes), tokenizer, tmp_path / "model")
    preset = preset_of(tmp_path / "model")
    model = looked_at(preset, "bfloat16")
    assert expected(model) == ("eager", False)
    assert next(report_on(preset, "bfloat16", "cpu")).endswith(RUNNING_STATES)
    before = floats()
    loaded = load(preset, "bfloat16", "cpu")
    weights = floats()
    taken = sum(size for place, size in weights.items() if place not in before)
    assert laid_out_bytes(model) == pytest.approx(taken, rel=0.1)
    runners = [loaded.target_runner(256) for _ in range(2)]
    for runner in runners:
        runner.prefill([3, 4, 5] * 84)
        runner.forward([3])  # the states are copied now
    caches = sum(size for place, size in floats().items() if place not in weights and place not in before)
    assert text_bytes(model, LANES) == pytest.approx(caches, rel=0.1)
    loaded.release()


def test_a_state_inside_a_larger_configuration_is_found() -> None:
    whole = AutoConfig.for_model("qwen3_5")
    assert not family_of(whole).state
    assert is_hybrid(whole)
