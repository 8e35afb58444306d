"""What `bench gpu --report` runs: the tests of a GPU, then some parts of `bench gpu`, within four minutes.

Each is a child process: what hangs is stopped, and an illegal access to the GPU's memory costs its own part only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryDirectory, TemporaryFile

import psutil

from specdemo.models.preset_models import find_models
from specdemo.models.presets import PRESETS, find_preset
from specdemo.system.hardware import dtype_name

from .gpu_passes import FAILED, LONGEST_ERROR, Gpu
from .results import spread

UNTIL = {"tests": 85, "shapes": 125, "preset": 180, "vllm": 230}  # seconds after the beginning
WORKERS = 4  # most of them compile
OUTCOME, TEST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b"), re.compile(r"\S+\.py::\w+(?:\[.*?\](?=\s|$))?")
KEPT = 20_000  # characters of what a child printed, in the file


def report(on: Gpu, words: Sequence[str]) -> None:
    """Run everything in turn. Weights are downloaded and converted before the time begins.

    Args:
        words: the options of `bench gpu` for the children.
    """
    with on.trying("weights"):
        find_models(find_preset(on.sizes.preset), dtype_name(on.dtype), str(on.device))
    began = time.monotonic()
    for part, until in UNTIL.items():
        seconds = until - (time.monotonic() - began)
        with on.trying(part):
            if part == "tests":
                run_tests(on, seconds)
            else:
                run_part(on, part, words, seconds)


def run_tests(on: Gpu, seconds: float) -> None:
    """A row of what passed and what did not, also where the tests are stopped."""
    named, began = f"pytest {' '.join(on.sizes.tests)}", time.monotonic()
    if not find_spec("pytest"):
        on.add("tests", f"{named}: left out, pytest is not installed")
        return
    together = min(WORKERS, (os.cpu_count() or 1) // 2) if find_spec("xdist") else 1
    options = ["-o", "addopts=", "-v", "--tb=short", *(["-n", str(together)] if together > 1 else [])]
    status, output = child(["pytest", *on.sizes.tests, *options], seconds)
    outcomes = {
        test[0]: outcome[0]
        for line in output.splitlines()
        if (test := TEST.search(line)) and (outcome := OUTCOME.search(line))
    }
    counts = {word: [*outcomes.values()].count(word.upper()) for word in ("passed", "failed", "skipped")}
    wrong = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    if status not in (0, 1):
        wrong.append(trouble(status, seconds, output))
    found = {"error": "; ".join(wrong), "output": [output[-KEPT:]]} if wrong else {}
    on.add("tests", named, **counts, seconds=time.monotonic() - began, **found)


def run_part(on: Gpu, part: str, words: Sequence[str], seconds: float) -> None:
    """The rows of a part, and one that says why there are no more. The last keeps what was printed, if any failed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        status, output = child(["tools.bench", "gpu", *words, "--only", part, "--json", str(path)], seconds)
        rows = json.loads(path.read_text(), object_hook=spread)["measurements"] if path.exists() else []
    if status not in (0, 1) or not rows:  # 1 where a row has an error
        rows.append({"part": FAILED, "what": part, "error": trouble(status, seconds, output)})
    if status != 0:
        rows[-1]["output"] = [output[-KEPT:]]
    for row in rows:
        on.take(row)


def child(words: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit status of a module of Python, None if it was stopped after so many seconds, and what it printed."""
    status = None
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        with Popen([sys.executable, "-m", *words], cwd=PRESETS.parent, stdout=out, stderr=out) as process:
            try:
                status = process.wait(seconds)
            except TimeoutExpired:
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    each.kill()
        out.seek(0)
        return status, out.read()


def trouble(status: int | None, seconds: float, output: str) -> str:
    if status is None:
        return f"stopped after {seconds:.0f} s: the rest is left out"
    return f"ended with status {status}: {' '.join(output.split())[-LONGEST_ERROR:]}"
