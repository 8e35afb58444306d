"""Everything `bench gpu` does on a GPU, on a CPU and small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specdemo.cli import app
from specdemo.lab import bench_gpu, gpu_checks
from specdemo.runners import graph, ops
from specdemo.types import BadInput

pytestmark = pytest.mark.usefixtures("one_thread", "little_room")
CPU = torch.device("cpu")


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph, "ROOM", 256)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def test_the_engine_passes_its_checks() -> None:
    found = list(gpu_checks.checks(CPU, runs=200))
    assert [check for check in found if not check.passed] == []
    assert len(found) == 6


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "HEADS", ((4, 2, 16),))
    assert gpu_checks.kernels_agree(ops, CPU, torch.float32).passed

    class Wrong:
        product, place, swiglu = staticmethod(ops.product), staticmethod(ops.place), staticmethod(ops.swiglu)

        @staticmethod
        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            return ops.attend(q, keys, values, start - 1)  # no token sees itself

    assert not gpu_checks.kernels_agree(Wrong, CPU, torch.float32).passed  # type: ignore[arg-type]


def test_a_wrong_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.place
    monkeypatch.setattr(ops, "place", lambda qkv, norms, rotation, *rest: right(qkv, None, rotation, *rest))
    assert gpu_checks.logits_agree("llama", CPU).passed  # which has no such norms
    assert not gpu_checks.logits_agree("qwen3", CPU).passed
    assert not gpu_checks.bfloat16_is_no_worse(CPU).passed
    assert not gpu_checks.texts_are_equal(CPU).passed
    assert not gpu_checks.law_is_the_targets(CPU, 300).passed


def test_what_is_checked_of_the_kernels_only_runs() -> None:
    assert "of 20 passes" in gpu_checks.attention_keeps_its_order(ops, CPU).found
    assert gpu_checks.drafts_change_no_bit(CPU, torch.float32).passed
    assert gpu_checks.logits_agree("llama", CPU, ops).passed


def test_every_measurement_gives_its_rows() -> None:
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    parts = {row["part"] for row in rows}
    assert parts >= {"memory", "capture", "pass, graph", "products alone, torch", "plain decoding", "round, forced"}
    assert all(value > 0 for row in rows for key, value in row.items() if key in ("ms", "tokens_per_second"))
    forced = {row["what"]: row for row in rows if row["part"] == "round, forced"}
    assert set(forced) == {"K = 1, 0 pass", "K = 1, 1 pass", "K = 3, 0 pass", "K = 3, 1 pass", "K = 3, 3 pass"}
    every = forced["K = 3, 3 pass"]
    assert every["tokens_per_second"] == pytest.approx(4 * 1000 / every["ms"])
    ours = [row for row in rows if row["part"] == "made pair, ours"]
    assert [row["same_tokens"] for row in ours] == [bench_gpu.TINY.new_tokens] * 4  # in float32
    assert ours[-1]["what"] == "draft model, K = auto"
    assert ours[2]["tokens_per_round"] > 1.5
    printed = bench_gpu.table(rows, bench_gpu.TINY)
    assert len(printed.splitlines()) > len(rows)
    assert "of the shape tiny" in printed


def test_where_weights_are_in_float16_everything_can_be_measured_too() -> None:
    rows = list(bench_gpu.measurements(CPU, torch.float16, bench_gpu.TINY))
    assert [row for row in rows if row["part"] == bench_gpu.FAILED] == []
    assert {row["part"] for row in rows} >= {"products alone, torch", "round, forced"}


def test_what_cannot_be_measured_is_told_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("not here")

    monkeypatch.setattr(bench_gpu, "random_pair", broken)
    monkeypatch.setattr(bench_gpu, "generate", broken)
    monkeypatch.setattr(bench_gpu.log, "exception", lambda *_: None)
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    failed = [row["what"] for row in rows if row["part"] == bench_gpu.FAILED]
    assert failed[0] == "broken: RuntimeError"
    assert len(failed) >= 3
    ours = [row for row in rows if row["part"] == "made pair, ours"]
    assert len(ours) == 2 + len(bench_gpu.TINY.ks)
    assert all(row["to_best_assisted"] is None and row["tokens_per_second"] > 0 for row in ours)
    assert "not here" not in bench_gpu.table(rows, bench_gpu.TINY)


def test_the_command_prints_and_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "checks", lambda device: iter([gpu_checks.Check("a check", False, "nothing")]))
    monkeypatch.setattr(bench_gpu, "TINY", replace(bench_gpu.TINY, ks=(1,), repeats=1))
    done = CliRunner().invoke(
        app, ["bench", "gpu", "--tiny", "--device", "cpu", "--dtype", "float32", "--json", str(tmp_path / "gpu.json")]
    )
    assert done.exit_code == 1
    assert "WRONG: a check." in done.output
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["checks"] == [{"name": "a check", "passed": False, "found": "nothing"}]
    assert kept["measurements"][-1]["part"] == "made pair, ours"
    assert kept["environment"]["torch"]


def test_it_measures_without_checks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "checks", lambda device: iter([gpu_checks.Check("a check", False, "nothing")]))
    monkeypatch.setattr(bench_gpu, "measurements", lambda *asked: iter([{"part": "memory", "what": "copying"}]))
    monkeypatch.setattr(bench_gpu, "table", lambda rows, sizes: f"{len(rows)} row")
    done = CliRunner().invoke(app, ["bench", "gpu", "--tiny", "--device", "cpu", "--no-checks"])
    assert (done.exit_code, done.stdout.split()) == (0, ["1", "row"])


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(BadInput, match="there is none here"):
        CliRunner().invoke(app, ["bench", "gpu", "--device", "cpu"], catch_exceptions=False, standalone_mode=False)
