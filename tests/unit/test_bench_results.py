"""What a bench keeps, and the results that ship: every row from the runs beside it, every table from a row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdemo.bench import results
from specdemo.bench.cases import ALONE, TREE, Case
from specdemo.bench.results import drafters_markdown, markdown, read_record, record
from specdemo.bench.throughput import bench
from specdemo.bench.trees import tree_rows, trees_markdown
from specdemo.models.loaded import Loaded
from specdemo.models.presets import PRESETS
from specdemo.racing.provenance import provenance
from specdemo.studies.prompts import Prompt
from specdemo.studies.statistics import Spread
from specdemo.studies.tables import write_json
from specdemo.types import AUTO, BadInput

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [Prompt("a", "easy", "the cat sat on the mat"), Prompt("b", "hard", "one two three")]


@pytest.fixture
def outcome(loaded: Loaded) -> dict[str, Any]:
    cases = [Case("hf"), ALONE, Case("speculative", "ngram", 3), Case("speculative", "ngram", AUTO)]
    facts = {"command": "python -m specdemo bench", **provenance(loaded), "prompts_sha256": "x"}
    return {**facts, **bench(loaded, PROMPTS, cases, [0.0, 0.8], 8, 1)}


@pytest.fixture
def kept(outcome: dict[str, Any], tmp_path: Path) -> Path:
    write_json(tmp_path / "some.json", record(outcome))
    return tmp_path / "some.json"


def test_what_is_kept_holds_every_run_and_gives_its_rows(outcome: dict[str, Any], kept: Path) -> None:
    facts, runs = read_record(kept)
    assert facts["environment"]["torch"]
    assert len(runs) == len(outcome["runs"])
    assert "token_ids" not in kept.read_text()
    assert max(map(len, kept.read_text().splitlines())) < 1000
    assert runs[0]["tokens_per_second"] == pytest.approx(outcome["runs"][0]["tokens_per_second"], rel=1e-5)
    lines = markdown(results.rows_of(runs))
    assert lines[0] == "| | T | tokens/s | times transformers | times the target alone |"
    assert len(lines) == 2 + 4 * 2
    assert len(drafters_markdown(runs)) == 2 + 2


def test_trees_stand_beside_the_fastest_chain_of_the_same_drafter(loaded: Loaded, tmp_path: Path) -> None:
    sizes = [("speculative", k) for k in (1, 3, AUTO)] + [(TREE, k) for k in (4, AUTO)]
    cases = [ALONE, Case("speculative", "prompt-lookup", 3), *(Case(method, "ngram", k) for method, k in sizes)]
    found = bench(loaded, PROMPTS, cases, [0.0, 0.8], 8, 1)
    rows = tree_rows(found["runs"])
    for temperature in (0.0, 0.8):
        mine = [row for row in rows if row["temperature"] == temperature]
        assert [(row["method"], row["k"]) for row in mine][1:] == [("speculative", AUTO), (TREE, 4), (TREE, AUTO)]
        assert [row["best_chain"] for row in mine] == [True, False, False, False]
        assert {row["drafter"] for row in mine} == {"ngram"}
        for row in mine:
            assert row["identical"] == row["runs"] == 2
            ours = [
                run
                for run in found["runs"]
                if (run["method"], run["k"], run["temperature"]) == (row["method"], row["k"], temperature)
                and run["drafter"] == "ngram"
            ]
            rounds = sum(run["rounds"] for run in ours)
            assert row["tokens_per_round"] == pytest.approx(sum(run["new_tokens"] - 1 for run in ours) / rounds)
            assert row["rows"] == pytest.approx(1 + sum(run["drafted"] for run in ours) / rounds)
    lines = trees_markdown(rows)
    assert len(lines) == 2 + 2 * 4
    assert "a tree of 4" in lines[4]
    assert "trees or chains, K = auto" in lines[5]
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    facts = {"command": "python -m specdemo bench", **provenance(loaded), "prompts_sha256": "x"}
    write_json(tmp_path / "trees.json", record({**facts, **found}))
    again = trees_markdown(tree_rows(read_record(tmp_path / "trees.json")[1]))
    assert [line.split("|")[:6] for line in again] == [line.split("|")[:6] for line in lines]  # speeds are rounded
    assert len(json.loads((tmp_path / "trees.json").read_text())["trees"]) == len(rows)
    assert tree_rows([run for run in found["runs"] if run["method"] != TREE]) == []


def test_kept_rows_that_are_not_those_of_the_runs_are_refused(kept: Path) -> None:
    whole = json.loads(kept.read_text())
    for name, change, reason in (
        ("rows", [*whole["rows"][1:]], "its rows are not those of its runs"),
        ("runs", [row[:-1] for row in whole["runs"]], "does not hold"),
        ("columns", [], "other columns"),
        ("rows", [{**row, "runs": 5} for row in whole["rows"]], "its rows are not those"),
    ):
        kept.write_text(json.dumps({**whole, name: change}))
        with pytest.raises(BadInput, match=f"some\\.json.*{reason}"):
            read_record(kept)
    kept.write_text("[]")
    with pytest.raises(BadInput, match="does not hold"):
        read_record(kept)


SHOWN = {"auto-sweep": drafters_markdown, "auto-layer-skip": drafters_markdown}


def spreads(value: Any) -> Any:
    """A row as it was before it was written to a file."""
    if not isinstance(value, dict):
        return value
    return Spread(**value) if "mean" in value else {name: spreads(part) for name, part in value.items()}


MEASURED = re.compile(
    r"^\| (?:specdemo, |transformers, |llama\.cpp[, ]|`[\w-]+` \| [\d.]+ \| \d).*\(.*\) \|", re.MULTILINE
)


def test_the_results_that_ship_are_small_whole_and_those_of_the_docs() -> None:
    """Every row that a file gives stands in the docs, as it is, and every row there comes from a file."""
    pages = (PRESETS.parent / "README.md", *PRESETS.parent.glob("docs/**/*.md"))
    docs = "".join(page.read_text(encoding="utf-8") for page in pages)
    folder = PRESETS / "results"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    given = set()
    for path in sorted(folder.glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        assert whole["command"].startswith("python -m specdemo "), path
        assert {"cpu", "cores", "torch", "transformers", "commit"} <= whole["environment"].keys(), path
        if "trees" in whole:
            lines = trees_markdown([spreads(row) for row in whole["trees"]])
        elif "runs" in whole:
            _, runs = read_record(path)
            lines = SHOWN[path.stem](runs) if path.stem in SHOWN else markdown(results.rows_of(runs))
        else:
            continue
        assert [line for line in lines if line not in docs] == [], path
        given |= set(lines)
    told = [line for line in docs.splitlines() if MEASURED.match(line)]
    assert len(told) > 100
    assert [line for line in told if line not in given] == []
