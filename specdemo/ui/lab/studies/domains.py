"""Where drafts pass: by category of prompt, by kind of token, by position in the draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....studies.prompts import readable
from ....system.imports import Later
from ....types import Settings
from ..form import DRAFTER, NEW_TOKENS, Field, k_field, temperature_field
from ..plots import SHARE, Picture, Section, bars, table
from ..study import Study, some_of_each

if TYPE_CHECKING:
    from ....models.loaded import Loaded
    from ....studies import domains
else:
    domains = Later("specdemo.studies.domains")


class Domains(Study):
    """A drafter is good at some texts and bad at others. This view writes texts of eight categories and counts which
    drafted tokens pass: by category, by kind of token, and by position in the draft.
    """

    name = "domains"
    title = "Where drafts pass"
    fields = (
        DRAFTER,
        k_field(4),
        temperature_field(0.0),
        Field("prompts", "Prompts per category", "whole", 2, 1, 3),
        NEW_TOKENS,
    )
    sections = ((3, 1),)

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.counts = domains.Counts()
        self.prompts, self.left_out = readable(loaded, some_of_each("domains", asked["prompts"]))
        self.steps = len(self.prompts)

    def run(self) -> Iterator[str]:
        k, temperature, tokens = self.given("k temperature max_new_tokens")
        settings = Settings(k=k, temperature=temperature, max_new_tokens=tokens)
        for prompt, entries in domains.domains(self.loaded, self.asked["drafter"], self.prompts, settings):
            self.counts.add(prompt.category, entries)
            self.done += 1
            yield "Writing texts"

    def picture(self) -> Picture:
        return of_domains(self.counts, [prompt.id for prompt in self.left_out])

    def rows(self) -> list[dict[str, Any]]:
        return self.counts.rows()


def of_domains(counts: domains.Counts, left_out: Sequence[str] = ()) -> Picture:
    """`left_out` names the prompts that the model cannot read."""
    rows = counts.rows()
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
    columns = [("by", "by", ""), ("name", "group", "")]
    columns += [(name, name, ",.0f") for name in ("drafted", "tested", "accepted")]
    columns += [("acceptance_rate", "acceptance rate", ".0%"), ("draft_efficiency", "draft efficiency", ".0%")]
    told = counts.in_words() or ["There are too few drafted tokens so far."]
    told += [f"Left out, since this model cannot read all their characters: {', '.join(left_out)}."] if left_out else []
    return [Section("", told, plots, [table("Counts", columns, rows)])]
