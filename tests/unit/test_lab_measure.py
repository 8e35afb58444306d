"""Profile, sweep and domains: what they run on tiny models, and their summaries by hand."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdemo.decoding.events import Round
from specdemo.drafters.names import DRAFTERS
from specdemo.errors import BadInput
from specdemo.studies import theory
from specdemo.studies.domains import CATEGORY, Domains
from specdemo.studies.grid import OF_TEXT
from specdemo.studies.profile import Profile, _timed_drafts, costs, in_words, parts_of
from specdemo.studies.prompts import Prompt
from specdemo.studies.statistics import Spread
from specdemo.studies.summaries import Row, values
from specdemo.studies.sweep import Sweep, best_k
from specdemo.studies.tables import write_csv, write_json
from specdemo.tokens import DraftedToken, DraftOutcome
from tests.harness.classes import Loaded

from ..sentences import gist, refuses, tells

PROMPTS = [Prompt("a", "easy", "the cat sat on the mat"), Prompt("b", "hard", "one two three")]


# Profile ---------------------------------------------------------------------------------------------------


def profile(loaded: Loaded, *drafters: str, **asked: Any) -> Profile:
    return Profile(loaded, {"drafters": drafters, "k": 3, "repeats": 2, "prompt": "the cat", **asked})


def test_a_profile_times_every_part(loaded: Loaded) -> None:
    drafters = ["ngram", "layer-skip"]
    study = profile(loaded, *drafters, max_new_tokens=8)
    assert len([*study.run()]) == study.steps == study.done == 18
    assert all(value >= 0 for run in study.runs for name in ("seconds", "first") for value in values([run], name))
    summary = study.result()
    assert [row["model"] for row in summary["models"]] == ["target", "draft model"]
    passes = [(row["model"], row["tokens"]) for row in summary["passes"]]
    assert passes == [(model, tokens) for model in ("target", "draft model") for tokens in range(1, 18)]
    assert [row["drafter"] for row in summary["drafters"]] == drafters
    assert all(row["tokens_per_draft"] <= 3 for row in summary["drafters"])
    assert len(in_words(summary, 3)) == 3


def test_a_stopped_profile_can_be_summarised(loaded: Loaded) -> None:
    study = profile(loaded, "ngram")
    steps = study.run()
    assert [next(steps) for _ in study.cases] == ["Warming up"] * len(study.cases)
    assert not any(study.result().values())
    next(steps)
    summary = study.result()
    assert summary["models"][0]["model"] == "target"
    assert summary["passes"] == summary["drafters"] == []


def passes(tokens: int, *seconds: float) -> list[Row]:
    return [{"part": "pass", "model": "target", "tokens": tokens, "seconds": each, "prompt_id": ""} for each in seconds]


def drafts(drafter: str, *timed: tuple[int, float]) -> list[Row]:
    parallel, made = DRAFTERS[drafter].parallel_drafting, [DraftedToken(1, DraftOutcome.UNTESTED)] * 8
    events = [Round(0, tuple(made[:tokens]), (), seconds, 0.0, 0.0) for tokens, seconds in timed]
    return [{"part": "draft", "drafter": drafter, "prompt_id": "", **row} for row in _timed_drafts(events, parallel)]


TOKEN = {"part": "token", "model": "target", "prompt_id": ""}
RUNS: list[Row] = [
    *[{**TOKEN, "first": seconds} for seconds in (0.2, 0.4, 0.3)],
    *[{**TOKEN, "seconds": seconds / 1000} for seconds in range(10, 31, 2)],
    *passes(1, 0.020, 0.010, 0.090),
    *passes(2, 0.025, 0.025, 0.023),
    *drafts("ngram", (4, 0.004), (4, 0.004), (4, 0.012)),
    *drafts("prompt-lookup", (0, 0.001)),
]


def test_a_profile_by_hand() -> None:
    summary = parts_of(RUNS)
    (model,), (one, two), (ngram, lookup) = summary["models"], summary["passes"], summary["drafters"]
    assert model == {
        "model": "target",
        "tokens_per_second": pytest.approx(50),
        "mean_ms": pytest.approx(20),
        "p50_ms": pytest.approx(20),
        "p90_ms": pytest.approx(28),
        "ttft_ms": pytest.approx(300),
    }
    assert (one["cost"], two["cost"]) == (1, pytest.approx(1.25))
    assert ngram["ms_per_drafted_token"] == pytest.approx(1)
    assert ngram["draft_cost"] == pytest.approx(0.05)
    assert (lookup["drafts"], lookup["draft_cost"]) == (0, None)


def test_the_costs_of_a_profile_for_the_theory() -> None:
    found = costs(parts_of(RUNS), "ngram")
    assert found is not None
    assert found.round(1) == pytest.approx(0.05 + 1.25)
    assert costs(parts_of(RUNS), "prompt-lookup") is None
    lines = in_words(parts_of(RUNS), 1)
    assert gist(lines[0]) == "One 2 1.25 checking"
    assert tells(lines[1], "K 1 30%")
    assert tells(lines[2], "prompt-lookup found")


@pytest.mark.parametrize("drafter", ["block", "lookup-block"])
def test_a_draft_made_at_once_costs_the_same_however_long_it_is(drafter: str) -> None:
    summary = parts_of([*RUNS, *drafts(drafter, *((tokens, 0.004) for tokens in (2, 4, 8)))])
    row = summary["drafters"][-1]
    assert (row["parallel"], row["draft_cost"], row["ms_per_drafted_token"]) == (True, 0.2, 1.0)
    found = costs(summary, drafter)
    assert found is not None
    assert found.round(1) == pytest.approx(0.2 + 1.25)
    assert theory.speed_up(1.0, 1, found) == pytest.approx(2 / 1.45)
    assert tells(in_words(summary, 1)[-1], f"{drafter}: however 20.0%")


def test_a_prompt_without_room_is_refused(loaded: Loaded) -> None:
    with refuses(BadInput, "context"):
        profile(loaded, prompt="the cat sat " * loaded.context)


# Sweep -----------------------------------------------------------------------------------------------------


SWEEP: dict[str, Any] = {"prompts": PROMPTS, "drafters": ["ngram"], "ks": (0, 1), "temperatures": (0.0,)}
SWEEP |= {"seeds": 1, "max_new_tokens": 8}


def test_a_sweep_runs_the_plan(loaded: Loaded) -> None:
    two: dict[str, Any] = {"drafters": ["ngram", "layer-skip"], "temperatures": (0.0, 1.0), "seeds": 2}
    study = Sweep(loaded, {**SWEEP, **two, "ks": (0, 1, 3)})
    assert len(list(study.run())) == study.steps == study.done == 4 + 2 * 2 * 2 * 4  # each case warms up
    runs = study.runs
    cases = [(drafter, k) for drafter in two["drafters"] for k in (1, 3)]
    assert [(run["drafter"], run["k"]) for run in runs[:4]] == cases
    for run in runs:
        assert run["accepted"] <= run["tested"] <= run["drafted"]
        assert run["tokens_per_second"] > (run["tokens"] - 1) / run["seconds"]  # after the prompt
        assert run["speedup"] == pytest.approx(run["tokens_per_second"] / run["alone"])
    rows = Sweep.rows_of(runs)
    cases = [("none", 0), *cases]
    assert [(row["category"], row["temperature"], row["drafter"], row["k"]) for row in rows] == [
        (category, t, *case) for category in ("easy", "hard") for t in (0.0, 1.0) for case in cases
    ]
    assert {row["runs"] for row in rows} == {2, 8}  # the target alone wrote beside each of four
    assert len(best_k(runs)) == 2 * 2 * 2


def test_a_sweep_that_cannot_run_is_refused_before_it_starts(loaded: Loaded) -> None:
    refused: dict[str, dict[str, Any]] = {
        "temperature": {"temperatures": (0.0, 3.0)},
        "K": {"ks": (0,)},
        "psychic": {"drafters": ["psychic"]},
        "context": {"max_new_tokens": 100_000},
    }
    for words, wrong in refused.items():
        with refuses(BadInput, words):
            next(Sweep(loaded, {**SWEEP, **wrong}).run())


def run(
    prompt: str, seed: int, k: int, speed: float, speedup: float | None, tested: int = 10, accepted: int = 5
) -> Row:
    names = {"prompt_id": prompt, "category": "easy", "drafter": "ngram", "k": k, "temperature": 0.0, "seed": seed}
    figures = zip(OF_TEXT, (21, 10, 2 * tested, tested, accepted, 2.0, speed), strict=True)
    return {**names, **dict(figures), "alone": speed / speedup if speedup else None, "speedup": speedup}


def test_a_summary_by_hand() -> None:
    runs = [run("a", 0, 2, 10, 1.0), run("a", 1, 2, 40, 4.0, 30, 25), run("b", 0, 2, 80, 8.0, 0, 0)]
    alone, row = Sweep.rows_of(runs)
    assert row["tokens_per_second"].mean == pytest.approx(40)  # of 20 and 80: prompts count, not texts
    assert row["speedup"].mean == pytest.approx(4)
    assert row["speedup"].count == 2
    assert row["acceptance_rate"] == Spread(30 / 40, None, None, 1)  # nothing was tested on the other prompt
    assert row["draft_efficiency"].mean == 30 / 80
    assert row["tokens_per_round"].mean == 2
    assert (row["runs"], alone["runs"]) == (3, 3)
    assert (alone["drafter"], alone["k"], alone["tokens_per_second"].mean) == ("none", 0, pytest.approx(10))


def test_a_single_prompt_is_spread_over_its_seeds() -> None:
    row = Sweep.rows_of([run("a", seed, 2, 10 * seed + 100, 1.0) for seed in range(3)])[1]
    assert row["tokens_per_second"].count == 3
    assert row["tokens_per_second"].low < 100


def runs_of(**speedups: list[float]) -> list[Row]:
    """Runs by K, with a speed-up for each prompt."""
    return [run(str(n), 0, int(k[1:]), 10, s) for k, values in speedups.items() for n, s in enumerate(values)]


@pytest.mark.parametrize(
    ("runs", "k", "tied", "sure", "words"),
    [
        (runs_of(k1=[1.2, 1.21, 1.19], k2=[1.4, 1.41, 1.42]), 2, [], True, "K 2 2, 1.41×"),
        (runs_of(k1=[1.39, 1.43, 1.40], k2=[1.4, 1.41, 1.42]), 2, [1], True, "K 1."),
        (runs_of(k1=[0.9, 1.5, 1.2]), 1, [0], False, "few varied gain"),
        (runs_of(k1=[1.2]), 1, [0], False, "K 1 1.20× few"),
        (runs_of(k1=[0.8, 0.81, 0.8], k4=[0.5, 0.5, 0.51]), 0, [], False, "not 2 0.80×"),
        (runs_of(k1=[0.8, 1.1, 0.9]), 0, [1], False, "K 1."),
    ],
)
def test_the_best_k(runs: list[Row], k: int, tied: list[int], sure: bool, words: str) -> None:
    (best,) = best_k(runs)
    assert (best["k"], best["tied"], best["sure"]) == (k, tied, sure)
    assert tells(best["sentence"], words)


def test_texts_without_a_pace_name_no_k() -> None:
    (best,) = best_k([run("a", 0, 2, 1.0, None)])
    assert (best["k"], best["speedup"], best["sure"]) == (0, None, False)


# Domains ---------------------------------------------------------------------------------------------------


def test_domains_counts_what_the_drafter_did(loaded: Loaded) -> None:
    study = Domains(loaded, {"drafter": "ngram", "prompts": PROMPTS, "k": 3, "max_new_tokens": 12})
    assert len(list(study.run())) == study.steps == len(PROMPTS)
    rows = [row for row in study.rows() if row["by"] == CATEGORY]
    assert [row["name"] for row in rows] == ["easy", "hard"]
    assert all(row["drafted"] >= row["tested"] > 0 for row in rows)


# Files -----------------------------------------------------------------------------------------------------


ROWS: list[dict[str, Any]] = [
    {"name": "a, b", "speed": Spread(2.0, 1.0, 3.0, 4), "k": None},
    {"name": "c", "speed": None, "k": 3},
]


def test_a_table_as_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ROWS)
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["name"], rows[0]["speed.mean"], rows[0]["speed.high"], rows[0]["k"]) == ("a, b", "2.0", "3.0", "")
    assert (rows[1]["speed.mean"], rows[1]["k"]) == ("", "3")


def test_a_file_is_whole_while_the_next_is_written_over_it(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_json(path, [1])
    with path.open() as before:
        write_json(path, [1, 2])
        assert json.load(before) == [1]
    assert json.loads(path.read_text()) == [1, 2]
    assert list(tmp_path.iterdir()) == [path]
    write_json(Path(os.devnull), [1])
    assert not Path(os.devnull).is_file()


def test_a_table_as_json(tmp_path: Path) -> None:
    write_json(tmp_path / "t.json", ROWS)
    assert json.loads((tmp_path / "t.json").read_text())[0]["speed"] == {"mean": 2, "low": 1, "high": 3, "count": 4}
