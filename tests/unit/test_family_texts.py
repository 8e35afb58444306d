"""The families that `test_families` compares with transformers: their texts with drafts, and several at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdemo.drafters.heads.files import save_head
from specdemo.engines.fused import FusedRunner, SharedPasses
from specdemo.engines.layout import FusedModel
from specdemo.engines.native import NativeRunner, native_model
from specdemo.engines.runner import Pass, Runner, read_together
from specdemo.models import loaded as loading
from specdemo.models import report
from specdemo.models.loaded import Loaded, load
from specdemo.racing.race import start

from .checkpoints import preset_of, rounded, save
from .test_families import CASES, SIZES, TREE, model_of, needs_native, without_a_compiler
from .toys import ids_of, texts_drafted_and_not, untrained_heads


def alike(name: str, engine: str, patch: pytest.MonkeyPatch) -> list[Runner]:
    """Six runners of a model; the last three share nothing."""
    if engine == "native":
        native = native_model(FusedModel.of(model_of(name)))
        assert native is not None
        return [NativeRunner(native, 64) for _ in range(6)]
    without_a_compiler(patch)
    shared = SharedPasses(FusedModel.of(model_of(name), torch.bfloat16))
    return [FusedRunner(shared.model, 64, shared if place < 3 else None) for place in range(6)]


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "fused"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
@torch.inference_mode()
def test_texts_read_in_one_pass_have_the_bits_of_each_alone(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, at and beyond the ends of windows. In C one of them is a tree."""
    runners = alike(name, engine, monkeypatch)
    if not runners[0].exact_rows:
        pytest.skip("no pass of it has the same bits")
    for runner, length in zip(runners, (3, 5, 23) * 2, strict=True):
        runner.prefill(list(range(1, 1 + length)))
    drafts = [([7], None), ([8, 9, 10], None), (list(range(11, 11 + len(TREE))), TREE if engine == "native" else None)]
    together = read_together([Pass(runner, *draft) for runner, draft in zip(runners[:3], drafts, strict=True)])
    alone = [runner.forward(*draft) for runner, draft in zip(runners[3:], drafts, strict=True)]
    assert all(torch.equal(*both) for both in zip(together, alone, strict=True))


@pytest.fixture(params=CASES)
def loaded(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[Loaded]:
    """One of the models with an untrained head. Its layers count for so much that it seldom repeats a token."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model: Any = model_of(request.param, vocab_size=len(tokenizer), tie_word_embeddings=False, **ids)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    layers, heads = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
    head = untrained_heads(len(tokenizer), SIZES["hidden_size"], layers, heads, len(tokenizer) - 20)["eagle"]
    save_head(head, tmp_path / "eagle.safetensors", {})
    folder = save(rounded(model), tokenizer, tmp_path / "model")
    preset = preset_of(folder, heads={"eagle": tmp_path / "eagle.safetensors"}, skip_layers=1)
    ready = load(preset, "float32", "cpu")
    yield ready
    ready.release()


@needs_native
@pytest.mark.sampled(7)
def test_a_drafted_text_is_the_targets_own(loaded: Loaded) -> None:
    """Over the ends of windows: by the first layers, by a head that reads states of layers, and by its trees."""
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    assert loaded.engine == "native"
    for settings, alone in texts_drafted_and_not(loaded, prompt, 20):
        for drafter, tree in (("layer-skip", False), ("eagle", False), ("eagle", True)):
            drafted = list(start(loaded, drafter, prompt, replace(settings, tree=tree)))
            assert ids_of(drafted) == alone, (drafter, tree)


@pytest.mark.parametrize(("name", "fits"), [("gemma2", False), ("gemma3", False), ("glm", True)])
def test_float16_is_not_chosen_for_a_model_with_numbers_beyond_it(
    name: str, fits: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where float16 is the best of a device: a GPU without bfloat16, or an Apple GPU. Who asks for it gets it."""
    for module in (loading, report):
        monkeypatch.setattr(module, "choose_dtype", lambda asked, device: torch.float16)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    preset = preset_of(save(model_of(name, vocab_size=len(tokenizer), **ids), tokenizer, tmp_path))
    asked, chosen = (report.report_on(preset, dtype, "cpu").models[0].weights for dtype in ("float16", "auto"))
    assert chosen == (1 if fits else 2) * asked
    for dtype, wanted in (("float16", torch.float16), ("auto", torch.float16 if fits else torch.float32)):
        ready = load(preset, dtype, "cpu")
        assert ready.weights_dtype == wanted
        ready.release()
