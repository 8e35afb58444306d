"""Trees that are drafted in captured calls: those of the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from specdemo.drafters.captured_trees import CapturedTrees
from specdemo.drafters.heads.ready import HeadSlots
from specdemo.engines.gpu.capture import CapturedFunctions, capture_for
from specdemo.models.trial import TableReader
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_NODES, Settings
from specdemo.tokens import Draft
from tests.harness.classes import GraphRunner
from tests.harness.doubles import accepting, proposed
from tools.bench.models import WITH_HEADS, random_head

from .helpers import graphs_of, tiny, tree_of_host

ASKED = [
    Settings(tree=True),
    Settings(temperature=0.8, seed=5, tree=True),
    Settings(temperature=1, top_p=0.9, tree=True),
]


@pytest.mark.parametrize("settings", ASKED, ids=str)
@pytest.mark.parametrize("depths", [2, 8])
def test_a_captured_tree_is_that_of_the_host(device: torch.device, settings: Settings, depths: int) -> None:
    """From the same logits, small trees and large ones in the same captured calls."""
    vocab = 4096 if device.type == "cuda" else 300
    table, rule = 4 * torch.randn(vocab, vocab, device=device), rule_for(settings)
    trees = CapturedTrees(partial(TableReader, table), CapturedFunctions(capture_for(device)), None, depths)
    for nodes, depth, token in ((16, 9, 0), (16, 40, 1), (9, 40, 2), (MAX_NODES, 40, 3), (16, 40, 4)):
        given = table[token : token + 1]
        host = tree_of_host(table, given, nodes, depth, rule, 7)
        tree = trees.draw([given], nodes, depth, rule, 7)
        assert (tree.token_ids, tree.parents) == (host.token_ids, host.parents)
        assert len(tree.token_ids) == nodes


@pytest.mark.parametrize("name", WITH_HEADS)
def test_a_captured_head_grows_trees_of_the_same_values(device: torch.device, name: str) -> None:
    """As uncaptured, in float32; where two values nearly tie, rounding may choose."""
    target, kind = tiny("qwen3", device), WITH_HEADS[name]
    ready, graphs, found = random_head(kind, target), graphs_of(target), list[Tensor]()
    prompt = torch.randint(target.config.vocab_size, (40,)).tolist()
    for capture in (None, capture_for(device)):
        if capture:
            ready.slots = HeadSlots(ready, kind.passes, capture)
        runner = GraphRunner(graphs, 200)
        drafter = kind(ready, runner, rule_for(ASKED[1]))
        runner.prefill(prompt[:-1])
        drafter.observe(accepting(0))
        found.append(values_of(proposed(drafter, prompt, 20, depth=6)))
        drafter.release()
        runner.release()
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def values_of(draft: Draft) -> Tensor:
    """The values of the tokens of a tree."""
    assert draft.q is not None
    values: list[float] = []
    for share, parent in zip(draft.q.tolist(), draft.parents or (), strict=True):
        values.append(share * (1.0 if parent < 0 else values[parent]))
    return torch.tensor(values)
