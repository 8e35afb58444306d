"""Where drafts pass: by category of prompt, by kind of token, by position in the draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...racing.trace import SPECULATIVE, read_trace, trace_lines
from ...system.imports import Later
from ...types import COMMAND, Field
from ..tables import Table, table
from .study import DRAFTER, NEW_TOKENS, RULE, SEED, Study, k_field, prompt_fields, settings_in, temperature_field

if TYPE_CHECKING:
    from ...models.loaded import Loaded
    from .. import domains
else:
    domains = Later("specdemo.studies.domains")


class Domains(Study):
    """A drafter is good at some texts and bad at others. This view writes texts of eight categories and counts which
    drafted tokens pass: by category, by kind of token, and by position in the draft.
    """

    name = "domains"
    title = "Where drafts pass"
    summary = "Count which drafted tokens pass: by category of prompt, by kind of token, by position in the draft."
    fields = (
        DRAFTER,
        k_field(4),
        temperature_field(0.0),
        SEED,
        RULE,
        *prompt_fields("domains", "Prompts per category", 2, 1, 3),
        NEW_TOKENS,
        Field(
            *("traces", "Traces", "traces"),
            help="Count in this trace, with no model; may be given several times.",
            only=COMMAND,
        ),
    )

    @classmethod
    def needs_models(cls, asked: Mapping[str, Any]) -> bool:
        return not asked.get("traces")

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.counts = domains.Counts()
        self.texts = self.readable(self.prompts("domains")) if self.needs_models(asked) else []
        self.steps = len(self.texts)

    def run(self) -> Iterator[str]:
        for trace in self.asked.get("traces") or ():
            drafted = [entry for entry in read_trace(trace_lines(trace))[1] if entry.lane == SPECULATIVE]
            self.counts.add(Path(trace.name.removesuffix(".gz")).stem, drafted)
            yield "Reading traces"
        if self.texts:
            texts = domains.domains(self.loaded, self.asked["drafter"], self.texts, settings_in(self.asked))
            for prompt, entries in texts:
                self.counts.add(prompt.category, entries)
                self.done += 1
                yield "Writing texts"

    def words(self) -> list[str]:
        return self.counts.in_words()

    def tables(self) -> list[Table]:
        columns = [("by", "by", ""), ("name", "group", "")]
        columns += [(name, name, ",.0f") for name in ("drafted", "tested", "accepted")]
        columns += [("acceptance_rate", "acceptance rate", ".0%"), ("low", "from", ".0%"), ("high", "to", ".0%")]
        columns += [("draft_efficiency", "draft efficiency", ".0%")]
        return [table("Counts", columns, self.rows())]

    def rows(self) -> list[dict[str, Any]]:
        return self.counts.rows()
