"""Everything `bench gpu` does on a GPU, on a CPU and small."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specdemo.cli import app
from specdemo.drafters.block import Block
from specdemo.drafters.head_cache import DeviceCache
from specdemo.lab import bench_gpu, gpu_checks, gpu_rounds
from specdemo.lab.gpu_parts import parts
from specdemo.runners import graph, ops
from specdemo.runners.graph import Graphs
from specdemo.runners.layout import FusedModel
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
    assert len(found) == 7


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "HEADS", ((4, 2, 16),))
    assert gpu_checks.kernels_agree(ops, CPU, torch.float32).passed

    class Wrong:
        product, place, swiglu = staticmethod(ops.product), staticmethod(ops.place), staticmethod(ops.swiglu)

        @staticmethod
        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            return ops.attend(q, keys, values, start - 1)  # no token sees itself

    assert not gpu_checks.kernels_agree(Wrong, CPU, torch.float32).passed  # type: ignore[arg-type]


def test_kernels_that_are_not_used_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "find_spec", lambda name: object())
    for capability, passed in (((9, 0), False), ((8, 0), False), ((7, 5), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, has=capability: has)
        assert gpu_checks.kernels_are_used(ops, torch.device("cuda")).passed == passed
        assert gpu_checks.kernels_are_used(gpu_checks, torch.device("cuda")).passed


def test_a_wrong_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.place
    monkeypatch.setattr(ops, "place", lambda qkv, norms, rotation, *rest: right(qkv, None, rotation, *rest))
    assert gpu_checks.logits_agree("llama", CPU).passed  # which has no such norms
    assert not gpu_checks.logits_agree("qwen3", CPU).passed
    assert not gpu_checks.bfloat16_is_no_worse(CPU).passed
    assert not gpu_checks.texts_are_equal(CPU).passed
    assert not gpu_checks.law_is_the_targets(CPU, 300).passed


def test_a_wrong_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DeviceCache.put
    monkeypatch.setattr(DeviceCache, "put", lambda cache, layer, keys, values: right(cache, layer, values, keys))
    assert not gpu_checks.heads_agree(CPU).passed


def test_what_is_checked_of_the_kernels_only_runs() -> None:
    assert "of 20 passes" in gpu_checks.attention_keeps_its_order(ops, CPU).found
    assert gpu_checks.drafts_change_no_bit(CPU, torch.float32).passed
    assert gpu_checks.logits_agree("llama", CPU, ops).passed


def test_a_failure_before_the_first_check_does_not_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "ops_for", broken)
    monkeypatch.setattr(gpu_checks.log, "exception", lambda *_: None)
    for name in ("logits_agree", "bfloat16_is_no_worse", "texts_are_equal", "law_is_the_targets"):
        monkeypatch.setattr(gpu_checks, name, lambda *_: gpu_checks.Check("another", True, ""))
    first, *others = gpu_checks.checks(CPU)
    assert (first.name, first.passed) == ("ops_for", False)
    assert first.found.startswith("RuntimeError: not here..")
    assert [check.passed for check in others] == [True] * 7


@pytest.fixture
def counted_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU waits for nothing: here it counts that numbers are read off the device."""
    read = torch.Tensor.tolist

    @contextmanager
    def waits() -> Iterator[list[Any]]:
        seen: list[Any] = []

        def counted(tensor: torch.Tensor) -> Any:
            seen.append(SimpleNamespace(message="called a synchronizing CUDA operation"))
            return read(tensor)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", counted)
            yield seen

    monkeypatch.setattr(gpu_checks, "_waits", waits)
    monkeypatch.setattr(gpu_checks, "REAL_VOCAB", 300)


@pytest.mark.usefixtures("counted_waits")
def test_every_drafter_is_asked_how_often_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_checks.waits_once(CPU)
    assert found.passed
    names = [f"1 of {name}" for name in ("draft-model", "prompt-lookup", "eagle", "block")]
    assert found.found.split(", ") == [f"{name} at T = {temperature}" for temperature in (0, 1) for name in names]

    propose = Block.propose
    monkeypatch.setattr(Block, "propose", lambda *asked: (torch.ones(1).tolist(), propose(*asked))[1])
    found = gpu_checks.waits_once(CPU)
    assert not found.passed
    assert "1 of eagle at T = 0, 2 of block at T = 0" in found.found


@pytest.mark.usefixtures("counted_waits")
def test_a_round_without_a_draft_says_nothing_of_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks.Copying, "match", lambda *_: None)
    with pytest.raises(AssertionError, match="nothing was drafted"):
        gpu_checks.waits_once(CPU)


