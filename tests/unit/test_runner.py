"""Every engine against transformers: passes, rollback, states; transformers' own runner: its cache, and `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedModel

from specdemo.engines import linear, ops
from specdemo.engines.eager import EagerRunner
from specdemo.engines.fused import MOST_ROWS, FusedRunner
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import LONGEST, GraphRunner, Graphs
from specdemo.engines.layout import FusedModel
from specdemo.engines.linear import Linear, Norm, can_pack
from specdemo.engines.runner import ANY_ROWS, Runner
from specdemo.system.hardware import cpu_multiplies_bf16
from specdemo.types import MAX_K
from tests.unit.toys import (
    ARCHITECTURES,
    ENGINES,
    MODEL_VOCAB,
    makes_runners,
    model_with_biases,
    native_runner,
    tiny_model,
)

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32]


@pytest.fixture(params=[*ARCHITECTURES, "smollm3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel, int], Any]:
    """Makes runners of one engine, from a model and a capacity."""
    monkeypatch.setattr(graph, "ROOM", 64)
    return lambda model, capacity: makes_runners(request.param, model)(capacity)


def fresh(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """The logits after each token, computed without any cache, [T, V]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[12], [1] * 12, [1, 1, 10], [4, 1, 7], [3, 8, 1]], ids=str)
def test_passes_of_every_length_give_the_logits_after_each_token(
    make: Any, model: PreTrainedModel, lengths: list[int]
) -> None:
    truth, runner = fresh(model, TEXT), make(model, len(TEXT))
    for length in lengths:
        begin, end = runner.length, runner.length + length
        logits = runner.forward(TEXT[begin:end]) if begin else runner.prefill(TEXT[:end])
        assert same(logits, truth[begin:end] if begin else truth[end - 1 : end])
        assert runner.length == end


def test_rollback_then_forward_equals_a_fresh_forward(make: Any, model: PreTrainedModel) -> None:
    truth = fresh(model, TEXT)
    runner = make(model, len(TEXT) + 6)
    runner.prefill(TEXT[:4])
    for keep in (4, 6, 5, 9):  # drafts of several lengths, partly taken back, now and then into read text
        done = min(runner.length, keep)
        runner.rollback(done)
        runner.forward([*TEXT[done:keep], 60, 59, 58])
        runner.rollback(keep)
        assert runner.length == keep
        assert same(runner.forward(TEXT[keep:]), truth[keep:])
    runner.rollback(len(TEXT) + 3)
    assert runner.length == len(TEXT)  # there is nothing to forget past the end


def test_the_buffers_are_allocated_once(model: PreTrainedModel) -> None:
    runner = EagerRunner(model, 12)
    runner.prefill(TEXT[:3])
    assert runner._cache is not None
    places = [layer.keys.data_ptr() for layer in runner._cache.layers]
    for token in TEXT[3:9]:
        runner.forward([token])
        runner.rollback(runner.length - (token % 2))
    assert [layer.keys.data_ptr() for layer in runner._cache.layers] == places
    assert {layer.keys.shape[-2] for layer in runner._cache.layers} == {12}


@pytest.mark.parametrize("extra", [1, 2])
def test_reading_past_the_capacity_is_an_error_and_never_silent(make: Any, model: PreTrainedModel, extra: int) -> None:
    runner = make(model, len(TEXT))
    runner.prefill(TEXT)
    with pytest.raises(ValueError, match="room for 12 tokens"):
        runner.forward([1] * extra)
    assert runner.length == len(TEXT)


def test_release_frees_and_a_new_prompt_starts_afresh(make: Any, model: PreTrainedModel) -> None:
    runner = make(model, len(TEXT))
    runner.prefill(TEXT)
    runner.release()
    runner.release()
    assert runner.length == 0
    assert runner._cache is None
    assert same(runner.prefill(TEXT[:5]), fresh(model, TEXT[:5])[-1:])
    assert same(runner.prefill(TEXT[2:7]), fresh(model, TEXT[2:7])[-1:])  # even without a release between


