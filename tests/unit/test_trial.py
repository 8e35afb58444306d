"""Work that may crash or hang is tried in a child process, once."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import psutil
import pytest
import torch

from specdemo.models import trial as trials
from specdemo.system import trial
from specdemo.system.progress import Stopped, attended
from specdemo.system.trial import tried
from tests.harness.models import config_of

CHILD = "tests.fakes.trials"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))


def test_every_trial_has_its_outcome_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SILENT", 1.5)
    notes, names = tmp_path / "notes", ["right", "wrong", "slow", "crash", "hang", "silent", "compiler", "poisoned"]
    names += ["chatty", "last"]
    began = time.monotonic()
    found = tried(CHILD, names, str(notes).encode(), ["a GPU"])
    assert [*found] == names
    assert time.monotonic() - began < 60
    assert found["right"] == found["slow"] == found["chatty"] == found["last"] == ""
    assert found["wrong"] == found["poisoned"] == "gives other numbers"
    assert "2 seconds" in str(found["compiler"])
    assert "answer" in str(found["silent"])
    assert "-11" in str(found["crash"])
    assert "2 seconds" in str(found["hang"])
    assert [*dict.fromkeys(notes.read_text().split())] == names
    assert not [child for child in psutil.Process().children() if CHILD in child.cmdline()]


def test_what_was_found_is_kept_for_the_same_facts(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    for facts in (["a GPU", "a driver"], ["a GPU", "a driver"], ["a GPU", "another driver"]):
        assert tried(CHILD, ["right", "wrong"], str(notes).encode(), facts)["wrong"]
    assert notes.read_text().split() == ["right", "wrong"] * 2
    (file, *_) = (tmp_path / "cache").glob("*.trial")
    for place, damage in enumerate(("damaged", "[]", "{}", '{"right": 3, "wrong": null}')):
        file.write_text(damage)
        for facts in (["a GPU", "a driver"], ["a GPU", "another driver"]):
            assert tried(CHILD, ["right", "wrong"], str(notes).encode(), facts)["wrong"]
        assert notes.read_text().split() == ["right", "wrong"] * (3 + place)


def test_where_a_child_cannot_begin_nothing_is_known_and_nothing_kept(tmp_path: Path) -> None:
    assert tried(CHILD, ["cannot begin", "right"], str(tmp_path / "notes").encode(), []) == {}
    assert tried("no.such.module", ["right"], b"", []) == {}
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["stopped", "short of memory"])
def test_what_says_nothing_of_a_kernel_is_not_kept(name: str, tmp_path: Path) -> None:
    assert not any(tried(CHILD, [name, "right"], str(tmp_path / "notes").encode(), []).values())
    assert not list((tmp_path / "cache").glob("*"))


def test_stop_ends_the_child(tmp_path: Path) -> None:
    until = time.monotonic() + 2
    with pytest.raises(Stopped), attended(lambda: time.monotonic() > until):
        tried(CHILD, ["hang"], str(tmp_path / "notes").encode(), [])
    assert not [child for child in psutil.Process().children() if CHILD in child.cmdline()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.quint4x2])
def test_the_c_library_passes_its_trial(dtype: torch.dtype) -> None:
    given = pickle.dumps((config_of("llama"), dtype, "cpu"))
    assert tried(trials.__name__, ["C"], given, []) == {"C": ""}


def test_draws_and_trees_pass_theirs() -> None:
    """On the CPU, where no kernel takes part but that of trees, in torch's operations."""
    for name in ("draws", "trees"):
        assert trials.outcome(name, config_of("llama"), torch.float32, torch.device("cpu")) == ""
