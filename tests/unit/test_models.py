"""Loading: from folders, from the hub, from a wheel; and everything that can go wrong on the way, in words."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BambaConfig, PreTrainedTokenizerFast

from specdemo.decoding.events import Round
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.errors import BadInput
from specdemo.models import sizes as room
from specdemo.models.errors import explain, wrap_load_errors
from specdemo.models.loaded import load
from specdemo.models.presets import Defaults
from specdemo.models.report import report_on
from specdemo.models.sources import Folder, Hub
from specdemo.models.store import LoadError, ignore
from specdemo.racing.race import start
from specdemo.settings import Settings
from specdemo.system.hardware import compute_dtype
from specdemo.ui.engine import Backend
from specdemo.ui.facts import facts as facts_of
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of
from tests.harness.engines import cpu_engine
from tests.harness.files import CHATML, make_tokenizer
from tests.harness.models import preset_of, save, tiny

from ..sentences import refuses, tells

ROOT = Path(__file__).resolve().parents[2]


# Checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """A folder for each tiny model; the two Qwen3 pad the same vocabulary to different widths."""
    folder, size = tmp_path_factory.mktemp("checkpoints"), len(tokenizer)
    return {
        "llama": save(tiny("llama", size), tokenizer, folder / "llama"),
        "qwen3": save(tiny("qwen3", size + 21), tokenizer, folder / "qwen3"),
        "qwen3-small": save(tiny("qwen3", size + 5, seed=1), tokenizer, folder / "qwen3-small"),
        "gpt2": save(tiny("gpt2", size, seed=2), make_tokenizer(template=None), folder / "gpt2"),
    }


def text_of(loaded: Loaded, drafter: str, **settings: Any) -> list[int]:
    """The greedy tokens of a run."""
    ids = loaded.encode("the cat sat")
    return ids_of(start(loaded, drafter, ids, Settings(**{"k": 3, "max_new_tokens": 24, **settings})))


PAIRS = [("llama", None), ("qwen3", "qwen3-small"), ("qwen3-small", "qwen3"), ("gpt2", None), ("gpt2", "llama")]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_pair_loads_and_every_drafter_keeps_the_targets_text(
    checkpoints: dict[str, Path], target: str, draft: str | None
) -> None:
    """The target's source is a path in place of a hub id."""
    preset = preset_of(Hub(str(checkpoints[target])), checkpoints[draft] if draft else None, skip_layers=1)
    loaded = load(preset, dtype="float32", device="cpu")
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert (loaded.parts.make_draft_runner is not None) == (draft is not None)
    names = [name for name in DRAFTERS if drafter_class(name).needs(loaded.parts).missing is None]
    assert set(names) >= {"none", "prompt-lookup", "layer-skip"} | ({"draft-model"} if draft else set())
    plain = text_of(loaded, "none", k=0)
    assert len(plain) > 4
    for name in names:
        assert text_of(loaded, name) == plain, name


def test_the_page_knows_what_passes_cost_before_its_first_race(checkpoints: dict[str, Path]) -> None:
    backend = Backend()
    loaded = backend.load(preset_of(checkpoints["llama"]), ignore, None)
    assert len(loaded.costs) == 1
    loaded.release()
    loaded = backend.load(preset_of(checkpoints["llama"], defaults=Defaults(k=4)), ignore, None)
    assert not loaded.costs  # nobody asks for them
    loaded.release()


def test_what_a_loaded_preset_says_of_itself(checkpoints: dict[str, Path]) -> None:
    seen: list[tuple[float | None, str]] = []
    preset = preset_of(checkpoints["qwen3"], checkpoints["gpt2"], skip_layers=1)
    loaded = load(preset, dtype="bfloat16", device="cpu", progress=lambda *stage: seen.append(stage))
    assert loaded.model.dtype == compute_dtype(torch.bfloat16, torch.device("cpu"))
    assert not loaded.model.training
    assert (loaded.context, loaded.parts.draft_context) == (256, 128)
    assert loaded.eos_ids == {2}
    assert loaded.parts.skip_layers == 1
    assert loaded.weights == {
        "target": {"source": "folder", "name": "qwen3"},
        "draft_model": {"source": "folder", "name": "gpt2"},
    }
    assert seen[-1] == (1.0, "ready")
    assert any("loading" in words and "gpt2" in words for _, words in seen)
    facts = loaded.environment()
    assert json.loads(json.dumps(facts)) == facts
    assert f"torch.{facts['dtype']}" == str(loaded.model.dtype)
    assert (facts["device"], facts["weights_dtype"]) == ("cpu", "bfloat16")
    assert facts["exact_rows"] == loaded.target_runner(1).exact_rows
    assert facts["exact_tree_rows"] == loaded.target_runner(1).exact_tree_rows
    assert facts["cpu"]
    assert facts["torch"] == torch.__version__
    assert facts["placement"] == {"cpu": 2 * sum(p.numel() for p in loaded.model.parameters())}