@pytest.mark.parametrize("layers", [(0,), (2, 0, 1)])
def test_the_states_of_the_last_pass_are_kept_in_the_order_asked_for(
    make: Any, model: PreTrainedModel, layers: tuple[int, ...]
) -> None:
    base: Any = model.base_model
    norm = base.ln_f if model.config.model_type == "gpt2" else base.norm
    with torch.inference_mode():
        truth = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states[1:]
    runner = make(model, len(TEXT) + 3)
    runner.capture_hidden_states(layers)
    assert runner.hidden_states is None

    @torch.inference_mode()
    def matches(begin: int, end: int) -> bool:
        assert runner.hidden_states is not None
        states = runner.hidden_states.chunk(len(layers), -1)
        normed = [norm(state) if layer == 2 else state for layer, state in zip(layers, states, strict=True)]
        return all(same(state, truth[layer][0, begin:end]) for layer, state in zip(layers, normed, strict=True))

    runner.prefill(TEXT[:5])
    assert matches(0, 5)
    runner.forward(TEXT[5:6])
    assert matches(5, 6)
    runner.forward([1, 2, 3])
    runner.rollback(6)
    runner.forward(TEXT[6:])
    assert matches(6, len(TEXT))
    runner.release()
    assert runner.hidden_states is None


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_biases_and_norms_are_kept(make: Any, architecture: str) -> None:
    model = model_with_biases(architecture)
    runner, truth = make(model, len(TEXT)), fresh(model, TEXT)
    assert same(torch.cat([runner.prefill(TEXT[:9]), runner.forward(TEXT[9:])]), truth[8:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "least"), [("fused", 1.25), ("native", 1.0)], indirect=["make"])
