"""Experts and LongRoPE in captured passes, with a stand-in for the capture. `test_kernels` runs Triton's kernels."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch

from specdemo.engines import ops
from specdemo.engines.choose import engine_of, is_exact
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import Graphs
from specdemo.engines.layout import Router
from specdemo.engines.linear import Linear, stacked
from specdemo.engines.rows import branches_of
from tests.harness.classes import FusedModel
from tests.harness.doubles import MODEL_VOCAB
from tests.harness.engines import recorded
from tests.harness.models import SWITCH, model_of

from .test_experts import KINDS
from .test_graph import OperationRecorder


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "of", lambda weight, bias, parts=1: Linear.unpacked(weight, bias))
    monkeypatch.setattr(graph, "ROOM", 128)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_pass_with_experts_is_the_same_operations_whatever_is_chosen(kind: str) -> None:
    graphs = Graphs(FusedModel.of(model_of(kind)), ops, lambda work: work, 1)
    passes, watched = graphs.acquire(1).passes, []
    for length in (0, 40):
        passes.where[0].fill_(length)
        passes.ids.copy_((7 * torch.arange(len(passes.ids)) + length) % MODEL_VOCAB)
        passes.branches.copy_(branches_of([-1, 0, 0]))
        with OperationRecorder() as watch:
            passes.run(3, passes.branches)
        watched.append((watch.seen, watch.outside))
    assert watched[0] == watched[1]


def test_the_weights_of_experts_are_not_copied() -> None:
    model = model_of("mixtral")
    layer, weight = FusedModel.of(model).layers[0], model.model.layers[0].mlp.experts.gate_up_proj
    assert stacked(layer.up).data_ptr() == weight.data_ptr()
    assert torch.equal(stacked(layer.up), weight)
    with pytest.raises(AssertionError, match="one weight"):
        stacked(layer.up[::2])


def test_equally_likely_experts_are_chosen_in_their_order() -> None:
    router = Router(Linear.unpacked(torch.zeros(64, 8), None), 3, normed=True)
    weights, chosen = router(torch.ones(2, 8))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_a_slot_has_the_angles_of_each_run_that_it_serves() -> None:
    graphs = Graphs(FusedModel.of(model_of("longrope")), ops, recorded, 1)
    (rope,) = graphs.model.ropes
    for context in (1, SWITCH - 1, SWITCH, SWITCH + 1, 129, 1000):
        capacity = graphs.capacity_for(context)
        assert capacity >= context
        assert rope.of_run(capacity) is rope.of_run(context)


@pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this machine")
@pytest.mark.parametrize("kind", [*KINDS, "longrope"])
def test_a_gpu_captures_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the report and the badge say."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = deepcopy(model_of(kind).config)
    config.head_dim = 64
    asked = config, torch.bfloat16, torch.device("cuda")
    assert engine_of(*asked) == "graph"
    assert is_exact("graph", *asked)
