"""Heads of others: they draft what their formats say, for the target that they were made for. Others are refused.

No published head was run here: there is no hub. These are tiny random ones in the published formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdemo.decoding.parts import DrafterParts
from specdemo.drafters import chain
from specdemo.drafters.chain import draw_chain
from specdemo.drafters.heads import drafter as head_drafter
from specdemo.drafters.heads import peagle
from specdemo.drafters.heads.backends import NativeBackend, TorchBackend
from specdemo.drafters.heads.block import Block
from specdemo.drafters.heads.files import load_published
from specdemo.drafters.heads.medusa import Medusa
from specdemo.drafters.heads.networks import BlockHead, EagleHead
from specdemo.drafters.heads.peagle import PEagle
from specdemo.drafters.heads.published_shape import ShapeReader, TargetSizes, format_of
from specdemo.engines.cpu.library import library_for
from specdemo.engines.linear import Linear
from specdemo.engines.passes import alone, answered
from specdemo.engines.quantized import widened
from specdemo.settings import Settings
from tests.harness.classes import Eagle, HeadDrafter
from tests.harness.doubles import MODEL_VOCAB, accepting, ids_of, proposed
from tests.harness.engines import tiny_model
from tests.harness.texts import decode
from tests.harness.toys import ModelToy, head_after

from ..fakes import published
from ..fakes.published import HIDDEN, LAYERS, MASK, Config, Tensors, write

Drafts = Callable[..., tuple[list[int], Tensor]]
TARGET = TargetSizes(MODEL_VOCAB, HIDDEN, LAYERS)

# The format, the places in transformers' hidden states that its heads read, whether it drafts from the anchor.
EAGLES: dict[str, tuple[Callable[[int], tuple[Config, Tensors]], list[int]]] = {
    "EAGLE-3": (published.eagle3, [2, 3, 3]),
    "EAGLE 3.1 of SpecForge": (published.specforge31, [1, 3, 5]),
    "narrow EAGLE-3": (published.narrow_eagle3, [2, 3, 3]),
    "EAGLE-3 of DeepSpec": (published.deepspec_eagle3, [1, 2, 3, 4, 5]),
    "speculators eagle3": (published.library_eagle3, [1, 3, 5, 4]),
}
BLOCKS: dict[str, tuple[Callable[[int], tuple[Config, Tensors]], list[int], bool]] = {
    "DFlash": (published.dflash, [2, 3, 5], False),
    "speculators dflash": (published.library_dflash, [2, 4], False),
    "DFlash 2": (published.dflash2, [2, 3, 5], False),
    "speculators dflash2": (published.library_dflash2, [2, 4], False),
    "DSpark": (published.dspark, [2, 3, 5], True),
    "DFlash of DeepSpec": (published.deepspec_dflash, [2, 3, 5], True),
    "DSpark of SpecForge": (published.specforge_dspark, [2, 3, 5], False),
    "speculators dspark": (published.library_dspark, [2, 4], True),
    "Medusa": (published.medusa, [LAYERS], False),
    "P-EAGLE": (published.peagle, [2, 3, 3], False),
    "speculators peagle": (published.library_peagle, [1, 3, 5, 4], False),
}
FORMATS = [*EAGLES, *BLOCKS]


@cache
def target() -> PreTrainedModel:
    """The tiny target; its final norm has weights, after which Medusa's heads read the state."""
    model = deepcopy(tiny_model("qwen3", layers=LAYERS))
    with torch.no_grad():
        model.base_model.norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
    return model


def made(name: str) -> tuple[Config, Tensors, type[HeadDrafter], Drafts]:
    """A head in a format, its drafter, and the function that says what it drafts after a text."""
    model = target()
    if name in EAGLES:
        make, numbers = EAGLES[name]
        config, tensors = make(MODEL_VOCAB)
        return config, tensors, Eagle, lambda ids, k: published.eagle_drafts(model, config, tensors, numbers, ids, k)
    make, numbers, anchored = BLOCKS[name]
    config, tensors = make(MODEL_VOCAB)
    stated = {**config, "anchored": anchored}
    kind = {"Medusa": Medusa, "P-EAGLE": PEagle, "speculators peagle": PEagle}.get(name, Block)
    return config, tensors, kind, lambda ids, k: published.block_drafts(model, stated, tensors, numbers, ids, k)


