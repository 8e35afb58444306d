"""The bench on tiny models: what it runs, in which order, what it keeps, and that a pass is held against the memory."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from specdemo.decoding.events import Event, emitted_tokens
from specdemo.drafters import names
from specdemo.errors import BadInput
from specdemo.models.results import describe_results
from specdemo.racing.race import start
from specdemo.settings import AUTO, MATCH, Settings
from specdemo.studies.prompts import Prompt
from specdemo.studies.tables import write_json
from tests.harness.classes import Loaded
from tests.harness.models import tiny
from tools.bench import hf, roofline
from tools.bench.__main__ import keep
from tools.bench.cases import (
    ALONE,
    ASSISTED,
    HF,
    LOOKUP,
    NGRAM,
    OURS,
    TREE,
    TUNED,
    Case,
    cases_of_ours,
    cases_of_theirs,
)
from tools.bench.cases import theirs as methods_of
from tools.bench.models import bytes_read, random_model
from tools.bench.results import drafters_markdown, markdown, read_record, record, table, trees_markdown
from tools.bench.rows import Row, drafter_rows, made_by, tree_rows
from tools.bench.throughput import bench
from tools.bench.turns import in_turns

from ..sentences import refuses, tells

PROMPTS = [Prompt("a", "easy", "the cat sat on the mat"), Prompt("b", "hard", "one two three")]
THEIRS, DRAFTERS = (HF, ASSISTED, TUNED, LOOKUP), ("ngram", "draft-model")
TEMPERATURES = (0.0, 0.8)


@pytest.fixture(scope="module")
def outcome(loaded: Loaded) -> dict[str, Any]:
    """Ten cases without trees, one of a drafter of chains only, and trees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(names.DRAFTERS, "layer-skip", names.DRAFTERS["layer-skip"]._replace(branches=False))
        ours = cases_of_ours(loaded, "ngram,draft-model,layer-skip", [3, AUTO], [MATCH], [4, AUTO])
    cases = [*cases_of_theirs(loaded, (HF, ASSISTED, LOOKUP), [3]), ALONE, *ours]
    for _ in range(3):  # the first token of transformers is timed in a run of its own, which others can hold up
        found = bench(loaded, PROMPTS, cases, TEMPERATURES, 12, 2)
        if all(run["tokens_per_second"] for run in found["runs"] if run["new_tokens"] > 1):
            break
    return {**made_by(loaded), "prompts_sha256": "x", **found}


def over_all(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["category"] == "all"]


@pytest.mark.slow
def test_every_case_meets_every_prompt_temperature_and_repeat(outcome: dict[str, Any]) -> None:
    runs, of = outcome["runs"], ("method", "drafter", "k", "temperature", "prompt_id", "repeat")
    assert len(runs) == len({tuple(run[name] for name in of) for run in runs}) == (5 + 1 + 2 * 4 + 2) * 2 * 2 * 2
    assert all(run["new_tokens"] <= 12 and min(run["prompt_seconds"], run["seconds"]) > 0 for run in runs)
    ours = [run for run in runs if run["method"] in OURS]  # transformers' first token is timed in a run of its own
    assert all(run["prompt_seconds"] < run["seconds"] or run["new_tokens"] == 1 for run in ours)
    trees = {(run["drafter"], run["k"]) for run in runs if run["method"] == TREE}
    assert trees == {(name, k) for name in DRAFTERS for k in (4, AUTO)}


def test_a_drafter_of_others_need_not_be_one_of_ours(loaded: Loaded) -> None:
    """The names that llama.cpp's own drafters have in a case are not looked up among ours."""

    class Server:
        def generate(self, prompt_ids: list[int], settings: Settings) -> Row:
            return hf.generate(loaded, Case(HF), prompt_ids, settings)

    case, server = Case(NGRAM, "ngram-simple 3", 8), Server()
    runs = bench(loaded, PROMPTS[:1], [case, ALONE], (0.0,), 8, 1, in_turn=True, servers={case: server})["runs"]  # type: ignore[dict-item]
    theirs, ours = (run["token_ids"] for run in runs)
    assert theirs == ours