def test_a_released_preset_holds_no_model_and_the_next_one_loads(checkpoints: dict[str, Path]) -> None:
    loaded = load(preset_of(checkpoints["llama"]), device="cpu")
    loaded.release()
    loaded.release()
    with pytest.raises(AssertionError, match="released"):
        _ = loaded.model
    assert load(preset_of(checkpoints["llama"]), device="cpu").model is not None


def test_several_stated_end_tokens_all_count(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints["llama"], tmp_path / "model"))
    stated = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**stated, "eos_token_id": [2, 17]}))
    assert load(preset_of(folder), device="cpu").eos_ids == {2, 17}


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}, {"temperature": 0.7}])
def test_an_end_token_of_the_configuration_alone_ends_a_text(tmp_path: Path, generation: Any) -> None:
    tokenizer = make_tokenizer(template=None)
    tokenizer.eos_token = None
    folder = save(tiny("llama", len(tokenizer), eos_token_id=17), tokenizer, tmp_path / "model")
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert load(preset_of(folder), device="cpu").eos_ids == {17}
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in stated.items() if k != "eos_token_id"}))
    defaults = frozenset() if generation else {2}  # Llama's, which nobody stated
    assert load(preset_of(folder), device="cpu").eos_ids == defaults


def test_the_end_of_a_turn_counts_as_an_end_token(tmp_path: Path) -> None:
    """As with models that state `<|endoftext|>` as their end but close every turn with another token."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    folder = save(tiny("llama", len(tokenizer), eos_token_id=0), tokenizer, tmp_path / "model")
    assert load(preset_of(folder), device="cpu").eos_ids == {0, 2}


# Weights in float16 on a CPU -------------------------------------------------------------------------------


def test_a_pair_with_weights_in_float16_keeps_the_targets_text(checkpoints: dict[str, Path]) -> None:
    loaded = load(preset_of(checkpoints["qwen3"], checkpoints["qwen3-small"], skip_layers=1), "float16", "cpu")
    assert (loaded.engine, loaded.dtype, loaded.weights_dtype) == (
        cpu_engine(torch.float16),
        torch.float32,
        torch.float16,
    )
    for model in (loaded.model, loaded.draft_model):
        assert all(torch.equal(weight, weight.half().float()) for weight in model.parameters())
    plain = text_of(loaded, "none", k=0)
    assert text_of(loaded, "draft-model") == text_of(loaded, "layer-skip") == plain


def test_what_runs_by_transformers_forward_keeps_its_weights_in_float32(
    checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    unknown = save(tiny("llama", len(tokenizer), hidden_act="gelu"), tokenizer, tmp_path / "unknown")
    for folder, eager in ((unknown, False), (checkpoints["llama"], True)):
        loaded = load(preset_of(folder), "float16", "cpu", eager=eager)
        assert (loaded.engine, loaded.dtype, loaded.weights_dtype) == ("eager", torch.float32, torch.float32)
        assert not all(torch.equal(weight, weight.half().float()) for weight in loaded.model.parameters())


def test_weights_that_float16_cannot_hold_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = tiny("llama", len(tokenizer))
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = -7e4
    folder = save(model, tokenizer, tmp_path / "large")
    with refuses(LoadError, "float16; float32"):
        load(preset_of(folder), "float16", "cpu")
    assert load(preset_of(folder), "float32", "cpu").model.dtype == torch.float32
    assert load(preset_of(folder), "float16", "cpu", eager=True).dtype == torch.float32


# Pairs and models that are refused ---------------------------------------------------------------------------


def test_a_draft_model_with_another_tokenizer_drafts_by_text(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    other = make_tokenizer(["zebras zigzag past quiet jumping foxes", "why would anyone weigh anchors"])
    save(tiny("llama", len(other), max_position_embeddings=32), other, tmp_path / "stranger")
    loaded = load(preset_of(checkpoints["llama"], tmp_path / "stranger"), dtype="float32", device="cpu")
    assert loaded.environment()["drafts_by_text"]
    assert tells(facts_of(loaded), "another tokenizer")
    assert loaded.context == 256  # the draft model reads the end of what is too long for it
    assert text_of(loaded, "draft-model") == text_of(loaded, "none", k=0)


def test_a_token_without_an_embedding_in_the_draft_model_is_not_seen_by_it(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Neither one of the template nor one that is typed stops it from drafting."""
    tokenizer = make_tokenizer(template=CHATML.replace("<|im_start|>", "<turn>"))
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    tokenizer.add_tokens(["<tool>"])
    save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "target")
    save(tiny("llama", len(tokenizer) - 2), tokenizer, tmp_path / "draft")
    preset = preset_of(tmp_path / "target", tmp_path / "draft")
    assert tells([*report_on(preset, "float32", "cpu")][2], "Token 299 '<turn>' draft")
    loaded = load(preset, "float32", "cpu")
    ids = loaded.encode("the <tool> cat")
    run = start(loaded, "draft-model", ids, Settings(k=4, max_new_tokens=24))
    assert sum(len(event.drafted) for event in run if isinstance(event, Round)) > 0
    assert text_of(loaded, "draft-model") == text_of(loaded, "none", k=0)


