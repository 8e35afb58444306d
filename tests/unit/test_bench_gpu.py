"""Everything that `bench gpu` does on a GPU, on the CPU and small."""

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
from torch.autograd import DeviceType
from typer.testing import CliRunner

from specdemo.decoding.events import Event, Finished, Prefilled, Round
from specdemo.engines import ops
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import Graphs
from specdemo.errors import BadInput
from specdemo.tokens import FinishReason, Token, TokenKind
from tests.harness.classes import FusedModel
from tools.bench import gpu as bench_gpu
from tools.bench import gpu_pair, gpu_passes
from tools.bench.__main__ import app
from tools.bench.cases import COMPILED, HF, Case
from tools.bench.gpu import TEMPERATURES, TINY, Gpu, measure
from tools.bench.gpu_passes import parts
from tools.bench.rows import Row

from ..gpu.helpers import graphs_of, tiny
from ..sentences import tells

pytestmark = pytest.mark.usefixtures("little_room")
CPU = torch.device("cpu")
TOKEN = Token(1, TokenKind.TARGET)
FEW = replace(TINY, ks=(1,), repeats=1)
TREES = "draft model, a tree of 3", "draft model, a tree of 6"
ENGINES = "graph", "eager: transformers", "fused, not captured", "graph of ops"


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph, "ROOM", 256)
    monkeypatch.setattr(gpu_passes.log, "error", lambda *_, **__: None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def measured(sizes: gpu_passes.Sizes = FEW, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Row]]:
    """The rows by what they are part of, and by what they measured."""
    found: dict[str, dict[str, Row]] = {}
    measure(Gpu(CPU, dtype, sizes, lambda row: found.setdefault(row["part"], {}).update({row["what"]: row})))
    return found


@pytest.mark.slow
def test_every_measurement_gives_its_rows() -> None:
    found = measured(TINY)
    rows = [row for part in found.values() for row in part.values()]
    expected = {"memory", "capture", "part of a pass, ops", "pass, graph", "plain decoding", "round, forced"}
    expected |= {"rounds of nanogpt-shakespeare", "pass of a shape", "exact rows", "texts equal to the target's own"}
    assert found.keys() >= expected
    assert "failed" not in found
    assert tuple(found["plain decoding"]) == ENGINES
    assert all(row["ms"] > 0 for row in rows if "ms" in row)
    forced = found["round, forced"]
    assert [*forced] == ["K = 1, 0 pass", "K = 1, 1 pass", *(f"K = 3, {passing} pass" for passing in (0, 1, 3))]
    every = forced["K = 3, 3 pass"]
    assert every["tokens_per_second"] == pytest.approx(4 * 1000 / every["ms"])
    assert every["drafted_token_ms"] == pytest.approx(every["draft_ms"] / 3)
    lengths = [f"T = {count}, one of 10 in a row" for count in (1, 6, 17)]
    assert [*found["pass of a shape"]] == [f"{shape}, {length}" for shape in TINY.shapes for length in lengths]
    heads = found["round of a shape"]
    ways = [f"{shape}, {way}" for shape in TINY.shapes for way in ("alone", "eagle", "block")]
    assert [*heads] == ways
    assert all(0 < heads[way]["draft_ms"] < heads[way]["ms"] for way in ways)
    ours = found["made pair, ours"]
    assert [*ours] == ["alone", *(f"draft model, K = {k}" for k in (1, 3, "auto")), *TREES]
    assert ours["draft model, K = 3"]["tokens_per_round"] > 1.5
    assert 3 < ours[TREES[0]]["rows"] <= 4 < ours[TREES[1]]["rows"] <= 7
    texts = found["texts of nanogpt-shakespeare"].values()  # by the bigram table
    assert [row["texts"] for row in texts] == [2] * len(TEMPERATURES) * 7  # alone, 2 chains, auto, 2 trees, auto
    assert all(row["identical"] == 2 and row["tokens_per_second"].mean > 0 for row in texts)
    sums = found["texts equal to the target's own"]  # auto that may draft trees counts as trees
    assert all((row["identical"], row["texts"]) == (12, 12) for row in sums.values())
    (exact,) = found["exact rows"].values()
    assert exact["rows"] > 0
    assert "error" not in exact


@pytest.mark.slow
def test_where_weights_are_in_float16_everything_can_be_measured_too() -> None:
    found = measured(dtype=torch.float16)
    assert "failed" not in found
    assert found.keys() >= {"part of a pass, ops", "round, forced"}


@pytest.mark.slow
def test_the_fastest_of_ours_is_compared_with_transformers_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pair, "cases_of_others", lambda on: [Case(HF), Case(COMPILED)])
    monkeypatch.setattr(gpu_pair, "generate", lambda loaded, case, *_: {"tokens_per_second": 1 + len(case.method)})
    rows = list[Row]()
    gpu_pair.made_pair(Gpu(CPU, torch.float32, FEW, rows.append))
    ours = {row["what"]: row["tokens_per_second"] for row in rows if row["part"] == "made pair, ours"}
    fastest = max(ours, key=lambda what: ours[what])
    assert rows[-1]["part"] == "made pair, the fastest to transformers compiled"
    assert (rows[-1]["what"], rows[-1]["to_compiled"]) == (fastest, ours[fastest] / 12)


