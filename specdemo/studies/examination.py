"""Does it pay off? The doctor, on the servers whose addresses were given, else on the preset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..servers.address import MAX_ADDRESS, Address
from ..system.imports import Later
from ..types import BadInput, Field
from .study import DRAFTER, NEW_TOKENS, Study, k_field
from .tables import Table, table

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..servers import dialects
    from . import diagnosis, doctor, report
else:
    diagnosis = Later("specdemo.studies.diagnosis")
    doctor = Later("specdemo.studies.doctor")
    report = Later("specdemo.studies.report")
    dialects = Later("specdemo.servers.dialects")

SERVERS, PRESET, BOUNDS = "Your servers", "Or the preset", "How much"
BASELINE = "Without it, no speed-up can be computed."


def _of_server(name: str, label: str, kind: str, info: str = "") -> Field:
    return Field(name, label, kind, "", 0, MAX_ADDRESS, info=info, group=SERVERS)


class Doctor(Study):
    """Speculation is on, but it is not faster. Why? This view examines a server that you run, or the preset: what is
    accepted at each position, what a round costs, and the speed-up over eight kinds of prompts, with many requests at
    once and with longer prompts. It says which setting to change and whether the text stays the same.
    """

    name = "doctor"
    title = "Does it pay off?"
    fields = (
        _of_server("server", "Address of the server", "address", "Such as http://127.0.0.1:8080"),
        _of_server("server_key", "Its API key", "key"),
        _of_server("baseline", "The same server without speculation", "address", BASELINE),
        _of_server("baseline_key", "Its API key", "key"),
        replace(DRAFTER, group=PRESET),
        k_field(4, PRESET),
        Field("prompts", "Prompts per kind", "whole", 1, 1, 3, group=BOUNDS),
        replace(NEW_TOKENS, group=BOUNDS),
        Field("at_once", "Requests at once, at most", "whole", 4, 0, 16, info="0 leaves them out.", group=BOUNDS),
        Field("context", "Longest prompt, tokens", "whole", 1024, 0, 4096, info="0 leaves it out.", group=BOUNDS),
    )
    has_page = True

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.doctor: doctor.Doctor | None = None
        self._found: diagnosis.Diagnosis | None = None
        self.plan = doctor.DoctorPlan(
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
                self._found = None  # more is known by now

    def _sides(self, opened: ExitStack) -> tuple[doctor.Writer, doctor.Writer | None]:
        names = ("server", "server_key"), ("baseline", "baseline_key")
        pairs = [(self.asked.get(address), self.asked.get(key)) for address, key in names]
        server, baseline = (
            doctor.ServerWriter(opened.enter_context(dialects.connected(Address.read(address), key)))
            if address
            else None
            for address, key in pairs
        )
        if server is not None:
            return server, baseline
        if baseline is not None:
            raise BadInput("Give the address of the server, too: a preset is its own baseline.")
        return doctor.PresetWriter(self.loaded, *self.given("drafter k")), doctor.PresetWriter(self.loaded, "none", 0)

    @property
    def found(self) -> diagnosis.Diagnosis | None:
        """What there is so far."""
        if self._found is None and self.doctor is not None:
            self._found = diagnosis.Diagnosis(self.doctor)
        return self._found

    def words(self) -> list[str]:
        found = self.found
        return [found.verdict, *found.advice(), *report.facts(found), *found.left_out] if found else []

    def tables(self) -> list[Table]:
        tables = report.TABLES.items() if self.found else ()
        return [table(title, columns, getattr(self.found, name)) for name, (title, _, columns) in tables]

    def rows(self) -> list[dict[str, Any]]:
        return self.found.rows() if self.found else []

    def result(self) -> dict[str, Any]:
        return self.found.as_dict() if self.found else {}

    def page(self) -> str:
        return report.html_report(self.found) if self.found else ""