def test_every_measurement_gives_its_rows() -> None:
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    measured = {row["part"] for row in rows}
    assert measured >= {"memory", "capture", "part of a pass, ops", "pass, graph", "plain decoding", "round, forced"}
    assert bench_gpu.FAILED not in measured
    assert [row["what"] for row in rows if row["part"] == "plain decoding"] == [
        *("graph", "eager: transformers", "fused, not captured", "graph of ops")
    ]
    assert all(value > 0 for row in rows for key, value in row.items() if key in ("ms", "tokens_per_second"))
    forced = {row["what"]: row for row in rows if row["part"] == "round, forced"}
    assert set(forced) == {"K = 1, 0 pass", "K = 1, 1 pass", "K = 3, 0 pass", "K = 3, 1 pass", "K = 3, 3 pass"}
    every = forced["K = 3, 3 pass"]
    assert every["tokens_per_second"] == pytest.approx(4 * 1000 / every["ms"])
    heads = [row for row in rows if row["part"] == "round with a head"]
    ways = [f"{kind}, {way}" for kind in ("eagle", "block") for way in ("captured", "as it comes")]
    assert [row["what"] for row in heads] == ["alone", *ways]
    assert all(0 < row["draft_ms"] < row["ms"] for row in heads[1:])
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
    assert {row["part"] for row in rows} >= {"part of a pass, ops", "round, forced"}


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("not\nhere" + 500 * ".")


def failures(rows: list[bench_gpu.Row]) -> list[str]:
    return [row["what"] for row in rows if row["part"] == bench_gpu.FAILED]


def whats(rows: list[bench_gpu.Row], part: str) -> list[str]:
    return [row["what"] for row in rows if row["part"] == part]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu.log, "error", lambda *_, **__: None)
    monkeypatch.setattr(bench_gpu, "TINY", replace(bench_gpu.TINY, ks=(1,), repeats=1))


@pytest.mark.usefixtures("quiet")
def test_where_the_kernels_cannot_be_captured_torchs_own_operations_are_measured_and_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = ModuleType("specdemo.runners.kernels")
    vars(kernels).update({name: getattr(ops, name) for name in ops.__all__}, attend=broken)
    whole = bench_gpu.captured

    def captured(model: FusedModel, functions: ModuleType | None = None) -> Graphs:
        made = whole(model, functions or kernels)
        made._free[0].run(1)  # as a capture does
        return made

    monkeypatch.setattr(bench_gpu, "captured", captured)
    monkeypatch.setattr(bench_gpu, "ops_for", lambda model: kernels)
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    models = "the target", "the draft model", "a small target", "the made target", "its draft model"
    assert failures(rows) == [
        "a slot of the target, as fast as can be",
        *(f"attend, kernels, T = {count}" for count in (1, 6, 17)),
        *(f"a slot of {model}, as fast as can be" for model in models[1:]),
    ]
    captures = [what for what in whats(rows, "capture") if "nothing to compile" not in what]
    assert captures == [f"a slot of {model}, made of ops, what is new compiled" for model in models]
    assert {row["part"] for row in rows} >= {"part of a pass, ops", "pass, graph", "round, forced", "made pair, ours"}
    assert len(whats(rows, "plain decoding")) == 4


@pytest.mark.usefixtures("quiet")
def test_where_nothing_can_be_captured_the_other_engines_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "captured", broken)
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    assert whats(rows, "plain decoding") == ["eager: transformers", "fused, not captured"]
    assert len(whats(rows, "made pair, transformers")) == 3
    assert "pass, graph of ops" in failures(rows)


@pytest.mark.usefixtures("quiet")
def test_a_slot_a_part_or_a_calibration_that_fails_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(graphs: Graphs, functions: ModuleType, count: int, live: int) -> Iterator[Any]:
        yield from (broken() if count == 6 else parts(graphs, functions, count, live))

    monkeypatch.setattr(bench_gpu, "another_slot", broken)
    monkeypatch.setattr(bench_gpu, "parts", some)
    monkeypatch.setattr(bench_gpu.Costs, "measured", broken)
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    assert failures(rows) == ["another slot", "parts of a pass, ops, T = 6", "what K = auto goes by"]
    assert len(whats(rows, "part of a pass, ops")) == 2 * 8
    assert whats(rows, "round, forced") == ["K = 1, 0 pass", "K = 1, 1 pass"]
    assert whats(rows, "made pair, ours") == ["alone", "draft model, K = 1"]


