"""The early exit: the first layers read ahead, and the whole model goes on where they ended."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook
from torch import Tensor
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.decoding.events import Round, emitted_tokens
from specdemo.decoding.loop import rule_for
from specdemo.drafters.layer_skip import LayerSkip
from specdemo.drafters.none import NoDrafter
from specdemo.engines import eager
from specdemo.engines.eager import EagerRunner
from specdemo.engines.fused import FusedRunner
from specdemo.engines.layout import FusedModel, knows
from specdemo.engines.native import NativeRunner
from specdemo.engines.preallocated_cache import PreallocatedLayer
from specdemo.engines.runner import Runner
from specdemo.types import DraftOutcome, Settings
from tests.unit.test_runner import fresh, same
from tests.unit.toys import ARCHITECTURES, MODEL_VOCAB, decode, ids_of, native_runner, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 0, 7, 9, 32]
LAYERS = 3
READ = 5  # tokens of TEXT that every test begins with

Make = Callable[[PreTrainedModel, int], Runner]
MAKERS: dict[str, Make] = {
    "eager": EagerRunner,
    "fused": lambda model, capacity: FusedRunner(FusedModel.of(model), capacity),
    "native": native_runner,
}


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, layers=LAYERS)


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, model: PreTrainedModel) -> Make:
    assert request.param == "eager" or knows(model.config)
    return MAKERS[request.param]


def started(make: Make, model: PreTrainedModel) -> Runner:
    runner = make(model, len(TEXT) + 4)
    runner.prefill(TEXT[:READ])
    return runner


def truncated(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The same model built with fewer layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    short = type(model)(config).eval()
    _, unexpected = short.load_state_dict(model.state_dict(), strict=False)
    assert unexpected
    return short


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_equal_a_truncated_model(make: Make, model: PreTrainedModel, layers: int) -> None:
    truth = fresh(truncated(model, layers), TEXT)
    runner = started(make, model)
    assert same(runner.early_exit_forward(TEXT[READ : READ + 1], layers), truth[READ : READ + 1])
    assert same(runner.early_exit_forward(TEXT[READ + 1 :], layers), truth[READ + 1 :])
    assert runner.length == READ


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "ahead", [TEXT[5:8], TEXT[5:6], TEXT[5:], [*TEXT[5:], 1, 2], [TEXT[5], 1, 2], [1, 2, 3]], ids=str
)
def test_the_whole_model_says_the_same_whatever_was_read_ahead(
    make: Make, model: PreTrainedModel, ahead: list[int], layers: int
) -> None:
    truth = fresh(model, TEXT)
    runner = started(make, model)
    for token in ahead:
        runner.early_exit_forward([token], layers)
    assert same(runner.forward(TEXT[READ:10]), truth[READ:10])
    runner.early_exit_forward([1, 2], LAYERS - layers)  # another exit, and of no use
    assert same(runner.forward(TEXT[10:]), truth[10:])
    assert runner.length == len(TEXT)


def test_a_rollback_forgets_what_was_read_ahead(make: Make, model: PreTrainedModel) -> None:
    truth = fresh(model, TEXT)
    runner = started(make, model)
    runner.forward(TEXT[READ:8])
    runner.early_exit_forward(TEXT[8:10], 2)
    runner.rollback(6)
    assert runner.length == 6
    runner.early_exit_forward(TEXT[6:7], 2)
    assert same(runner.forward(TEXT[6:]), truth[6:])


def test_states_that_were_asked_for_are_whole(make: Make, model: PreTrainedModel) -> None:
    states = []
    for ahead in ([], TEXT[READ:8]):
        runner = make(model, len(TEXT))
        runner.capture_hidden_states([0, 2])
        runner.prefill(TEXT[:READ])
        for token in ahead:
            runner.early_exit_forward([token], 2)
        runner.forward(TEXT[READ:])
        assert runner.hidden_states is not None
        states.append(runner.hidden_states)
    assert same(*states)


def test_reading_ahead_past_the_capacity_is_an_error_and_never_silent(make: Make, model: PreTrainedModel) -> None:
    runner = started(make, model)
    runner.early_exit_forward([1] * (len(TEXT) + 4 - READ), 1)
    with pytest.raises(ValueError, match="room for 16 tokens"):
        runner.early_exit_forward([1], 1)


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_an_early_exit_must_be_a_proper_part(make: Make, model: PreTrainedModel, layers: int) -> None:
    with pytest.raises(ValueError, match="has 3 layers"):
        started(make, model).early_exit_forward([1], layers)


def test_the_parts_of_a_split_model_share_its_weights_and_leave_it_whole(model: PreTrainedModel) -> None:
    before, names = fresh(model, TEXT), set(model.state_dict())
    split = eager.Split.of(model, 1)
    own = {weight.data_ptr() for weight in model.parameters()}
    for part in (split.first, split.rest):
        assert {weight.data_ptr() for weight in part.parameters()} < own
    assert set(model.state_dict()) == names
    assert torch.equal(fresh(model, TEXT), before)


def dispatched(model: PreTrainedModel) -> PreTrainedModel:
    """The model as accelerate spreads it over devices, all of which are the CPU here: the hooks are its own."""
    hooked = copy.deepcopy(model)
    (stack,) = (name for name, child in hooked.base_model.named_children() if isinstance(child, ModuleList))
    base = hooked.base_model_prefix
    parts = [name for name, _ in hooked.named_children() if name != base]
    parts += [f"{base}.{name}" for name, _ in hooked.base_model.named_children() if name != stack]
    parts += [f"{base}.{stack}.{place}" for place in range(LAYERS)]
    made: PreTrainedModel = dispatch_model(hooked, dict.fromkeys(parts, "cpu"), force_hooks=True)
    return made


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_of_a_model_spread_over_devices_are_no_more_than_these(
    model: PreTrainedModel, layers: int
) -> None:
    """With accelerate's real hooks, and the CPU in place of several GPUs."""
    truth, hooked = fresh(truncated(model, layers), TEXT), dispatched(model)
    runner = started(EagerRunner, hooked)
    assert same(runner.early_exit_forward(TEXT[READ : READ + 1], layers), truth[READ : READ + 1])
    assert same(runner.early_exit_forward(TEXT[READ + 1 :], layers), truth[READ + 1 :])
    assert same(runner.forward(TEXT[READ:]), fresh(model, TEXT)[READ:])
    assert same(fresh(hooked, TEXT), fresh(model, TEXT))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_layer_of_a_model_spread_over_devices_reads_every_token_once(
    model: PreTrainedModel, temperature: float, reads: dict[Any, Counter[int]]
) -> None:
    """With accelerate's real hooks, and the CPU in place of several GPUs."""
    settings = Settings(temperature=temperature, k=3, max_new_tokens=30)
    texts = []
    for one in (model, dispatched(model)):
        reads.clear()
        runner = EagerRunner(one, len(TEXT) + 30)
        events = list(decode(runner, skipping(runner, settings), TEXT, settings))
        drafted = sum(len(event.drafted) + 1 for event in events if isinstance(event, Round))
        assert [counted.total() for counted in reads.values()] == [len(TEXT) + drafted] * LAYERS
        texts.append(ids_of(events))
    assert texts[0] == texts[1]


