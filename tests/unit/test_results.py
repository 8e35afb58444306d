"""The results that ship with a preset: from the bench to the drafter menu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdemo.drafters.names import DRAFTERS
from specdemo.errors import BadInput
from specdemo.models.presets import PRESETS, load_presets
from specdemo.models.results import describe_results, read_results, results_path
from tools.bench.results import joined

from ..sentences import gist, refuses, tells


def row(drafter: str, k: int, temperature: float, speed_up: Any) -> dict[str, Any]:
    return locals()


RESULTS: dict[str, Any] = {
    "environment": {
        **{"cpu": "a processor", "cpu_model": None, "cores": 2},
        **{"dtype": "bfloat16", "weights_dtype": "bfloat16"},
    },
    "prompts": 9,
    "rows": [
        row("ngram", 2, 0.0, 1.2),
        row("ngram", 4, 0.0, 1.25),
        row("ngram", 2, 1.0, 0.904),
        row("eagle", 2, 0.0, 1),
    ],
}


def test_the_best_k_is_told_for_each_temperature() -> None:
    sentence = describe_results(RESULTS, "ngram")
    assert gist(sentence) == "Measured speed-up 1.25× 0 K 4 0.90× 1 K 2 On 2 bfloat16 9"
    assert "a processor" in sentence
    assert describe_results(RESULTS, "prompt-lookup") == ""
    halves = {**RESULTS["environment"], "dtype": "float32", "weights_dtype": "float16"}
    assert tells(describe_results({**RESULTS, "environment": halves}, "ngram"), "float32 float16 weights, 9")


def test_auto_is_told_where_no_fixed_k_is_faster() -> None:
    auto = {**row("eagle", 0, 0.0, 1.5), "k": "auto"}
    as_fast, faster = row("eagle", 3, 0.0, 1.5), row("eagle", 4, 0.0, 1.6)
    sentences = [describe_results({**RESULTS, "rows": [auto, *rows]}, "eagle") for rows in ([], [as_fast], [faster])]
    assert [*map(gist, [words.split(". On")[0] for words in sentences])] == [
        "Measured speed-up 1.50× 0 K",
        "Measured speed-up 1.50× 0 K",
        "Measured speed-up 1.60× 0 K 4",
    ]


def test_results_lie_beside_their_preset(tmp_path: Path) -> None:
    path = results_path(tmp_path / "some.toml")
    assert path == tmp_path / "some.results.json"
    assert read_results(path) is None
    path.write_text(json.dumps(RESULTS))
    assert read_results(path) == RESULTS


def test_drafters_that_were_not_measured_again_keep_their_rows_while_all_else_is_the_same() -> None:
    old = {**RESULTS, "environment": {**RESULTS["environment"], "commit": "one"}}
    new = {**old, "environment": {**RESULTS["environment"], "commit": "two"}, "rows": [row("eagle", 4, 0.0, 1.1)]}
    rows = joined(old, new)["rows"]
    assert [(r["drafter"], r["speed_up"], r["commit"]) for r in rows] == [
        *(("ngram", 1.2, "one"), ("ngram", 1.25, "one"), ("ngram", 0.904, "one")),
        ("eagle", 1.1, "two"),
    ]
    again = joined(joined(old, new), {**new, "rows": [row("block", 4, 0.0, 1.2)]})["rows"]
    assert [r["commit"] for r in again] == ["one"] * 3 + ["two"] * 2
    for other in (None, {**old, "prompts": 8}, {**old, "environment": {**RESULTS["environment"], "cpu": "another"}}):
        assert [r["drafter"] for r in joined(other, new)["rows"]] == ["eagle"]


def file_of(*rows: Any) -> str:
    return json.dumps({**RESULTS, "rows": rows})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[" * 100_000, "[]", "{}", '{"rows": 1}', '{"rows": []}'),
        *(file_of("x"), file_of({}), file_of({"drafter": "x"})),
        *(file_of(row("x", 2, 0.0, None)), file_of(row("ngram", 2, 0.0, 1.2), row("x", 2, 0.0, "fast"))),
    ],
)
def test_a_damaged_file_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.results.json"
    path.write_text(text)
    with refuses(BadInput, "some.results.json"):
        read_results(path)


def test_shipped_results_are_told_for_every_drafter_that_was_measured() -> None:
    presets, broken = load_presets(PRESETS)
    assert not broken
    for results in filter(None, (preset.results for preset in presets.values())):
        for name in {row["drafter"] for row in results["rows"]}:
            assert name in DRAFTERS
            best = max(row["speed_up"] for row in results["rows"] if row["drafter"] == name)
            assert tells(describe_results(results, name), f"{best:.2f}×")