def toy_with(folder: Path, kind: type[HeadDrafter], model: Any = None) -> ModelToy:
    """A tiny target with the head in a folder."""
    model = model or target()
    embeddings = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    files, norm = {kind.network.kind: folder}, model.base_model.norm
    final_norm = norm.weight.detach(), norm.variance_epsilon
    parts = DrafterParts(embeddings, head_files=files, layers=model.config.num_hidden_layers, final_norm=final_norm)
    toy = ModelToy(model=model)
    toy.heads = {kind.network.kind: kind.make_ready(parts)}
    return toy


def drafts_of(
    toy: ModelToy, kind: type[HeadDrafter], monkeypatch: pytest.MonkeyPatch, k: int, expected: Drafts
) -> list[tuple[list[int], list[int], Tensor, Tensor]]:
    """Rounds in which 2, 0, all and 1 tokens were accepted: what was drafted and should be, with both logits."""
    seen: list[Tensor] = []

    def watched(next_logits: Any, *rest: Any) -> Any:
        def watching(drawn: Sequence[Tensor]) -> Tensor:
            seen.append(alone(answered(next_logits(drawn)))[0].float())
            return seen[-1][None]

        return draw_chain(watching, *rest)

    for module in (chain, head_drafter):
        monkeypatch.setattr(module, "draw_chain", watched)
    text = torch.randint(0, MODEL_VOCAB, (11,), generator=torch.Generator().manual_seed(3)).tolist()
    drafter, rounds = head_after(toy, kind.name, text, Settings(temperature=0)), []
    for accepted in (2, 0, k, 1):
        seen.clear()
        drafted = torch.as_tensor(proposed(drafter, text, k).token_ids).tolist()
        wanted, logits = expected(text, k)
        rounds.append((drafted, wanted, torch.stack(seen[-len(drafted) :]), logits))
        drafter.runner.forward([text[-1], *drafted])
        text += [*drafted[:accepted], (drafted[0] + 5) % MODEL_VOCAB]
        drafter.runner.keep(range(accepted + 1))
        drafter.observe(accepting(accepted))
    drafter.release()
    return rounds


def check(rounds: list[tuple[list[int], list[int], Tensor, Tensor]]) -> None:
    for drafted, wanted, logits, reference in rounds:
        torch.testing.assert_close(logits, reference, rtol=1e-3, atol=1e-3)
        assert drafted == wanted


