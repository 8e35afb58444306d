"""Rows made of runs by hand, works in turn, files of prompts, and the results that ship."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdemo.errors import BadInput
from specdemo.models.presets import PRESETS
from specdemo.settings import AUTO, MATCH
from specdemo.studies.prompts import Prompt, read_prompts, some
from specdemo.studies.statistics import Spread
from tools.bench import docs
from tools.bench.__main__ import app
from tools.bench.docs import DOCS, RESULTS, pages
from tools.bench.rows import Row, summary
from tools.bench.rows import command as command_line
from tools.bench.tables import text_table
from tools.bench.turns import in_turns, mean_of

from ..conftest import Command
from ..sentences import refuses, tells


def run(
    method: str, prompt: str, speed: float | None, repeat: int = 0, k: int | str | None = None, **other: Any
) -> Row:
    """A run of two tokens."""
    ours = {"method": method, "drafter": None if k is None else "ngram", "k": k, "rule": MATCH, "temperature": 0.0}
    ours["repeat"] = repeat
    figures = {"prompt_id": prompt, "category": {"a": "easy", "b": "hard"}[prompt], "new_tokens": 2, "seconds": 1.0}
    counts = {"accepted": 1, "tested": 2, "drafted": 4, "rounds": 1, "draft_cost": 0.5, "prompt_seconds": 0.0}
    return {**ours, **figures, **counts, "tokens_per_second": speed, "digest": "x", **other}


def over_all(runs: list[Row]) -> list[Row]:
    return [row for row in summary(runs) if row["category"] == "all"]


def test_ratios_are_taken_run_by_run_and_averaged_as_logarithms() -> None:
    runs = [run("plain", "a", 10), run("hf", "a", 5), run("plain", "a", 40, 1), run("hf", "a", 5, 1, digest="y")]
    runs += [run("plain", "b", 20), run("hf", "b", 20)]
    plain, hf = over_all(runs)
    assert plain["ratio_to"]["hf"].mean == pytest.approx(2)  # 2 and 8 of one prompt, 1 of the other
    assert hf["ratio_to"]["plain"].mean == pytest.approx(1 / 2)
    assert plain["tokens_per_second"].mean / hf["tokens_per_second"].mean == pytest.approx(2)
    assert plain["ratio_to"]["hf"].count == 2
    assert (hf["identical"], hf["acceptance_rate"], hf["tokens_per_round"]) == (2, 0.5, 1)
    assert over_all(runs[::2])[0]["ratio_to"]["hf"] is None


def test_a_text_of_a_single_token_has_no_pace_and_is_left_out() -> None:
    runs = [run("plain", "a", 10), run("plain", "b", 10)]
    runs += [run("speculative", "a", 20, k=2), run("speculative", "b", None, k=2)]
    ratio = over_all(runs)[1]["ratio_to"]["plain"]
    assert (ratio.mean, ratio.count) == (pytest.approx(2), 1)


def test_auto_is_held_against_the_fixed_k_that_was_the_fastest_in_its_row() -> None:
    rates: dict[int | str, tuple[float, float]] = {0: (10, 20), 2: (30, 20), 8: (10, 50), AUTO: (18, 60)}
    runs = [
        run("plain" if k == 0 else "speculative", prompt, rate, k=k)
        for k, both in rates.items()
        for prompt, rate in zip("ab", both, strict=True)
    ]
    held = {row["category"]: row["ratio_to_best_k"] for row in summary(runs) if row["k"] == AUTO}
    assert (held["easy"]["k"], held["easy"]["mean"]) == (2, pytest.approx(0.6))
    assert (held["hard"]["k"], held["hard"]["mean"]) == (8, pytest.approx(1.2))
    assert (held["all"]["k"], held["all"]["mean"]) == (2, pytest.approx((0.6 * 3) ** 0.5))  # by ratios, not by tokens/s
    assert all(row["ratio_to_best_k"] is None for row in summary(runs) if row["k"] != AUTO)
    assert all(row["ratio_to_best_k"] is None for row in summary([run for run in runs if run["k"] in (0, AUTO)]))


def test_each_turn_begins_with_another_work() -> None:
    count = itertools.count(1)
    found = in_turns({name: lambda: next(count) for name in "abc"}, 4)
    assert found == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}  # abc bca cab abc


def test_an_interval_does_not_reach_below_zero() -> None:
    spread = mean_of([1.0, 9.0])
    assert spread is not None
    assert (spread.mean, spread.low, spread.high) == (5, 0, pytest.approx(5 + 12.706 * 4, abs=0.01))
    assert mean_of([]) is None
    share = mean_of([0.9, 1.0], most=1.0)
    assert share is not None
    assert (share.low, share.high) == (pytest.approx(0.95 - 12.706 * 0.05, abs=1e-4), 1)


def test_a_command_is_told_without_the_file_that_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--json", "a.json", "-k", "2,auto", "--json=b", "--shapes", ""])
    assert command_line() == "python -m tools.bench -k 2,auto --shapes ''"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--json", "/"], "/ written."),
        (["--each", "-1"], "--each"),
        (["roofline", "--context", "0"], "'--context': 1"),
        (["roofline", "--preset", "nanogpt-shakespeare", "--context", "5000"], "256"),
        (["gpu", "--tiny", "--only", "speed"], "part 'speed'"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(command: Command, words: list[str], named: str) -> None:
    status, out, err = command(*words, app=app)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert tells(err, named)


def test_a_table_for_people() -> None:
    rows: list[Row] = [{"name": "a, b", "speed": Spread(2, 1, 3, 4), "k": None}, {"name": "c", "speed": None, "k": 3}]
    assert text_table(rows, {"name": "", "speed": ".1f", "k": "d"}).splitlines() == [
        "name             speed  k",
        "a, b  2.0 (1.0 to 3.0)  -",
        "   c                 -  3",
    ]


# Files of prompts ------------------------------------------------------------------------------------------

PROMPT = {"id": "a", "category": "b", "prompt": "c"}
LINE = json.dumps({**PROMPT, "prompt": "one\u2028two\x85three"}, ensure_ascii=False)


def test_a_prompt_file_as_other_programs_write_it(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_bytes(("\ufeff" + LINE + "\r\n\r\n").encode())
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "some.jsonl")] == ["one\u2028two\x85three"]


BAD_LINES = ["no json", "[]", '"abc"', '{"id": "a"}', "[" * 100_000, json.dumps({**PROMPT, "id": []})]
AN_OBJECT = "some.jsonl, 3: id, category prompt,"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((f"{json.dumps(PROMPT)}\n\n{line}\n".encode(), AN_OBJECT) for line in BAD_LINES),
        (b"\xff", "some.jsonl UTF-8."),
        (f"{LINE}\n{LINE}\n".encode(), "some.jsonl 'a'."),
        (json.dumps({**PROMPT, "category": "all"}).encode(), "some.jsonl 'all',"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "some.jsonl").write_bytes(content)
    with refuses(BadInput, words):
        read_prompts(tmp_path / "some.jsonl")


def test_a_few_prompts_of_each_category_can_be_chosen() -> None:
    prompts = [Prompt(str(place), category, "") for place, category in enumerate("aabab")]
    assert [prompt.id for prompt in some(prompts, 2)] == ["0", "2", "1", "4"]
    assert some(prompts, 0) == prompts


# What ships ------------------------------------------------------------------------------------------------

ROOT = PRESETS.parent
MEASURED = re.compile(
    r"^\| (?:specdemo, |transformers, |OpenVINO|(?:ik_)?llama\.cpp[, ]|`[\w-]+` \| [\d.]+ \| \d).*\(.*\) \|",
    re.MULTILINE,
)
HEADING = re.compile(r"^\|.*\n\|[-|]+\n", re.MULTILINE)


def cells(row: str) -> Counter[str]:
    return Counter(cell.strip() for cell in row.strip("|").split("|"))


def test_the_results_that_ship_are_small_and_whole() -> None:
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) < 1_000_000
    for path in sorted(RESULTS.glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        assert re.match(r"python -m (?:specdemo|tools\.\w+)\b", whole["command"]), path
        known = whole["environment"].keys()
        assert {"cores", "torch", "transformers", "commit"} <= known, path
        assert {"cpu", "host"} & known, path


def test_the_pages_of_results_are_those_that_the_bench_writes() -> None:
    """So every row that a file gives stands in the docs as it is: `python -m tools.bench docs`."""
    assert {path.name: path.read_text(encoding="utf-8") for path in DOCS.iterdir()} == pages()


def test_every_measured_row_of_the_docs_comes_from_a_file() -> None:
    """Such a row may leave out cells of the row of the page that it is from."""
    results = ROOT / "docs" / "results.md"
    written = [path for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")) if path.parent != DOCS]
    measured = [
        line for path in written for line in path.read_text(encoding="utf-8").splitlines() if MEASURED.match(line)
    ]
    excerpts = HEADING.sub("", results.read_text(encoding="utf-8"))
    measured += [line for line in excerpts.splitlines() if line.startswith("|")]
    given = [cells(line) for page in pages().values() for line in page.splitlines() if line.startswith("|")]
    assert len(measured) > 25
    assert [line for line in measured if not any(cells(line) <= row for row in given)] == []


def test_every_page_of_results_is_linked_from_the_headlines() -> None:
    headlines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert [name for name in pages() if f"](results/{name})" not in headlines] == []


def test_a_file_without_a_title_and_a_title_without_a_file_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    (tmp_path / docs.ABOUT).write_text('[gone]\ntitle = ""\nbounds = ""\n')
    (tmp_path / "new.json").write_text("{}")
    with refuses(BadInput, "pages.toml gone, new."):
        pages()


def test_a_page_has_the_flags_of_every_other_program(tmp_path: Path) -> None:
    saved = json.loads((RESULTS / "transformers.json").read_text(encoding="utf-8"))
    saved["others"] = {"llama.cpp": {"version": "b1", "flags": "--flash-attn on"}, "openvino": {"version": "2"}}
    (tmp_path / "llamacpp-built.json").write_text(json.dumps(saved))
    lines = docs.page(tmp_path / "llamacpp-built.json", "Built", "Bounded.").splitlines()
    assert "- llama.cpp: b1, --flash-attn on." in lines
    assert "- openvino: 2." in lines
    assert lines[-1] == "Bounded."
