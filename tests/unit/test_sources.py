"""Kinds of sources: one that is made up works everywhere by its class alone, and each is saved and read again."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdemo.errors import BadInput
from specdemo.models import sources
from specdemo.models.checkpoint import Checkpoint
from specdemo.models.loaded import load
from specdemo.models.package_index import PartWheel
from specdemo.models.presets import find_preset, load_presets, preset_of, with_head
from specdemo.models.report import report_on, save_preset
from specdemo.models.source import Source, path_of
from specdemo.models.sources import Folder, Gguf, Hub, Parts, Wheel
from specdemo.models.store import LoadError, Progress
from specdemo.models.tables import RelativePath
from specdemo.system.folders import cache_folder
from tests.harness.models import save, tiny

from ..sentences import refuses, tells

SUM, OTHER = "0" * 64, "1" * 64


@dataclass(frozen=True, slots=True)
class Zipped(Source):
    """A folder of `save_pretrained` in a ZIP file, made up here."""

    keys = ("zip",)
    zip: RelativePath

    def __str__(self) -> str:
        return str(self.zip)

    @classmethod
    def named(cls, text: str) -> Source | None:
        return cls(path_of(text)) if text.endswith(".zip") else None

    def location(self, dtype: torch.dtype | None, progress: Progress) -> Checkpoint:
        if not self.zip.is_file():
            raise LoadError(f"There is no file {self.zip}.")
        progress(None, f"unpacking {self}")
        folder = cache_folder() / self.zip.stem
        with zipfile.ZipFile(self.zip) as packed:
            packed.extractall(folder)
        return Checkpoint(self, str(folder), {"source": "zip", "name": self.zip.name})


@pytest.fixture
def zipped(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "KINDS", [Zipped, *sources.KINDS])
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "tiny")
    with zipfile.ZipFile(tmp_path / "tiny.zip", "w") as packed:
        for file in folder.iterdir():
            packed.write(file, file.name)
    return tmp_path / "tiny.zip"


def test_a_new_kind_of_source_is_one_class(zipped: Path, tmp_path: Path) -> None:
    preset = preset_of(str(zipped), "a/b")
    assert (preset.target, preset.draft_model) == (Zipped(zipped), Hub("a/b"))
    save_preset(preset, "mine", tmp_path)
    assert find_preset("mine", tmp_path).target == preset.target
    alone = preset_of(str(zipped))
    assert tells(next(report_on(alone, "float32", "cpu")), f"{zipped}: nothing")
    stages: list[str] = []
    loaded = load(alone, "float32", "cpu", lambda _, words: stages.append(words))
    assert loaded.weights["target"] == {"source": "zip", "name": "tiny.zip"}
    assert f"unpacking {zipped}" in stages
    with refuses(LoadError, "absent.zip"):
        load(preset_of("absent.zip"), "float32", "cpu")
    with refuses(BadInput, zipped.name):
        with_head(alone, "eagle", str(zipped))
    text = 'title = "T"\ndescription = "D"\n[target]\n'
    for fields, words in (
        ('zip = "a"\nhub = "a/b"', "target zip, wheel, hub path."),
        ("zip = 3", "target.zip text 3."),
        ('zip = "a"\nfile = "b"', "target.file field"),
    ):
        (tmp_path / "bad.toml").write_text(text + fields)
        with refuses(BadInput, f"bad.toml: {words}"):
            find_preset("bad", tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        Hub("a/b"),
        Hub("a/b", "v1"),
        Gguf("c.gguf", "a/b", "v1"),
        Gguf("/absent/c.gguf"),
        Folder(Path('/absent/it\'s "quoted"')),
        Wheel("some-package", "1.0", 10, SUM, "a/b.gguf", OTHER),
        Parts(
            Hub("a/b", "v1"), (PartWheel("p-1", "1", 5, SUM, "1.bin"), PartWheel("p-2", "1", 6, SUM, "2.bin")), OTHER
        ),
    ],
    ids=lambda source: type(source).__name__,
)
def test_every_kind_is_saved_in_a_preset_and_read_again(tmp_path: Path, source: Source) -> None:
    """With a head, presets of any kind can be saved: see `--head` and `--save-preset`."""
    preset = with_head(replace(preset_of("a/b"), target=source), "eagle", "c/d")
    save_preset(preset, "mine", tmp_path)
    presets, broken = load_presets(tmp_path)
    assert not broken
    assert (presets["mine"].target, presets["mine"].heads) == (source, {"eagle": Hub("c/d")})
