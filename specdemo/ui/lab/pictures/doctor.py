"""Does it pay off? Plots of what the doctor found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....studies.lab.doctor import Doctor
from ..plots import SHARE, Figure, Picture, Section, bars, lines

if TYPE_CHECKING:
    from ....studies.diagnosis import Diagnosis

NO_BASELINE = "Tokens per round: a speed-up needs a baseline."
Point = list[float | None]


def of_doctor(study: Doctor) -> Picture:
    if study.found is None or not study.found.samples:
        return []
    verdict, *words = study.words()
    return [Section(verdict, words, figures(study.found), study.tables())]


def figures(found: Diagnosis) -> list[Figure]:
    whole = {"format": ",.0f"}
    return [
        lines(
            "What passes at each position",
            "Of the guesses that were tested there, and of all drafts: each guess is tested only if all before it "
            "passed.",
            {"label": "position in the draft", **whole},
            {"label": "share accepted", **SHARE},
            [
                ("of those tested", _points(found.positions, "position", "conditional")),
                ("of all drafts", _points(found.positions, "position", "unconditional")),
            ],
        ),
        _kinds(found),
        lines(
            "Several requests at once",
            "Tokens per second of all requests together, including their prompts and the waiting.",
            {"label": "requests at once", **whole},
            {"label": "tokens/s", "format": ".1f", "from": 0},
            [
                ("with speculation", _points(found.at_once, "at_once", "tokens_per_second")),
                ("the baseline", _points(found.at_once, "at_once", "alone_tokens_per_second")),
            ],
        ),
        lines(
            "Longer prompts",
            "The same questions, each after a long text of notes.",
            {"label": "tokens of the prompt", **whole},
            {"label": "times the baseline", "format": "times", "from": 0},
            [("speed-up", _points(found.contexts, "prompt_tokens", "speed_up"))],
            [(1, "the baseline")],
        ),
    ]


def _kinds(found: Diagnosis) -> Figure:
    """The speed-up, or without a baseline the tokens per round: both are 1 where speculation changes nothing."""
    known = found.speed_up is not None
    key = "speed_up" if known else "tokens_per_round"
    rows = [
        {"name": row["kind"], "value": row[key].mean, "high": row[key].high, "low": row[key].low}
        for row in found.kinds
        if row[key] is not None
    ]
    words = "After the prompt. An outlined bar is slower than the baseline." if known else NO_BASELINE
    x = {"label": "times the baseline", "format": "times"} if known else {"label": "tokens per round", "format": ".2f"}
    rules = [(1, "the baseline" if known else "without speculation")]
    return bars("By kind of prompt", words, x, rows, rules, whisker="95% confidence interval")


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[Point]:
    """[x, y, low, high] of the rows in which y is known, a figure or a `Spread`."""
    known = [(row[x], row[y]) for row in rows if row[y] is not None]
    return [
        [at, value, None, None] if isinstance(value, float) else [at, value.mean, value.low, value.high]
        for at, value in known
    ]
