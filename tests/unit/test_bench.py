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

from specdemo.events import Event, emitted_tokens
from specdemo.lab import bench_hf, roofline
from specdemo.lab.bench import (
    ALONE,
    Case,
    Prompt,
    bench,
    drafter_rows,
    provenance,
    read_prompts,
    some,
    summarise,
    table,
)
from specdemo.lab.cli import LOOKUP_K, TUNED_K, cases_of_hf, cases_of_ours, keep, theirs
from specdemo.models import Loaded
from specdemo.race import start
from specdemo.results import in_words
from specdemo.types import AUTO, BadInput, Settings

from .checkpoints import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [Prompt("a", "easy", "the cat sat on the mat"), Prompt("b", "hard", "one two three")]
RUN = {
    *("method", "drafter", "k", "temperature", "prompt_id", "repeat", "new_tokens", "seconds", "ttft_seconds"),
    *("tokens_per_second", "accepted", "tested", "drafted", "rounds", "token_ids"),
}
ROW = {"method", "drafter", "k", "temperature", "category", "tokens_per_second", "ratio_to_plain", "ratio_to_hf"}


@pytest.fixture(scope="module")
def outcome(loaded: Loaded) -> dict[str, Any]:
    methods = list(bench_hf.METHODS)
    cases = [*cases_of_hf(loaded, methods, [3]), ALONE, *cases_of_ours(loaded, "ngram,draft-model", [3, AUTO])]
    return bench(loaded, PROMPTS, cases, [0.0, 0.8], 12, 2)


def test_every_case_meets_every_prompt_temperature_and_repeat(outcome: dict[str, Any]) -> None:
    runs = outcome["runs"]
    assert all(run.keys() >= RUN for run in runs)
    assert len(runs) == 10 * 2 * 2 * 2
    assert len({(r["method"], r["drafter"], r["k"], r["temperature"], r["prompt_id"], r["repeat"]) for r in runs}) == 80
    assert all(run["new_tokens"] == len(run["token_ids"]) <= 12 for run in runs)
    assert all(run["ttft_seconds"] > 0 and run["seconds"] > 0 for run in runs)
    json.dumps(outcome)


def test_greedy_texts_are_the_same_by_every_method_of_ours_and_of_transformers(outcome: dict[str, Any]) -> None:
    greedy = [row for row in outcome["summary"] if row["temperature"] == 0 and row["category"] == "all"]
    assert {row["method"] for row in greedy} == {*bench_hf.METHODS, "plain", "speculative"}
    assert all(row["identical"] == row["runs"] == 4 for row in greedy)
    assert all(row["identical"] is None for row in outcome["summary"] if row["temperature"])


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

    monkeypatch.setattr("specdemo.lab.bench.start", watched)
    cases = [*cases_of_hf(loaded, ["hf"], [3]), ALONE, *cases_of_ours(loaded, "draft-model", [3, 3, AUTO])]
    turned = bench(loaded, PROMPTS[:1], cases, [0.0], 12, 1, in_turn=True)
    assert turned["in_turn"]
    assert not outcome["in_turn"]
    of = {(run["method"], run["drafter"], run["k"]): run["token_ids"] for run in turned["runs"]}
    assert len(of) == len(turned["runs"]) == 4
    same = [run for run in outcome["runs"] if (run["prompt_id"], run["temperature"]) == ("a", 0)]
    before = {(run["method"], run["drafter"], run["k"]): run for run in same}
    assert all(tokens == before[case]["token_ids"] for case, tokens in of.items())

    assert len(begun) == 6  # three to warm up, then the three that count
    written: Counter[int | str] = Counter({0: 0, 3: 0, AUTO: 0})
    for k, tokens in steps[begun[3] :]:
        assert written[k] == min(written.values())
        written[k] += tokens
    assert set(written.values()) == {len(of["plain", "none", 0])}
    assert max(tokens for _, tokens in steps) > 1