def test_what_the_prompt_launches_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the first round, in which a draft model reads it."""
    counting, launched = False, 0

    @contextmanager
    def profiled(activities: object) -> Iterator[Any]:
        nonlocal counting
        counting = True
        yield SimpleNamespace(key_averages=rows)

    def rows() -> list[Any]:
        found = (
            ("cudaLaunchKernel", DeviceType.CPU, launched),
            ("_product", DeviceType.CUDA, 5 * launched),
            ("Memcpy HtoD", DeviceType.CUDA, 3),
            ("aten::add", DeviceType.CPU, 4),
        )
        return [SimpleNamespace(key=key, device_type=device, count=count) for key, device, count in found]

    def run() -> Iterator[Event]:
        nonlocal launched
        prompt, one, last = (
            Prefilled(5, TOKEN, 0.1),
            Round(0, (), (TOKEN,), 0.0, 0.1, 0.1),
            Finished(FinishReason.LENGTH),
        )
        for event, launches in ((prompt, 900), (one, 80), (one, 7), (one, 11), (last, 0)):
            launched += launches * counting
            yield event

    monkeypatch.setattr(bench_gpu, "profile", profiled)
    on = Gpu(torch.device("cuda"), torch.float32, FEW, list[Row]().append)
    assert bench_gpu.launches(on, run) == {"launches": 9, "kernels": 45}


@pytest.mark.parametrize("claimed", [17, 0])
def test_texts_that_differ_from_the_targets_count_as_failed_where_they_are_claimed_to_be_the_same(
    claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"temperature": 0, "tokens_per_second": 1, "tokens_per_round": 1, "rows": 1, "ratio_to": {"plain": 1}}
    shared = {"k": 4, "category": "all", "runs": 2, **figures}
    counts = {"plain": 2, "speculative": 2, "tree": 1}
    summary = [{**shared, "method": method, "identical": same} for method, same in counts.items()]
    monkeypatch.setattr(bench_gpu, "bench", lambda *_, **__: {"summary": summary})
    monkeypatch.setattr(bench_gpu, "able", lambda *_: ["eagle"])
    monkeypatch.setattr(bench_gpu, "cases_of_ours", lambda *_: [])
    rows = list[Row]()
    loaded: Any = SimpleNamespace(exact_rows=claimed, exact_tree_rows=claimed)
    bench_gpu.texts(Gpu(CPU, torch.float32, FEW, rows.append), loaded)
    *_, trees, chains = rows
    assert (trees["identical"], trees["texts"], chains["identical"], chains["texts"]) == (1, 2, 2, 2)
    assert trees.get("error") == (f"1 differ, though {claimed} rows are exact" if claimed else None)
    assert "error" not in chains


def test_where_memory_is_short_fewer_layers_are_measured_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_passes, "ROOM", 0)
    rows = list[Row]()
    bench_gpu.passes_and_rounds(Gpu(CPU, torch.float32, FEW, rows.append), "tiny", bench_gpu.TINY_TARGET)
    named = [row["what"] for row in rows if row["part"] in ("pass of a shape", "round of a shape")]
    assert len(named) == 6
    assert all(what.startswith("tiny with 1 of its 4 layers, ") for what in named)


# What fails ------------------------------------------------------------------------------------------------


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("not\nhere" + 500 * ".")


@pytest.mark.slow
def test_where_the_kernels_cannot_be_captured_torchs_own_operations_are_measured_and_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = ModuleType("specdemo.engines.gpu.kernels")
    vars(kernels).update({name: getattr(ops, name) for name in ops.__all__}, attend=broken)
    whole = gpu_passes.captured

    def captured(model: FusedModel, functions: ModuleType | None = None) -> Graphs:
        made = whole(model, functions or kernels)
        made._free[0].passes.run(1, made._free[0].passes.chain)  # as a capture does
        return made

    monkeypatch.setattr(gpu_passes, "captured", captured)
    monkeypatch.setattr(gpu_passes, "ops_for", lambda width, device: kernels)
    found = measured()
    models = "tiny", "tinier", "the target", "the draft model", "the made target", "its draft model"
    slots = [f"a slot of {model}, as fast as can be" for model in models]
    parts = [f"attend, kernels, T = {count}" for count in (1, 6, 17)]
    assert [*found["failed"]] == [*slots[:4], *parts, *slots[4:]]
    captures = [what for what in found["capture"] if "nothing to compile" not in what]
    assert captures == [f"a slot of {model}, made of ops, what is new compiled" for model in models]
    assert found.keys() >= {"part of a pass, ops", "pass, graph", "round, forced", "made pair, ours"}
    assert tuple(found["plain decoding"]) == ENGINES


@pytest.mark.slow
def test_where_nothing_can_be_captured_the_other_engines_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_passes, "captured", broken)
    found = measured()
    assert tuple(found["plain decoding"]) == ENGINES[1:3]
    assert len(found["made pair, transformers"]) == 3
    assert "pass, graph of ops" in found["failed"]


@pytest.mark.slow
def test_a_slot_a_part_or_a_calibration_that_fails_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(graphs: Graphs, functions: ModuleType, count: int, live: int) -> Iterator[Any]:
        yield from (broken() if count == 6 else parts(graphs, functions, count, live))

    monkeypatch.setattr(bench_gpu, "another_slot", broken)
    monkeypatch.setattr(gpu_passes, "parts", some)
    monkeypatch.setattr(gpu_pair, "measure_passes", broken)
    found = measured()
    assert [*found["failed"]] == ["another slot", "parts of a pass, ops, T = 6", "the costs for K = auto"]
    assert len(found["part of a pass, ops"]) == 2 * 7
    assert [*found["round, forced"]] == ["K = 1, 0 pass", "K = 1, 1 pass"]
    assert [*found["made pair, ours"]] == ["alone", "draft model, K = 1", *TREES]


@pytest.mark.slow
def test_what_cannot_be_measured_is_told_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_in(owner: Any, name: str, when: Callable[..., bool]) -> None:
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *asked: broken() if when(*asked) else whole(*asked))

    monkeypatch.setattr(gpu_passes, "EagerRunner", broken)
    monkeypatch.setattr(gpu_pair, "generate", broken)
    broken_in(gpu_passes, "ForcedMatch", lambda settings, passing: passing == 3)
    broken_in(gpu_pair.Pair, "events", lambda pair, prompt, settings, *_: settings.k == 1)
    found = measured(TINY)
    others = "hf", "hf-assisted", "hf-assisted-tuned, K = 1", "hf-assisted-tuned, K = 3"
    assert set(found["failed"]) == {
        *("pass, eager: transformers", "forced rounds, K = 3", "ours, K = 1"),
        *(f"transformers, {name}" for name in others),
    }
    errors = [row["error"] for row in found["failed"].values()]
    assert all(error.startswith("RuntimeError: not here..") and len(error) == 300 for error in errors)
    assert tuple(found["plain decoding"]) == (ENGINES[0], *ENGINES[2:])
    assert [*found["round, forced"]] == [f"K = {k}, {passing} pass" for k in (1, 3) for passing in (0, 1)]
    ours = found["made pair, ours"]
    assert [*ours] == ["alone", "draft model, K = 3", "draft model, K = auto", *TREES]
    assert all(row["to_best_assisted"] is None and row["tokens_per_second"] > 0 for row in ours.values())
    assert "RuntimeError: not here.." in bench_gpu.line(next(iter(found["failed"].values())))


# The parts, and the command ----------------------------------------------------------------------------------


def test_the_parts_of_a_pass_read_all_of_its_weights_and_the_live_cache() -> None:
    model = tiny("qwen3", CPU)
    graphs = graphs_of(model)
    found = {name: size for name, _, size in parts(graphs, ops, 3, 40)}
    layers = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2]
    products = [found[name] or 0 for name in ("qkv", "out", "up", "down")]
    assert sum(products) == sum(weight.nbytes for weight in layers)
    assert found["head"] == model.lm_head.weight.nbytes
    assert found["attend"] == 4 * 2 * 2 * 16 * 43 * 4  # layers, keys and values, their heads, width, tokens, bytes
    assert found["write_kv"] is None


def gpu(*words: str) -> Any:
    """The command, on the CPU."""
    return CliRunner().invoke(app, ["gpu", "--device", "cpu", *words])


@pytest.mark.slow
def test_the_command_prints_and_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "another_slot", broken)
    monkeypatch.setattr(bench_gpu, "TINY", FEW)
    done = gpu("--tiny", "--only", "passes,preset", "--dtype", "float32", "--json", str(tmp_path / "gpu.json"))
    assert done.exit_code == 1
    assert "FAILED: another slot." in done.stdout
    assert "pass, graph, T = 1, ms " in done.stderr  # what is left of a run that is cut off
    found = json.loads((tmp_path / "gpu.json").read_text())
    *_, last = found["measurements"]
    assert last["part"] == "rounds of nanogpt-shakespeare"
    assert found["environment"].keys() >= {"torch", "commit", "device"}
    assert found["command"].startswith("python -m tools.bench")


def test_a_run_that_is_cut_off_leaves_every_row_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "gpu.json", []

    def cut_off(on: Gpu, only: list[str]) -> None:
        for what in ("one", "two", "three"):
            on.add("pass", what, ms=1.5, achieved=0.5)
            seen.append([row["what"] for row in json.loads(path.read_text())["measurements"]])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "measure", cut_off)
    done = gpu("--tiny", "--json", str(path))
    assert seen == [["one"], ["one", "two"], ["one", "two", "three"]]
    assert [row["what"] for row in json.loads(path.read_text())["measurements"]] == seen[-1]
    assert "pass, two, ms 1.5, achieved 50%" in done.output


def test_without_a_gpu_it_says_so() -> None:
    done = gpu()
    assert isinstance(done.exception, BadInput)
    assert tells(done.exception, "GPU --tiny")
