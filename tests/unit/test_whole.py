"""No weight is ever made up: what files lack is named, and tied embeddings are those of transformers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from specdemo.engines.quantized import widened
from specdemo.errors import BadInput
from specdemo.models import converted as converting
from specdemo.models import store
from specdemo.models.converted import converted
from specdemo.models.loaded import load
from specdemo.models.sources import Gguf
from specdemo.models.store import LoadError, ignore
from specdemo.settings import Settings
from tests.harness.files import make_tokenizer, sha256, write_gguf
from tests.harness.models import ENGINES, load_by, preset_of, rounded, save, tiny
from tests.harness.texts import generated, plain_text

from ..conftest import Command
from ..sentences import refuses, tells
from .test_memory import PROMPT, logits

UP, HEAD, TABLE = "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
Weights = dict[str, Tensor]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def change(folder: Path, changed: Callable[[Weights], Any]) -> None:
    """Write the weights of a checkpoint anew."""
    weights = load_file(folder / "model.safetensors")
    changed(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def wanted(model: Any) -> Tensor:
    """The same of transformers."""
    return torch.as_tensor(model(torch.tensor([[*PROMPT, 1, 2]])).logits[0, len(PROMPT) - 1 :])


# Missing weights -------------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "one weight": (lambda weights: weights.pop(UP), "lacks model.layers.1.mlp.up_proj.weight."),
    "the head": (lambda weights: weights.pop(HEAD), "lacks lm_head.weight."),
    "the embeddings": (lambda weights: weights.pop(TABLE), "lacks model.embed_tokens.weight."),
    "a layer": (
        lambda weights: [weights.pop(name) for name in list(weights) if ".layers.1." in name],
        "lacks model.layers.1.input_layernorm.weight, 6",
    ),
    "half a weight": (
        lambda weights: weights.update({UP: weights[UP][:5].clone()}),
        "shape model.layers.1.mlp.up_proj.weight [5, 32], [64, 32].",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_what_a_checkpoint_lacks_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, broken: Callable[[Weights], Any], words: str, eager: bool
) -> None:
    model = tiny("llama", len(tokenizer), tie_word_embeddings=False)
    whole, folder = (save(model, tokenizer, tmp_path / name) for name in ("whole", "broken"))
    change(folder, broken)
    for preset in (preset_of(folder), preset_of(whole, folder)):
        with refuses(LoadError, f"broken {words}"):
            load(preset, "float32", "cpu", eager=eager)
    load(preset_of(whole), "float32", "cpu", eager=eager).release()


def test_what_another_family_lacks_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes)
    folder = save(MistralForCausalLM(config), tokenizer, tmp_path / "mistral")
    change(folder, lambda weights: weights.pop(UP))
    with refuses(LoadError, "lacks model.layers.1.mlp.up_proj.weight."):
        load(preset_of(folder), "float32", "cpu")


def test_a_lacking_weight_is_one_sentence_on_the_command_line(
    command: Command, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    change(folder, lambda weights: weights.pop(UP))
    status, out, err = command("generate", "--prompt", "the cat", "--target", str(folder))
    assert (status, out) == (2, "")
    assert tells(err.splitlines()[-1], f"specdemo: {folder} lacks {UP}.")
    assert "REPORT" not in err


def test_a_file_that_the_list_of_files_names_is_missed(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = tiny("llama", len(tokenizer))
    save(model, tokenizer, folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    second = sorted(folder.glob("model-*.safetensors"))[1]
    second.unlink()
    with refuses(LoadError, f"{second.name}, model.safetensors.index.json"):
        load(preset_of(folder), "float32", "cpu")


@pytest.mark.parametrize("outside", ["../other.safetensors", "c:\\other.safetensors", "..", 5, ["a.safetensors"]])
def test_a_list_of_files_that_leads_out_of_the_folder_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, outside: Any
) -> None:
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {UP: outside}}))
    for eager in (False, True):
        with refuses(BadInput, "safetensors folder"):
            load(preset_of(folder), "float32", "cpu", eager=eager)


def test_what_no_model_asks_for_may_lack_or_be_there(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Tied heads and buffers that are computed lack; old checkpoints have such buffers."""
    model = tiny("llama", len(tokenizer), tie_word_embeddings=True)
    folder = save(model, tokenizer, tmp_path / "model")
    change(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    for eager in (False, True):
        loaded = load(preset_of(folder), "float32", "cpu", eager=eager)
        torch.testing.assert_close(logits(loaded), wanted(model))
        loaded.release()


LACKING_GGUF: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "one weight": ({"blk.1.ffn_up.weight": None}, "tiny.gguf lacks model.layers.1.mlp.up_proj.weight."),
    "the embeddings": ({"token_embd.weight": None}, "tiny.gguf lacks model.embed_tokens.weight."),
    "half a weight": ({"blk.1.ffn_up.weight": torch.ones(5, 32)}, "shape up_proj.weight [5, 32],"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tensors", "words"), LACKING_GGUF.values(), ids=LACKING_GGUF.keys())
def test_what_a_gguf_file_lacks_is_named_and_nothing_is_kept(
    cache: Path, tmp_path: Path, tensors: dict[str, Tensor | None], words: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors=tensors)
    write_gguf(tmp_path / "whole.gguf")
    whole, broken = (Gguf(str(tmp_path / name)) for name in ("whole.gguf", "tiny.gguf"))
    for preset in (preset_of(broken), preset_of(whole, broken)):
        with refuses(LoadError, words):
            load(preset, "float32", "cpu")
    assert {path.name.partition("-")[0] for path in cache.iterdir() if path.suffix not in (".lock", ".checked")} <= {
        "whole"
    }


def test_what_an_earlier_version_made_of_a_file_is_made_again_and_deleted(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    source = Gguf(str(tmp_path / "tiny.gguf"))
    made, _ = converted(source, torch.bfloat16, ignore)
    older = made.with_name(made.name.removesuffix(f"v{converting.LAYOUT}") + "v1")
    made.rename(older)
    again, _ = converted(source, torch.bfloat16, ignore)
    assert again == made
    assert made.is_dir()
    assert not older.exists()


# Tied embeddings ---------------------------------------------------------------------------------------------------


def of_its_own(weights: Weights) -> None:
    weights[HEAD] = torch.randn(weights[table_of(weights)].shape, generator=torch.Generator().manual_seed(1))


def table_of(weights: Weights) -> str:
    return TABLE if TABLE in weights else "transformer.wte.weight"


TIED: dict[str, tuple[Callable[[Weights], Any], bool]] = {
    "not there": (lambda weights: None, True),
    "the same": (lambda weights: weights.update({HEAD: weights[table_of(weights)].clone()}), True),
    "of its own": (of_its_own, False),
    "alone": (lambda weights: weights.update({HEAD: weights.pop(table_of(weights))}), True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("head", "one"), TIED.values(), ids=TIED.keys())
def test_a_head_is_tied_where_transformers_ties_it(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    kind: str,
    head: Callable[[Weights], Any],
    one: bool,
) -> None:
    folder = save(tiny(kind, len(tokenizer), tie_word_embeddings=True), tokenizer, tmp_path / "model")
    change(folder, head)
    loaded = load_by(engine, folder, monkeypatch, heads={"eagle": tmp_path / "none.safetensors"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == one
    torch.testing.assert_close(logits(loaded), wanted(model))
    text = plain_text(loaded.target_runner(32), PROMPT, Settings(max_new_tokens=12), loaded.eos_ids)
    assert text == generated(model, PROMPT, 12)
    assert loaded.parts.embeddings is not None
    first, last = map(widened, loaded.parts.embeddings)
    assert (first.data_ptr() == last.data_ptr()) == one
    assert torch.equal(last, model.get_output_embeddings().weight)
    assert loaded.placement["cpu"] == 4 * sum(weight.numel() for weight in model.parameters())
    loaded.release()


@pytest.mark.parametrize("stored_in", [{}, {"up_proj": "F16", "down_proj": "Q4_0"}], ids=["float32", "mixed"])
def test_who_asks_for_float32_gets_the_numbers_of_a_gguf_file(
    cache: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, stored_in: dict[str, str]
) -> None:
    """Whoever does not ask gets bfloat16, which takes half the disk; eager, too, which computes in float32."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny("llama", len(tokenizer)), tokenizer=tokenizer, stored_in=stored_in)
    preset = preset_of(Gguf(str(path)))
    load(preset, None, "cpu", eager=True).release()
    (usual,) = (entry for entry in cache.iterdir() if entry.is_dir())
    assert load_file(usual / "model.safetensors")[UP].dtype == torch.bfloat16
    loaded = load(preset, "float32", "cpu")
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    for name, weight in own.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    loaded.release()


def test_a_local_gguf_file_is_read_for_its_sum_once_as_long_as_it_does_not_change(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all processes, and where it is moved: what this one remembers is forgotten before each load."""
    path, hashed = tmp_path / "tiny.gguf", list[int]()

    class Counting:
        def __init__(self) -> None:
            self.digest = hashlib.sha256()
            self.hexdigest = self.digest.hexdigest

        def update(self, block: bytes) -> None:
            hashed.append(len(block))
            self.digest.update(block)

    def load_anew() -> int:
        hashed.clear()
        store._sum_of.cache_clear()
        loaded = load(preset_of(Gguf(str(path))), "bfloat16", "cpu")
        assert loaded.weights["target"]["gguf_sha256"] == sha256(path)
        loaded.release()
        return sum(hashed)

    write_gguf(path)
    monkeypatch.setattr(store, "hashlib", SimpleNamespace(sha256=Counting))
    assert [load_anew(), load_anew()] == [path.stat().st_size, 0]
    path = path.rename(tmp_path / "moved.gguf")
    assert load_anew() == 0
    os.utime(path)
    assert [load_anew(), load_anew()] == [path.stat().st_size, 0]
    write_gguf(path, tiny("llama", len(make_tokenizer()), seed=1))
    assert [load_anew(), load_anew()] == [path.stat().st_size, 0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_files_head_is_tied_where_it_has_none(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: PreTrainedTokenizerFast,
    engine: str,
    tied: bool,
) -> None:
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path, rounded(tiny("llama", len(tokenizer), tie_word_embeddings=tied)))
    loaded = load_by(engine, Gguf(str(path)), monkeypatch)
    torch.testing.assert_close(logits(loaded), wanted(model))
    stored = load_file(converted(Gguf(str(path)), torch.float32, ignore)[0] / "model.safetensors")
    assert (HEAD in stored) != tied
    loaded.release()