def test_the_copy_of_a_model_spread_over_devices_brings_its_logits_where_the_model_does(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accelerate's real hooks, and the CPU in place of several GPUs."""
    hooked, brought = dispatched(model), []
    post_forward = AlignDevicesHook.post_forward

    def watched(hook: Any, module: Any, output: Any) -> Any:
        if hook.io_same_device:
            brought.append((module, hook.input_device))
        return post_forward(hook, module, output)

    monkeypatch.setattr(AlignDevicesHook, "post_forward", watched)
    split = eager.Split.of(hooked, 1)
    runner = started(EagerRunner, hooked)
    with torch.inference_mode():
        split.first(torch.tensor([TEXT]), use_cache=False)
    assert brought == [(hooked, torch.device("cpu")), (split.first, torch.device("cpu"))]
    assert runner.device == torch.device("cpu")


# A whole run -----------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Counter[int]]:
    """How often each layer has read each position, counted where its keys and values are made."""
    counted: dict[Any, Counter[int]] = defaultdict(Counter)
    update = PreallocatedLayer.update

    def counting_update(layer: PreallocatedLayer, keys: Tensor, *rest: Any, **options: Any) -> Any:
        counted[id(layer)].update(range(layer.length, layer.length + keys.shape[-2]))
        return update(layer, keys, *rest, **options)

    def counting(through: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counting_through(runner: FusedRunner, x: Tensor, start: int, layers: range, *rest: Any) -> Tensor:
            for layer in layers:
                counted[layer].update(range(start, start + len(x)))
            return through(runner, x, start, layers, *rest)

        return counting_through

    monkeypatch.setattr(PreallocatedLayer, "update", counting_update)
    for runner in (FusedRunner, NativeRunner):
        monkeypatch.setattr(runner, "_through", counting(runner._through))
    return counted


def skipping(runner: Runner, settings: Settings) -> LayerSkip:
    return LayerSkip(runner, 2, rule_for(settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_layer_reads_every_token_once(
    make: Make, model: PreTrainedModel, temperature: float, reads: dict[Any, Counter[int]]
) -> None:
    settings = Settings(temperature=temperature, k=3, max_new_tokens=40)
    runner = make(model, len(TEXT) + 40)
    length, expected, outcomes = len(TEXT), Counter(range(len(TEXT))), set()
    for event in decode(runner, skipping(runner, settings), TEXT, settings):
        if isinstance(event, Round):
            expected.update(range(length - 1, length + len(event.drafted)))  # the pending token and all drafted ones
            outcomes |= {token.outcome for token in event.drafted}
        length += len(emitted_tokens(event))
    assert outcomes == {*DraftOutcome}
    assert len(reads) == LAYERS
    for counted in reads.values():
        assert counted == expected


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_text_is_the_targets_own(make: Make, model: PreTrainedModel, k: int) -> None:
    settings = Settings(k=k, max_new_tokens=40)
    runner = make(model, len(TEXT) + 40)
    events = list(decode(runner, skipping(runner, settings), TEXT, settings))
    plain = list(decode(EagerRunner(model, len(TEXT) + 40), NoDrafter(), TEXT, settings))
    assert ids_of(events) == ids_of(plain)


@pytest.mark.parametrize("family", sorted(eager.SIMPLE | {"gemma2", "bloom", "opt"}))
def test_every_family_goes_on_rightly(family: str, reads: dict[Any, Counter[int]]) -> None:
    """Those not known to be resumable read everything again: slower, and as right."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "vocab_size": MODEL_VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model(family, initializer_range=0.25, pad_token_id=None, **sizes, **heads)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    truth = fresh(model, TEXT)
    runner = EagerRunner(model, len(TEXT))
    runner.prefill(TEXT[:READ])
    runner.early_exit_forward(TEXT[READ:8], 2)
    assert same(runner.forward(TEXT[READ:]), truth[READ:])
    again = 0 if family in eager.SIMPLE else 2 * (8 - READ)
    assert sum(counted.total() for counted in reads.values()) == LAYERS * len(TEXT) + again
