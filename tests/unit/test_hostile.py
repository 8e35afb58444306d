"""Damaged files of models and heads give a model or one sentence: no signal, no traceback, no gigabytes of memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdemo.system.folders import cache_folder

from .hostile import CASES, prepare

EVERY_DAY = 23  # each so many-th case
MOST = 3 * 2**30  # bytes of memory: torch and transformers take most of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "good").mkdir()
    prepare(folder / "good")
    (folder / "cache").mkdir()
    for file in cache_folder().iterdir() if cache_folder().is_dir() else ():
        if file.suffix == ".so":  # to build them takes longer than all cases
            shutil.copy(file, folder / "cache")
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="the most memory of a process is known on Unix")
@pytest.mark.parametrize("every", [EVERY_DAY, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_file_is_a_model_or_one_sentence(folder: Path, every: int) -> None:
    command = [sys.executable, "-m", "tests.unit.hostile", str(folder), "0", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    *lines, memory = lines
    outcomes = list(zip(lines[::2], lines[1::2], strict=True))
    assert len(outcomes) == len(range(0, CASES, every))
    assert not [(case, outcome) for case, outcome in outcomes if "\n" in outcome]
    assert {"loaded", "LoadError", "BadInput"} <= {outcome.partition(":")[0] for _, outcome in outcomes}
    assert memory < MOST
