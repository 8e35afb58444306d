"""The tests of this folder fail where something is wrong. On the CPU, with mistakes put in."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo.drafters.heads.backends import TorchBackend
from specdemo.drafters.heads.block import Block
from specdemo.engines import ops
from tools.bench import models

from . import helpers, test_kernels, test_passes, test_texts, test_waits

CPU = torch.device("cpu")


def with_attend(attend: Callable[..., torch.Tensor]) -> ModuleType:
    """The operations of a pass with another attention."""
    made: Any = SimpleNamespace(**{**vars(ops), "attend": attend})
    return made


def each_by_itself(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: ops.RowPlaces, **look: Any
) -> torch.Tensor:
    """Attention of each token by itself, to what it sees and nothing besides."""
    found = []
    for one, seen in zip(q.split(1), rows.seen, strict=True):
        everything = rows._replace(seen=torch.ones(1, int(seen.sum()), dtype=torch.bool))
        found.append(ops.attend(one, keys[:, seen], values[:, seen], everything, **look))
    return torch.cat(found)


def stretched(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: ops.RowPlaces, **look: Any
) -> torch.Tensor:
    """Attention that grows with the number of tokens that are read together."""
    return ops.attend(q, keys, values, rows, **look) * (1 + len(q) / 20)


def blind(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: ops.RowPlaces, **look: Any) -> torch.Tensor:
    """Attention in which no token sees itself."""
    return ops.attend(q, keys, values, rows._replace(seen=rows.seen.scatter(1, rows.slots[:, None], False)), **look)


def of_the_pass(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: ops.RowPlaces, **look: Any
) -> torch.Tensor:
    """Attention to all tokens of the pass that come before, in the branch or not."""
    everything = torch.arange(keys.shape[1]) <= rows.slots[:, None]
    return ops.attend(q, keys, values, rows._replace(seen=everything), **look)


def test_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ops_for", lambda *asked: with_attend(blind))
    with pytest.raises(AssertionError, match=r"relative errors: .*'attend'"):
        test_kernels.test_operations_agree_with_float64(CPU, torch.float32, (4, 2, 16))


def test_kernels_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faked GPU, by its compute capability."""
    monkeypatch.setattr(test_kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(AssertionError):
        test_kernels.test_passes_are_made_of_tritons_kernels(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(pytest.skip.Exception):
        test_kernels.test_passes_are_made_of_tritons_kernels(CPU)


def test_attention_whose_sums_depend_on_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ops_for", lambda *asked: with_attend(each_by_itself))
    test_kernels.test_a_row_of_attention_is_the_same_bits_in_every_pass(CPU)
    monkeypatch.setattr(models, "ops_for", lambda *asked: with_attend(stretched))
    with pytest.raises(AssertionError, match="0 of 20 passes"):
        test_kernels.test_a_row_of_attention_is_the_same_bits_in_every_pass(CPU)


def test_rows_that_see_other_branches() -> None:
    tree = test_kernels.TREES["two of the same"]
    for functions, differing in ((with_attend(each_by_itself), 0), (with_attend(of_the_pass), 5)):
        found = test_kernels.leaves_unlike_their_chains(functions, 4, 2, 16, tree, 0, CPU, torch.float64)
        assert found == differing


@pytest.mark.slow
def test_a_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.write_kv
    monkeypatch.setattr(ops, "write_kv", lambda qkv, norms, rotation, *rest: right(qkv, None, rotation, *rest))
    test_passes.test_logits_are_those_of_transformers(CPU, "llama", None)  # which has no such norms
    with pytest.raises(AssertionError, match="relative error"):
        test_passes.test_logits_are_those_of_transformers(CPU, "qwen3", None)
    with pytest.raises(AssertionError, match="that of transformers"):
        test_passes.test_bfloat16_is_as_near_to_float32_as_transformers_own(CPU)
    with pytest.raises(AssertionError, match="of 9 equal to plain decoding"):
        test_texts.test_greedy_texts_are_those_of_transformers(CPU)
    with pytest.raises(AssertionError, match="chi-square over 300 runs"):
        test_texts.test_sampled_texts_have_the_targets_distribution(CPU)


def test_wrong_functions_that_were_asked_for() -> None:
    with pytest.raises(AssertionError, match="relative error"):
        test_passes.test_logits_are_those_of_transformers(CPU, "llama", with_attend(stretched))


def test_a_wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchBackend.write
    monkeypatch.setattr(TorchBackend, "write", lambda own, layer, k, v, placed: right(own, layer, v, k, placed))
    with pytest.raises(AssertionError, match="relative errors of 5 drafts"):
        test_passes.test_captured_heads_draft_the_same(CPU, "eagle")


@pytest.mark.slow
def test_drafts_that_change_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ops_for", lambda *asked: with_attend(stretched))
    with pytest.raises(AssertionError, match="of 9 equal to ours alone"):
        test_texts.test_drafts_change_no_bit(CPU, "qwen3")


def test_a_drafter_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = Block.propose
    monkeypatch.setattr(Block, "propose", lambda *asked: (torch.ones(1).tolist(), propose(*asked))[1])
    with pytest.raises(AssertionError, match="'block at T = 0, match': 2"):
        test_waits.test_a_round_waits_once(CPU)


def test_a_round_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers.Copying, "match", lambda *_: None)
    with pytest.raises(AssertionError, match="nothing was drafted"):
        test_waits.test_a_round_waits_once(CPU)
