"""Models for pictures and text: the text part alone is read, and writes what the whole model writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from specdemo.drafters.heads.files import save_head
from specdemo.engines.families import knows
from specdemo.models.configuration import text_name, text_part
from specdemo.models.loaded import load
from specdemo.models.presets import preset_of
from specdemo.racing.race import start
from tests.harness.classes import LaneFigures
from tests.harness.doubles import ids_of
from tests.harness.models import looked_at, save
from tests.harness.models import preset_of as by_heads
from tests.harness.texts import texts_drafted_and_not
from tests.harness.toys import untrained_heads

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
}
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
PICTURES: dict[str, Any] = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"head_dim": 16, "image_size": 28, "patch_size": 14},
    "image_token_index": 5,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"text_config": {**SIZES, "sliding_window": 8}, "mm_tokens_per_image": 4}),
    "mistral3": ("mistral3", {"text_config": {**SIZES, "model_type": "mistral", "sliding_window": None}}),
    "ministral3": (
        "mistral3",
        {
            "text_config": {
                **{**SIZES, "model_type": "ministral3"},
                "rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.4},
            }
        },
    ),
}


def whole_of(kind: str, vocab: int, tied: bool) -> PreTrainedModel:
    """A random model for pictures and text."""
    model_type, fields = KINDS[kind]
    text = {**fields["text_config"], "vocab_size": vocab, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(model_type, **{**fields, "text_config": text}, **PICTURES, tie_word_embeddings=tied)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model


def renamed(stored: dict[str, Tensor], old: bool) -> dict[str, Tensor]:
    """The weights of a file under the names that transformers wrote before version 5, or writes since."""
    begins = {"model.": "language_model.model." if old else "model.language_model."}
    begins["lm_head."] = "language_model.lm_head." if old else "lm_head."
    names = {name: text_name(name) for name in stored}
    for name, ours in names.items():
        first = f"{ours.partition('.')[0]}."
        if first in begins and (ours != name or first == "lm_head."):  # of the text part
            names[name] = begins[first] + ours.removeprefix(first)
    return {names[name]: weight for name, weight in stored.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["two embeddings", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_text_part_alone_writes_what_the_whole_model_writes(
    kind: str, tied: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """By a fast engine and by transformers, from files with old and with new names."""
    whole = whole_of(kind, len(tokenizer), tied)
    ids = [(7 * i + i * i) % len(tokenizer) for i in range(30)]
    wanted = whole(input_ids=torch.tensor([ids])).logits[0, 19:]
    size = sum(weight.nbytes for weight in whole.get_decoder().parameters())
    size += 0 if tied else whole.lm_head.weight.nbytes
    folder = save(whole, tokenizer, tmp_path / "model")
    file, preset = folder / "model.safetensors", preset_of(str(folder))
    stored = load_file(file)
    for old, eager in ((False, False), (True, False), (False, True), (True, True)):
        save_file(renamed(stored, old), file, metadata={"format": "pt"})
        loaded = load(preset, "float32", "cpu", eager=eager)
        assert (loaded.engine == "eager") == eager
        assert loaded.held["cpu"] == size
        runner = loaded.target_runner(32)
        got = torch.cat([runner.prefill(ids[:20]), runner.forward(ids[20:])])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        if (old, eager, tied) == (False, False, False):  # a tied Gemma repeats itself
            assert looked_at(preset).engine == loaded.engine
            texts_drafted_and_not(loaded, ids[:12], 20)
        runner.release()
        loaded.release()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_fewer_layers_draft_chains_and_trees_for_the_text_part(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    heads = untrained_heads(len(tokenizer), 32, layers=2, heads=4, draft_vocab=len(tokenizer) - 20)
    files = {name: tmp_path / f"{name}.safetensors" for name in heads}
    for name, head in heads.items():
        save_head(head, files[name], {})
    folder = save(whole_of(kind, len(tokenizer), tied=False), tokenizer, tmp_path / "model")
    loaded = load(by_heads(folder, heads=files, skip_layers=1), "float32", "cpu")
    prompt = loaded.encode("the cat sat on the mat", raw=True)
    for settings, alone in texts_drafted_and_not(loaded, prompt, 20):
        for drafter, tree in (("eagle", False), ("eagle", True), ("block", False), ("layer-skip", False)):
            events = list(start(loaded, drafter, prompt, replace(settings, tree=tree)))
            assert ids_of(events) == alone, (drafter, tree)
            assert not tree or LaneFigures.of(events).trees
    loaded.release()


def test_a_model_whose_text_part_is_of_another_kind_stays_whole() -> None:
    config = AutoConfig.for_model("mistral3", text_config={**SIZES, "model_type": "cohere"}, **PICTURES)
    assert text_part(config) is None
    assert text_part(AutoConfig.for_model("mistral")) is None
    quantized = AutoConfig.for_model("mistral3", **{**KINDS["mistral3"][1], **PICTURES})
    quantized.quantization_config = {"quant_method": "fp8"}
    part = text_part(quantized)
    assert part is not None
    assert not knows(part)  # transformers reads it
    assert part.quantization_config == {"quant_method": "fp8"}


@pytest.mark.parametrize(("whole", "part"), [(True, False), (False, True), (False, False)])
def test_embeddings_are_tied_where_one_of_the_two_configurations_says_so(whole: bool, part: bool) -> None:
    text = {**KINDS["mistral3"][1]["text_config"], "tie_word_embeddings": part}
    found = text_part(AutoConfig.for_model("mistral3", text_config=text, **PICTURES, tie_word_embeddings=whole))
    assert found is not None
    assert found.tie_word_embeddings == (whole or part)
