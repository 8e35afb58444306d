"""Models open whatever their folders are called: by name on the command line and on the page, and from a trace."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from specdemo.errors import BadInput
from specdemo.models import report as reporting
from specdemo.models.presets import WITH, find_preset, load_presets, preset_of, with_head
from specdemo.models.report import save_preset
from specdemo.models.sources import Folder
from specdemo.racing.race import race
from specdemo.settings import Settings
from specdemo.ui.engine import Backend
from specdemo.ui.race.own_models import _named
from tests.harness.files import make_tokenizer
from tests.harness.models import save, tiny
from tests.harness.ui_classes import Engine

from ..conftest import Command
from ..sentences import refuses, tells

NAMES = [
    "a + b",
    "a +",
    "+ b",
    "a @ b",
    f"a{WITH}eagle b",
    "a with the head",
    'quo"ted',
    '"quoted"',
    " spaces around ",
    "Modèle 模型 👋",
    "folder.gguf",
    "100% [x] {y} & #z",
    "back\\slash",
    "two\nlines",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama", 299), make_tokenizer(), tmp_path_factory.mktemp("names") / "model")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_opens_by_its_name_wherever_that_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, other = tmp_path / name, tmp_path / f"{name} + {name}"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for given in (str(folder), os.path.join(".", name), name):
        alone = preset_of(given)
        assert alone.target == Folder(folder)
        both = with_head(with_head(preset_of(given, given), "eagle", given), "block", "owner/name@v1")
        pairs = (preset_of(*pair) for pair in (("a/b", given), (given, "a/b"), (given, "gpt2")))
        for preset in (alone, both, *pairs, with_head(alone, "eagle", given)):
            assert find_preset(preset.name) == preset
        assert _named({}, given, " ", "") == alone
    save_preset(both, "kept", tmp_path)
    presets, broken = load_presets(tmp_path)
    assert not broken
    assert (presets["kept"].target, presets["kept"].draft_model) == (both.target, both.draft_model)
    other.mkdir()
    assert find_preset(str(other)).target == Folder(other)  # as a person types it


def test_a_folder_called_like_a_home_opens_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "~home").mkdir()
    assert find_preset(preset_of(str(tmp_path / "~home")).name).target == Folder(tmp_path / "~home")


def test_names_without_anything_odd_are_as_they_were() -> None:
    assert with_head(preset_of("a/b", "c/d"), "eagle", "e/f").name == "a/b + c/d with the head eagle e/f"
    assert preset_of("a/b", "c/d").name == "a/b + c/d"
    assert find_preset("a/b + gpt2 with the head eagle b") == with_head(preset_of("a/b", "gpt2"), "eagle", "b")
    assert find_preset(preset_of("gpt2", "distilgpt2").name) == preset_of("gpt2", "distilgpt2")
    for name, missing in {"./x + y": "./x.", "a/b + ./y": "./y."}.items():
        with refuses(BadInput, missing):
            find_preset(name)


def test_a_name_that_is_no_text_is_one_sentence() -> None:
    with refuses(BadInput, "'a/\\udcff'"):
        preset_of(os.fsdecode(b"a/\xff"))


@pytest.mark.parametrize("name", ["a + b", f'"x"{WITH}eagle y + z @ 模型'])
def test_such_a_folder_races_and_its_trace_is_run_again(
    command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, trace = Path(shutil.copytree(model, tmp_path / name)), tmp_path / "trace.jsonl"
    monkeypatch.setattr(reporting.save_preset, "__defaults__", (tmp_path,))
    named = ["--target", str(folder), "--draft", str(folder), "--prompt", "the cat", "--max-new-tokens", "6", "-k", "2"]
    status, out, err = command("generate", *named, "--json", "--save-preset", "mine")
    assert status == 0, err
    assert json.loads(out)["stats"]["drafted"] > 0
    assert command("record", *named, "--out", str(trace))[0] == 0
    status, out, err = command("race", "--again", str(trace), "--json")
    assert status == 0, err
    assert json.loads(out)["again"]["same"]


def test_such_a_folder_loads_and_races_on_the_page(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "a + b"))
    preset = _named({}, str(folder), str(folder), "")
    engine = Engine({"toy": preset_of(str(model))}, Backend())
    assert tells([*engine.report(preset)], "tokenizers match")
    engine.add(preset, "me")
    *_, status = engine.follow(preset.name)
    assert (status.stage, status.loaded) == ("ready", preset.name)
    settings = Settings(k=2, max_new_tokens=6)
    batches = engine.stream(preset.name, lambda loaded: race(loaded, "draft-model", loaded.encode("Hi"), settings))  # type: ignore[arg-type, return-value]
    assert sum(len(batch) for batch in batches) > 2
    list(engine.stream(None, lambda loaded: (loaded.release() for _ in "1")))
