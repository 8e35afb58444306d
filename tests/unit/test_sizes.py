"""Sizes that no model has are refused in a sentence that names the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

from specdemo.models.loaded import load
from specdemo.models.store import LoadError
from tests.harness.files import make_tokenizer
from tests.harness.models import preset_of, save, tiny

from ..sentences import refuses

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": len(make_tokenizer())}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": -1000001}, "sliding_window -1000001, whole 0"),
    ("mistral", {"sliding_window": 0, "layer_types": ["sliding_attention"] * 2}, "sliding_window stated"),
    ("mixtral", {"num_experts_per_tok": -1}, "num_experts_per_tok -1, whole"),
    ("mixtral", {"num_experts_per_tok": 0}, "experts, num_experts_per_tok 0"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5, 4"),
    ("mixtral", {"num_local_experts": -4}, "num_local_experts -4"),
    (
        "llama",
        {"num_hidden_layers": 10**9},
        "num_hidden_layers 1000000000, 1 1000",
    ),
    ("llama", {"num_hidden_layers": -2}, "num_hidden_layers -2"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads 0"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3, divide 4"),
    ("llama", {"num_key_value_heads": -2}, "num_key_value_heads -2"),
    ("llama", {"head_dim": -8}, "head_dim -8"),
    ("llama", {"hidden_size": 2**40}, "hidden_size 1099511627776"),
    ("llama", {"vocab_size": "many"}, "vocab_size 'many'"),
    ("llama", {"intermediate_size": 2**20}, "lacks 201,352,032"),
    ("llama", {"intermediate_size": None}, "'intermediate_size' int"),
    ("llama", {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}}, "rope_type ['default']"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta -1.0"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta nan"),
    ("gpt2", {"n_head": 5}, "hidden_size 32, 5 divide"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("sizes"), make_tokenizer()
    save(tiny("llama", len(tokenizer)), tokenizer, folder / "llama")
    save(tiny("gpt2", len(tokenizer)), tokenizer, folder / "gpt2")
    save(MistralForCausalLM(MistralConfig(sliding_window=8, **SIZES)), tokenizer, folder / "mistral")
    mixed = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES)
    save(MixtralForCausalLM(mixed), tokenizer, folder / "mixtral")
    return folder


@pytest.mark.parametrize(("name", "change", "words"), WRONG, ids=[str(change) for _, change, _ in WRONG])
def test_a_size_that_no_model_has_is_refused_in_a_sentence(
    models: Path, tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    for file in (models / name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((models / name / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with refuses(LoadError, words):
        load(preset_of(tmp_path), "float32", "cpu")


def test_a_list_is_no_configuration(models: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with refuses(LoadError, "config.json damaged: JSON"):
        load(preset_of(tmp_path), "float32", "cpu")
