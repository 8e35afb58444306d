"""What things cost: the cost of a pass by its tokens, and of a token."""

from __future__ import annotations

from itertools import groupby

from ....studies.lab.profile import Profile
from ..plots import Picture, Section, bars, lines


def of_profile(study: Profile) -> Picture:
    if not study.timings:
        return []
    found = study.result()
    curves = [
        (model, [[row["tokens"], row["cost"], None, row["cost"] * row["p90_ms"] / row["p50_ms"]] for row in rows])
        for model, rows in groupby(found["passes"], key=lambda row: row["model"])
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
                    for row in found["models"]
                ),
                *(
                    {"name": f"{row['drafter']}: drafted", "value": row["ms_per_drafted_token"]}
                    for row in found["drafters"]
                    if row["drafts"]
                ),
            ],
            whisker="to the slowest tenth",
        ),
    ]
    verdict, *words = study.words() or [""]
    return [Section(verdict, words, plots, study.tables())]
