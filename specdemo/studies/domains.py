"""Where guesses are accepted: by category of prompt and by position in the draft. Counted from events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..decoding.acceptance import branches
from ..decoding.events import Event, Round
from ..errors import BadInput
from ..racing.trace import SPECULATIVE, read_trace, trace_lines
from ..settings import COMMAND, Field
from ..tokens import DraftOutcome
from .grid import Grid
from .plots import OVER_TEXTS, passing
from .statistics import rates_differ
from .study import DRAFTER, NEW_TOKENS, RULE, SEED, form_and_command, k_field, prompt_fields, temperature_field
from .summaries import ACCEPTANCE_RATE, Figures, Row, Runs, parts, share, summarise, total
from .tables import Rows, group_by

if TYPE_CHECKING:
    from ..models.loaded import Loaded

CATEGORY, POSITION = "category", "position in the draft"
LATER = "A later token of a draft builds on the earlier ones."
SEVERAL_TRACES = "Count in this trace, with no model; may be given several times."
COUNTED = ("drafted", "tested", "accepted")
ENOUGH = 30  # tested guesses that a group needs before a sentence is made of it


class Domains(Grid):
    """A drafter is good at some texts and bad at others. This view writes texts of eight categories and counts which
    guesses pass, by category and by position in the draft.
    """

    name = "domains"
    title = "Where guesses are accepted"
    summary = "Count which guesses are accepted, by category of prompt and by position in the draft."
    fields = (
        DRAFTER,
        k_field(4),
        temperature_field(0.0),
        SEED,
        RULE,
        *prompt_fields("domains", 2, 3),
        *form_and_command(NEW_TOKENS, 48, 64),
        Field("traces", "Traces", "text", help=SEVERAL_TRACES, shown_in=COMMAND),
    )
    figures: ClassVar[Figures] = {
        **{name: total(name) for name in COUNTED},
        "draft_efficiency": share("accepted", "drafted"),
        "acceptance_rate": ACCEPTANCE_RATE,
    }
    timed = False
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

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        if self.needs_models(chosen):
            self.plan(self.texts_of(self.readable(self.prompts("domains"))))

    def run(self) -> Iterator[str]:
        for trace in self.chosen.get("traces") or ():
            drafted = [entry.event for entry in read_trace(trace_lines(trace))[1] if entry.lane == SPECULATIVE]
            names = {"prompt_id": str(trace), CATEGORY: Path(trace.name.removesuffix(".gz")).stem}
            self.runs += ({**names, **count} for count in counts_of(drafted))
            yield "Reading traces"
        yield from super().run()

    def write(self, names: Row) -> Iterator[Row]:
        with closing(self.events(names)) as events:  # type: ignore[type-var]
            yield from counts_of(events)

    def words(self) -> list[str]:
        few = ["Too few guesses were tested to say where they pass."] * bool(self.runs)
        return in_words(self.runs) or few

    def drawn(self) -> Mapping[str, Rows]:
        return group_by(self.rows(), lambda row: row["by"])

    def rows(self) -> list[Row]:
        return [row for by in (CATEGORY, POSITION) for row in rows_of(self.runs, by)]


def counts_of(events: Iterable[Event]) -> Iterator[Row]:
    """The guesses of a text, a row for each position in its drafts."""
    drafts = [event.drafted for event in events if isinstance(event, Round)]
    if any(map(branches, drafts)):
        raise BadInput("Drafts are counted by position, and those of this trace are trees.")
    for position, tokens in enumerate(zip_longest(*drafts), start=1):
        outcomes = [token.outcome for token in tokens if token]
        tested = len(outcomes) - outcomes.count(DraftOutcome.UNTESTED)
        figures = dict(zip(COUNTED, (len(outcomes), tested, outcomes.count(DraftOutcome.ACCEPTED)), strict=True))
        yield {POSITION: position, **figures}


def rows_of(runs: Runs, by: str) -> list[Row]:
    """A row for each group. `low` and `high` bound the acceptance rate, with texts as units: guesses of one text pass
    or fail together. None of a single text.
    """
    rows = []
    for row in summarise(runs, (by,), Domains.figures):
        names, found = {"by": by, "name": str(row.pop(by))}, row["acceptance_rate"]
        ends = {"acceptance_rate": found.mean, "low": found.low, "high": found.high} if found else {}
        rows.append({**names, **row, "low": None, "high": None, **ends})
    return rows


def in_words(runs: Runs) -> list[str]:
    """The largest difference of each kind in a sentence, where enough was tested."""
    lines = []
    for by in (CATEGORY, POSITION):
        rows = [row for row in rows_of(runs, by) if row["tested"] >= ENOUGH]
        if len(rows) < 2:
            continue
        worst, best = (pick(rows, key=lambda row: row["acceptance_rate"]) for pick in (min, max))
        texts = group_by(runs, lambda run, by=by: str(run[by]))  # type: ignore[misc]
        high, low = (parts(texts[row["name"]], "accepted", "tested", "prompt_id") for row in (best, worst))
        differ = rates_differ(high, low, len(rows))
        caution = "" if differ else " (with so few texts and so many groups this may be chance)"
        lines.append(
            f"By {by}: {best['name']} passes most often, {best['acceptance_rate']:.0%} of the tested guesses, "
            f"{worst['name']} least, {worst['acceptance_rate']:.0%}{caution}."
        )
    return lines