# What they draft -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("engine", ["torch", "C", "captured"])
def test_a_head_drafts_what_its_format_says(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "C" and library_for(torch.float32) is None:
        pytest.skip("no C library here")
    if engine != "C":
        monkeypatch.setattr("specdemo.engines.linear.library_for", lambda dtype: None)
    config, tensors, kind, expected = made(name)
    toy = toy_with(write(tmp_path / "head", config, tensors), kind)
    ready = toy.heads[kind.network.kind]
    if engine == "captured":
        kind.capture(ready, lambda work: work)
        assert ready.slots is not None
    elif kind is not Medusa:  # which has no layers, only products
        in_library = engine == "C" and "2" not in name and kind is not PEagle  # which has no convolutions
        assert isinstance(ready.backend(8), NativeBackend if in_library else TorchBackend)
    check(drafts_of(toy, kind, monkeypatch, 4 if kind is Eagle else ready.head.shape.most_drafted, expected))


@pytest.mark.parametrize("most_read", [4, 512])
def test_of_a_draft_of_p_eagle_no_mask_stays_in_its_cache(
    most_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some rounds the entries are those of one pass over the text; a long prompt is read in parts."""
    monkeypatch.setattr(peagle, "MOST_READ", most_read)
    config, tensors, kind, expected = made("P-EAGLE")
    toy = toy_with(write(tmp_path / "it", config, tensors), kind)
    text, passes, entries, run = list(range(11)), list[int](), list[Tensor](), TorchBackend.run

    def counted(self: TorchBackend, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        passes.append(len(x))
        return run(self, x, *rest, **named)

    monkeypatch.setattr(TorchBackend, "run", counted)
    drafter = head_after(toy, kind.name, text, Settings(temperature=0))
    for accepted in (0, 3, 1):
        drafted = torch.as_tensor(proposed(drafter, text, 3).token_ids).tolist()
        assert drafted == expected(text, 3)[0]
        drafter.runner.forward([text[-1], *drafted])
        text += [*drafted[:accepted], 5]
        drafter.runner.keep(range(accepted + 1))
        drafter.observe(accepting(accepted))
    assert passes == ([4, 4, 4, 3, 6] if most_read == 4 else [12, 3, 6])  # 10, 1 and 4 states, and two masks in each
    for one in (drafter, head_after(toy, kind.name, text, Settings(temperature=0))):
        proposed(one, text, 5)
        entries.append(one._passes.backend.entries[..., : len(text) - 1, :].clone())
        one.release()
    torch.testing.assert_close(*entries)


@pytest.mark.parametrize("name", ["P-EAGLE", "speculators peagle"])
def test_p_eagle_tells_what_it_drew_from(name: str, tmp_path: Path) -> None:
    config, tensors, kind, expected = made(name)
    toy, text = toy_with(write(tmp_path / "it", config, tensors), kind), list(range(11))
    drafter = head_after(toy, kind.name, text, Settings(temperature=0.8, k=4, seed=1, rule="rejection"))
    probs, known = proposed(drafter, text, 4).probs, torch.arange(40) + tensors["d2t"]
    assert probs is not None
    assert probs.sum(-1).tolist() == pytest.approx([1.0] * 4)
    torch.testing.assert_close(probs[:, known], (expected(text, 4)[1] / 0.8).softmax(-1), rtol=1e-3, atol=1e-4)
    drafter.release()


def test_a_block_drafts_no_more_than_it_has_places_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("DFlash", 4), ("DSpark", 5)):
        config, tensors, kind, expected = made(name)
        toy = toy_with(write(tmp_path / name, config, tensors), kind)
        for k in (2, most, 9):
            rounds = drafts_of(toy, kind, monkeypatch, k, expected)
            check(rounds)
            assert {len(row[0]) for row in rounds} == {min(k, most)}


def test_a_pickle_and_parts_are_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, kind, expected = made("EAGLE-3")
    folder = write(tmp_path / "pickled", config, tensors, pickle=True)
    check(drafts_of(toy_with(folder, kind), kind, monkeypatch, 3, expected))
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    folder = tmp_path / "parts"
    for file, some in parts.items():
        write(folder, config, {name: tensors[name] for name in some})
        (folder / "model.safetensors").rename(folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check(drafts_of(toy_with(folder, kind), kind, monkeypatch, 3, expected))


def test_layers_that_a_configuration_does_not_name_are_those_of_the_formats() -> None:
    """EAGLE-3's numbers 2, L // 2 and L - 3 are places in hidden_states, DFlash's are spread from 1 to L - 3."""
    target = TargetSizes(MODEL_VOCAB, HIDDEN, 36)
    eagle, flash = published.eagle3(MODEL_VOCAB)[0], published.dflash(MODEL_VOCAB, num_target_layers=36)[0]
    flash["dflash_config"] = {"mask_token_id": MASK}
    sizes = {"sliding_window": None, "layer_types": None}
    for config, layers in (
        (eagle, (1, 17, 32)),
        ({**flash, **sizes, "num_hidden_layers": 5}, (1, 9, 17, 25, 33)),
        ({**flash, **sizes, "num_hidden_layers": 1}, (18,)),
    ):
        found = format_of(config, "it")
        assert ShapeReader("it", found, config, target).shape(()).state_layers == layers


def test_dflash_2_draws_from_its_candidates_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rule knows of a draft is what it was drawn from: the edges from the token drawn before to candidates."""
    config, tensors, kind, expected = made("DFlash 2")
    toy, text = toy_with(write(tmp_path / "it", config, tensors), kind), list(range(11))
    rounds = drafts_of(toy, kind, monkeypatch, 4, expected)
    assert {int(row.isfinite().sum()) for _, _, logits, _ in rounds for row in logits} == {6}
    without = {name: 0 * tensor if "codebook" in name else tensor for name, tensor in tensors.items()}
    stated = {**config, "anchored": False}, [2, 3, 5]
    assert published.block_drafts(target(), stated[0], without, stated[1], text, 4)[0] != expected(text, 4)[0]
    greedy = 0
    for seed in range(5):
        drafter = head_after(toy, kind.name, text, Settings(temperature=0.8, k=4, seed=seed, rule="rejection"))
        draft = proposed(drafter, text, 4)
        drawn = torch.as_tensor(draft.token_ids).tolist()
        best, logits = published.block_drafts(target(), stated[0], tensors, stated[1], text, 4, drawn)
        assert draft.probs is not None
        torch.testing.assert_close(draft.probs, (logits / 0.8).softmax(-1), rtol=1e-3, atol=1e-4)
        greedy += drawn == best
        drafter.release()
    assert greedy < 5


def test_dflash_2_can_be_captured(tmp_path: Path) -> None:
    """No operation of its own reads a number on the host: they run where there are no numbers."""
    config, tensors, _, _ = made("DFlash 2")
    head = load_published(write(tmp_path / "it", config, tensors), BlockHead, TARGET, weights=False)
    x, rotation = torch.zeros(5, HIDDEN, device="meta"), torch.zeros(5, 8, device="meta")
    layer = head.decoder_layers()[1]
    q, k, v = layer.attention_inputs(x, None, (rotation, rotation), 5)
    assert (q.shape, k.shape, v.shape) == ((4, 5, 8), (2, 5, 8), (2, 5, 8))
    outputs = head.norm(layer.finish(x, q))[1:]
    assert head.selector is not None
    found = head.selector.candidates(outputs @ torch.zeros(HIDDEN, MODEL_VOCAB, device="meta"), outputs)
    unary, tokens, gate = (rows[:1] for rows in found)
    logits = head.selector.logits(unary, tokens, gate, torch.zeros(1, device="meta").long())
    assert (logits.shape, logits.device.type) == ((1, MODEL_VOCAB), "meta")


def test_tokens_that_are_not_in_order_are_brought_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGLE-3", "speculators dspark"):
        config, tensors, kind, expected = made(name)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        ids = (torch.arange(40) + tensors["d2t"])[order]
        mixed = {**tensors, "d2t": ids - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order]}
        if "markov_head.markov_w2.weight" in mixed:
            mixed["markov_head.markov_w2.weight"] = mixed["markov_head.markov_w2.weight"][order]
        check(drafts_of(toy_with(write(tmp_path / name, config, mixed), kind), kind, monkeypatch, 4, expected))


def test_embeddings_that_are_a_copy_of_the_targets_are_not_kept_twice(tmp_path: Path) -> None:
    config, tensors, kind, _ = made("speculators eagle3")
    model = target()
    weight = model.get_input_embeddings().weight.detach()
    copied = write(tmp_path / "copied", config, {**tensors, "embed_tokens.weight": weight.clone()})
    assert widened(toy_with(copied, kind).heads["eagle"].embedding).data_ptr() == weight.data_ptr()
    own = write(tmp_path / "own", config, tensors)
    assert torch.equal(widened(toy_with(own, kind).heads["eagle"].embedding), tensors["embed_tokens.weight"])


def test_an_output_layer_that_is_a_copy_of_the_targets_is_not_kept_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []

    def watched(weight: Any, *rest: Any) -> Any:
        kept.append(weight)
        return linear(weight, *rest)

    linear = Linear.of
    monkeypatch.setattr(Linear, "of", watched)
    config, tensors, kind, _ = made("EAGLE-3 of DeepSpec")
    theirs, own = target().get_output_embeddings().weight.detach(), tensors["lm_head.weight"]
    for name, output in (("copied", theirs), ("own", own)):
        kept.clear()
        toy_with(write(tmp_path / name, config, {**tensors, "lm_head.weight": output.clone()}), kind)
        like_it = [weight for weight in kept if torch.equal(weight, output)]
        assert {weight.data_ptr() == theirs.data_ptr() for weight in like_it} == {name == "copied"}


ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 2.0},
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_a_rescaled_rotation_is_that_of_transformers(rope_type: str, tmp_path: Path) -> None:
    config, tensors = published.eagle3(MODEL_VOCAB)
    scaling = {"rope_type": rope_type, **ROPES[rope_type]}
    config |= {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 2048}
    head = load_published(write(tmp_path, config, tensors), EagleHead, TARGET)
    theirs = LlamaConfig(head_dim=8, rope_parameters={**scaling, "rope_theta": 5e5}, max_position_embeddings=2048)
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](theirs)
    torch.testing.assert_close(head.rope.frequencies, frequencies)
    assert head.rope.scale == pytest.approx(scale)
    assert not torch.allclose(frequencies, load_published(plain(tmp_path), EagleHead, TARGET).rope.frequencies)


def plain(folder: Path) -> Path:
    return write(folder / "plain", *published.eagle3(MODEL_VOCAB))


# The text --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("temperature", "tree"), [(0.7, True), (0.0, False), (0.8, False)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_text_is_the_one_that_the_target_writes_alone(
    name: str, temperature: float, tree: bool, tmp_path: Path
) -> None:
    config, tensors, kind, _ = made(name)
    toy = toy_with(write(tmp_path / "head", config, tensors), kind)
    alone = Settings(k=4, temperature=temperature, seed=5, max_new_tokens=24)
    texts = []
    for drafter, settings in ((kind.name, replace(alone, tree=tree)), ("none", alone)):
        runner = toy.target_runner(128)
        texts.append(ids_of(list(decode(runner, toy.drafter(drafter, runner, settings), [3, 1, 4, 1, 5], settings))))
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24
