"""What becomes of the loaded preset when another is chosen that cannot be had, with real models.

Free memory is a fake where it has to be short, and so is the hub that cannot be reached.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo.decoding.events import Finished
from specdemo.models import loaded as models
from specdemo.models import on_hub
from specdemo.models import preset_models as opening
from specdemo.models import sizes as room
from specdemo.models.presets import find_preset
from specdemo.models.sources import Folder, Hub
from specdemo.models.store import ignore
from specdemo.racing import race
from specdemo.racing.trace import Entry
from specdemo.settings import Settings
from specdemo.ui import engine as engine_module
from specdemo.ui.engine import Backend, EngineTrouble, Status
from tests.harness.ui_classes import Engine

from ..sentences import tells

SMALL, LARGE = "nanogpt-shakespeare", "nanogpt-shakespeare-large"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """With the small preset loaded, and others that cannot be."""
    small = find_preset(SMALL)
    assert isinstance(small.target, Folder)
    broken = Path(shutil.copytree(small.target.path, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    sources: dict[str, Any] = {
        "absent": (Folder(tmp_path / "nowhere"), None),
        "broken": (Folder(broken), None),
        "llama-68m": (Hub("huggyllama/llama-7b"), Hub("JackFram/llama-68m")),
    }
    presets = {
        name: replace(small, name=name, target=target, draft_model=draft) for name, (target, draft) in sources.items()
    }
    engine = Engine({SMALL: small, LARGE: find_preset(LARGE), **presets}, Backend())
    assert last(engine, SMALL).stage == "ready"
    yield engine
    list(engine.stream(engine.status.loaded, lambda loaded: (loaded.release() for _ in "1")))


def last(engine: Engine, preset: str) -> Status:
    *_, status = engine.follow(preset)
    return status


def races(engine: Engine, preset: str) -> bool:
    """Whether a race of the preset that is loaded runs to its end, without another load."""
    loaded: list[Any] = []

    def run(ready: Any) -> Iterator[Entry]:
        loaded.append(ready)
        return race.race(ready, "prompt-lookup", ready.encode("To be or", raw=True), Settings(k=2, max_new_tokens=6))

    stream: Any = engine.stream(preset, run)  # type: ignore[arg-type]
    entries = [entry for batch in stream for entry in batch]
    assert loaded == [engine._loaded]
    return sum(isinstance(entry.event, Finished) for entry in entries) == 2


NAMED = {
    "absent": "folder nowhere: config.json.",
    "broken": "broken loaded:",
    "llama-68m": "huggyllama/llama-7b downloaded: reached.",
}


@pytest.mark.parametrize("preset", NAMED)
def test_a_preset_that_cannot_be_had_leaves_the_loaded_one_in_place(
    engine: Engine, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*asked: Any, **options: Any) -> Any:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(on_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setenv("HF_HOME", "/nowhere")
    before, began = engine._loaded, time.monotonic()
    status = last(engine, preset)
    assert time.monotonic() - began < 2
    assert (status.stage, status.preset, status.loaded) == ("failed", preset, SMALL)
    assert tells(status.words, NAMED[preset])
    assert status.facts == engine_module.facts(before)
    assert engine._loaded is before
    assert races(engine, SMALL)
    stages = [seen.stage for seen in engine.follow(SMALL)]  # whoever races it asks for it first
    assert stages[-1] == "ready"
    assert engine._loaded is before
    assert last(engine, LARGE).stage == "ready"  # a good load follows
    assert before.released
    assert engine.status.loaded == LARGE
    assert races(engine, LARGE)
    with pytest.raises(EngineTrouble):
        races(engine, SMALL)


def test_what_memory_cannot_hold_even_alone_is_refused_before_anything_is_let_go(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine._loaded
    with monkeypatch.context() as patch:
        patch.setattr(room, "free_memory", lambda: 1000)
        patch.setattr(room.psutil, "swap_memory", lambda: SimpleNamespace(free=0))
        patch.setattr(models, "fetch_weights", lambda *asked: pytest.fail("it was fetched before it was refused"))
        status = last(engine, LARGE)
    assert (status.stage, status.loaded) == ("failed", SMALL)
    assert tells(status.words, "MB memory,")
    assert engine._loaded is before
    assert races(engine, SMALL)


def test_a_preset_that_does_not_fit_beside_the_loaded_one_replaces_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, small = engine._loaded, engine.presets[SMALL]
    found = opening.find_checkpoint(find_preset(LARGE).target, torch.float32, ignore)
    needed = room.weight_bytes(found)
    monkeypatch.setattr(room, "free_memory", lambda: needed)
    released: list[str] = []
    real = before.release

    def release() -> None:
        released.append(engine.status.words)
        real()

    monkeypatch.setattr(before, "release", release)
    assert last(engine, LARGE).stage == "ready"
    assert released == [models.MAKING_ROOM]  # before it was loaded, and only once
    assert engine._loaded.preset is not small
    assert races(engine, LARGE)


def test_a_preset_that_had_to_make_room_for_one_that_fails_is_loaded_when_it_is_wanted_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine._loaded
    with monkeypatch.context() as patch:
        patch.setattr(models, "plan", lambda *asked: replace(room.plan(*asked), replaces=True))
        status = last(engine, "broken")
    assert before.released
    assert (status.stage, status.loaded) == ("failed", "")
    assert tells(status.words, "broken loaded")
    assert last(engine, SMALL).stage == "ready"
    assert races(engine, SMALL)


def test_a_calibration_that_fails_leaves_the_loaded_preset_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before, given_up = engine._loaded, list[Any]()

    def fails(loaded: Any, _: Settings) -> None:
        given_up.append(loaded)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(race, "costs_of", fails)
        status = last(engine, LARGE)
    assert (status.stage, status.loaded) == ("failed", SMALL)
    assert tells(status.words, "little memory")
    assert [loaded.released for loaded in given_up] == [True]
    assert engine._loaded is before
    assert races(engine, SMALL)
