"""The families that the engines know: their texts with drafts, and the type of their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdemo.drafters.heads.files import save_head
from specdemo.models import preset_models
from specdemo.models.loaded import load
from specdemo.models.sizes import laid_out_bytes
from specdemo.racing.race import start
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of
from tests.harness.models import FAMILIES, load_by, looked_at, model_of, preset_of, rounded, save
from tests.harness.texts import texts_drafted_and_not
from tests.harness.toys import untrained_heads

KINDS = ("eagle", "block")
INT8 = "qwen3_moe in int8"


@pytest.fixture(params=[*FAMILIES, INT8])
def loaded(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Loaded]:
    """One of the models with untrained heads."""
    name, _, dtype = request.param.partition(" in ")
    model = rounded(model_of(name, 3, tie_word_embeddings=False))  # tied embeddings repeat their token
    sizes = model.config.num_hidden_layers, model.config.num_attention_heads
    heads = untrained_heads(len(tokenizer), model.config.hidden_size, *sizes, len(tokenizer) - 20)
    files = {kind: tmp_path / f"{kind}.safetensors" for kind in KINDS}
    for kind, file in files.items():
        save_head(heads[kind], file, {})
    folder = save(model, tokenizer, tmp_path / "model")
    ready = load_by("native", folder, monkeypatch, dtype or "float32", heads=files, skip_layers=1)
    yield ready
    ready.release()


@pytest.mark.sampled(3)
def test_a_drafted_text_is_the_targets_own(loaded: Loaded) -> None:
    """Over the ends of windows: by the first layers, by heads that read states of layers, and by trees."""
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    branches = loaded.target_runner(8).cannot_branch is None
    for settings, alone in texts_drafted_and_not(loaded, prompt, 20):
        for drafter, tree in (("layer-skip", False), ("eagle", False), ("block", False), ("eagle", True)):
            if branches or not tree:
                drafted = list(start(loaded, drafter, prompt, replace(settings, tree=tree)))
                assert ids_of(drafted) == alone, (drafter, tree)


@pytest.mark.parametrize(("name", "fits"), [("gemma2", False), ("gemma3", False), ("glm", True)])
def test_float16_is_not_chosen_for_a_model_with_numbers_beyond_it(
    name: str, fits: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where float16 is the best of a device: a GPU without bfloat16, or an Apple GPU. Who asks for it gets it."""
    monkeypatch.setattr(preset_models, "choose_dtype", lambda asked, device: torch.float16)
    preset = preset_of(save(model_of(name), tokenizer, tmp_path))
    asked, chosen = (laid_out_bytes(looked_at(preset, dtype)) for dtype in ("float16", "auto"))
    assert chosen == (1 if fits else 2) * asked
    for dtype, wanted in (("float16", torch.float16), ("auto", torch.float16 if fits else torch.float32)):
        ready = load(preset, dtype, "cpu")
        assert ready.weights_dtype == wanted
        ready.release()
