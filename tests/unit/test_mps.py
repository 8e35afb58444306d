"""Apple's GPUs, by a fake: tensors in main memory that have no float64. Nothing was run on an Apple GPU yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel

from specdemo.decoding.events import emitted_tokens
from specdemo.engines import eager
from specdemo.errors import BadInput
from specdemo.models import apple, opened
from specdemo.models.loaded import load
from specdemo.models.preset_models import find_models
from specdemo.models.report import report_on
from specdemo.models.sizes import plan, weight_bytes
from specdemo.racing.race import race
from specdemo.settings import Settings
from specdemo.system import device as device_module
from specdemo.system import hardware
from tests.harness.classes import Loaded
from tests.harness.files import full_preset
from tests.harness.models import tiny, unread

from ..sentences import refuses, tells

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
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
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


# The CPU or the GPU -----------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts the operations that make a new tensor, not a view of another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        places = {part.data_ptr() for part in torch.utils._pytree.tree_leaves(args) if isinstance(part, Tensor)}
        self.count += not (isinstance(found, Tensor) and found.data_ptr() in places)
        return found


def operations(layers: int) -> int:
    """Of a pass over one token by transformers' forward."""
    model, cache = tiny("llama", 64, num_hidden_layers=layers).to(torch.float16), hf.DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([[3, 4]]), past_key_values=cache)
        with Counted() as counted:
            model(torch.tensor([[5]]), past_key_values=cache)
    return counted.count


def test_a_layer_has_as_many_operations_as_the_estimate_says() -> None:
    assert operations(3) - operations(2) == pytest.approx(apple.OPERATIONS, rel=0.1)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float | None]]:
    """Of a Mac: bytes per second by the type of a device."""
    found: dict[str, float | None] = {"cpu": 60e9, "mps": 400e9}
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(apple, "memory_rate", lambda device, size: found[device.type])
    monkeypatch.setattr(apple, "launch_seconds", lambda device: 25e-6)
    apple.speeds.cache_clear()
    yield found
    apple.speeds.cache_clear()


SMALL = hf.LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                       num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)  # fmt: skip
LARGE = hf.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256)  # fmt: skip


@pytest.mark.usefixtures("rates")
def test_the_gpu_is_faster_for_a_large_model_only() -> None:
    device, why = apple.choose_on_mac(unread(SMALL), None)
    assert device == apple.CPU
    assert why == (
        "It runs on the CPU: by estimate a pass takes 9.0 ms on the CPU, to read 0.5 GB, and 30.7 ms on the Apple GPU, "
        "30.0 ms of them to launch 1,200 operations."
    )
    device, why = apple.choose_on_mac(unread(LARGE), None)
    assert device == MPS
    assert tells(why or "", "on the Apple GPU 32.0 1,280")
    assert apple.speeds.cache_info().misses == 1  # measured once


def test_no_gpu_is_taken_where_memory_has_no_room_to_measure(rates: dict[str, float | None]) -> None:
    rates["mps"] = None
    assert apple.choose_on_mac(unread(LARGE), None) == (apple.CPU, None)


@pytest.mark.usefixtures("rates")
def test_auto_takes_the_faster_device_and_a_report_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = full_preset(tmp_path)
    for auto in (None, "auto"):
        assert {found.device.type for found in find_models(preset, None, auto)} == {"cpu"}
    assert any(line.startswith("It runs on the CPU: ") for line in report_on(preset))
    stages: list[str] = []
    load(preset, "float32", progress=lambda share, stage: stages.append(stage)).release()
    assert any(stage.startswith("It runs on the CPU: ") for stage in stages)

    monkeypatch.setattr(apple, "launch_seconds", lambda device: 0.0)
    apple.speeds.cache_clear()
    target, draft = find_models(preset)
    assert (target.device, target.dtype, draft.device) == (MPS, torch.float16, MPS)
    assert any(line.startswith("It runs on the Apple GPU: ") for line in report_on(preset))


@pytest.mark.usefixtures("rates")
def test_nothing_is_measured_where_there_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = full_preset(tmp_path)
    cases = (None, "cpu", "cpu"), (None, "mps", "mps"), ("float32", "auto,cpu", "cpu"), ("int8", None, "cpu")
    monkeypatch.setattr("specdemo.models.preset_models.check_dtype", lambda dtype, device: None)  # of this CPU
    for dtype, asked, device in cases:
        found = find_models(preset, dtype, asked)[0]
        assert (found.device.type, found.choice) == (device, None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_models(preset)[0].choice is None
    assert apple.speeds.cache_info().misses == 0


def test_a_launch_takes_microseconds_and_the_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e-7 < apple.launch_seconds(torch.device("cpu")) < 1e-3
    waited: list[bool] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(True))
    assert device_module.seconds_of(MPS, lambda: waited.append(False)) >= 0
    assert waited == [True, False, True]
