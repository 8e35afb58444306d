"""A target that memory cannot hold: some of its weights stay on the disk, and every pass reads them from there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specdemo.formats import byte_size
from specdemo.models import report as reporting
from specdemo.models import sizes as room
from specdemo.models.checkpoint import Checkpoint
from specdemo.models.loaded import load
from specdemo.models.preset_models import find_models
from specdemo.models.presets import Preset
from specdemo.models.report import report_on
from specdemo.models.sizes import laid_out_bytes, least_memory, plan, text_bytes, weight_bytes
from specdemo.models.sources import Gguf
from specdemo.models.store import LoadError
from specdemo.settings import Settings
from specdemo.ui.facts import facts
from tests.harness.files import write_gguf
from tests.harness.models import looked_at, model_of, preset_of, save, tiny, unread
from tests.harness.texts import generated

from ..sentences import refuses, tells
from .test_by_name import tokens_of
from .test_hybrid import outcomes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Targets most of whose weights are in their layers, and a draft model."""
    folder = tmp_path_factory.mktemp("disk")
    sizes: dict[str, Any] = {"num_hidden_layers": 8, "max_position_embeddings": 64}
    models = {
        "draft": tiny("llama", len(tokenizer), max_position_embeddings=64),
        "llama": tiny("llama", len(tokenizer), intermediate_size=256, **sizes),
        "hybrid": model_of("lfm2", layer_types=["conv", "full_attention"] * 4, **sizes),
    }
    return {name: save(model, tokenizer, folder / name) for name, model in models.items()}


def give_memory(monkeypatch: pytest.MonkeyPatch, free: int, swap: int = 0) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: free)
    monkeypatch.setattr(reporting, "free_memory", lambda: free)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap))


# What is planned ------------------------------------------------------------------------------------------------


def model_with(device: str = "cpu", **more: Any) -> Checkpoint:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, **more}
    return unread(LlamaConfig(vocab_size=100, num_hidden_layers=20, **sizes), device=device)


def test_what_memory_cannot_hold_stays_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = model_with(), model_with(hidden_size=16, intermediate_size=16)
    give_memory(monkeypatch, weight_bytes(target) // 2)
    chosen = plan([target, draft])
    share = int(weight_bytes(target) // 2 * room.SHARE) - weight_bytes(draft)
    assert chosen.max_memory == {"cpu": share}
    assert chosen.on_disk == weight_bytes(target) - share
    assert (chosen.devices, chosen.offloaded, chosen.replaces) == ((CPU, CPU), 0, False)
    assert plan([target, draft], {"cpu": 0}).replaces  # all else goes first
    give_memory(monkeypatch, weight_bytes(target) // 2, swap=weight_bytes(target))
    assert plan([target, draft]).on_disk == 0


def test_what_cannot_be_read_layer_by_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model_with()
    for model, free in (
        (target, int(least_memory(target))),  # of which not all is for weights
        (model_with("mps:0"), weight_bytes(target) // 2),
        (model_with(quantization_config={"quant_method": "gptq", "bits": 8}), 10),
    ):
        give_memory(monkeypatch, free)
        with refuses(LoadError, "model memory,"):
            plan([model])


def test_gpus_fill_up_first_then_main_memory_then_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model_with("cuda", intermediate_size=2**20)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (room.WORK_SPACE + 2**30, 80 * 2**30))
    give_memory(monkeypatch, 2**31)
    chosen = plan([target])
    assert chosen.max_memory is not None
    assert [*chosen.max_memory] == [0, "cpu"]  # what is left after these goes to the disk
    assert chosen.offloaded == chosen.max_memory["cpu"] == int(2**31 * room.SHARE)
    assert chosen.on_disk == weight_bytes(target) - sum(chosen.max_memory.values()) > 0


# What is run ----------------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> int:
    """Bytes of its weights in float32."""
    return weight_bytes(looked_at(preset_of(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "hybrid"])
def test_a_target_on_the_disk_writes_the_text_of_generate(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    preset = preset_of(folders[kind], folders["draft"])
    whole = load(preset, "float32", "cpu", eager=True)
    greedy = generated(whole.model, whole.encode("the cat sat on the mat", raw=True), 16)
    hot = Settings(k=3, temperature=0.7, max_new_tokens=16)
    expected = outcomes(whole, "none", hot)[0]
    whole.release()

    give_memory(monkeypatch, int(weights_of(folders[kind]) * 0.9))
    stages: list[str] = []
    loaded = load(preset, "float32", "cpu", lambda fraction, words: stages.append(words))
    assert loaded.engine == "eager"
    assert loaded.exact_rows == 0
    assert loaded.placement["disk"] > loaded.placement["cpu"] / 4
    assert any(weight.is_meta for weight in loaded.model.parameters())
    assert any(tells(stage, "MB disk, slow") for stage in stages)
    assert tells(facts(loaded)[-1], "MB")
    for drafter in ("none", "prompt-lookup", "draft-model"):
        assert tokens_of(loaded, drafter, 16) == greedy
        assert outcomes(loaded, drafter, hot)[0] == expected
    loaded.release()
    assert {path.name for path in folders[kind].iterdir()} >= {"model.safetensors"}  # which was only read


# The report -----------------------------------------------------------------------------------------------------


def test_a_report_says_what_stays_on_the_disk(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preset = preset_of(folders["llama"], folders["draft"])
    usual = [*report_on(preset, "float32", "cpu")]
    give_memory(monkeypatch, 2**40)
    assert [*report_on(preset, "float32", "cpu")][:-1] == usual[:-1]
    target, draft = find_models(preset, "float32", "cpu", fetch=False)
    give_memory(monkeypatch, int(5.5 * (text_bytes(target, 2) + text_bytes(draft, 1))))
    first, second, *_, on_disk, _ = report_on(preset, "float32", "cpu")
    assert tells(first, "engine eager, not exact")
    assert second == usual[1]
    assert tells(on_disk, f"cannot hold {byte_size(plan([target, draft]).on_disk)} case speculation")
    give_memory(monkeypatch, 1000)
    with refuses(LoadError, "smaller"):
        [*report_on(preset, "float32", "cpu")]


def test_a_gguf_file_has_to_be_in_memory_to_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    preset = Preset("toy", "Toy", "A preset of the tests.", Gguf(str(tmp_path / "tiny.gguf")))
    give_memory(monkeypatch, laid_out_bytes(looked_at(preset)) * 3 // 4)
    with refuses(LoadError, "smaller"):
        [*report_on(preset, "float32", "cpu")]
