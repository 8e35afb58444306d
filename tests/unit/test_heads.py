"""Trained heads: what they draft is what they were trained to give, and their files and their training are sound."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdemo.decoding.parts import DrafterParts
from specdemo.drafters.chain import NextPass
from specdemo.drafters.heads import drafter as head_drafter
from specdemo.drafters.heads.backends import NativeBackend
from specdemo.drafters.heads.files import load_head, save_head
from specdemo.drafters.heads.medusa import MedusaHead
from specdemo.drafters.heads.networks import BlockHead, EagleHead, Head, LayeredHead
from specdemo.drafters.heads.ready import LayeredPasses, Packed, ReadyHead
from specdemo.engines.cpu.library import PackedLinear, library_for
from specdemo.engines.linear import Linear
from specdemo.engines.passes import alone, answered
from specdemo.engines.quantized import GROUP, quantized
from specdemo.engines.runner import Pass
from specdemo.errors import BadInput
from specdemo.models.presets import find_preset
from specdemo.settings import MAX_K, Settings
from specdemo.system.hardware import UNQUANTIZED
from specdemo.tokens import Draft
from tests.harness.classes import Eagle, HeadDrafter
from tests.harness.doubles import MODEL_VOCAB, accepting, proposed
from tests.harness.engines import tiny_model
from tests.harness.toys import ModelToy, head_after
from tools.train.data import ASSISTANT
from tools.train.head import TrainingPlan, judge, train_head
from tools.train.outputs import OUTPUTS
from tools.train.states import Shard, Text, conversations, default_layers, read_states

from ..sentences import refuses

KINDS: list[type[Head]] = [EagleHead, BlockHead, MedusaHead]
SETTINGS = Settings(temperature=0)
LAYERS = (0, 1, 2)


def text_of(ids: Sequence[int], model: Any, layers: tuple[int, ...]) -> Text:
    """One conversation, as the training sees it."""
    tokens = torch.tensor([ids])
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 0] = True
    states = read_states(model, layers, tokens, starts).clone()
    embedded = model.get_input_embeddings().weight.detach()[tokens]
    return Text(tokens, torch.full_like(tokens, ASSISTANT), *conversations(starts), embedded, states)


def logits_of(drafter: HeadDrafter, context: Sequence[int], forced: Sequence[int]) -> list[Tensor]:
    """What a drafter has for each place of a draft, if `forced` is what it draws."""
    seen: list[Tensor] = []

    def take(next_logits: NextPass, k: int, *rest: object) -> Generator[Pass, Tensor, Draft]:
        drawn = torch.tensor(forced).split(1)
        seen.extend(alone(answered(next_logits(drawn[:place])))[0] for place in range(k))
        yield from ()
        return Draft(list(forced))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_drafter, "draw_chain", take)
        proposed(drafter, context, len(forced))
    return seen


def rounds_of(drafter: HeadDrafter, ids: Sequence[int], length: int, accepted: Sequence[int]) -> Iterator[list[Tensor]]:
    """The logits of a draft in rounds that draft the next four of `ids`, of which so many are accepted."""
    for count in accepted:
        forced = ids[length + 1 : length + 5]
        yield logits_of(drafter, ids[: length + 1], forced)
        drafter.runner.forward([ids[length], *forced])
        length += count + 1
        drafter.runner.keep(range(count + 1))
        drafter.observe(accepting(count))


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_gives_what_training_compared_with_the_target(kind: type[Head]) -> None:
    model = tiny_model("llama")
    toy = ModelToy(model=model)
    ids = torch.randint(0, MODEL_VOCAB, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    head, k = toy.heads[kind.kind].head, 4
    text = text_of(ids, model, head.shape.state_layers)
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = list(OUTPUTS[kind.kind](head, text, k))
        trained = {}  # column of the token before, place in the draft -> logits
        for place, (x, _row, column) in enumerate(outputs):
            logits = toy.heads[kind.kind].logits(x) + head.bigram_bias(text.embedded[0, column])
            trained.update({(int(at), place): row for at, row in zip(column, logits, strict=True)})

    # The same text as a run would see it: a prompt, then rounds in which 2, 0, 4 and 1 tokens were accepted.
    length, compared = 9, 0
    drafter = head_after(toy, kind.kind, ids[: length + 1], SETTINGS)
    for drafted in rounds_of(drafter, ids, length, (2, 0, 4, 1)):
        length = drafter.runner.length
        for place, logits in enumerate(drafted):
            if (length + place, place) in trained:  # blocks are put at random places
                torch.testing.assert_close(logits, trained[length + place, place], rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared >= 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_is_read_as_far_back_as_the_window_reaches(kind: type[Head]) -> None:
    window = 128
    ids = torch.randint(0, MODEL_VOCAB, (window + 40,), generator=torch.Generator().manual_seed(3)).tolist()
    seen = []
    for cut in (0, 20):  # the head's positions are relative, so dropping what it cannot reach changes nothing
        toy = ModelToy(model=tiny_model("llama"), window=window)
        runner = toy.target_runner(256)
        drafter = toy.drafter(kind.kind, runner, SETTINGS)
        assert isinstance(drafter, HeadDrafter)
        runner.prefill(ids)
        assert runner.hidden_states is not None
        runner.hidden_states = runner.hidden_states[cut:]
        drafter.observe(accepting(0))
        seen.append(logits_of(drafter, [*ids, 1], [2, 3, 4]))
    for whole, cut_off in zip(*seen, strict=True):
        torch.testing.assert_close(whole, cut_off, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "kept"), [(10, 10), (30, 16)])
def test_of_a_long_prompts_states_only_those_in_the_window_stay_in_memory(
    kind: type[Head], length: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first draft, which K = 0 may put off for a whole run; the runner's own go with its next pass."""
    toy = ModelToy(model=tiny_model("llama"))
    runner = toy.target_runner(64)
    drafter = toy.drafter(kind.kind, runner, SETTINGS)
    assert isinstance(drafter, HeadDrafter)
    head = drafter.ready.head
    if isinstance(head, LayeredHead):
        monkeypatch.setattr(head, "shape", replace(head.shape, window=16))
    else:
        kept = 1
    runner.prefill(list(range(length)))
    assert runner.hidden_states is not None
    drafter.observe(accepting(0))
    (states,) = drafter._unread
    assert torch.equal(states, runner.hidden_states[-kept:])
    assert states.untyped_storage().nbytes() == kept * runner.hidden_states.shape[1] * states.itemsize