@pytest.mark.slow
def test_texts_are_the_targets_by_every_method_where_they_should_be(outcome: dict[str, Any]) -> None:
    rows = over_all(outcome["summary"])
    assert {row["method"] for row in rows} == {*THEIRS, *OURS}
    for row in rows:
        comparable = row["temperature"] == 0 or row["rule"] is not None
        assert (row["identical"], row["runs"]) == (4 if comparable else None, 4)
    trees = [row for row in rows if (row["method"], row["k"]) == (TREE, 4)]
    assert all(3 < row["rows"] <= 5 for row in trees)


def test_the_summary_has_a_row_for_each_category_and_all(outcome: dict[str, Any]) -> None:
    summary = outcome["summary"]
    assert len(summary) == 16 * 2 * 3
    assert {row["category"] for row in summary} == {"easy", "hard", "all"}
    for row in summary:
        for base in ("plain", "hf"):
            ratio = row["ratio_to"][base]
            assert ratio.count == (2 if row["category"] == "all" else 1)
            assert ratio.low is None or ratio.low <= ratio.mean <= ratio.high
            if row["method"] == base:
                assert (ratio.mean, ratio.low) == (1, None)
        assert row["ratio_to"]["llama.cpp"] is None
    printed = table(summary)
    assert len(printed.splitlines()) == 1 + len(summary)
    assert ("to hf" in printed, "to llama.cpp" in printed, "tree" in printed) == (True, False, True)


def test_the_rows_of_drafters_are_over_all_prompts_and_can_be_told(outcome: dict[str, Any]) -> None:
    rows = drafter_rows(outcome["summary"])
    cases = {(name, k) for name in (*DRAFTERS, "layer-skip") for k in (3, AUTO)}
    assert sorted(str((row["drafter"], row["k"])) for row in rows) == sorted(2 * [*map(str, cases)])
    for row in rows:
        assert row["speed_up_from"] is None or row["speed_up_from"] <= row["speed_up"] <= row["speed_up_to"]
        assert row["k"] == AUTO or len(row["acceptance_by_place"]) <= row["k"]
    fixed = next(row for row in rows if row["drafter"] == "draft-model" and row["k"] == 3)
    assert len(fixed["acceptance_by_place"]) >= 1
    here = {**dict.fromkeys(("dtype", "weights_dtype"), "float32"), "cpu": "this one", "cpu_model": None, "cores": 1}
    results = {"environment": here, "prompts": 2, "rows": json.loads(json.dumps(rows))}
    assert tells(describe_results(results, "ngram"), "0 1 float32, 2")


def test_trees_stand_beside_the_fastest_chain_of_the_same_drafter(outcome: dict[str, Any]) -> None:
    rows = tree_rows(outcome["runs"])
    kinds = [("speculative", 3), ("speculative", AUTO), (TREE, 4), (TREE, AUTO)]
    assert len(rows) == 2 * 2 * 4
    for drafter, temperature in itertools.product(DRAFTERS, TEMPERATURES):
        mine = [row for row in rows if (row["drafter"], row["temperature"]) == (drafter, temperature)]
        assert [(row["method"], row["k"]) for row in mine] == kinds
        assert [row["best_chain"] for row in mine] == [True, False, False, False]
        for row in mine:
            of = ("drafter", "method", "k", "temperature")
            ours = [run for run in outcome["runs"] if all(run[name] == row[name] for name in of)]
            rounds = sum(run["rounds"] for run in ours)
            assert row["identical"] == row["runs"] == len(ours) == 4
            assert row["tokens_per_round"] == pytest.approx(sum(run["new_tokens"] - 1 for run in ours) / rounds)
            assert row["rows"] == pytest.approx(1 + sum(run["drafted"] for run in ours) / rounds)
    lines = trees_markdown(rows)
    assert len(lines) == 2 + len(rows)
    assert tells("".join(lines), "tree 4 trees chains, auto")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert tree_rows([run for run in outcome["runs"] if run["method"] != TREE]) == []