def test_the_summary_has_a_row_for_each_category_and_all(outcome: dict[str, Any]) -> None:
    summary = outcome["summary"]
    assert all(row.keys() >= ROW for row in summary)
    assert len(summary) == 10 * 2 * 3
    assert {row["category"] for row in summary} == {"easy", "hard", "all"}
    for row in summary:
        for base, name in (("plain", "ratio_to_plain"), ("hf", "ratio_to_hf")):
            ratio = row[name]
            assert ratio["min"] <= ratio["median"] <= ratio["max"]
            if row["method"] == base:
                assert ratio == {"min": 1, "median": 1, "max": 1}
    assert len(table(summary).splitlines()) == 1 + len(summary)


def test_ratios_are_taken_run_by_run() -> None:
    def run(method: str, repeat: int, rate: float, tokens: list[int]) -> dict[str, Any]:
        return {
            **{"method": method, "drafter": None, "k": None, "temperature": 0.0, "prompt_id": "a", "repeat": repeat},
            **{
                "new_tokens": 2,
                "tokens_per_second": rate,
                "seconds": 2 / rate,
                "ttft_seconds": 0.0,
                "token_ids": tokens,
            },
            **{"accepted": 1, "tested": 2, "drafted": 4, "rounds": 1, "draft_cost": 0.5},
        }

    runs = [run("plain", 0, 10, [1, 2]), run("hf", 0, 5, [1, 2]), run("plain", 1, 40, [1, 2]), run("hf", 1, 10, [1, 3])]
    rows = [row for row in summarise(PROMPTS, runs) if row["category"] == "all"]
    plain, hf = rows
    assert plain["ratio_to_hf"] == {"min": 2, "median": 3, "max": 4}
    assert hf["ratio_to_plain"] == {"min": 0.25, "median": 0.375, "max": 0.5}
    assert (plain["tokens_per_second"], hf["identical"], hf["acceptance_rate"], hf["tokens_per_round"]) == (
        25,
        1,
        0.5,
        1,
    )
    assert next(iter(summarise(PROMPTS, runs[::2])))["ratio_to_hf"] is None


def test_texts_that_end_at_different_places_are_compared_at_equal_length() -> None:
    def run(method: str, tokens: int, seconds: float) -> dict[str, Any]:
        return {
            **{"method": method, "drafter": None, "k": None, "temperature": 1.0, "prompt_id": "a", "repeat": 0},
            **{"new_tokens": tokens, "tokens_per_second": tokens / seconds, "seconds": seconds, "ttft_seconds": 1.0},
            **{"token_ids": [1], "accepted": 1, "tested": 2, "drafted": 4, "rounds": 1, "draft_cost": 0.5},
        }

    for tokens, seconds, ratio in ((11, 1.5, 11 / 6), (101, 6.0, 11 / 6), (1, 1.0, 11 / 101)):
        rows = summarise(PROMPTS, [run("plain", 101, 11.0), run("speculative", tokens, seconds)])
        assert [row["ratio_to_plain"]["median"] for row in rows][-1] == pytest.approx(ratio)


