"""Is the captured engine right on this machine? On a GPU: `python -m pytest tests/gpu -m gpu`.

These tests need pytest, torch and transformers, and nothing else. Without `-m gpu` they run on the CPU, where a pass is
called instead of captured and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdemo.drafters.captured_trees import Growth
from specdemo.engines.gpu import graph
from specdemo.engines.linear import Linear
from tests.harness.growth import grown


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU every day, the GPU with `-m gpu`."""
    device: torch.device = request.getfixturevalue("cuda") if request.param == "cuda" else torch.device("cpu")
    return device


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU on this machine")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def small_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small caches on the CPU, where clearing a large one takes longer than a test."""
    if "cuda" not in request.node.name:
        monkeypatch.setattr(graph, "ROOM", 256)


@pytest.fixture(autouse=True)
def trees_without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, where the kernel does not run, grows them by torch's operations."""
    if "cuda" not in request.node.name:
        monkeypatch.setattr(Growth, "grown", grown)


@pytest.fixture
def nothing_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Captured passes read the experts of a layer from one weight."""
    monkeypatch.setattr(Linear, "of", lambda weight, bias, parts=1: Linear.unpacked(weight, bias))
