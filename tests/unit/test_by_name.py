"""Models that a person names: what is known before anything is fetched, and inputs that are wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import PreTrainedTokenizerFast

from specdemo.errors import BadInput
from specdemo.models import preset_models
from specdemo.models import report as reporting
from specdemo.models.cached import delete_cached, list_cached
from specdemo.models.loaded import LANES, load
from specdemo.models.preset_models import find_models
from specdemo.models.presets import AND, find_preset, load_presets, preset_of, read_preset
from specdemo.models.report import report_on, save_preset
from specdemo.models.sizes import laid_out_bytes, text_bytes
from specdemo.models.sources import Folder, Gguf, Hub
from specdemo.models.store import LoadError
from specdemo.racing.race import start
from specdemo.settings import Settings
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of
from tests.harness.files import make_tokenizer, write_gguf
from tests.harness.models import looked_at, save, tiny

from ..conftest import Command
from ..sentences import refuses, tells
from .test_memory import floats


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Tiny random checkpoints of two families."""
    folder = tmp_path_factory.mktemp("families")
    return {kind: save(tiny(kind, len(tokenizer)), tokenizer, folder / kind) for kind in ("llama", "qwen3")}


def tokens_of(loaded: Loaded, drafter: str, count: int = 24) -> list[int]:
    ids = loaded.encode("the cat sat on the mat", raw=True)
    return ids_of(start(loaded, drafter, ids, Settings(k=3, max_new_tokens=count)))


# Told before anything is fetched -----------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_told_is_what_is_taken(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str, dtype: str
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2} if family == "gpt2" else {"num_attention_heads": 2, "num_key_value_heads": 1}
    heads |= {"head_dim": 128} if family == "gemma3_text" else {}  # it has two rotations
    config = hf.AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes, **heads)
    config.tie_word_embeddings = family != "llama"
    folder = save(hf.AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "model")
    preset = preset_of(str(folder))
    model = looked_at(preset, dtype)
    if model.engine == "fused":
        pytest.skip("this CPU packs weights out of sight")
    before = floats()
    loaded = load(preset, dtype, "cpu")
    weights = floats()
    taken = sum(size for place, size in weights.items() if place not in before)
    assert laid_out_bytes(model) == pytest.approx(taken, rel=0.1)
    runners = [loaded.target_runner(1024) for _ in range(2)]
    for runner in runners:
        runner.prefill([3, 4, 5])
    caches = sum(size for place, size in floats().items() if place not in weights and place not in before)
    assert text_bytes(model, LANES) == pytest.approx(caches, rel=0.1)
    for runner in runners:
        runner.release()
    loaded.release()


def test_a_draft_model_is_told_of_the_device_that_it_gets(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset_models, "choose_devices", lambda asked: (torch.device("cuda"), torch.device("cpu")))
    preset = preset_of(str(folders["llama"]), str(folders["llama"]))
    assert [model.device.type for model in find_models(preset, "float32", "cuda,cpu", fetch=False)] == ["cuda", "cpu"]


def test_a_report_is_sentences_and_a_pair_that_does_not_match_is_one(folders: dict[str, Path], tmp_path: Path) -> None:
    preset = preset_of(str(folders["llama"]), str(folders["qwen3"]))
    target, draft, tokenizers, estimate, memory = report_on(preset, "float32", "cpu")
    assert tells(target, "llama: nothing memory weights")
    assert tells(draft, "licence not")
    assert tells(tokenizers, "tokenizers match")
    sizes = [laid_out_bytes(model) for model in find_models(preset, "float32", "cpu", fetch=False)]
    share = sizes[1] / sizes[0]
    assert tells(estimate, f"{folders['qwen3']} {share:.0%} {1 + 4 * share:.1f}")
    assert tells(memory, "they need")
    other = make_tokenizer(["quite another text of other words altogether"])
    unlike = save(tiny("llama", len(other)), other, tmp_path / "unlike")
    _, _, tokenizers, *_ = report_on(preset_of(str(folders["llama"]), str(unlike)), "float32", "cpu")
    assert tells(tokenizers, "drafts text")
    assert tells(tokenizers, "target")


def test_what_memory_cannot_hold_is_refused_by_its_report(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "free_memory", lambda: 1000)
    with refuses(LoadError, "0.0 MB free"):
        [*report_on(preset_of(str(folders["llama"])), "float32", "cpu")]


