"""Passes whose rows branch: each row is that of the chain that leads to it, and a kept path reads as a chain."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.engines import linear, ops
from specdemo.engines.eager import EagerRunner
from specdemo.engines.fused import FusedRunner
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import GraphRunner, Graphs
from specdemo.engines.layout import FusedModel
from specdemo.engines.rows import MOST_ROWS, ancestors_of, branches_of, depths_of, is_beginning, mask_of
from specdemo.engines.runner import CannotBranch
from specdemo.studies.remember import Remembering
from tests.harness.trees import FORKED, FULL, ONE, TREES, check, path_to
from tests.unit.test_native import random_model
from tests.unit.test_runner import same as near
from tests.unit.toys import MODEL_VOCAB, TableRunner, native_runner, random_table, recorded, tiny_model

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("architecture", "heads", "kv_heads", "width"), [("llama", 6, 2, 20), ("llama", 11, 1, 4), ("gpt2", 4, 4, 32)]
)
def test_in_c_a_row_that_branches_is_bit_for_bit_that_of_its_chain(
    architecture, heads, kv_heads, width, weights_dtype
) -> None:
    """After texts that end inside of a pair and of a block of keys, and at their ends."""
    model = random_model(architecture, heads, kv_heads, width).to(weights_dtype)
    ids = torch.randint(MODEL_VOCAB, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    assert native_runner(model, 8).exact_tree_rows == MOST_ROWS
    for turn, parents in enumerate(TREES):
        for length in (1, 12, 31, 32, 63)[turn % 2 :: 2]:
            check(lambda: native_runner(model, 160), ids[:length], parents, torch.equal)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "smollm3", "gpt2"])
def test_transformers_and_the_fused_path_mask_what_is_not_in_a_branch(architecture: str, parents: list[int]) -> None:
    model = tiny_model(architecture)
    check(lambda: EagerRunner(model, 96), TEXT, parents, near)
    fused = FusedModel.of(model)
    check(lambda: FusedRunner(fused, 96), TEXT, parents, near)
    assert FusedRunner(fused, 96).exact_tree_rows == EagerRunner(model, 96).exact_tree_rows == 0


def test_packed_products_are_padded_in_a_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "library_for", lambda dtype: None)
    model = tiny_model("llama")
    fused = FusedModel.of(model, torch.bfloat16)
    rough = lambda one, other: torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.05)  # noqa: E731
    for parents in ([-1], [-1, 0, 0], FORKED):
        check(lambda: FusedRunner(fused, 64), TEXT, parents, rough)


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_the_table_runner_and_a_memory_of_it_read_trees(parents: list[int]) -> None:
    table = random_table(0, MODEL_VOCAB)
    check(lambda: TableRunner(table), TEXT, parents, torch.equal)
    check(lambda: Remembering(TableRunner(table), TEXT[:4]), TEXT, parents, torch.equal)


def test_families_whose_masks_are_not_known_say_that_they_cannot_branch() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": MODEL_VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}

    def of(family: str, **options: object) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **options))
        return model.eval()

    for model, words in (
        (of("mistral", sliding_window=4, **heads), "a window only"),
        (of("gemma2", **heads), "type gemma2"),
        (of("bloom", n_head=2), "type bloom"),
    ):
        runner = EagerRunner(model, 20)
        runner.prefill([1, 2, 3])
        assert runner.cannot_branch is not None
        assert words in runner.cannot_branch
        with pytest.raises(CannotBranch, match="Draft a chain"):
            runner.forward([4, 5], [-1, 0])
        assert near(runner.forward([4, 5]), model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 3:])
    check(lambda: EagerRunner(of("mistral", sliding_window=None, **heads), 96), TEXT, ONE, lambda one, other: True)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_passes_captured_of_torchs_operations_mask_too(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "ROOM", 128)
    graphs, runners = Graphs(FusedModel.of(tiny_model(architecture)), ops, recorded, 2), list[GraphRunner]()

    def made() -> GraphRunner:
        runners.append(GraphRunner(graphs, 96))
        return runners[-1]

    for parents in TREES:
        check(made, TEXT, parents, near)
        assert runners[-1].exact_tree_rows == 0
        for runner in runners:
            runner.release()


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
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    runner = native_runner(tiny_model("llama"), 128)
    runner.prefill(TEXT)
    with pytest.raises(ValueError, match=r"Row|rows"):
        runner.forward([1] * len(parents), parents)
    with pytest.raises(ValueError, match="rise"):
        runner.keep([0, 2, 1])