def test_bfloat16_strays_no_further_from_float32_than_transformers_does(
    make: Any, least: float, model: PreTrainedModel
) -> None:
    rough = copy.deepcopy(model).bfloat16()
    ids = torch.randint(MODEL_VOCAB, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for runner in (EagerRunner(model, 200), make(rough, 200), EagerRunner(rough, 200)):
        runner.capture_hidden_states([1])
        runner.prefill(ids[:1])
        logits.append(torch.cat([runner.forward(ids[i : i + 5]) for i in range(1, 200, 5)]).float())
        assert runner.hidden_states is not None
        assert runner.hidden_states.dtype == runner.model.dtype
    ours, theirs = ((rows - logits[0]).square().mean().sqrt() for rows in logits[1:])
    assert ours < least * theirs


def runner_with(engine: str, monkeypatch: pytest.MonkeyPatch) -> Runner:
    model = tiny_model("llama")
    if engine == "eager":
        return EagerRunner(model, 64)
    if engine.startswith("native"):
        return native_runner(model, 64, getattr(torch, engine.split()[1]))
    if engine.startswith("fused"):
        monkeypatch.setattr(linear, "library_for", lambda dtype: None)
        monkeypatch.setattr(linear, "can_pack", lambda dtype: can_pack(dtype) and "unpacked" not in engine)
        return FusedRunner(FusedModel.of(model, getattr(torch, engine.split()[1])), 64)
    kernels: Any = SimpleNamespace(**vars(ops)) if "kernels" in engine else ops
    model = copy.deepcopy(model).to(getattr(torch, engine.rpartition(" ")[2]))  # the one at hand is shared
    return GraphRunner(Graphs(FusedModel.of(model), kernels, lambda work: work, 1), 64)


needs_bf16 = pytest.mark.skipif(not cpu_multiplies_bf16(), reason="models in bfloat16 compute in float32 here")


@pytest.mark.parametrize(
    ("engine", "exact_rows", "exact_tree_rows"),
    [
        ("eager", 0, 0),
        ("native float32", ANY_ROWS, 64),
        ("native bfloat16", ANY_ROWS, 64),
        ("fused float32", 0, 0),
        ("fused bfloat16", MOST_ROWS if cpu_multiplies_bf16() and can_pack(torch.bfloat16) else 0, 0),
        ("fused bfloat16 unpacked", 0, 0),
        ("graph of kernels float32", LONGEST, 64),
        pytest.param("graph of kernels bfloat16", LONGEST, 64, marks=needs_bf16),
        ("graph float32", 0, 0),
    ],
)
def test_up_to_how_many_rows_an_engine_is_exact(
    engine: str, exact_rows: int, exact_tree_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are a stand-in: what they say of themselves `test_kernels.py` checks."""
    runner = runner_with(engine, monkeypatch)
    assert (runner.exact_rows, runner.exact_tree_rows) == (exact_rows, exact_tree_rows)
    if "kernels" in engine:
        return
    runner.prefill(TEXT)
    ids = [(7 * place + 1) % MODEL_VOCAB for place in range(min(exact_rows, MAX_K + 1))]
    whole = runner.forward(ids) if ids else None
    for count in range(1, len(ids)):
        runner.rollback(len(TEXT))
        assert whole is not None
        assert torch.equal(runner.forward(ids[:count]), whole[:count])


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


def read_by(runner: Any) -> Tensor:
    """The logits of all tokens of the text but the first five, of which some are read twice."""
    runner.prefill(TEXT[:5])
    first = runner.forward(TEXT[5:6])
    runner.forward([1, 2])
    runner.rollback(6)
    return torch.cat([first, runner.forward(TEXT[6:])])


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_equal_a_truncated_model(make: Any, model: PreTrainedModel, layers: int) -> None:
    whole = make(model, 20)
    expected = fresh(truncated(model, layers), TEXT)[5:]
    for _ in range(2):  # as from run to run
        runner = whole.first_layers(layers, 30)
        assert runner.context == 30
        assert same(read_by(runner), expected)
        runner.release()
    assert same(read_by(whole), fresh(model, TEXT)[5:])


def weights_of(parts: Any) -> set[int]:
    """Where the weights of a fused model lie, whether packed or not."""
    steps = [step for layer in parts.layers for step in (*layer.products, layer.mlp_norm)]
    held = [step.weight if isinstance(step, Norm) else step.multiply for step in (*steps, parts.head, parts.norm)]
    assert {type(step) for step in steps} == {Linear, Norm}
    return {*map(id, held), id(parts.embedding)}


def test_no_weight_is_copied(make: Any, model: PreTrainedModel) -> None:
    before, names = fresh(model, TEXT), set(model.state_dict())
    whole = make(model, 20)
    first = whole.first_layers(2, 20)
    if isinstance(whole, FusedRunner):
        assert weights_of(first.model) < weights_of(whole.model)
    else:
        theirs, ours = ({weight.data_ptr() for weight in one.model.parameters()} for one in (first, whole))
        assert theirs < ours
    assert set(model.state_dict()) == names
    assert torch.equal(fresh(model, TEXT), before)


@pytest.mark.parametrize("make", ["graph"], indirect=True)
def test_passes_are_captured_once(make: Any) -> None:
    """The first runner is asked for before a race is timed; those after it capture nothing."""
    whole = make(tiny_model("llama"), 20)
    first = whole.first_layers(2, 20)
    assert whole.first_layers(2, 20)._graphs is first._graphs is not whole._graphs
    assert whole.first_layers(1, 20)._graphs is not first._graphs
    assert first.exact_rows == whole.exact_rows
    first.prefill(TEXT)
    assert first._slot not in first._graphs._free


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
    first: Any = EagerRunner(hooked, 20).first_layers(2, 20)
    assert same(read_by(first), truth[5:])
    assert same(fresh(hooked, TEXT), fresh(model, TEXT))
    assert set(brought) == {(first.model, torch.device("cpu")), (hooked, torch.device("cpu"))}