def test_a_gguf_file_is_told_from_its_header_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    model = write_gguf(tmp_path / "tiny.gguf")
    preset = preset_of(str(tmp_path / "tiny.gguf"))
    found = looked_at(preset, "bfloat16")
    loaded = load(preset, "bfloat16", "cpu")
    assert found.engine == loaded.engine
    assert laid_out_bytes(found) == 2 * sum(weight.numel() for weight in model.parameters()) == loaded.held["cpu"]
    assert found.vocabulary == loaded.tokenizer.get_vocab()
    assert loaded.weights["target"]["source"] == "gguf"
    assert (tmp_path / "tiny.gguf").is_file()
    (entry,) = (entry for entry in list_cached() if not entry.of_hub)
    assert entry.name.startswith("tiny-")
    assert entry.size > laid_out_bytes(found)
    delete_cached(entry.name)
    assert not entry.path.exists()
    with refuses(BadInput, f"'{entry.name}'"):
        delete_cached(entry.name)


# Names ------------------------------------------------------------------------------------------------------------


def test_names_become_sources(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert preset_of("Qwen/Qwen2.5-0.5B").target == Hub("Qwen/Qwen2.5-0.5B")
    assert preset_of("gpt2@main").target == Hub("gpt2", "main")
    assert preset_of("a/b:c-Q4_K_M.gguf").target == Gguf("c-Q4_K_M.gguf", "a/b")
    assert preset_of("a/b@v1:c.gguf").target == Gguf("c.gguf", "a/b", "v1")
    assert preset_of(str(tmp_path / "a.gguf")).target == Gguf(str(tmp_path / "a.gguf"))
    assert preset_of(str(tmp_path)).target == Folder(tmp_path)
    pair = preset_of("a/b", "c/d")
    assert (pair.target, pair.draft_model, pair.defaults.drafter) == (Hub("a/b"), Hub("c/d"), "draft-model")
    assert find_preset(pair.name) == pair
    assert pair.name == f"a/b{AND}c/d"


def test_a_preset_that_was_saved_is_read_again(tmp_path: Path) -> None:
    preset = preset_of("a/b@v1", "c/d:e.gguf")  # other sources: see test_sources.py
    save_preset(preset, "mine", tmp_path)
    presets, broken = load_presets(tmp_path)
    assert not broken
    mine = presets["mine"]
    assert (mine.target, mine.draft_model, mine.defaults) == (preset.target, preset.draft_model, preset.defaults)
    with refuses(BadInput, "mine already"):
        save_preset(preset, "mine", tmp_path)
    for name in ("", "../x", "a b", ".x"):
        with refuses(BadInput, "named"):
            save_preset(preset, name, tmp_path)
    with refuses(BadInput, "written:"):
        save_preset(preset, "mine", tmp_path / "absent")


def test_a_space_loads_what_its_owner_allows(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/space")
    for name in ("a/b", str(folders["llama"]), "a/b:c.gguf"):
        with refuses(BadInput, "Space"):
            preset_of(name)
    monkeypatch.setenv("SPECDEMO_ALLOW", "a/b, c/d")
    assert preset_of("a/b", "c/d").target == Hub("a/b")
    with refuses(BadInput, "a/b@v1"):
        preset_of("a/b", "a/b@v1")


# Wrong inputs -----------------------------------------------------------------------------------------------------

NAMES = {  # refused as they are
    "empty": ("", "Name"),
    "blank": ("  ", "Name"),
    "an address": ("https://huggingface.co/a/b", "address"),
    "no such path": ("./absent", "./absent."),
    "no such GGUF file": ("absent.gguf", "absent.gguf."),
    "several words": ("my favourite model", "neither id"),
    "two lines": ("a/b\nc/d", "neither id"),
    "too many parts": ("a/b/c", "neither id"),
    "one of several files": ("a/b:x-00001-of-00003.gguf", "join"),
    "a pickle": ("{folder}/pickle.bin", "pickle"),
    "a text": ("{folder}/text.txt", "text.txt model"),
}
MODELS = {  # refused when they are looked at
    "an empty folder": ("empty", "empty config.json"),
    "a broken configuration": ("broken", "config.json damaged"),
    "an encoder": ("encoder", "an encoder"),  # other types that are refused: see test_model_types.py
    "an unknown kind": ("unknown", "unknown loaded:"),
    "code of its own": ("code", "code repository,"),
    "no tokenizer": ("silent", "silent loaded:"),
    "pickled weights": ("pickled", "pickled safetensors"),
    "truncated weights": ("truncated", "truncated lacks numbers"),
    "no GGUF file": ("false.gguf", "false.gguf not"),
    "half a GGUF file": ("half.gguf", "half.gguf whole"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """A folder of things that are no models to run."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "pickle.bin").write_bytes(b"x")
    (folder / "text.txt").write_text("x")
    (folder / "empty").mkdir()
    for name in ("broken", "unknown", "code", "silent", "pickled", "truncated", "encoder"):
        shutil.copytree(folders["llama"], folder / name)
    (folder / "broken" / "config.json").write_text("{")
    stated = json.loads((folders["llama"] / "config.json").read_text())
    (folder / "unknown" / "config.json").write_text(json.dumps({**stated, "model_type": "nobodys"}))
    code = {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "nobodys"}
    (folder / "code" / "config.json").write_text(json.dumps({**stated, **code}))
    (folder / "code" / "code.py").write_text("raise SystemExit('this must never run')")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "silent" / name).unlink()
    (folder / "pickled" / "model.safetensors").unlink()
    torch.save({}, folder / "pickled" / "pytorch_model.bin")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    hf.BertConfig().save_pretrained(folder / "encoder")
    (folder / "false.gguf").write_bytes(b"not a GGUF file")
    write_gguf(folder / "whole.gguf")
    (folder / "half.gguf").write_bytes((folder / "whole.gguf").read_bytes()[:2000])
    return folder


@pytest.fixture(scope="module")
def before(folders: dict[str, Path]) -> Iterator[tuple[Loaded, list[int]]]:
    """What is loaded while something wrong is asked for, and its text."""
    loaded = load(preset_of(str(folders["llama"])), "float32", "cpu")
    yield loaded, tokens_of(loaded, "prompt-lookup")
    loaded.release()


@pytest.mark.parametrize(("name", "words"), NAMES.values(), ids=NAMES.keys())
def test_a_wrong_name_is_one_sentence(wrong: Path, name: str, words: str) -> None:
    with refuses(BadInput, words) as caught:
        preset_of(name.format(folder=wrong))
    assert "\n" not in str(caught.value).replace("a/b\nc/d", "")


@pytest.mark.parametrize(("name", "words"), MODELS.values(), ids=MODELS.keys())
def test_a_wrong_model_is_one_sentence_and_what_was_loaded_still_races(
    wrong: Path, before: tuple[Loaded, list[int]], name: str, words: str
) -> None:
    preset = preset_of(str(wrong / name))
    loaded, text = before

    def look_and_load() -> None:
        with suppress(StopIteration):
            next(report_on(preset, "float32", "cpu"))
        load(preset, "float32", "cpu", instead_of=loaded)

    with refuses((BadInput, LoadError), words) as caught:
        look_and_load()
    assert "\n" not in str(caught.value)
    assert tokens_of(loaded, "prompt-lookup") == text


# The command line --------------------------------------------------------------------------------------------------


def test_a_pair_by_name_is_reported_saved_and_run(
    command: Command, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting.save_preset, "__defaults__", (tmp_path,))
    names = ["--target", str(folders["llama"]), "--draft", str(folders["qwen3"])]
    words = ["generate", "--prompt", "the cat", "--max-new-tokens", "6", "-k", "2", "--json", *names]
    status, out, err = command(*words, "--save-preset", "mine")
    assert status == 0
    assert json.loads(out)["stats"]["drafted"] > 0
    assert "engine " in err
    assert tells(err, "tokenizers match")
    assert read_preset(tmp_path / "mine.toml").draft_model == Folder(folders["qwen3"])
    status, out, err = command("generate", "--prompt", "the cat", "--draft", "a/b")
    assert (status, out, tells(err, "--draft --save-preset --target.")) == (2, "", True)
    status, out, err = command("generate", "--prompt", "the cat", "--target", "absent.gguf")
    assert (status, out, tells(err, "absent.gguf.")) == (2, "", True)


def test_what_was_fetched_is_listed_and_deleted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path))
    (tmp_path / "model-v1").mkdir()
    (tmp_path / "model-v1" / "model.safetensors").write_bytes(bytes(2_000_000))
    (tmp_path / "model-v1.lock").touch()
    status, out, _ = command("cache")
    assert status == 0
    assert "      2.0 MB  model-v1\n" in out
    assert ".lock" not in out
    assert command("cache", "--delete", "model-v1") == (0, "Deleted model-v1, 2.0 MB.\n", "")
    status, _, err = command("cache", "--delete", "model-v1")
    assert status == 2
    assert tells(err, "specdemo: Nothing 'model-v1'")
