"""Where guesses pass: by category of prompt and by position in the draft. Counted from events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decoding.acceptance import branches
from ..decoding.events import Event, Round
from ..errors import BadInput
from ..racing.trace import SPECULATIVE, read_trace, trace_lines
from ..settings import COMMAND, Field
from ..system.imports import LazyModule
from ..tokens import DraftOutcome
from .plots import OVER_TEXTS, passing
from .statistics import pooled_rate, rates_differ
from .study import DRAFTER, NEW_TOKENS, RULE, SEED, Study, k_field, prompt_fields, settings_in, temperature_field
from .tables import Rows, grouped

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import lanes, race
else:
    lanes, race = LazyModule("specdemo.racing.lanes"), LazyModule("specdemo.racing.race")

CATEGORY, POSITION = "category", "position in the draft"
LATER = "A later token of a draft builds on the earlier ones."
SEVERAL_TRACES = "Count in this trace, with no model; may be given several times."
COUNTED = ("drafted", "tested", "accepted")
ENOUGH = 30  # tested guesses that a group needs before a sentence is made of it


class Domains(Study):
    """A drafter is good at some texts and bad at others. This view writes texts of eight categories and counts which
    drafted tokens pass, by category and by position in the draft.
    """

    name = "domains"
    title = "Where drafts pass"
    summary = "Count which drafted tokens pass, by category of prompt and by position in the draft."
    fields = (
        DRAFTER,
        k_field(4),
        temperature_field(0.0),
        SEED,
        RULE,
        *prompt_fields("domains", 2, 3),
        NEW_TOKENS,
        Field("traces", "Traces", "traces", help=SEVERAL_TRACES, shown_in=COMMAND),
    )
    heading = "Counts"
    columns = (
        ("by", "by", ""),
        ("name", "group", ""),
        *((name, name, ",.0f") for name in COUNTED),
        ("acceptance_rate", "acceptance rate", ".0%"),
        ("low", "from", ".0%"),
        ("high", "to", ".0%"),
        ("draft_efficiency", "draft efficiency", ".0%"),
    )
    concludes = False
    plots = (
        (
            passing("By category", OVER_TEXTS, at="name", part=CATEGORY),
            passing("By position in the draft", f"{LATER} {OVER_TEXTS}", at="name", part=POSITION),
        ),
    )

    @classmethod
    def needs_models(cls, asked: Mapping[str, Any]) -> bool:
        return not asked.get("traces")

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.counts = Counts()
        self.texts = self.readable(self.prompts("domains")) if self.needs_models(asked) else []
        self.steps = len(self.texts)

    def run(self) -> Iterator[str]:
        for trace in self.asked.get("traces") or ():
            drafted = [entry.event for entry in read_trace(trace_lines(trace))[1] if entry.lane == SPECULATIVE]
            self.counts.add(Path(trace.name.removesuffix(".gz")).stem, drafted)
            yield "Reading traces"
        if not self.texts:
            return
        loaded, drafter, settings = self.loaded, self.asked["drafter"], settings_in(self.asked)
        race.check_drafter(loaded, drafter)
        prompt_ids = [loaded.encode(prompt.prompt) for prompt in self.texts]
        for ids in prompt_ids:
            race.check_fits(loaded, len(ids), settings, drafter)
        for prompt, ids in zip(self.texts, prompt_ids, strict=True):
            with closing(race.start(loaded, drafter, ids, settings)) as events:  # type: ignore[type-var]
                self.counts.add(prompt.category, list(events))
            self.done += 1
            yield "Writing texts"

    def words(self) -> list[str]:
        return self.counts.in_words() or ["Too few drafted tokens were tested to say where they pass."]

    def drawn(self) -> Mapping[str, Rows]:
        return grouped(self.rows(), lambda row: row["by"])

    def rows(self) -> list[dict[str, Any]]:
        return self.counts.rows()


@dataclass(slots=True)
class Counts:
    """Drafted tokens by category and position, over any number of texts."""

    groups: dict[tuple[str, str], dict[str, Counter[str]]] = field(default_factory=dict)
    """How many are `COUNTED` in each text, by question and group."""
    texts: int = 0

    def add(self, category: str, events: Iterable[Event]) -> None:
        """Count one text."""
        name = str(self.texts)
        self.texts += 1
        for event in events:
            if isinstance(event, Round):
                if branches(event.drafted):
                    raise BadInput("Drafts are counted by position, and those of this trace are trees.")
                for position, token in enumerate(event.drafted, 1):
                    for group in ((CATEGORY, category), (POSITION, str(position))):
                        count = self.groups.setdefault(group, {}).setdefault(name, Counter())
                        count["drafted"] += 1
                        count["tested"] += token.outcome is not DraftOutcome.UNTESTED
                        count["accepted"] += token.outcome is DraftOutcome.ACCEPTED

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group, in the order of the two questions.

        `low` and `high` bound the acceptance rate, with texts as units: guesses of one text pass or fail together. None
        of a single text.
        """
        rows = []
        for by in (CATEGORY, POSITION):
            names = [name for question, name in self.groups if question == by]
            for name in sorted(names, key=lambda name: int(name) if by == POSITION else 0):
                counts = self.groups[by, name].values()
                drafted, tested, accepted = (sum(count[of] for count in counts) for of in COUNTED)
                rate = pooled_rate([(count["accepted"], count["tested"]) for count in counts], 1.0)
                row = {"by": by, "name": name, "drafted": drafted, "tested": tested, "accepted": accepted}
                row |= {"draft_efficiency": accepted / drafted, "acceptance_rate": rate and rate.mean}
                rows.append(row | {"low": rate and rate.low, "high": rate and rate.high})
        return rows

    def in_words(self) -> list[str]:
        """The largest difference of each kind in a sentence, where enough was tested."""
        lines = []
        for by in (CATEGORY, POSITION):
            rows = [row for row in self.rows() if row["by"] == by and row["tested"] >= ENOUGH]
            if len(rows) < 2:
                continue
            worst, best = (pick(rows, key=lambda row: row["acceptance_rate"]) for pick in (min, max))
            differ = rates_differ(self._parts(by, best["name"]), self._parts(by, worst["name"]), len(rows))
            caution = "" if differ else " (with so few texts and so many groups this may be chance)"
            lines.append(
                f"By {by}: {best['name']} passes most often, {best['acceptance_rate']:.0%} of the tested guesses, "
                f"{worst['name']} least, {worst['acceptance_rate']:.0%}{caution}."
            )
        return lines

    def _parts(self, by: str, name: str) -> dict[str, tuple[float, float]]:
        return {text: (count["accepted"], count["tested"]) for text, count in self.groups[by, name].items()}
