"""Trees by captured passes, with the stand-in for the capture of `test_graph.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdemo.decoding.events import Round
from specdemo.engines.eager import EagerRunner
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.rows import MOST_ROWS
from specdemo.types import MATCH, MAX_NODES, REJECTION, Settings

from .test_graph import CountedWaits, graph_toy, graphs_of, run
from .toys import MODEL_VOCAB, ModelToy, ids_of, tiny_model

pytestmark = pytest.mark.usefixtures("little_room")


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "ROOM", 128)


@pytest.mark.parametrize("rows", [2, 17, 18, 27, MOST_ROWS])
def test_a_tree_is_read_and_a_path_kept_without_a_wait_for_the_device(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the end of the cache, where there is no place for the rows that fill a captured pass up."""
    runner, expected = GraphRunner(graphs_of("llama"), 128), EagerRunner(tiny_model("llama"), 128)
    prompt, ids = [place % 50 for place in range(128 - rows)], [7 * row % MODEL_VOCAB for row in range(rows)]
    parents = [max(-1, row - 1 - row % 2) for row in range(rows)]
    for one in (runner, expected):
        one.capture_hidden_states([1])
        one.prefill(prompt)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    with CountedWaits() as waits:
        logits = runner.forward(ids, parents)
        runner.keep([row for row in range(rows - 1) if row % 2 == 0])
    assert waits.count == 0
    monkeypatch.undo()
    torch.testing.assert_close(logits, expected.forward(ids, parents))
    expected.keep([row for row in range(rows - 1) if row % 2 == 0])
    torch.testing.assert_close(runner.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(runner.forward([4]), expected.forward([4]))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["draft-model", "eagle", "block", "medusa", "prompt-lookup", "lookup-eagle"])
@pytest.mark.parametrize("rule", [MATCH, pytest.param(REJECTION, marks=pytest.mark.slow)])
def test_the_trees_of_every_drafter_leave_the_text_alone(name: str, rule: str) -> None:
    """Under rejection a text depends on the draft: there it is that of the eager runner with the same trees."""
    toy, eager = graph_toy(), ModelToy(model=tiny_model("llama"), draft_model=tiny_model("llama", 1))
    parents = list[int | None]()
    for nodes, temperature in ((6, 0.0), (20, 0.8), (MAX_NODES, 1.0)):
        settings = Settings(k=nodes, temperature=temperature, max_new_tokens=40, seed=3, tree=True, rule=rule)
        events = list(run(toy, name, settings))
        if rule == MATCH or not temperature:
            expected = run(eager, "none", replace(settings, k=0, tree=False))
        else:
            expected = run(eager, name, settings)
        assert ids_of(events) == ids_of(list(expected))
        parents += [token.parent for event in events if isinstance(event, Round) for token in event.drafted]
    assert any(parent is not None for parent in parents)
