"""Passes whose rows branch: each row is that of the chain that leads to it, and a kept path reads as a chain."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.engines.rows import MOST_ROWS, ancestors_of, branches_of, depths_of, mask_of
from specdemo.engines.runner import is_beginning
from specdemo.errors import BadInput
from specdemo.studies.remember import RunnerWithMemory
from tests.harness.doubles import MODEL_VOCAB, TableRunner, random_table
from tests.harness.engines import tiny_model
from tests.harness.models import model_of, run_by
from tests.harness.trees import FORKED, FULL, TREES, check, path_to
from tests.unit.test_runner import same as near

from ..sentences import refuses, tells

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("engine", ["eager", "fused", "graph"])
@pytest.mark.parametrize("name", ["llama", "smollm3", "gpt2"])
def test_a_row_is_that_of_its_chain(
    name: str, engine: str, parents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of many forms, by engines whose rows are not the same bits."""
    make = run_by(engine, model_of(name), monkeypatch)
    check(lambda: make(96), TEXT, parents, near)


def test_packed_products_are_padded_in_a_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    make = run_by("fused", tiny_model("llama"), monkeypatch, torch.bfloat16)
    rough = lambda one, other: torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.05)  # noqa: E731
    for parents in ([-1], [-1, 0, 0], FORKED):
        check(lambda: make(64), TEXT, parents, rough)


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_the_table_runner_and_a_memory_of_it_read_trees(parents: list[int]) -> None:
    table = random_table(0, MODEL_VOCAB)
    check(lambda: TableRunner(table), TEXT, parents, torch.equal)
    check(lambda: RunnerWithMemory(TableRunner(table), TEXT[:4]), TEXT, parents, torch.equal)


def test_families_whose_masks_are_not_known_say_that_they_cannot_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": MODEL_VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}

    def of(family: str, **options: object) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **options))
        return model.eval()

    for model, words in (
        (of("mistral", sliding_window=4, **heads), "window"),
        (of("gemma2", **heads), "gemma2"),
        (of("bloom", n_head=2), "bloom"),
    ):
        runner = run_by("eager", model, monkeypatch)(20)
        runner.prefill([1, 2, 3])
        assert tells(runner.cannot_branch, words)
        with refuses(BadInput, str(runner.cannot_branch)):
            runner.forward([4, 5], [-1, 0])
        assert near(runner.forward([4, 5]), model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 3:])
    assert run_by("eager", of("mistral", sliding_window=None, **heads), monkeypatch)(20).cannot_branch is None


def test_what_a_captured_pass_reads_of_its_rows() -> None:
    table = branches_of(FORKED)
    assert table.shape == (MOST_ROWS + 1, MOST_ROWS)
    for row in range(MOST_ROWS):  # the last row stands for those that are missing
        path = path_to(FORKED, min(row, len(FORKED) - 1))
        assert table[row].tolist() == path + path[-1:] * (MOST_ROWS - len(path))
        assert table[-1, row] == len(path) - 1
    assert branches_of(FULL)[-1].tolist() == depths_of(FULL)
    assert branches_of(range(-1, MOST_ROWS - 1))[MOST_ROWS - 1].tolist() == list(range(MOST_ROWS))


def test_ancestors_and_masks() -> None:
    assert ancestors_of(FORKED) == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1100101, 0b10001011]
    assert depths_of(FORKED) == [0, 1, 1, 2, 2, 2, 3, 3]
    assert depths_of([]) == []
    seen = mask_of([-1, 0, 0], 2, torch.float32, torch.device("cpu")) == 0
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert is_beginning([0, 1, 2])
    assert is_beginning([])
    assert not is_beginning([0, 2])


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-2], [-1] * (MOST_ROWS + 1)], ids=str)
def test_what_is_no_tree_is_refused(parents: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = run_by("native", tiny_model("llama"), monkeypatch)(128)
    runner.prefill(TEXT)
    with pytest.raises(ValueError, match=r"Row|rows"):
        runner.forward([1] * len(parents), parents)
    with pytest.raises(ValueError, match="rise"):
        runner.keep([0, 2, 1])