# Files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(outcome: dict[str, Any], tmp_path: Path) -> Path:
    write_json(tmp_path / "some.json", record(outcome))
    return tmp_path / "some.json"


def test_what_is_kept_holds_every_run_and_gives_its_rows(outcome: dict[str, Any], kept: Path) -> None:
    found = read_record(kept)
    runs = found["runs"]
    assert {"cpu", "dtype", "torch", "transformers", "commit"} <= found["environment"].keys()
    assert found["command"].startswith("python -m tools.bench")
    assert len(runs) == len(outcome["runs"])
    assert "token_ids" not in kept.read_text()
    assert max(map(len, kept.read_text().splitlines())) < 2000
    kept_speeds, speeds = ([run["tokens_per_second"] or 0 for run in each] for each in (runs, outcome["runs"]))
    assert kept_speeds == pytest.approx(speeds, rel=1e-5)  # a busy machine withholds some
    lines = markdown(found["rows"])
    assert lines[0].count("|") == 7
    assert tells(lines[0], "T tokens/s transformers alone texts")
    assert len(lines) == 2 + 16 * 2
    assert tells("".join(lines), "`ngram` 4")
    assert len(drafters_markdown(runs)) == 2 + 3 * 2
    assert trees_markdown(found["trees"]) == trees_markdown(tree_rows(outcome["runs"]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda whole: {"runs": [row[:-1] for row in whole["runs"]]}, "hold"),
        (lambda whole: {"columns": []}, "hold"),
        (None, "hold"),
    ],
)
def test_a_file_that_no_bench_wrote_is_refused(kept: Path, change: Any, reason: str) -> None:
    whole = json.loads(kept.read_text())
    kept.write_text(json.dumps({**whole, **change(whole)}) if change else "[]")
    with refuses(BadInput, f"some.json {reason}"):
        read_record(kept)


# The order of the runs, and what stops them -----------------------------------------------------------------


