"""The engine on ARM64, emulated by qemu where `root.sh` has been run: `python -m pytest tests/arm -m arm`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, find_preset
from tests.harness.texts import generated

SOURCE = Path(__file__).parents[2]
CACHE = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
PYTHON = Path(os.environ.get("SPECDEMO_ARM") or f"{CACHE}/specdemo-arm").expanduser().absolute() / "python"
FILES = {  # with the fewest tests that pass
    "native": 55,
    "quantized": 50,
    "experts": 20,
    "exact_rows": 15,
    "noise": 18,
    "sampling": 250,
    "trees": 12,
    "batch": 35,
}
SKIPPED = {"this CPU lacks more", "these are instructions of x86"}
LEFT_OUT = "exact_rows and (fused or graph or eager)"  # other engines
HOUR = 3600
PROMPT, TOKENS = "Name three fruits.", 16

pytestmark = [
    pytest.mark.arm,
    pytest.mark.timeout(HOUR),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: run tests/arm/root.sh"),
    pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="there is no qemu-aarch64"),
]


def emulated(cpu: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python on ARM64 with this `-cpu` of qemu."""
    chosen = {"QEMU_CPU": cpu, "CC": "aarch64-linux-gnu-gcc", "OMP_NUM_THREADS": "1", **variables}
    caught: dict[str, Any] = {"capture_output": True, "text": True}
    return subprocess.run([PYTHON, *words], cwd=SOURCE, env=os.environ | chosen, check=False, timeout=HOUR, **caught)


# All that ARM has; nothing but NEON, where torch itself ends with more than one thread.
@pytest.mark.parametrize(("cpu", "threads"), [("max", {}), ("cortex-a72", {"OMP_THREAD_LIMIT": "1"})])
def test_the_engine_passes_its_tests(cpu: str, threads: dict[str, str], tmp_path: Path) -> None:
    files, report = [f"tests/unit/test_{name}.py" for name in FILES], tmp_path / "report.xml"
    options = ["-n0", "-p", "no:cacheprovider", "--timeout", "1200", "-k", f"not ({LEFT_OUT})", f"--junitxml={report}"]
    ended = emulated(cpu, "-m", "pytest", *options, *files, SPECDEMO_CACHE=str(tmp_path / "cache"), **threads)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    cases = ET.parse(report).findall(".//testcase")
    skipped = Counter(str(reason.get("message")) for case in cases for reason in case.findall("skipped"))
    passed = Counter(
        str(case.get("classname")).rpartition("test_")[2] for case in cases if case.find("skipped") is None
    )
    assert skipped.keys() <= SKIPPED, skipped
    assert all(passed[name] >= least for name, least in FILES.items()), passed


@pytest.fixture(scope="module")
def text() -> list[int]:
    """By transformers on this CPU."""
    loaded = load(find_preset(DEFAULT_PRESET), "float32", "cpu")
    text = generated(loaded.model, loaded.encode(PROMPT), TOKENS)
    loaded.release()
    return text


@pytest.mark.real
@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
def test_a_race_writes_the_text_of_transformers(cpu: str, text: list[int]) -> None:
    words = ["--prompt", PROMPT, "--dtype", "float32", "--max-new-tokens", str(TOKENS), "--json"]
    ended = emulated(cpu, "-m", "specdemo", "race", *words)
    assert ended.returncode == 0, ended.stderr
    race: dict[str, Any] = json.loads(ended.stdout)
    assert len(text) > 8
    assert race["plain"]["token_ids"] == race["speculative"]["token_ids"] == text
    assert race["speculative"]["stats"]["accepted"] > 0
    assert (race["comparison"]["identical"], race["environment"]["engine"]) == (True, "native")