def test_a_token_that_only_the_draft_model_has_does_no_harm(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<pad>"], special_tokens=True)
    save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "padded")
    loaded = load(preset_of(checkpoints["llama"], tmp_path / "padded"), dtype="float32", device="cpu")
    assert text_of(loaded, "draft-model") == text_of(loaded, "none", k=0)


def test_a_token_that_the_draft_model_cannot_read_reaches_it_as_text(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "target")
    loaded = load(preset_of(tmp_path / "target", checkpoints["llama"]), dtype="float32", device="cpu")
    assert loaded.parts.translator is not None
    prompt = loaded.encode("a <tool> b", raw=True)
    assert loaded.tokenizer.decode(prompt) == make_tokenizer().decode(loaded.parts.translator.to_draft(prompt))
    assert text_of(loaded, "draft-model") == text_of(loaded, "none", k=0)


def test_states_that_a_pass_of_several_tokens_loses_are_refused_before_the_weights(tmp_path: Path) -> None:
    BambaConfig(num_hidden_layers=2, attn_layer_indices=[1]).save_pretrained(tmp_path / "model")
    with refuses(LoadError, "model (linear_attention)"):
        load(preset_of(tmp_path / "model"), device="cpu")  # there are no weights to load


def test_skipping_more_layers_than_there_are_is_refused(checkpoints: dict[str, Path]) -> None:
    with refuses(BadInput, "toy.toml: skip_layers 2"):
        load(preset_of(checkpoints["llama"], skip_layers=2), device="cpu")


# Failures in words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BadInput("Say something."), "Say something."),
        (LoadError("The weights are gone."), "The weights are gone."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "lower"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
    ],
)
def test_a_failure_that_a_person_can_mend_is_a_sentence(error: Exception, words: str) -> None:
    assert tells(explain(error), words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/home/me/a/b.safetensors"), "Permission denied: 'b.safetensors'."),
        (OSError("No file named x in directory /home/me/a.\nSee /home/me."), "No file named x in directory a."),
        (OSError(r"C:\Users\me\b.json is damaged"), "b.json is damaged."),
        (KeyError("added_tokens"), "'added_tokens' is missing."),
        (
            ValueError("Validation error for 'a':\n    TypeError: no int.\n more"),
            "Validation error for 'a': TypeError: no int.",
        ),
        (ValueError("a/b: see https://example.org/c/d or 1/2"), "a/b: see https://example.org/c/d or 1/2."),
    ],
)
def test_what_a_library_says_is_told_without_folders_of_this_machine(error: Exception, words: str) -> None:
    with pytest.raises(LoadError) as caught, wrap_load_errors(Hub("me/model")):
        raise error
    assert str(caught.value).endswith(words)
    assert tells(str(caught.value), "me/model loaded")


def test_memory_that_cannot_be_had_is_a_sentence() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert tells(str(explain(caught.value)), "little memory")


def test_a_model_that_memory_cannot_hold_is_refused_before_its_weights_are_read(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: 1000)
    monkeypatch.setattr(room.psutil, "swap_memory", lambda: SimpleNamespace(free=500))
    with refuses(LoadError, "MB memory,"):
        load(preset_of(Folder(checkpoints["llama"])), "float32", "cpu")


@pytest.mark.parametrize("bug", [RuntimeError("shape mismatch"), KeyError("x"), IndexError("index out of range")])
def test_a_bug_has_no_sentence(bug: Exception) -> None:
    assert explain(bug) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "generation_config.json damaged:"),
        ("[" * 100_000, "generation_config.json damaged:"),
        ('{"eos_token_id": {"a": 1}}', "{'a': 1} eos_token_id,"),
        ('{"eos_token_id": ["a"]}', "['a'] eos_token_id,"),
    ],
    ids=["list", "deep", "object", "texts"],
)
def test_a_damaged_file_beside_the_weights_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, content: str, words: str
) -> None:
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    with refuses(LoadError, words):
        load(preset_of(folder), "float32", "cpu")
