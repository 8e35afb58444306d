"""Apple's GPUs, by a fake: tensors in main memory that have no float64. Nothing was run on an Apple GPU yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import LlamaForCausalLM, PreTrainedModel

from specdemo.decoding.events import emitted_tokens
from specdemo.engines import eager
from specdemo.errors import BadInput
from specdemo.models import opened
from specdemo.models.loaded import load
from specdemo.models.sizes import plan, weight_bytes
from specdemo.racing.race import race
from specdemo.settings import Settings
from specdemo.system import device as device_module
from specdemo.system import hardware
from tests.harness.classes import Loaded
from tests.harness.files import full_preset
from tests.harness.models import unread

from ..sentences import refuses

MPS = torch.device("mps", 0)


class OnMps(Tensor):
    """Whatever is computed from it is on the same device, which has no float64, until it is sent to the CPU."""

    device = MPS

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.to and "cpu" in map(str, args):
            return found.as_subclass(Tensor)
        if isinstance(found, Tensor) and found.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype.")
        return found


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, outputs_of, arange = LlamaForCausalLM.forward, eager.outputs_of, torch.arange

    @wraps(forward)  # its arguments say how it takes the cache
    def answer(model: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        answered = forward(model, *args, **kwargs)
        answered.logits = answered.logits.as_subclass(OnMps)
        return answered

    @contextmanager
    def outputs(layers: Sequence[Module]) -> Iterator[dict[Module, Tensor]]:
        with outputs_of(layers) as found:
            yield found
        found.update({layer: output.as_subclass(OnMps) for layer, output in found.items()})

    def to_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
        assert device == MPS
        return device_module.to_device(numbers, torch.device("cpu"))

    def arange_there(*numbers: Any, device: Any = None, **options: Any) -> Tensor:
        return arange(*numbers, device=None if device == MPS else device, **options)

    monkeypatch.setattr(torch, "arange", arange_there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "device", MPS)
    monkeypatch.setattr(LlamaForCausalLM, "forward", answer)
    monkeypatch.setattr(eager, "outputs_of", outputs)
    monkeypatch.setattr(eager, "to_device", to_device)
    monkeypatch.setattr(opened, "device_map", lambda device, max_memory: {})


def texts(loaded: Loaded) -> dict[tuple[str, float], list[int]]:
    """What each drafter writes at each temperature."""
    written = {}
    for drafter in ("none", "prompt-lookup", "layer-skip", "ngram", "draft-model", "eagle", "block"):
        for temperature in (0.0, 0.8):
            settings = Settings(k=3, temperature=temperature, max_new_tokens=12, seed=3)
            events = race(loaded, drafter, loaded.encode("the cat sat on the mat"), settings)
            written[drafter, temperature] = [
                token.id for entry in events if entry.lane == "speculative" for token in emitted_tokens(entry.event)
            ]
    return written


@pytest.mark.slow
def test_every_drafter_writes_what_it_writes_on_a_cpu(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    preset = full_preset(tmp_path)
    on_cpu = load(preset, "float32", "cpu", eager=True)
    expected = texts(on_cpu)
    request.getfixturevalue("mac")
    loaded = load(preset, "float32", "mps")
    assert (loaded.device, loaded.engine) == (MPS, "eager")
    assert texts(loaded) == expected
    assert loaded.environment()["device_name"] == "Apple GPU"
    runner = loaded.target_runner(8)
    logits = runner.prefill([3, 4])
    assert (runner.device.type, logits.device.type, logits.dtype) == ("cpu", "cpu", torch.float32)
    for one in (on_cpu, loaded):
        one.release()


def test_it_is_taken_when_it_is_asked_for_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with refuses(BadInput, "Apple"):
        hardware.choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert hardware.choose_device("mps") == MPS
    assert hardware.choose_dtype("auto", MPS) == torch.float16


def test_weights_go_to_main_memory_which_it_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load(full_preset(tmp_path), "float32", "cpu").model.config
    model = unread(config, device="mps:0")
    assert plan([model, model]).devices == (MPS, MPS)
    monkeypatch.setattr("specdemo.models.sizes.free_memory", lambda: weight_bytes(model))
    assert plan([model], {"mps:0": weight_bytes(model)}).replaces
