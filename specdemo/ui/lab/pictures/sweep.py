"""Which K, which temperature: a curve for each drafter on each kind of prompt."""

from __future__ import annotations

from typing import Any

from ....studies.lab.sweep import Sweep
from ..plots import ALONE, DRAFT_LENGTH, SHARE, TIMES, Figure, Picture, Section, lines


def of_sweep(study: Sweep) -> Picture:
    if not study.runs:
        return []
    rows, plan = study.rows(), study.plan
    axis, values = ("temperature", plan.temperatures) if study.over_temperatures else ("k", plan.ks)
    places = {value: place for place, value in enumerate(values)}
    drafters = list(plan.drafters)
    categories = list(dict.fromkeys(row["category"] for row in rows))

    def curve(figure: str, category: str, drafter: str) -> list[list[float | None]]:
        """The K sweep of a drafter begins with K = 0, the target alone."""
        names = {drafter, "none"} if axis == "k" else {drafter}
        mine = [row for row in rows if row["category"] == category and row["drafter"] in names]
        points = [(places[row[axis]], row[figure]) for row in mine if row[figure] is not None]
        return [[at, spread.mean, spread.low, spread.high] for at, spread in sorted(points, key=lambda point: point[0])]

    def plot(title: str, words: str, figure: str, y: dict[str, Any], alone: bool = False, rules: Any = ()) -> Figure:
        shown = [*drafters, "none"] if alone and axis == "temperature" else drafters
        series = [
            (f"{drafter if drafter != 'none' else 'target alone'}, {category}", curve(figure, category, drafter))
            for category in categories
            for drafter in shown
        ]
        x = {
            "label": DRAFT_LENGTH if axis == "k" else "temperature",
            "ticks": [f"{at:g}" for at in places],
        }
        return lines(title, words, x, {"format": ".1f", "from": 0, **y}, series, rules)

    share = {"label": "share of drafted tokens", **SHARE}
    plots = [
        plot(
            "Speed-up",
            "Compared with the target alone on the same prompt, after the prompt: geometric mean. Whiskers: 95% "
            "confidence interval over prompts.",
            "speedup",
            TIMES,
            rules=ALONE,
        ),
        plot("Tokens per second", "The speed itself.", "tokens_per_second", {"label": "tokens/s"}, alone=True),
        plot("Acceptance rate", "Accepted / tested.", "acceptance_rate", share),
        plot("Draft efficiency", "Accepted / drafted.", "draft_efficiency", share),
    ]
    return [Section("", study.words(), plots, study.tables())]