class Watched:
    """Stands in for `start`: notes the K of every run with the number of events before it, and of every event with its
    tokens. Run number `last` is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int = 0) -> None:
        self.begun, self.steps, self.last = list[tuple[Any, int]](), list[tuple[Any, int]](), last
        monkeypatch.setattr("tools.bench.throughput.start", self)

    def __call__(self, loaded: Loaded, drafter: str, prompt_ids: Any, settings: Settings) -> Iterator[Event]:
        k = 0 if drafter == "none" else settings.k
        self.begun.append((k, len(self.steps)))
        if len(self.begun) == self.last:
            raise KeyboardInterrupt
        return self.noted(k, start(loaded, drafter, prompt_ids, settings))

    def noted(self, k: Any, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            self.steps.append((k, len(emitted_tokens(event))))
            yield event


def test_in_turn_whoever_has_written_least_goes_next_and_writes_the_same(
    loaded: Loaded, outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cases_of_ours(loaded, "draft-model", [3, 3, AUTO], [MATCH])
    watched = Watched(monkeypatch)
    turned = bench(loaded, PROMPTS[:1], [Case(HF), ALONE, *ours], [0.0], 12, 1, in_turn=True)
    assert (turned["in_turn"], outcome["in_turn"]) == (True, False)
    of = {(run["method"], run["drafter"], run["k"]): run["digest"] for run in turned["runs"]}
    assert len(of) == len(turned["runs"]) == 4
    same = [run for run in outcome["runs"] if (run["prompt_id"], run["temperature"]) == ("a", 0)]
    before = {(run["method"], run["drafter"], run["k"]): run for run in same}
    assert all(text == before[case]["digest"] for case, text in of.items())

    assert len(watched.begun) == 6  # three to warm up, then the three that count
    written: Counter[Any] = Counter({0: 0, 3: 0, AUTO: 0})
    for k, tokens in watched.steps[watched.begun[3][1] :]:
        assert written[k] == min(written.values())
        written[k] += tokens
    assert set(written.values()) == {before["plain", "none", 0]["new_tokens"]}
    assert max(tokens for _, tokens in watched.steps) > 1


def test_the_first_of_the_cases_is_another_with_every_text(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    bench(loaded, PROMPTS, [ALONE, *cases_of_ours(loaded, "ngram", [2, 3], [MATCH])], [0.0], 4, 1)
    assert [k for k, _ in watched.begun] == [0, 2, 3, 2, 3, 0, 3, 0, 2]


@pytest.mark.parametrize("in_turn", [False, True])
def test_only_the_answers_to_the_prompts_before_are_remembered(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    """Not that to the same prompt, which another case may have written already, nor those of other runs."""
    began: list[list[int]] = []

    def starting(loaded: Loaded, drafter: str, prompt_ids: Any, settings: Settings) -> Iterator[Event]:
        began.append([*map(len, loaded.parts.remembered)])
        return start(loaded, drafter, prompt_ids, settings)

    monkeypatch.setattr("tools.bench.throughput.start", starting)
    cases = [ALONE, *cases_of_ours(loaded, "suffix", [2, 3], [MATCH])]
    prompts = [*PROMPTS, Prompt("c", "easy", "four five six")]
    runs = bench(loaded, prompts, cases, TEMPERATURES, 5, 2, in_turn, remember=True)["runs"]
    tokens = {(run["prompt_id"], run["temperature"], run["repeat"]): run["new_tokens"] for run in runs}
    expected = [
        [tokens[earlier.id, temperature, repeat] for earlier in prompts[:place]]
        for repeat in range(2)
        for place in range(len(prompts))
        for temperature in TEMPERATURES
        for _ in cases
    ]
    assert began[len(cases) * len(TEMPERATURES) :] == expected  # after the warm-up


@pytest.mark.parametrize(("text", "reason"), [(" ", "empty"), ("the cat " * 1000, "context")])
def test_a_prompt_that_cannot_be_run_is_refused_before_anything_is_measured(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    watched = Watched(monkeypatch)
    with refuses(BadInput, f"'b': {reason}"):
        bench(loaded, [PROMPTS[0], Prompt("b", "hard", text)], [ALONE], [0.0], 12, 1)
    assert watched.begun == []


def test_what_was_measured_before_an_interruption_is_kept_and_told(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [ALONE, *cases_of_ours(loaded, "ngram", [3], [MATCH])]
    Watched(monkeypatch, last=6)  # two warm up, two write the first text
    stopped = bench(loaded, PROMPTS, cases, [0.0], 4, 1)
    assert [(run["method"], run["prompt_id"]) for run in stopped["runs"]] == [("plain", "a"), ("speculative", "a")]
    assert {row["category"] for row in stopped["summary"]} == {"all", "easy"}
    with pytest.raises(typer.Exit) as ended:
        keep(stopped, tmp_path / "a.json")
    assert ended.value.exit_code == 130
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["interrupted"], len(found["runs"]), len(found["rows"])) == (True, 2, 2)
    assert "Interrupted" in capsys.readouterr().err
    keep({"interrupted": False}, None)
    Watched(monkeypatch, last=3)
    with pytest.raises(KeyboardInterrupt):
        bench(loaded, PROMPTS, cases, [0.0], 4, 1)


# What others can do ------------------------------------------------------------------------------------------


def test_the_assistant_is_set_up_for_a_run_and_then_as_before(loaded: Loaded) -> None:
    model = loaded.draft_model
    config, assisted = model.generation_config, Case(ASSISTED, "draft-model")
    config.num_assistant_tokens = 7
    try:
        with hf._assisting(loaded, Case(TUNED, "draft-model", 2)) as assistant:
            assert assistant is model
            assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (2, 0.0)
            assert config.num_assistant_tokens_schedule == "constant"
        with hf._assisting(loaded, assisted):
            assert config.num_assistant_tokens == 7  # as it comes
        hf.generate(loaded, assisted, loaded.encode("the cat"), Settings(max_new_tokens=4))
        assert config.num_assistant_tokens == 7
    finally:
        config.num_assistant_tokens = None


@pytest.mark.parametrize(
    ("methods", "ks", "found"),
    [
        ([ASSISTED], [AUTO], [(ASSISTED, None), (TUNED, 3), (TUNED, 5), (TUNED, 8)]),
        ([ASSISTED], [4], [(ASSISTED, None), (TUNED, 4)]),
        ([LOOKUP], [4, AUTO], [(LOOKUP, 4), (LOOKUP, 10)]),
    ],
)
def test_the_cases_of_transformers(loaded: Loaded, methods: list[str], ks: list[Any], found: list[Any]) -> None:
    assert [(case.method, case.k) for case in cases_of_theirs(loaded, methods, ks)] == found


def test_what_cannot_be_compared_is_told(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    alone = replace(loaded, parts=replace(loaded.parts, make_draft_runner=None))
    assert cases_of_theirs(alone, [HF, ASSISTED], [AUTO]) == [Case(HF)]
    assert tells(capsys.readouterr().err, "hf-assisted assist")
    with refuses(BadInput, "'vllm' hf, hf-assisted,"):
        methods_of("hf, vllm")


# Roofline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_pass(tied: bool) -> None:
    vocab, hidden, layers = 50, 32, 2
    model, narrow = (tiny("llama", vocab, tie_word_embeddings=tied).to(dtype) for dtype in (None, torch.float16))
    layer = 4 * (hidden * (32 + 16 + 16) + 32 * hidden + 3 * hidden * 64 + 2 * hidden)
    rest = 4 * (vocab * hidden + hidden)
    cache = 2 * 2 * 8 * 4  # keys and values of two heads of eight numbers
    for context, tokens in ((0, 1), (10, 1), (10, 6)):
        expected = layers * layer + rest + tokens * hidden * 4 + context * layers * cache
        assert bytes_read(model, context, tokens) == expected
        halves = (expected - context * layers * cache) // 2 + context * layers * cache  # keys and values stay wide
        assert bytes_read(narrow, context, tokens) == halves


def test_random_weights_are_cut_to_the_memory_there_is() -> None:
    config = tiny("llama", 50).config
    for room, layers in ((1e9, 2), (0, 1)):
        model = random_model(config, torch.float32, torch.device("cpu"), room)
        assert model.config.num_hidden_layers == layers
        assert all(0 < float(weight.detach().abs().max()) <= 0.02 for weight in model.parameters())


def test_a_roofline_of_a_loaded_preset(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, streamed = roofline.Stream(loaded.device, size=2**20), {1: 1e9, 4: 4e9}
    assert 0 < stream.rate() == stream.bandwidth["best"]
    beside = {(length, ""): [rate] for length, rate in streamed.items()}
    monkeypatch.setattr(roofline, "in_turns", lambda works, turns: in_turns(works, turns) | beside)
    makers = roofline.engines(loaded)
    kept = loaded.bytes_per_pass + 8 * loaded.token_bytes["target"]
    rows = list(roofline.passes("toy", loaded.model, makers, [1, 4], 8, stream, all_layers=5, kept=kept))
    cases = [(engine, tokens) for tokens in (1, 4) for engine in (loaded.engine, "eager")]
    assert [(row["engine"], row["tokens"]) for row in rows] == cases
    assert {(row["layers"], row["all_layers"]) for row in rows} == {(2, 5)}
    eager = [row["bytes"] for row in rows if row["engine"] == "eager"]
    assert all(row["bytes"] == kept or row["engine"] == "eager" for row in rows)
    assert eager == [bytes_read(loaded.model, 8, tokens) for tokens in (1, 4)]
    assert kept == pytest.approx(eager[0], rel=0.01)  # the same weights
    for row in rows:  # the least time follows from what the memory streamed beside the passes
        assert row["floor_ms"] == pytest.approx(1000 * row["bytes"] / streamed[row["tokens"]])
        assert row["achieved"] == pytest.approx(row["floor_ms"] / row["ms"])
    assert tells(roofline.table(stream.bandwidth, rows), "some layers")