def test_auto_is_held_against_the_fixed_k_that_was_the_fastest_in_its_row() -> None:
    def run(k: int | str, prompt: str, rate: float) -> dict[str, Any]:
        method, drafter = ("plain", "none") if k == 0 else ("speculative", "ngram")
        return {
            **{"method": method, "drafter": drafter, "k": k, "temperature": 0.0, "prompt_id": prompt, "repeat": 0},
            **{
                "new_tokens": 2,
                "tokens_per_second": rate,
                "seconds": 2 / rate,
                "ttft_seconds": 0.0,
                "token_ids": [1, 2],
            },
            **{"accepted": 1, "tested": 2, "drafted": 4, "rounds": 1, "draft_cost": 0.5},
        }

    rates: dict[int | str, tuple[float, float]] = {0: (10, 20), 2: (30, 20), 8: (10, 50), AUTO: (18, 60)}
    runs = [run(k, prompt, rate) for k, both in rates.items() for prompt, rate in zip("ab", both, strict=True)]
    rows = list(summarise(PROMPTS, runs))
    held = {row["category"]: row["ratio_to_best_k"] for row in rows if row["k"] == AUTO}
    assert held["easy"] == {"k": 2, "min": 0.6, "median": 0.6, "max": 0.6}
    assert held["hard"] == {"k": 8, "min": 1.2, "median": 1.2, "max": 1.2}
    assert held["all"] == {"k": 2, "min": 0.6, "median": 1.8, "max": 3}  # against the target alone, not by tokens/s
    assert all(row["ratio_to_best_k"] is None for row in rows if row["k"] != AUTO)
    alone = summarise(PROMPTS, [run for run in runs if run["k"] in (0, AUTO)])
    assert all(row["ratio_to_best_k"] is None for row in alone)


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

    monkeypatch.setattr("specdemo.lab.bench.start", never)
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

    monkeypatch.setattr("specdemo.lab.bench.start", cut_off)
    cases = [ALONE, *cases_of_ours(loaded, "ngram", [3])]
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
    outcome = {"interrupted": True, "runs": [1]}
    with pytest.raises(typer.Exit) as ended:
        keep(outcome, tmp_path / "a.json")
    assert ended.value.exit_code == 130
    assert json.loads((tmp_path / "a.json").read_text()) == outcome
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
        assert row["speed_up_from"] <= row["speed_up"] <= row["speed_up_to"]
        assert row["k"] == AUTO or len(row["acceptance_by_place"]) <= row["k"]
    fixed = next(row for row in rows if row["drafter"] == "draft-model" and row["k"] == 3)
    assert len(fixed["acceptance_by_place"]) >= 1
    told = {
        "environment": {"cpu": "this one", "cores": 1, "dtype": "float32"},
        "prompts": 2,
        "rows": json.loads(json.dumps(rows)),
    }
    assert in_words(told, "ngram").startswith("Measured at temperature 0, 0.8: ")


def test_the_assistant_is_set_up_for_a_run_and_then_as_before(loaded: Loaded) -> None:
    assert loaded.draft_model is not None
    config, settings = loaded.draft_model.generation_config, Settings(max_new_tokens=4)
    config.num_assistant_tokens = 7
    try:
        with bench_hf._assisting(loaded, Case(bench_hf.TUNED, "draft-model", 2)) as assistant:
            assert assistant is loaded.draft_model
            assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (2, 0.0)
            assert config.num_assistant_tokens_schedule == "constant"
        with bench_hf._assisting(loaded, Case(bench_hf.ASSISTED, "draft-model")):
            assert config.num_assistant_tokens == 7  # as it comes
        bench_hf.generate(loaded, Case(bench_hf.ASSISTED, "draft-model"), loaded.encode("the cat"), settings)
        assert config.num_assistant_tokens == 7
    finally:
        config.num_assistant_tokens = None


def test_what_cannot_be_compared_is_told(loaded: Loaded, capsys: pytest.CaptureFixture) -> None:
    alone = replace(loaded, draft_model=None)
    assert cases_of_hf(alone, ["hf", "hf-assisted"], [AUTO]) == [Case("hf")]
    assert capsys.readouterr().err == "hf-assisted is left out: the preset toy has no draft model to assist.\n"
    assert [case.k for case in cases_of_hf(loaded, ["hf-assisted-tuned"], [AUTO])] == list(TUNED_K)
    both = cases_of_hf(loaded, ["hf-assisted", "hf-assisted-tuned"], [4])
    assert (
        both
        == cases_of_hf(loaded, ["hf-assisted"], [4])
        == [
            Case("hf-assisted", "draft-model"),
            Case("hf-assisted-tuned", "draft-model", 4),
        ]
    )
    assert [case.k for case in cases_of_hf(loaded, ["hf-prompt-lookup"], [4, AUTO])] == [4, LOOKUP_K]
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
