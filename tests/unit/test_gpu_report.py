"""`bench cpu`, and `bench gpu --report`: its children, and what becomes of those that fail. On the CPU and small."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specdemo.system import hardware
from tools.bench import cpu_report, docs, gpu_report, gpu_vllm
from tools.bench.__main__ import app
from tools.bench.gpu import TINY, self_test
from tools.bench.gpu_passes import Gpu
from tools.bench.results import spread
from tools.bench.rows import Row

from ..sentences import tells


def small(rows: list[Row]) -> Gpu:
    return Gpu(torch.device("cpu"), torch.float32, replace(TINY, repeats=1), rows.append)


@pytest.mark.slow
def test_a_report_holds_every_part_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["gpu", "--report", "--tiny", "--device", "cpu", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text(), object_hook=spread)
    rows = {(row["part"], row["what"]): row for row in found["measurements"]}
    tests = rows["tests", "pytest tests/gpu/test_waits.py -m not gpu"]
    assert (tests["passed"], tests["failed"], tests["skipped"]) == (3, 0, 0)
    for drafts in ("by trees", "by chains"):
        assert rows["texts equal to the target's own", drafts]["identical"] == 12
    assert rows["pass of a shape", "tiny, T = 17, one of 10 in a row"]["ms"] > 0
    assert [what for part, what in rows if part == gpu_vllm.PART] == ["left out: vLLM is not installed"]
    assert "\n".join(docs.measured(found)) in done.stdout


def test_a_report_of_a_cpu_goes_on_after_what_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_report, "SIZES", replace(TINY, tests=("tests/gpu/test_waits.py", "-m", "not gpu")))
    monkeypatch.setattr(cpu_report, "KINDS", [("cpu", "int5"), ("cpu", "float32")])
    path = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["cpu", "--json", str(path)])
    assert done.exit_code == 1
    assert "FAILED: int5 on cpu." in done.stdout
    found = json.loads(path.read_text(), object_hook=spread)
    rows = {(row["part"], row["what"]): row for row in found["measurements"]}
    assert tells(rows["failed", "int5 on cpu"]["error"], "int5")
    assert rows["tests", "pytest tests/gpu/test_waits.py -m not gpu"]["passed"] == 3
    assert rows["memory", "copying, read and written"]["gb_per_second"] > 0
    (compiler,) = (what for part, what in rows if part == "compiler")
    assert str(hardware.cpu_instructions()) in compiler
    for drafts in ("by trees", "by chains"):
        texts = rows["texts equal to the target's own, float32 on cpu", drafts]
        assert texts["identical"] == texts["texts"] > 0
    assert "\n".join(docs.measured(found)) in done.stdout


def test_what_a_child_began_ends_with_it() -> None:
    begin = "import subprocess, sys, time; sleep = 'import time; time.sleep(99)'"
    work = "print(subprocess.Popen([sys.executable, '-c', sleep]).pid, flush=True); time.sleep(99)"
    status, printed = gpu_report.child(["timeit", "-n1", "-r1", "-s", begin, work], 2)
    assert status is None
    pid = int(printed)
    with suppress(psutil.NoSuchProcess):  # the system takes a moment to end it
        left = psutil.Process(pid)
        for _ in range(100):
            if left.status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.1)
        else:
            pytest.fail("It still runs.")


@pytest.mark.parametrize(
    ("status", "kept", "error"),
    [(0, True, ""), (1, True, ""), (None, True, "stopped after 7 s"), (-11, True, "-11: a b"), (1, False, "1: a b")],
)
def test_the_rows_that_a_part_had_are_kept_and_its_end_is_one_more(
    status: int | None, kept: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(words: Sequence[str], seconds: float) -> tuple[int | None, str]:
        assert [*words[:5]] == ["tools.bench", "gpu", "--tiny", "--only", "shapes"]
        if kept:
            Path(words[-1]).write_text('{"measurements": [{"part": "pass", "what": "one", "ms": 2}]}')
        return status, "a\nb"

    monkeypatch.setattr(gpu_report, "child", child)
    rows = list[Row]()
    gpu_report.run_part(small(rows), "shapes", ["--tiny"], 7)
    assert [row["what"] for row in rows] == ["one"] * kept + ["shapes"] * bool(error)
    assert not error or error in rows[-1]["error"]
    assert rows[-1].get("output") == (["a\nb"] if status != 0 else None)


ALONE = """\
t/a.py::test_b[cpu-f(k=4, t=())] PASSED [ 10%]
t/a.py::test_c FAILED [ 20%]
t/a.py::test_d SKIPPED (no) [ 30%]
"""
TOGETHER = """\
t/a.py::test_c
[gw0] [ 10%] PASSED t/a.py::test_b[cpu-f(k=4, t=())]
[gw1] [ 20%] FAILED t/a.py::test_c
[gw0] [ 30%] SKIPPED t/a.py::test_d
"""
SUMMARY = "\nE   assert 1 == 2\n=== short test summary info ===\nFAILED t/a.py::test_c - assert 1 == 2\n"


@pytest.mark.parametrize("printed", [ALONE, TOGETHER, ALONE + SUMMARY])
@pytest.mark.parametrize("status", [1, None])
def test_tests_are_counted_and_those_that_fail_are_named(
    printed: str, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "child", lambda *_: (status, printed))
    rows = list[Row]()
    gpu_report.run_tests(small(rows), 7)
    (row,) = rows
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 1, 1)
    assert row["error"] == "t/a.py::test_c" + ("" if status else "; stopped after 7 s: the rest is left out")
    assert row["output"] == [printed]


def test_without_pytest_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "find_spec", lambda name: None)
    rows = list[Row]()
    gpu_report.run_tests(small(rows), 7)
    assert tells(rows[0]["what"], "left out, pytest is not installed")


def test_what_an_engine_replaced_counts_as_failed() -> None:
    known = {"engine": "graph", "exact_rows": 5, "exact_tree_rows": 0}
    sentence = "attend runs as torch's operations"
    found = {"rows": 5, "tree_rows": 0, "seconds": 1.5, "replaced": [sentence]}
    rows = list[Row]()
    for test in (found, None):
        self_test(small(rows), SimpleNamespace(environment=lambda test=test: {**known, "self_test": test}))  # type: ignore[arg-type]
    made, replaced, none = rows
    assert (made["rows"], made["tree_rows"], made["seconds"]) == (5, 0, 1.5)
    assert replaced["error"] == sentence
    assert tells(none["what"], "no self-test")
    assert (none["rows"], none["seconds"]) == (5, None)


def test_vllm_decodes_the_weights_that_ours_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for `vllm.LLM` that decodes by transformers."""
    asked = list[int]()

    class LLM:
        def __init__(self, model: str, dtype: str, **others: Any) -> None:
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            assert others["max_model_len"] == TINY.context + TINY.new_tokens

        def generate(self, prompt: Any, sampling: Any, use_tqdm: bool) -> None:
            asked.append(sampling.max_tokens)
            self.model.generate(torch.tensor([prompt["prompt_token_ids"]]), max_new_tokens=sampling.max_tokens)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))
    monkeypatch.setattr(gpu_vllm, "find_spec", lambda name: True)
    monkeypatch.setattr(gpu_vllm, "version", lambda name: "0.0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # is put back
    rows = list[Row]()
    gpu_vllm.beside_vllm(small(rows))
    speeds = {row["what"]: row["tokens_per_second"] for row in rows if row["part"] == gpu_vllm.PART}
    assert [*speeds] == ["specdemo", "vLLM 0.0"]
    assert all(speed > 0 for speed in speeds.values())
    assert asked == [1, TINY.new_tokens, TINY.new_tokens, 1]
