"""Which kernels a GPU would compile and run: one for each of Triton's keys, which the arguments of a call make.

So calls with the same key run the same code, and a key that was not met at load is compiled in the middle of a race.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from specdemo.decoding.batch import read_together
from specdemo.engines import choose
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import LENGTHS, Graphs
from specdemo.engines.linear import Linear
from specdemo.engines.rows import MOST_ROWS, TREES, WIDTH
from specdemo.engines.runner import Pass
from specdemo.settings import MAX_K, MAX_NODES
from specdemo.system.progress import attended
from tests.harness.classes import FusedModel, GraphRunner
from tests.harness.engines import recorded, tiny_model
from tools.bench.gpu_passes import parts

from ..sentences import tells

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this machine")
ATTENTION = "_write_kv", "_attend", "_combine"


class Keys:
    """In place of a kernel: computes nothing, and notes the key of each call on an H100."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bound = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.seen: set[str] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            _, key, others = self.bound(*arguments, **options)
            self.seen.add(f"{key} {others}")

        return launch


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> dict[str, Keys]:
    """Of each kernel by its name."""
    from specdemo.engines.gpu import kernels, noise, products, trees

    found = {}
    of_module = {kernels: ATTENTION, products: ("_product", "_plus"), noise: ("_race",), trees: ("_grown",)}
    for module, names in of_module.items():
        for name in names:
            found[name] = Keys(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    monkeypatch.setattr(Linear, "of", lambda weight, bias, parts=1: Linear.unpacked(weight, bias))  # as on a GPU
    monkeypatch.setattr(products, "starts_early", lambda device: True)
    monkeypatch.setattr(choose, "ops_for", lambda *_: kernels)
    monkeypatch.setattr(choose, "CudaCapture", lambda device: recorded)
    return found


def graphs_of() -> Graphs:
    from specdemo.engines.gpu import kernels

    return Graphs(FusedModel.of(tiny_model("llama")), kernels, recorded, 1)


def seen(keys: dict[str, Keys]) -> dict[str, set[str]]:
    return {name: {*of_kernel.seen} for name, of_kernel in keys.items()}


def test_chains_trees_and_several_texts_run_the_same_compiled_kernels(keys: dict[str, Keys]) -> None:
    """So a row has the same sums in each of them, of whatever size."""
    graphs = graphs_of()
    passes = graphs._free[0].passes
    assert [*passes._passes, *passes._trees] == [*LENGTHS, *TREES]
    assert [len(keys[name].seen) for name in ATTENTION] == [1, 1, 1]
    captured = seen(keys)
    assert captured["_product"]
    runners = [GraphRunner(graphs, 100) for _ in range(2)]
    for runner, prompt in zip(runners, ([1, 2, 3], [4, 5]), strict=True):
        runner.prefill(prompt)
        runner.forward([6, 7, 8], [-1, 0, 0])
        runner.keep([0, 2])
    read_together([Pass(runner, [1, 2]) for runner in runners])
    assert seen(keys) == captured


@pytest.mark.parametrize("count", [1, 6, MAX_K + 1])
def test_the_parts_of_a_pass_are_measured_by_the_kernels_of_a_pass(keys: dict[str, Keys], count: int) -> None:
    from specdemo.engines.gpu import kernels

    graphs = graphs_of()
    captured, graphs.capture = seen(keys), lambda work: work
    for _, work, _ in parts(graphs, kernels, count, 500):
        work()
    assert seen(keys) == captured


def test_what_draws_tokens_and_grows_trees_is_compiled_at_load_and_told(
    keys: dict[str, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdemo.engines.gpu import noise, trees

    monkeypatch.setattr(graph, "ROOM", 128)
    messages = list[str]()
    model = FusedModel.of(tiny_model("llama"))
    with attended(lambda: False, messages.append):
        choose._on_gpu(model, 1)
    first, then = messages
    assert tells(first, "kernels passes")
    assert tells(then, "kernels trees")
    loaded, probs = seen(keys), torch.ones(MOST_ROWS, model.vocab_size)
    assert len(loaded["_race"]) == len(loaded["_grown"]) == 2
    ids, numbers = torch.arange(model.vocab_size), torch.zeros(MOST_ROWS, dtype=torch.int64)
    for rows in (1, 2, 16, 17, MOST_ROWS):
        noise.race(probs[:rows], numbers[:rows])
    for place in range(3):  # of a draft
        for known in (None, ids):
            noise.race(probs[:1], numbers[place : place + 1], known)
    table, limits = torch.zeros(4, MAX_NODES + 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    growth = table, numbers[:1], numbers[:1] == 0, numbers[:1].clone(), numbers[:1] - 1
    for read in (1, WIDTH, WIDTH):
        shares = torch.ones(read, WIDTH)
        new = trees.grown(*growth, shares.long(), shares, limits, WIDTH, MOST_ROWS)
        growth = new[0], new[1], new[3], new[5], new[6]
    assert seen(keys) == loaded
