"""Does it pay off? The doctor, on the servers whose addresses were given, else on the preset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....servers.address import Address
from ....system.imports import Later
from ....types import BadInput
from ..form import NEW_TOKENS, Field, k_field
from ..plots import SHARE, Figure, Picture, Section, bars, lines, table
from ..study import Study

if TYPE_CHECKING:
    from ....models.loaded import Loaded
    from ....servers import dialects
    from ....studies import diagnosis, doctor, report, writers
    from ....studies.writers import Writer
else:
    diagnosis = Later("specdemo.studies.diagnosis")
    doctor = Later("specdemo.studies.doctor")
    report = Later("specdemo.studies.report")
    writers = Later("specdemo.studies.writers")
    dialects = Later("specdemo.servers.dialects")

SERVERS, PRESET, BOUNDS = "Your servers", "Or the preset", "How much"
BASELINE = "Without it, no speed-up can be computed."
NO_BASELINE = "Tokens per round: a speed-up needs a baseline."
Point = list[float | None]


class Doctor(Study):
    """Speculation is on, but it is not faster. Why? This view examines a server that you run, or the preset: what is
    accepted at each position, what a round costs, and the speed-up over eight kinds of prompts, with many requests at
    once and with longer prompts. It says which setting to change and whether the text stays the same.
    """

    name = "doctor"
    title = "Does it pay off?"
    fields = (
        Field("server", "Address of the server", "address", "", info="Such as http://127.0.0.1:8080", group=SERVERS),
        Field("server_key", "Its API key", "key", "", group=SERVERS),
        Field("baseline", "The same server without speculation", "address", "", info=BASELINE, group=SERVERS),
        Field("baseline_key", "Its API key", "key", "", group=SERVERS),
        Field("drafter", "Drafter", "drafter", group=PRESET),
        k_field(4, PRESET),
        Field("prompts", "Prompts per kind", "whole", 1, 1, 3, group=BOUNDS),
        replace(NEW_TOKENS, group=BOUNDS),
        Field("at_once", "Requests at once, at most", "whole", 4, 0, 16, info="0 leaves them out.", group=BOUNDS),
        Field("context", "Longest prompt, tokens", "whole", 1024, 0, 4096, info="0 leaves it out.", group=BOUNDS),
    )
    sections = ((4, 5),)
    has_page = True

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.doctor: doctor.Doctor | None = None
        self.plan = doctor.Plan(
            asked["prompts"],
            doctor.settings_of(0.0, asked["max_new_tokens"], bool(asked.get("server"))),
            [count for count in doctor.AT_ONCE if count <= asked["at_once"]],
            [tokens for tokens in doctor.CONTEXTS if tokens <= asked["context"]],
        )

    def run(self) -> Iterator[str]:
        with ExitStack() as opened:
            examined = self.doctor = doctor.Doctor(*self._sides(opened), self.plan)
            self.steps = examined.steps
            for words in examined.run():
                self.done = examined.done
                yield words

    def _sides(self, opened: ExitStack) -> tuple[Writer, Writer | None]:
        names = ("server", "server_key"), ("baseline", "baseline_key")
        pairs = [(self.asked.get(address), self.asked.get(key)) for address, key in names]
        server, baseline = (
            writers.ServerWriter(opened.enter_context(dialects.connected(Address.read(address), key)))
            if address
            else None
            for address, key in pairs
        )
        if server is not None:
            return server, baseline
        if baseline is not None:
            raise BadInput("Give the address of the server, too: a preset is its own baseline.")
        return writers.PresetWriter(self.loaded, *self.given("drafter k")), writers.PresetWriter(self.loaded, "none", 0)

    def picture(self) -> Picture:
        return of_diagnosis(diagnosis.Diagnosis.of(self.doctor)) if self.doctor and self.doctor.samples else []

    def rows(self) -> list[dict[str, Any]]:
        return diagnosis.Diagnosis.of(self.doctor).rows() if self.doctor else []

    def result(self) -> dict[str, Any]:
        return diagnosis.Diagnosis.of(self.doctor).as_dict() if self.doctor else {}

    def page(self) -> str:
        return report.html_report(diagnosis.Diagnosis.of(self.doctor)) if self.doctor else ""


def of_diagnosis(found: diagnosis.Diagnosis) -> Picture:
    """The words and tables of the report, and plots."""
    whole = {"format": ",.0f"}
    plots = [
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
    tables = [table(title, columns, getattr(found, name)) for name, (title, _, columns) in report.TABLES.items()]
    return [Section(found.verdict, [*found.advice(), *report.facts(found), *found.left_out], plots, tables)]


def _kinds(found: diagnosis.Diagnosis) -> Figure:
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
