"""The bench: what it runs on tiny models, its summary by hand, and the bytes of the roofline."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from specdemo.bench import hf as bench_hf
from specdemo.bench import roofline
from specdemo.bench.cases import ALONE, OURS, TREE, Case
from specdemo.bench.methods import LOOKUP_K, TUNED_K, cases_of_ours, cases_of_theirs, theirs
from specdemo.bench.results import markdown
from specdemo.bench.throughput import Run, bench, drafter_rows, summarise, table
from specdemo.cli.bench import keep
from specdemo.decoding.events import Event, emitted_tokens
from specdemo.drafters.names import drafter_class
from specdemo.models.loaded import Loaded
from specdemo.models.results import describe_results
from specdemo.racing.provenance import provenance
from specdemo.racing.race import start
from specdemo.studies.prompts import Prompt, read_prompts, some
from specdemo.studies.tables import json_text
from specdemo.types import AUTO, MATCH, BadInput, Settings

from .checkpoints import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [Prompt("a", "easy", "the cat sat on the mat"), Prompt("b", "hard", "one two three")]
RUN = {
    *("method", "drafter", "k", "temperature", "prompt_id", "repeat", "new_tokens", "seconds", "prompt_seconds"),
    *("tokens_per_second", "accepted", "tested", "drafted", "rounds", "digest"),
}
ROW = {"method", "drafter", "k", "temperature", "category", "tokens_per_second", "ratio_to"}


@pytest.fixture(scope="module")
def outcome(loaded: Loaded) -> dict[str, Any]:
    methods = dict.fromkeys(bench_hf.METHODS)
    cases = [
        *cases_of_theirs(loaded, methods, [3]),
        ALONE,
        *cases_of_ours(loaded, "ngram,draft-model", [3, AUTO], [MATCH]),
    ]
    return bench(loaded, PROMPTS, cases, [0.0, 0.8], 12, 2)


def test_every_case_meets_every_prompt_temperature_and_repeat(outcome: dict[str, Any]) -> None:
    runs = outcome["runs"]
    assert all(run.keys() >= RUN for run in runs)
    assert len(runs) == 10 * 2 * 2 * 2
    assert len({(r["method"], r["drafter"], r["k"], r["temperature"], r["prompt_id"], r["repeat"]) for r in runs}) == 80
    assert all(run["new_tokens"] <= 12 for run in runs)
    assert all(min(run["prompt_seconds"], run["seconds"]) > 0 for run in runs)
    ours = [run for run in runs if run["method"] in OURS]  # transformers' first token is timed in a run of its own
    assert len(ours) == 5 * 2 * 2 * 2
    assert all(run["prompt_seconds"] < run["seconds"] or run["new_tokens"] == 1 for run in ours)
    json_text(outcome)


def test_greedy_texts_are_the_same_by_every_method_of_ours_and_of_transformers(outcome: dict[str, Any]) -> None:
    greedy = [row for row in outcome["summary"] if row["temperature"] == 0 and row["category"] == "all"]
    assert {row["method"] for row in greedy} == {*bench_hf.METHODS, "plain", "speculative"}
    assert all(row["identical"] == row["runs"] == 4 for row in greedy)
    sampled = [row for row in outcome["summary"] if row["temperature"]]
    assert all(row["identical"] == (None if row["rule"] is None else row["runs"]) for row in sampled)


def test_trees_are_rows_of_their_own(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_class("layer-skip"), "branches", False)
    cases = [ALONE, *cases_of_ours(loaded, "ngram,draft-model,layer-skip", [3], [MATCH], [6])]
    trees = [case for case in cases if case.method == TREE]
    assert [(case.drafter, case.k) for case in trees] == [("ngram", 6), ("draft-model", 6)]
    summary = bench(loaded, PROMPTS, cases, [0.8], 12, 1)["summary"]
    rows = {row["drafter"]: row for row in summary if row["method"] == TREE and row["category"] == "all"}
    assert rows.keys() == {"ngram", "draft-model"}
    assert all(row["identical"] == row["runs"] == 2 for row in rows.values())
    assert all(4 < row["rows"] <= 7 for row in rows.values())
    assert "tree" in table(summary)
    assert "`ngram`, a tree of 6" in "".join(markdown(summary))


def test_in_turn_whoever_has_written_least_goes_next_and_writes_the_same(
    loaded: Loaded, outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int | str, int]] = []
    begun: list[int] = []

    def watched(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> Iterator[Event]:
        lane, k = start(loaded, drafter, prompt_ids, settings), settings.k if drafter != "none" else 0
        begun.append(len(steps))

        def noted() -> Iterator[Event]:
            for event in lane:
                steps.append((k, len(emitted_tokens(event))))
                yield event

        return noted()

    monkeypatch.setattr("specdemo.bench.throughput.start", watched)
    cases = [
        *cases_of_theirs(loaded, dict.fromkeys(["hf"]), [3]),
        ALONE,
        *cases_of_ours(loaded, "draft-model", [3, 3, AUTO], [MATCH]),
    ]
    turned = bench(loaded, PROMPTS[:1], cases, [0.0], 12, 1, in_turn=True)
    assert turned["in_turn"]
    assert not outcome["in_turn"]
    of = {(run["method"], run["drafter"], run["k"]): run["digest"] for run in turned["runs"]}
    assert len(of) == len(turned["runs"]) == 4
    same = [run for run in outcome["runs"] if (run["prompt_id"], run["temperature"]) == ("a", 0)]
    before = {(run["method"], run["drafter"], run["k"]): run for run in same}
    assert all(text == before[case]["digest"] for case, text in of.items())

    assert len(begun) == 6  # three to warm up, then the three that count
    written: Counter[int | str] = Counter({0: 0, 3: 0, AUTO: 0})
    for k, tokens in steps[begun[3] :]:
        assert written[k] == min(written.values())
        written[k] += tokens
    assert set(written.values()) == {before["plain", "none", 0]["new_tokens"]}
    assert max(tokens for _, tokens in steps) > 1


def test_the_summary_has_a_row_for_each_category_and_all(outcome: dict[str, Any]) -> None:
    summary = outcome["summary"]
    assert all(row.keys() >= ROW for row in summary)
    assert len(summary) == 10 * 2 * 3
    assert {row["category"] for row in summary} == {"easy", "hard", "all"}
    for row in summary:
        for base in ("plain", "hf"):
            ratio = row["ratio_to"][base]
            assert ratio.count == (2 if row["category"] == "all" else 1)
            assert ratio.low is None or ratio.low <= ratio.mean <= ratio.high
            if row["method"] == base:
                assert (ratio.mean, ratio.low) == (1, None)
        assert row["ratio_to"]["llama.cpp"] is None
    assert len(table(summary).splitlines()) == 1 + len(summary)
    assert "to llama.cpp" not in table(summary)


def run(
    method: str, prompt: str, speed: float | None, repeat: int = 0, k: int | str | None = None, **other: Any
) -> Run:
    """A run of two tokens."""
    ours = {"method": method, "drafter": None if k is None else "ngram", "k": k, "rule": MATCH, "temperature": 0.0}
    ours["repeat"] = repeat
    figures = {"prompt_id": prompt, "category": {"a": "easy", "b": "hard"}[prompt], "new_tokens": 2, "seconds": 1.0}
    counts = {"accepted": 1, "tested": 2, "drafted": 4, "rounds": 1, "draft_cost": 0.5, "prompt_seconds": 0.0}
    return {**ours, **figures, **counts, "tokens_per_second": speed, "digest": "x", **other}


def rows_of(runs: Sequence[Run], category: str = "all") -> list[Run]:
    return [row for row in summarise(runs) if row["category"] == category]


def test_ratios_are_taken_run_by_run_and_averaged_as_logarithms() -> None:
    runs = [run("plain", "a", 10), run("hf", "a", 5), run("plain", "a", 40, 1), run("hf", "a", 5, 1, digest="y")]
    runs += [run("plain", "b", 20), run("hf", "b", 20)]
    plain, hf = rows_of(runs)
    assert plain["ratio_to"]["hf"].mean == pytest.approx(2)  # 2 and 8 of one prompt, 1 of the other
    assert hf["ratio_to"]["plain"].mean == pytest.approx(1 / 2)
    assert plain["tokens_per_second"].mean / hf["tokens_per_second"].mean == pytest.approx(2)
    assert plain["ratio_to"]["hf"].count == 2
    assert (hf["identical"], hf["acceptance_rate"], hf["tokens_per_round"]) == (2, 0.5, 1)
    assert rows_of(runs[::2])[0]["ratio_to"]["hf"] is None


def test_a_text_of_a_single_token_has_no_pace_and_is_left_out() -> None:
    runs = [
        run("plain", "a", 10),
        run("plain", "b", 10),
        run("speculative", "a", 20, k=2),
        run("speculative", "b", None, k=2),
    ]
    ratio = rows_of(runs)[1]["ratio_to"]["plain"]
    assert (ratio.mean, ratio.count) == (pytest.approx(2), 1)


def test_auto_is_held_against_the_fixed_k_that_was_the_fastest_in_its_row() -> None:
    rates: dict[int | str, tuple[float, float]] = {0: (10, 20), 2: (30, 20), 8: (10, 50), AUTO: (18, 60)}
    runs = [
        run("plain" if k == 0 else "speculative", prompt, rate, k=k)
        for k, both in rates.items()
        for prompt, rate in zip("ab", both, strict=True)
    ]
    held = {row["category"]: row["ratio_to_best_k"] for row in summarise(runs) if row["k"] == AUTO}
    assert (held["easy"]["k"], held["easy"]["mean"]) == (2, pytest.approx(0.6))
    assert (held["hard"]["k"], held["hard"]["mean"]) == (8, pytest.approx(1.2))
    assert (held["all"]["k"], held["all"]["mean"]) == (2, pytest.approx((0.6 * 3) ** 0.5))  # by ratios, not by tokens/s
    assert all(row["ratio_to_best_k"] is None for row in summarise(runs) if row["k"] != AUTO)
    assert all(row["ratio_to_best_k"] is None for row in summarise([run for run in runs if run["k"] in (0, AUTO)]))


def test_the_first_of_the_cases_is_another_with_every_text(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int | str] = []

    def noted(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> Iterator[Event]:
        begun.append(settings.k)
        return start(loaded, drafter, prompt_ids, settings)

    monkeypatch.setattr("specdemo.bench.throughput.start", noted)
    bench(loaded, PROMPTS, [ALONE, *cases_of_ours(loaded, "ngram", [2, 3], [MATCH])], [0.0], 4, 1)
    assert begun == [0, 2, 3, 2, 3, 0, 3, 0, 2]


PROMPT = {"id": "a", "category": "b", "prompt": "c"}


def test_a_prompt_file_as_other_programs_write_it(tmp_path: Path) -> None:
    line = json.dumps({"id": "a", "category": "b", "prompt": "one\u2028two\x85three"}, ensure_ascii=False)
    (tmp_path / "some.jsonl").write_bytes(("\ufeff" + line + "\r\n\r\n").encode())
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "some.jsonl")] == ["one\u2028two\x85three"]
    (tmp_path / "twice.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"twice\.jsonl has two prompts with the id 'a'\."):
        read_prompts(tmp_path / "twice.jsonl")


@pytest.mark.parametrize(
    "line", ["no json", "[]", '"abc"', '{"id": "a"}', "[" * 100_000, json.dumps({**PROMPT, "id": []})]
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "some.jsonl").write_text(f"{json.dumps(PROMPT)}\n\n{line}\n", encoding="utf-8")
    words = "some.jsonl, line 3: every line must be an object of id, category and prompt, all texts."
    with pytest.raises(BadInput, match=f"^{re.escape(words)}$"):
        read_prompts(tmp_path / "some.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff")
    with pytest.raises(BadInput, match=r"^latin\.jsonl is no text in UTF-8\.$"):
        read_prompts(tmp_path / "latin.jsonl")


def test_a_category_cannot_have_the_name_of_all(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "category": "all", "prompt": "b"}')
    with pytest.raises(BadInput, match="a category called 'all'"):
        read_prompts(path)


def test_a_prompt_that_cannot_be_run_is_refused_before_anything_is_measured(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("it began")

    monkeypatch.setattr("specdemo.bench.throughput.start", never)
    for text, reason in ((" ", "empty|blank"), ("the cat " * 1000, "the context holds")):
        with pytest.raises(BadInput, match=f"Prompt 'b': .*({reason})"):
            bench(loaded, [PROMPTS[0], Prompt("b", "hard", text)], [ALONE], [0.0], 12, 1)


def test_what_was_measured_before_an_interruption_is_kept(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0

    def cut_off(*asked: Any) -> Iterator[Event]:
        nonlocal begun
        begun += 1
        if begun == last:
            raise KeyboardInterrupt
        return start(*asked)

    monkeypatch.setattr("specdemo.bench.throughput.start", cut_off)
    cases = [ALONE, *cases_of_ours(loaded, "ngram", [3], [MATCH])]
    last = 6  # two warm up, two write the first text
    stopped = bench(loaded, PROMPTS, cases, [0.0], 4, 1)
    assert stopped["interrupted"]
    assert [(run["method"], run["prompt_id"]) for run in stopped["runs"]] == [("plain", "a"), ("speculative", "a")]
    assert {row["category"] for row in stopped["summary"]} == {"all", "easy"}
    begun, last = 0, 3
    with pytest.raises(KeyboardInterrupt):
        bench(loaded, PROMPTS, cases, [0.0], 4, 1)


def test_an_interrupted_bench_keeps_its_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    outcome = {"interrupted": True, "runs": [run("plain", "a", 10, k=0)]}
    with pytest.raises(typer.Exit) as ended:
        keep(outcome, tmp_path / "a.json")
    assert ended.value.exit_code == 130
    kept = json.loads((tmp_path / "a.json").read_text())
    assert (kept["interrupted"], len(kept["runs"]), len(kept["rows"])) == (True, 1, 1)
    assert "Interrupted" in capsys.readouterr().err
    keep({"interrupted": False}, None)


def test_a_few_prompts_of_each_category_can_be_chosen() -> None:
    prompts = [Prompt(str(place), category, "") for place, category in enumerate("aabab")]
    assert [prompt.id for prompt in some(prompts, 2)] == ["0", "1", "2", "4"]
    assert some(prompts, 0) == prompts


def test_the_table_of_drafters_is_over_all_prompts_and_can_be_told(outcome: dict[str, Any]) -> None:
    rows = drafter_rows(outcome["summary"])
    cases = {("ngram", 3), ("ngram", AUTO), ("draft-model", 3), ("draft-model", AUTO)}
    assert {(row["drafter"], row["k"]) for row in rows} == cases
    assert len(rows) == 2 * len(cases)
    for row in rows:
        assert row["speed_up_from"] is None or row["speed_up_from"] <= row["speed_up"] <= row["speed_up_to"]
        assert row["k"] == AUTO or len(row["acceptance_by_place"]) <= row["k"]
    fixed = next(row for row in rows if row["drafter"] == "draft-model" and row["k"] == 3)
    assert len(fixed["acceptance_by_place"]) >= 1
    told = {
        "environment": {**dict.fromkeys(("dtype", "weights_dtype"), "float32"), "cpu": "this one", "cores": 1}
        | {"cpu_model": None},
        "prompts": 2,
        "rows": json.loads(json.dumps(rows)),
    }
    assert describe_results(told, "ngram").startswith("Measured speed-up: ")


def test_the_assistant_is_set_up_for_a_run_and_then_as_before(loaded: Loaded) -> None:
    model = loaded.draft_model
    config, settings = model.generation_config, Settings(max_new_tokens=4)
    config.num_assistant_tokens = 7
    try:
        with bench_hf._assisting(loaded, Case(bench_hf.TUNED, "draft-model", 2)) as assistant:
            assert assistant is model
            assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (2, 0.0)
            assert config.num_assistant_tokens_schedule == "constant"
        with bench_hf._assisting(loaded, Case(bench_hf.ASSISTED, "draft-model")):
            assert config.num_assistant_tokens == 7  # as it comes
        bench_hf.generate(loaded, Case(bench_hf.ASSISTED, "draft-model"), loaded.encode("the cat"), settings)
        assert config.num_assistant_tokens == 7
    finally:
        config.num_assistant_tokens = None


def test_what_cannot_be_compared_is_told(loaded: Loaded, capsys: pytest.CaptureFixture) -> None:
    alone = replace(loaded, parts=replace(loaded.parts, make_draft_runner=None))
    assert cases_of_theirs(alone, dict.fromkeys(["hf", "hf-assisted"]), [AUTO]) == [Case("hf")]
    assert capsys.readouterr().err == "hf-assisted is left out: the preset toy has no draft model to assist.\n"
    assert [case.k for case in cases_of_theirs(loaded, dict.fromkeys(["hf-assisted-tuned"]), [AUTO])] == list(TUNED_K)
    both = cases_of_theirs(loaded, dict.fromkeys(["hf-assisted", "hf-assisted-tuned"]), [4])
    assert (
        both
        == cases_of_theirs(loaded, dict.fromkeys(["hf-assisted"]), [4])
        == [
            Case("hf-assisted", "draft-model"),
            Case("hf-assisted-tuned", "draft-model", 4),
        ]
    )
    assert [case.k for case in cases_of_theirs(loaded, dict.fromkeys(["hf-prompt-lookup"]), [4, AUTO])] == [4, LOOKUP_K]
    with pytest.raises(BadInput, match=r"no method called 'vllm' to compare with\. Choose from: hf, hf-assisted,"):
        theirs("hf, vllm")


def test_figures_say_where_they_are_from(loaded: Loaded) -> None:
    told = provenance(loaded)
    assert told.keys() == {"environment", "weights"}
    assert {"cpu", "dtype", "torch", "transformers", "commit"} <= told["environment"].keys()


# Roofline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_pass(tied: bool) -> None:
    vocab, hidden, layers = 50, 32, 2
    model = tiny("llama", vocab, tie_word_embeddings=tied)
    layer = 4 * (hidden * (32 + 16 + 16) + 32 * hidden + 3 * hidden * 64 + 2 * hidden)
    rest = 4 * (vocab * hidden + hidden)
    cache = 2 * 2 * 8 * 4  # keys and values of two heads of eight numbers
    for context, tokens in ((0, 1), (10, 1), (10, 6)):
        expected = layers * layer + rest + tokens * hidden * 4 + context * layers * cache
        assert roofline.bytes_read(model, context, tokens) == expected
        halves = (expected - context * layers * cache) // 2 + context * layers * cache  # keys and values stay wide
        assert roofline.bytes_read(model, context, tokens, torch.float16) == halves


def test_random_weights_are_cut_to_the_memory_there_is() -> None:
    config = tiny("llama", 50).config
    whole = roofline.random_model(config, torch.float32, torch.device("cpu"), 1e9)
    assert whole.config.num_hidden_layers == 2
    assert all(0 < float(weight.detach().abs().max()) <= 0.02 for weight in whole.parameters())
    assert roofline.random_model(config, torch.float32, torch.device("cpu"), 0).config.num_hidden_layers == 1


def test_a_roofline_of_a_loaded_preset(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, rates = roofline.Stream(loaded.device, size=2**20), itertools.cycle([1e9, 4e9])  # of each length in turn
    assert 0 < stream.rate() == stream.bandwidth["best"]
    monkeypatch.setattr(stream, "rate", lambda: next(rates))
    makers = roofline.engines(loaded)
    ours = ["native"] if loaded.engine == "native" else ["fused", "not bit-exact"]
    rows = list(roofline.passes("toy", loaded.model, makers, lengths=[1, 4], context=8, stream=stream, all_layers=5))
    assert [(row.engine, row.tokens) for row in rows] == [
        (engine, tokens) for tokens in (1, 4) for engine in (*ours, "eager")
    ]
    assert {(row.layers, row.all_layers) for row in rows} == {(2, 5)}
    for row in rows:  # the least time is told by what the memory streamed beside the passes
        assert row.floor_ms == pytest.approx(row.bytes / (1e6 if row.tokens == 1 else 4e6))
        assert roofline.as_dict(row)["achieved"] == pytest.approx(row.floor_ms / row.ms)
    assert "only some of the layers" in roofline.table(stream.bandwidth, rows)
