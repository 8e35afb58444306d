"""Where drafts pass: bars for each group."""

from __future__ import annotations

from ....studies.lab.domains import Domains, domains
from ..plots import SHARE, Picture, Section, bars


def of_domains(study: Domains) -> Picture:
    rows = study.rows()
    titles = {
        domains.CATEGORY: ("By category", "Of the tested tokens, how many passed."),
        domains.KIND: ("By kind of token", "What the drafted token itself was."),
        domains.POSITION: (
            "By position in the draft",
            "A later token of a draft builds on the earlier ones. Only tested tokens count.",
        ),
    }
    plots, tested = [], {"label": "share of the tested tokens", **SHARE}
    for by, (title, words) in titles.items():
        counted = [
            {"name": row["name"], "value": row["acceptance_rate"], "low": row["low"], "high": row["high"]}
            | {"words": f"{row['accepted']} of {row['tested']} tested tokens passed"}
            for row in rows
            if row["by"] == by and row["tested"]
        ]
        plots.append(bars(title, words, tested, counted, whisker="95% confidence interval over texts"))
    told = study.words() or ["There are too few drafted tokens so far."]
    return [Section("", [*told, *[study.left_out] * bool(study.left_out)], plots, study.tables())]
