"""What runners keep and share: caches, weights, first layers. `test_logits` has what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedModel

from tests.harness.doubles import MODEL_VOCAB
from tests.harness.engines import ARCHITECTURES, tiny_model
from tests.harness.models import ENGINES, run_by

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32]


@pytest.fixture(params=[*ARCHITECTURES, "smollm3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel, int], Any]:
    """Makes runners of one engine, from a model and a capacity."""
    return lambda model, capacity: run_by(request.param, model, monkeypatch)(capacity)


def fresh(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """The logits after each token, computed without any cache, [T, V]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4, rtol=1e-4)


def test_release_frees_the_cache(make: Any, model: PreTrainedModel) -> None:
    runner = make(model, len(TEXT))
    runner.prefill(TEXT)
    runner.release()
    assert runner._cache is None


@pytest.mark.parametrize("make", ["eager"], indirect=True)
def test_the_buffers_are_allocated_once(make: Any, model: PreTrainedModel) -> None:
    runner = make(model, 12)
    runner.prefill(TEXT[:3])
    assert runner._cache is not None
    places = [layer.keys.data_ptr() for layer in runner._cache.layers]
    for token in TEXT[3:9]:
        runner.forward([token])
        runner.rollback(runner.length - (token % 2))
    assert [layer.keys.data_ptr() for layer in runner._cache.layers] == places
    assert {layer.keys.shape[-2] for layer in runner._cache.layers} == {12}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "least"), [("fused", 1.25), ("native", 1.0)], indirect=["make"])
def test_bfloat16_strays_no_further_from_float32_than_transformers_does(
    make: Any, least: float, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rough = copy.deepcopy(model).bfloat16()
    ids = torch.randint(MODEL_VOCAB, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    by_transformers: list[Any] = [run_by("eager", one, monkeypatch)(200) for one in (model, rough)]
    for runner in (by_transformers[0], make(rough, 200), by_transformers[1]):
        runner.capture_hidden_states([1])
        runner.prefill(ids[:1])
        logits.append(torch.cat([runner.forward(ids[i : i + 5]) for i in range(1, 200, 5)]).float())
        assert runner.hidden_states is not None
        assert runner.hidden_states.dtype == runner.model.dtype
    ours, theirs = ((rows - logits[0]).square().mean().sqrt() for rows in logits[1:])
    assert ours < least * theirs


# Its first layers -----------------------------------------------------------------------------------------


def truncated(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The same model built with fewer layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:count])
    short = type(model)(config).eval()
    _, unexpected = short.load_state_dict(model.state_dict(), strict=False)
    assert unexpected
    return short


def weights_of(parts: Any) -> set[int]:
    """Where the weights of a fused model lie, whether packed or not."""
    steps = [step for layer in parts.layers for step in (*layer.products, layer.mlp_norm)]
    held = [getattr(step, "multiply", step.weight) for step in (*steps, parts.head, parts.norm)]
    return {*map(id, held), id(parts.embedding)}


def test_no_weight_is_copied(make: Any, model: PreTrainedModel) -> None:
    before, names = fresh(model, TEXT), set(model.state_dict())
    whole = make(model, 20)
    first = whole.first_layers(2, 20)
    if hasattr(whole.model, "embedding"):
        assert weights_of(first.model) < weights_of(whole.model)
    else:
        theirs, ours = ({weight.data_ptr() for weight in one.model.parameters()} for one in (first, whole))
        assert theirs < ours
    assert set(model.state_dict()) == names
    assert torch.equal(fresh(model, TEXT), before)


def dispatched(model: PreTrainedModel) -> PreTrainedModel:
    """The model as accelerate spreads it over devices, all of which are the CPU here: the hooks are its own."""
    hooked = copy.deepcopy(model)
    (stack,) = (name for name, child in hooked.base_model.named_children() if isinstance(child, ModuleList))
    base = hooked.base_model_prefix
    parts = [name for name, _ in hooked.named_children() if name != base]
    parts += [f"{base}.{name}" for name, _ in hooked.base_model.named_children() if name != stack]
    parts += [f"{base}.{stack}.{place}" for place in range(3)]
    made: PreTrainedModel = dispatch_model(hooked, dict.fromkeys(parts, "cpu"), force_hooks=True)
    return made


def test_the_first_layers_of_a_model_spread_over_devices_are_no_more_than_these(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accelerate's real hooks, and the CPU in place of several GPUs. The logits come where the model's do."""
    truth, hooked, brought = fresh(truncated(model, 2), TEXT), dispatched(model), []
    post_forward = AlignDevicesHook.post_forward

    def watched(hook: Any, module: Any, output: Any) -> Any:
        if hook.io_same_device:
            brought.append((module, hook.input_device))
        return post_forward(hook, module, output)

    monkeypatch.setattr(AlignDevicesHook, "post_forward", watched)
    first: Any = run_by("eager", hooked, monkeypatch)(20).first_layers(2, 20)
    first.prefill(TEXT[:5])
    assert same(first.forward(TEXT[5:]), truth[5:])
    assert same(fresh(hooked, TEXT), fresh(model, TEXT))
    assert set(brought) == {(first.model, torch.device("cpu")), (hooked, torch.device("cpu"))}
