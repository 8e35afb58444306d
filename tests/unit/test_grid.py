"""The grid of the studies: its order, its warm-up, and its one summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.errors import BadInput
from specdemo.studies.grid import Grid
from specdemo.studies.summaries import Row, average, mean, rate, share, summarise, total, with_speedups

from ..sentences import refuses


class Scripted(Grid):
    """Four texts by `cases` cases at two temperatures; notes what was written, and how many tokens were asked for."""

    axes = ("case",)

    def __init__(self, asked: Mapping[str, Any]) -> None:
        super().__init__(SimpleNamespace(), {"max_new_tokens": 40, **asked})  # type: ignore[arg-type]
        self.order: list[Row] = []
        cases = [{"case": place} for place in range(asked["cases"])]
        self.plan([{"prompt_id": place} for place in "abcd"], cases, [{"temperature": t} for t in (0.0, 1.0)])

    def check_run(self, names: Row) -> None:
        if names["temperature"] > self.chosen.get("most", 2):
            raise BadInput("The temperature is too high.")

    def write(self, names: Row) -> Iterator[Row]:
        self.order.append({**names, "tokens": self.settings_of(names).max_new_tokens})
        yield {"written": len(self.order)}


def test_each_case_begins_as_often_at_every_setting_and_rows_keep_the_order_of_the_cases() -> None:
    study = Scripted({"cases": 2})
    steps = [*study.run()]
    assert len(steps) == study.steps == study.done == 2 + 4 * 2 * 2
    assert [(run["case"], run["tokens"]) for run in study.order[:2]] == [(0, 8), (1, 8)]  # to warm up
    begun = Counter((run["temperature"], run["case"]) for run in study.order[2::2])
    assert begun == {(t, case): 2 for t in (0.0, 1.0) for case in (0, 1)}
    assert [run["case"] for run in study.runs] == [0, 1] * 8
    assert [row["case"] for row in study.rows()] == [0, 1]


def test_what_was_measured_stays_when_it_is_stopped() -> None:
    study = Scripted({"cases": 3})
    steps = study.run()
    for _ in range(3 + 4):
        next(steps)
    assert [(run["temperature"], run["case"]) for run in study.runs] == [(0.0, 0), (0.0, 1), (0.0, 2), (1.0, 0)]


def test_a_run_that_is_not_possible_is_refused_before_the_first() -> None:
    with refuses(BadInput, "temperature"):
        Scripted({"cases": 1, "most": 0.5})


def test_a_summary_by_hand() -> None:
    runs = [
        {"k": k, "text": text, "seed": seed, "speed": speed, "tested": 10 * seed, "accepted": seed}
        for k, text, seed, speed in [(2, "a", 0, 1.0), (2, "a", 1, 4.0), (1, "a", 3, 5.0), (2, "b", 2, 8.0)]
    ]
    figures = {"speed": mean("speed"), "rate": rate("accepted", "tested"), "share": share("accepted", "tested")}
    figures |= {"sum": total("accepted"), "mean": average("speed"), "runs": len, "none": average("unknown")}
    two, one = summarise(runs, ("k",), figures, ("text", "seed"))
    assert (two["k"], two["sum"], two["runs"], two["none"]) == (2, 3, 3, None)
    assert two["speed"].mean == pytest.approx(4)  # of 2 and 8: texts count, not runs
    assert two["rate"].mean == two["share"] == 0.1
    assert two["mean"] == pytest.approx(13 / 3)
    assert (one["speed"].mean, one["speed"].low, one["speed"].count) == (pytest.approx(5), None, 1)
    seeds = summarise([run for run in runs if run["text"] == "a"], ("k",), figures, ("text", "seed"))
    assert seeds[0]["speed"].count == 2  # of a single text


def test_runs_are_compared_with_the_base_of_the_same_text() -> None:
    runs = [
        {"who": who, "text": text, "tokens_per_second": speed}
        for who, text, speed in [
            ("base", "a", 10.0),
            ("other", "a", 15.0),
            ("other", "b", 9.0),
            ("base", "c", None),
            ("other", "c", 8.0),
        ]
    ]
    found = with_speedups(runs, lambda run: run["who"] == "base", "text")
    assert [run["speedup"] for run in found] == [None, 1.5, None, None, None]
