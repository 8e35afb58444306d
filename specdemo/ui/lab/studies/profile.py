"""What things cost: a token of each model, a pass over several tokens, a drafted token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ....system.imports import Later
from ..form import PROMPT, Field, k_field
from ..plots import Picture, Section, bars, lines, table
from ..study import Study

if TYPE_CHECKING:
    from ....models.loaded import Loaded
    from ....studies import profile
else:
    profile = Later("specdemo.studies.profile")


class Profile(Study):
    """Drafting pays off if a drafted token is cheap and if checking many tokens takes hardly longer than writing one.
    This view measures both on the server: a pass of the target over 1 to 17 tokens, and a draft of each drafter.
    """

    name = "profile"
    title = "What things cost"
    fields = (
        Field("drafters", "Drafters", "drafters", "all"),
        k_field(4),
        Field("repeats", "Repeats of each measurement", "whole", 2, 1, 20),
        PROMPT,
    )
    sections = ((2, 3),)

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.timings: list[profile.Timing] = []
        self.steps = profile.steps(loaded, asked["drafters"], asked["repeats"])

    def run(self) -> Iterator[str]:
        ids, (drafters, k, repeats) = self.loaded.encode(self.asked["prompt"]), self.given("drafters k repeats")
        for timings in profile.profile(self.loaded, ids, drafters, k, repeats=repeats):
            self.timings += timings
            self.done += 1
            yield timing(timings)

    def picture(self) -> Picture:
        return of_profile(profile.summarise(self.timings), self.asked["k"]) if self.timings else []

    def rows(self) -> list[dict[str, Any]]:
        return [{"part": part, **row} for part, rows in self.result().items() for row in rows]

    def result(self) -> dict[str, Any]:
        return dict(profile.summarise(self.timings))


def of_profile(summary: Mapping[str, list[dict[str, Any]]], k: int) -> Picture:
    curves = [
        (model, [[row["tokens"], row["cost"], None, row["cost"] * row["p90_ms"] / row["p50_ms"]] for row in rows])
        for model, rows in groupby(summary["passes"], key=lambda row: row["model"])
    ]
    plots = [
        lines(
            "What a pass over several tokens takes",
            "As a multiple of a pass over one token. A flat line is good: checking costs nothing. The whisker ends "
            "where the slowest tenth begins.",
            {"label": "tokens in the pass", "format": ",.0f"},
            {"label": "times a pass over one", "format": "times", "from": 0},
            curves,
            [(1, "if checking were free")],
        ),
        bars(
            "One token, one drafted token",
            "Milliseconds for a token that a model writes alone, and for a token that each drafter drafts.",
            {"label": "milliseconds", "format": "ms"},
            [
                *(
                    {"name": f"{row['model']}: a token", "value": row["p50_ms"], "high": row["p90_ms"]}
                    for row in summary["models"]
                ),
                *(
                    {"name": f"{row['drafter']}: drafted", "value": row["ms_per_drafted_token"]}
                    for row in summary["drafters"]
                    if row["drafts"]
                ),
            ],
            whisker="to the slowest tenth",
        ),
    ]
    times = [("mean_ms", "mean ms", "ms"), ("p50_ms", "median ms", "ms"), ("p90_ms", "p90 (ms)", "ms")]
    speed = [("tokens_per_second", "tokens/s", ".1f"), *times, ("ttft_ms", "first token, ms", "ms")]
    cost = [("ms_per_drafted_token", "ms per drafted token", "ms"), ("parallel", "all at once", "yes")]
    cost += [("draft_cost", "a drafted token, or all at once, in target passes (c)", ".1%")]
    tables = [
        table("A token", [("model", "model", ""), *speed], summary["models"]),
        table(
            "A drafted token",
            [("drafter", "drafter", ""), ("drafts", "drafts timed", ",.0f"), *cost],
            summary["drafters"],
        ),
        table(
            "A pass",
            [("model", "model", ""), ("tokens", "tokens", ",.0f"), *times, ("cost", "times one", "times")],
            summary["passes"],
        ),
    ]
    verdict, *words = profile.in_words(dict(summary), k) or [""]
    return [Section(verdict, words, plots, tables)]


def timing(timings: Sequence[profile.Timing]) -> str:
    """What a step of the profile is at: the first ones give nothing."""
    return "Timing passes and drafts" if timings else "Warming up"