def test_what_cannot_be_measured_is_told_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_in(owner: Any, name: str, when: Callable[..., bool]) -> None:
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *asked: broken() if when(*asked) else whole(*asked))

    monkeypatch.setattr(bench_gpu, "EagerRunner", broken)
    monkeypatch.setattr(bench_gpu, "generate", broken)
    broken_in(gpu_rounds, "forced", lambda passing: passing == 3)
    broken_in(bench_gpu.Pair, "events", lambda pair, prompt, settings, *_: settings.k == 1)
    monkeypatch.setattr(bench_gpu.log, "error", lambda *_, **__: None)
    rows = list(bench_gpu.measurements(CPU, torch.float32, bench_gpu.TINY))
    failed = {row["what"]: row["error"] for row in rows if row["part"] == bench_gpu.FAILED}
    assert set(failed) == {
        *("pass, eager: transformers", "forced rounds, K = 3", "ours, K = 1"),
        *(f"transformers, {name}" for name in ("hf", "hf-assisted", "hf-assisted-tuned, K = 1")),
        "transformers, hf-assisted-tuned, K = 3",
    }
    assert all(error.startswith("RuntimeError: not here..") and len(error) == 300 for error in failed.values())
    assert [row["what"] for row in rows if row["part"] == "plain decoding"][1:] == [
        "fused, not captured",
        "graph of ops",
    ]
    forced = [row["what"] for row in rows if row["part"] == "round, forced"]
    assert forced == ["K = 1, 0 pass", "K = 1, 1 pass", "K = 3, 0 pass", "K = 3, 1 pass"]
    ours = [row for row in rows if row["part"] == "made pair, ours"]
    assert [row["what"] for row in ours] == ["alone", "draft model, K = 3", "draft model, K = auto"]
    assert all(row["to_best_assisted"] is None and row["tokens_per_second"] > 0 for row in ours)
    assert "RuntimeError: not here.." in bench_gpu.line(next(row for row in rows if "error" in row))


def test_the_parts_of_a_pass_read_all_of_its_weights_and_the_live_cache() -> None:
    model = gpu_checks.tiny("qwen3", CPU)
    graphs = gpu_checks.graphs_of(model)
    found = {name: size for name, _, size in parts(graphs, ops, 3, 40)}
    layers = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2]
    products = [found[name] or 0 for name in ("qkv", "out", "up", "down")]
    assert sum(products) == sum(weight.nbytes for weight in layers)
    assert found["head"] == model.lm_head.weight.nbytes
    assert found["attend"] == 4 * 2 * 2 * 16 * 43 * 4  # layers, keys and values, their heads, width, tokens, bytes
    assert found["place"] is found["activate"] is None


def test_the_command_prints_and_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "checks", lambda device: iter([gpu_checks.Check("a check", False, "nothing")]))
    monkeypatch.setattr(bench_gpu, "TINY", replace(bench_gpu.TINY, ks=(1,), repeats=1))
    done = CliRunner().invoke(
        app, ["bench", "gpu", "--tiny", "--device", "cpu", "--dtype", "float32", "--json", str(tmp_path / "gpu.json")]
    )
    assert done.exit_code == 1
    assert "WRONG: a check." in done.output
    assert "pass, graph, T = 1, ms " in done.output  # what is left of a run that is cut off
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["checks"] == [{"name": "a check", "passed": False, "found": "nothing"}]
    assert kept["measurements"][-1]["part"] == "made pair, ours"
    assert kept["environment"]["torch"]


def test_a_run_that_is_cut_off_leaves_every_row_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "gpu.json", []

    def cut_off(*_: object) -> Iterator[bench_gpu.Row]:
        for what in ("one", "two", "three"):
            yield {"part": "pass", "what": what, "ms": 1.5, "achieved": 0.5}
            with path.open() as file:
                seen.append([row["what"] for row in json.load(file)["measurements"]])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "measurements", cut_off)
    done = CliRunner().invoke(app, ["bench", "gpu", "--tiny", "--device", "cpu", "--no-checks", "--json", str(path)])
    assert seen == [["one"], ["one", "two"], ["one", "two", "three"]]
    assert [row["what"] for row in json.loads(path.read_text())["measurements"]] == seen[-1]
    assert "pass, two, ms 1.500, achieved 50%" in done.output


def test_it_measures_without_checks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "checks", lambda device: iter([gpu_checks.Check("a check", False, "nothing")]))
    monkeypatch.setattr(bench_gpu, "measurements", lambda *asked: iter([{"part": "memory", "what": "copying"}]))
    monkeypatch.setattr(bench_gpu, "table", lambda rows, sizes: f"{len(rows)} row")
    done = CliRunner().invoke(app, ["bench", "gpu", "--tiny", "--device", "cpu", "--no-checks"])
    assert (done.exit_code, done.stdout.split()) == (0, ["1", "row"])


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(BadInput, match="there is none here"):
        CliRunner().invoke(app, ["bench", "gpu", "--device", "cpu"], catch_exceptions=False, standalone_mode=False)