def by_library_alone(drafter: HeadDrafter) -> bool:
    """Whether the C library runs a head's layers, or all products of one that has no layers."""
    head, output = drafter.ready.head, drafter.ready._outputs[0]
    if isinstance(drafter._passes, LayeredPasses):
        return isinstance(drafter._passes.backend, NativeBackend)
    steps = [module.step for module in head.modules() if isinstance(module, Packed)]
    return {type(step.multiply) for step in [*steps, output] if isinstance(step, Linear)} == {PackedLinear}


@pytest.mark.skipif(library_for(torch.float32) is None, reason="no C library here")
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_drafts_what_torchs_operations_do(kind: type[Head], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a text that is longer than the window, in rounds in which all, some or none were accepted."""
    ids = torch.randint(0, MODEL_VOCAB, (120,), generator=torch.Generator().manual_seed(3)).tolist()
    seen: list[list[Tensor]] = []
    for by_library in (True, False):
        if not by_library:
            monkeypatch.setattr("specdemo.engines.linear.library_for", lambda dtype: None)
        toy = ModelToy(model=tiny_model("llama"), window=24)
        drafter = head_after(toy, kind.kind, ids[:21], SETTINGS)
        assert by_library_alone(drafter) == by_library
        seen.append([logits for drafted in rounds_of(drafter, ids, 20, (2, 0, 4, 1) * 8) for logits in drafted])
    torch.testing.assert_close(torch.stack(seen[0]), torch.stack(seen[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(library_for(torch.float32) is None, reason="no C library here")
@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_the_weights_of_a_decoder_layer_are_packed_once(kind: str) -> None:
    """The library reads those that torch's operations read."""
    ready = ModelToy(model=tiny_model("llama")).heads[kind]
    backend = ready.backend(8)
    assert isinstance(backend, NativeBackend)
    held = {id(weight) for weight in backend.layers._held}
    for layer in ready.head.decoder_layers():
        for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
            assert id(product.step.multiply) in held


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_target_in_float16_a_head_rounds_its_weights_and_computes_in_float32(kind: type[Head]) -> None:
    torch.manual_seed(0)
    shape = ModelToy(model=tiny_model("llama")).heads[kind.kind].head.shape
    head, embedding = kind(shape), torch.randn(shape.vocab_size, shape.hidden).half()
    rounded = copy.deepcopy(head).half().float()
    halves, wide = ReadyHead(head, embedding, embedding), ReadyHead(rounded, embedding.float(), embedding.float())
    states = torch.randn(3, len(shape.state_layers) * shape.hidden)
    outcomes = []
    for ready in (halves, wide):
        x, embedded = ready.head.fused(states), ready.embed([1, 2])
        outcomes.append([x, ready.logits(x), embedded, torch.as_tensor(ready.head.bigram_bias(embedded))])
    for ours, exact in zip(*outcomes, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact)


@pytest.mark.skipif(library_for(UNQUANTIZED, quantized=True) is None, reason="no C library here")
@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_quantized_target_a_head_has_weights_of_eight_bits(kind: type[Head]) -> None:
    torch.manual_seed(0)
    shape = ModelToy(model=tiny_model("llama")).heads[kind.kind].head.shape
    head, embedding = kind(shape).half().float(), quantized(torch.randn(shape.vocab_size, shape.hidden), 8)
    exact = copy.deepcopy(head)
    for part in exact.modules():
        if isinstance(part, nn.Linear) and part.in_features % GROUP == 0:
            part.weight.data = quantized(part.weight, 8).float()
    ours, wide = ReadyHead(head, embedding, embedding), ReadyHead(exact, embedding.float(), embedding.float())
    steps = [part.step for part in ours.head.modules() if isinstance(part, Packed) and isinstance(part.step, Linear)]
    eights = [getattr(step.multiply, "code_bytes", 0) == 1 for step in steps]
    assert any(eights)
    assert all(eights) or kind is MedusaHead  # its bigram term reads few numbers
    states = torch.randn(3, len(shape.state_layers) * shape.hidden)
    for made in (lambda ready: ready.head.fused(states), lambda ready: ready.logits(ready.embed([1, 2]))):
        product, of_numbers = made(ours), made(wide)
        assert (product - of_numbers).abs().max() < 0.03 * of_numbers.abs().max()  # inputs have 8 bits too


# Files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_comes_back_from_its_file_in_bfloat16(kind: type[Head], tmp_path: Path) -> None:
    head = ModelToy(model=tiny_model("llama")).heads[kind.kind].head
    head = kind(head.shape)
    save_head(head, tmp_path / "a.safetensors", {"made": "here"})
    again = load_head(kind, tmp_path / "a.safetensors")
    assert again.shape == head.shape
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor.bfloat16().to(tensor.dtype))
    assert json.loads((tmp_path / "a.json").read_text()) == {"made": "here"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_head_and_one_of_an_older_file_have_their_sizes(kind: type[Head]) -> None:
    """Older files have the sizes of a block head for Medusa too, as the shipped one has, or Medusa's for the others."""
    shipped = find_preset("smollm2-135m").heads[kind.kind]
    assert isinstance(shipped, Path)
    shape = load_head(kind, shipped).shape
    assert shape.vocab_size == 49152
    assert shape.most_drafted == (3 if kind is MedusaHead else MAX_K)
    if kind is not MedusaHead:
        assert kind.shape_from({**asdict(shape), "blocks": 0}) == shape


def test_a_file_that_is_no_such_head_is_refused_in_words(tmp_path: Path) -> None:
    head = EagleHead(ModelToy(model=tiny_model("llama")).heads["eagle"].head.shape)
    path = tmp_path / "a.safetensors"
    save_head(head, path, {})
    with refuses(BadInput, "a.safetensors block"):
        load_head(BlockHead, path)
    with refuses(BadInput, "b.safetensors read"):
        load_head(EagleHead, tmp_path / "b.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with refuses(BadInput, "a.safetensors read"):
        load_head(EagleHead, path)


def test_a_head_of_another_target_is_refused_in_words(tmp_path: Path) -> None:
    weight = tiny_model("llama").get_output_embeddings().weight.detach()
    parts = DrafterParts((weight, weight), head_files={"eagle": tmp_path / "a.safetensors"})
    shape = ModelToy(model=tiny_model("llama")).heads["eagle"].head.shape
    save_head(EagleHead(replace(shape, vocab_size=7, draft_vocab=5)), tmp_path / "a.safetensors", {})
    with refuses(BadInput, "7 32 61"):
        Eagle.make_ready(parts)
    save_head(EagleHead(shape), tmp_path / "a.safetensors", {})
    assert Eagle.make_ready(parts) is Eagle.make_ready(parts)


# Training --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random text."""
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(0)
    write_waves(folder, lambda: torch.randint(0, MODEL_VOCAB, (16, 40), generator=generator), generator)
    return folder


@pytest.fixture(scope="module")
def circles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that goes round through a few tokens, so that there is something to learn of a random target."""
    folder = tmp_path_factory.mktemp("circles")
    generator = torch.Generator().manual_seed(0)
    begins = lambda: torch.randint(0, 6, (16, 1), generator=generator)  # noqa: E731
    write_waves(folder, lambda: (begins() + torch.arange(40)) % 6, generator)
    return folder


def write_waves(folder: Path, tokens: Callable[[], Tensor], generator: torch.Generator) -> None:
    """Two waves of text, 16 rows of 40 tokens each: one to train on, one held out."""
    for name in ("train-00000", "heldout-00001"):
        starts = torch.rand(16, 40, generator=generator) < 0.05
        starts[:, 0] = True
        block = {
            "tokens": tokens().int(),
            "roles": torch.full((16, 40), ASSISTANT, dtype=torch.uint8),
            "starts": starts,
        }
        save_file(block, folder / f"{name}.safetensors", metadata={"provenance": json.dumps({"seed": 0})})


PLAN = TrainingPlan("eagle", tokens=40 * 8 * 48, steps=3, rate=3e-2, draft_vocab=MODEL_VOCAB, mlp=48)


OTHERS = replace(PLAN, kind="block", depth=2), replace(PLAN, kind="medusa", rate=0.1)
PLANS = [PLAN, *(pytest.param(plan, marks=pytest.mark.slow) for plan in OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=["eagle", "block", "medusa"])
def test_a_head_learns_and_says_how_well(plan: TrainingPlan, circles: Path, tmp_path: Path) -> None:
    out = tmp_path / "head.safetensors"
    read: list[int] = []
    train_head(
        tiny_model("llama"),
        plan,
        circles,
        out,
        {"made": "for a test"},
        states_folder=tmp_path,
        every=8,
        progress=read.append,
    )
    card = json.loads(out.with_suffix(".json").read_text())
    first, *_, last = card["curve"]
    assert last["loss"][0] < math.log(MODEL_VOCAB) - 0.3  # of a head that takes every token for as likely
    for share in ("agreement", "overlap"):
        assert last[share][0] > first[share][0] + 0.1
    assert last["tokens_per_round"] == pytest.approx(1 + sum(accumulate(last["agreement"], mul)), abs=1e-3)
    assert last["tokens"] == sum(read) == plan.tokens
    assert all(0 <= share <= 1 for share in last["agreement"] + last["overlap"])
    assert card["made"] == "for a test"
    assert card["plan"]["kind"] == plan.kind
    assert not list(tmp_path.glob("*.checkpoint"))


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_trained_head(kind: type[Head], text: Path, tmp_path: Path) -> None:
    """It begins where the first ended: with a rate of next to nothing, it ends there too."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    plan = TrainingPlan(kind.kind, 300, rows=2, steps=2, rate=0.02, draft_vocab=24, mlp=32)
    train_head(tiny_model("llama"), plan, text, first, {})
    go_on = replace(plan, tokens=1, rate=1e-9, mlp=48)
    train_head(tiny_model("llama"), go_on, text, second, {}, begin_with=first)
    one, two = (load_head(kind, path) for path in (first, second))
    assert torch.equal(one.token_ids, two.token_ids)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    card = json.loads(second.with_suffix(".json").read_text())
    assert card["plan"]["mlp"] == json.loads(first.with_suffix(".json").read_text())["plan"]["mlp"]
    assert card["optimizer_steps"] == 1
    before = json.loads(first.with_suffix(".json").read_text())
    assert card["began_with"] == {**{name: before[name] for name in ("plan", "text", "curve")}, "began_with": None}
    start, end = card["curve"]
    assert start["tokens"] == 0
    for one, other in ((start, before["curve"][-1]), (end, start)):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.02)
    other = "block" if kind is EagleHead else "eagle"
    with refuses(BadInput, other):
        train_head(tiny_model("llama"), replace(go_on, kind=other), text, second, {}, begin_with=first)


def test_a_medusa_head_begins_with_the_bigrams_of_a_block_head(text: Path, tmp_path: Path) -> None:
    block, out = tmp_path / "block.safetensors", tmp_path / "medusa.safetensors"
    plan = TrainingPlan("block", 600, rows=2, steps=2, rate=0.02, draft_vocab=24, mlp=32)
    train_head(tiny_model("llama"), plan, text, block, {})
    little = replace(plan, kind="medusa", tokens=1, rate=1e-9, draft_vocab=30)
    train_head(tiny_model("llama"), little, text, out, {}, begin_with=block)
    given, taken = load_head(BlockHead, block).state_dict(), load_head(MedusaHead, out).state_dict()
    near = partial(torch.testing.assert_close, atol=2e-3, rtol=1e-2)
    near(given["before.weight"], taken["before.weight"])
    after = dict(zip(given["token_ids"].tolist(), given["after.weight"], strict=True))
    for token, weight in zip(taken["token_ids"].tolist(), taken["after.weight"], strict=True):
        near(weight, after.pop(token, torch.zeros(64)))
    assert not after  # those that only the block head can draft
    card = json.loads(out.with_suffix(".json").read_text())
    assert (card["plan"]["draft_vocab"], card["began_with"]["plan"]["kind"]) == (30, "block")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_judged_as_it_was_while_it_trained(kind: type[Head], text: Path, tmp_path: Path) -> None:
    model, out = tiny_model("llama"), tmp_path / "head.safetensors"
    train_head(model, TrainingPlan(kind.kind, 600, rows=2, steps=2, rate=0.02, draft_vocab=24, mlp=32), text, out, {})
    last = json.loads(out.with_suffix(".json").read_text())["curve"][-1]
    found = judge(model, kind, out, text)  # the file has half the digits
    assert found == {name: pytest.approx(last[name], abs=0.02) for name in found}
    with refuses(BadInput, tmp_path.name):
        judge(model, kind, out, tmp_path)
    if kind is EagleHead:
        assert judge(model, kind, out, text, draft_vocab=24) == found
        few, all_ = (judge(model, kind, out, text, draft_vocab=size)["agreement"][0] for size in (6, MODEL_VOCAB))
        assert few < all_
    else:
        with refuses(BadInput, "vocabulary"):
            judge(model, kind, out, text, draft_vocab=24)


def test_targets_and_text_that_no_head_is_trained_with_are_refused_in_words(text: Path, tmp_path: Path) -> None:
    with refuses(BadInput, "gpt2."):
        train_head(tiny_model("gpt2"), PLAN, text, tmp_path / "a.safetensors", {})
    with refuses(BadInput, tmp_path.name):
        train_head(tiny_model("llama"), PLAN, tmp_path, tmp_path / "a.safetensors", {})


def test_a_head_reads_the_layers_it_is_told_to(text: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    last = model.config.num_hidden_layers - 1
    few = replace(PLAN, tokens=8 * 48, state_layers=(last,))
    train_head(model, few, text, tmp_path / "head.safetensors", {})
    assert load_head(EagleHead, tmp_path / "head.safetensors").shape.state_layers == (last,)
    for wrong in ((0,), (last + 1, last), (-1, last)):
        with refuses(BadInput, f"0 {last}"):
            train_head(model, replace(few, state_layers=wrong), text, tmp_path / "other.safetensors", {})


def test_states_that_were_kept_are_those_that_are_computed(text: Path, tmp_path: Path) -> None:
    """Those of the default layers also serve a head that reads fewer."""
    model, path, rows = tiny_model("llama"), text / "train-00000.safetensors", torch.tensor([3, 1])
    for layers in (default_layers(model), default_layers(model), (2,)):  # once written, twice read
        kept = Shard(model, layers, path, tmp_path).read(rows).states
        torch.testing.assert_close(kept, Shard(model, layers, path, None).read(rows).states)
    assert len(list(tmp_path.iterdir())) == 1
    block = load_file(path)
    save_file({**block, "tokens": block["tokens"].flip(0)}, tmp_path / path.name)
    with refuses(BadInput, "states"):
        Shard(model, default_layers(model), tmp_path / path.name, tmp_path)


def test_a_conversation_does_not_see_the_one_before_it(text: Path) -> None:
    model = tiny_model("llama")
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 5]] = True
    tokens = torch.arange(12)[None]
    packed = read_states(model, LAYERS, tokens, starts)
    alone = read_states(model, LAYERS, tokens[:, 5:], starts[:, 5:])
    torch.testing.assert_close(packed[:, 5:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_ends_when_its_time_is_up(text: Path, tmp_path: Path) -> None:
    plan, out = replace(PLAN, tokens=10**9, minutes=0.01), tmp_path / "head.safetensors"
    train_head(tiny_model("llama"), plan, text, out, {})
    card = json.loads(out.with_suffix(".json").read_text())
    assert 0 < card["optimizer_steps"] < 10**5
    assert card["plan"]["minutes"] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=["eagle", "block", "medusa"])
def test_training_goes_on_from_its_checkpoint(plan: TrainingPlan, text: Path, tmp_path: Path) -> None:
    model, plan = tiny_model("llama"), replace(plan, tokens=plan.tokens // 2)
    whole, halves = tmp_path / "whole.safetensors", tmp_path / "halves.safetensors"
    train_head(model, plan, text, whole, {}, every=8)

    class Stopped(Exception):
        pass

    def stop(_line: str) -> None:
        raise Stopped

    with pytest.raises(Stopped):  # after the first validation, whose checkpoint is written later
        train_head(model, plan, text, halves, {}, every=8, log=stop)
    with refuses(BadInput, "plan"):
        train_head(model, plan, text, halves, {}, every=8, begin_with=whole)
    read: list[int] = []
    train_head(model, plan, text, halves, {}, every=8, progress=read.append)
    assert 0 < sum(read) < plan.tokens
    first, second = (json.loads(path.with_suffix(".json").read_text()) for path in (whole, halves))
    assert first["curve"] == second["curve"]
