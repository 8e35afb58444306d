"""The early exit: the first layers read ahead, and the whole model goes on where they ended."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdemo.decode import decode
from specdemo.drafters.layer_skip import LayerSkip
from specdemo.drafters.none import NoDrafter
from specdemo.events import Round, emitted_tokens
from specdemo.runners import Runner, eager
from specdemo.runners.cache import PreallocatedLayer
from specdemo.runners.eager import EagerRunner
from specdemo.runners.fused import FusedRunner
from specdemo.runners.layout import FusedModel, knows
from specdemo.runners.native import NativeRunner
from specdemo.types import Fate, Settings
from tests.unit.toys import ARCHITECTURES, MODEL_VOCAB, ids_of, native_runner, noise_for, tiny_model

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


def fresh(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """The logits after each token, computed without any cache, [T, V]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4, rtol=1e-4)


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
    assert same(runner.read_ahead(TEXT[READ : READ + 1], layers), truth[READ : READ + 1])
    assert same(runner.read_ahead(TEXT[READ + 1 :], layers), truth[READ + 1 :])
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
        runner.read_ahead([token], layers)
    assert same(runner.forward(TEXT[READ:10]), truth[READ:10])
    runner.read_ahead([1, 2], LAYERS - layers)  # another exit, and of no use
    assert same(runner.forward(TEXT[10:]), truth[10:])
    assert runner.length == len(TEXT)


def test_a_rollback_forgets_what_was_read_ahead(make: Make, model: PreTrainedModel) -> None:
    truth = fresh(model, TEXT)
    runner = started(make, model)
    runner.forward(TEXT[READ:8])
    runner.read_ahead(TEXT[8:10], 2)
    runner.rollback(6)
    assert runner.length == 6
    runner.read_ahead(TEXT[6:7], 2)
    assert same(runner.forward(TEXT[6:]), truth[6:])


def test_states_that_were_asked_for_are_whole(make: Make, model: PreTrainedModel) -> None:
    states = []
    for ahead in ([], TEXT[READ:8]):
        runner = make(model, len(TEXT))
        runner.keep_states([0, 2])
        runner.prefill(TEXT[:READ])
        for token in ahead:
            runner.read_ahead([token], 2)
        runner.forward(TEXT[READ:])
        assert runner.states is not None
        states.append(runner.states)
    assert same(*states)


def test_reading_ahead_past_the_capacity_is_an_error_and_never_silent(make: Make, model: PreTrainedModel) -> None:
    runner = started(make, model)
    runner.read_ahead([1] * (len(TEXT) + 4 - READ), 1)
    with pytest.raises(ValueError, match="room for 16 tokens"):
        runner.read_ahead([1], 1)


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_an_early_exit_must_be_a_proper_part(make: Make, model: PreTrainedModel, layers: int) -> None:
    with pytest.raises(ValueError, match="has 3 layers"):
        started(make, model).read_ahead([1], layers)


def test_the_parts_of_a_split_model_share_its_weights_and_leave_it_whole(model: PreTrainedModel) -> None:
    before, names = fresh(model, TEXT), set(model.state_dict())
    split = eager.Split.of(model, 1)
    own = {weight.data_ptr() for weight in model.parameters()}
    for part in (split.first, split.rest):
        assert {weight.data_ptr() for weight in part.parameters()} < own
    assert set(model.state_dict()) == names
    assert torch.equal(fresh(model, TEXT), before)


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
    return LayerSkip(runner, 2, settings, noise_for(settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_layer_reads_every_token_once(
    make: Make, model: PreTrainedModel, temperature: float, reads: dict[Any, Counter[int]]
) -> None:
    settings = Settings(temperature=temperature, k=3, max_new_tokens=40)
    runner = make(model, len(TEXT) + 40)
    length, expected, fates = len(TEXT), Counter(range(len(TEXT))), set()
    for event in decode(runner, skipping(runner, settings), TEXT, settings):
        if isinstance(event, Round):
            expected.update(range(length - 1, length + len(event.drafted)))  # the pending token and all drafted ones
            fates |= {token.fate for token in event.drafted}
        length += len(emitted_tokens(event))
    assert fates == {*Fate}
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


@pytest.mark.parametrize("family", sorted(eager.RESUMABLE | {"gemma2", "bloom"}))
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
    runner.read_ahead(TEXT[READ:8], 2)
    assert same(runner.forward(TEXT[READ:]), truth[READ:])
    again = 0 if family in eager.RESUMABLE else 2 * (8 - READ)
    assert sum(counted.total() for counted in reads.values()) == LAYERS * len(TEXT) + again
