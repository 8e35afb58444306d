"""Who writes the texts that a study measures: a server as it is, or a preset with a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..decoding.events import Event, Round, emitted_tokens
from ..models.loaded import Loaded
from ..racing.compare import tokens_of
from ..racing.figures import LaneFigures, counts_by_place
from ..racing.lanes import race_lanes, write_in_turn
from ..racing.race import start
from ..servers.address import Address
from ..servers.dialects import Dialect, connected
from ..servers.race import gap, server_lane
from ..servers.steps import ServerReport
from ..settings import Settings
from ..tokens import Token

Places = list[tuple[int | None, int]]
"""For each position of a draft how many tokens were tested there, None if that is unknown, and how many accepted."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text and its figures.

    `rounds` are all after the first token, `drafts` those with a draft. `drafts` and `places` are None where they are
    unknown.
    """

    tokens: Sequence[Token]
    stats: LaneFigures
    rounds: int
    drafts: int | None
    drafted: int | None
    places: Places | None
    notes: Sequence[str] = ()
    halves: Sequence[tuple[int, int]] = ()
    """How many tokens were tested and accepted in the rounds of the first half of the text, and of the second."""

    @property
    def milliseconds(self) -> dict[str, float | None]:
        """Of all rounds together, and of their parts; None if unknown."""
        stats, known = self.stats, self.rounds and self.stats.seconds > self.stats.prompt_seconds
        parts = {"draft_ms": stats.draft_seconds, "verify_ms": stats.verify_seconds, "other_ms": stats.other_seconds}
        all_parts = {"ms": stats.seconds - stats.prompt_seconds, **parts}
        return {name: 1000 * part if known and part is not None else None for name, part in all_parts.items()}


class Writer(Protocol):
    """`facts` are the engine, its version and the model."""

    facts: dict[str, Any]

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Text:
        """One text.

        Args:
            alone: whether nothing else is asked of it meanwhile.

        Raises:
            Stopped: whoever waits for it has stopped it.
        """

    def write_beside(self, other: Writer, prompt: str, settings: Settings) -> tuple[Text, Text]:
        """One text each by this and by another `Writer` of its kind, this one first where one follows the other."""
        return self.write(prompt, settings), other.write(prompt, settings)

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        """How far apart the logits of two tokens are after a text; None if that is unknown."""


class ServerWriter(Writer):
    """A `Writer`: a server, as it is."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.facts = dialect, dict(dialect.facts)

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Text:
        lane, report = server_lane("", self.dialect, prompt, False, settings, alone)
        events = [entry.event for entry in race_lanes([lane])]
        return _of_server(events, tokens_of(events), report)

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        return gap(self.dialect, self.dialect.prompt_of(prompt, False), before, pair)


def server_writer(opened: ExitStack, address: str, key: str | None = None) -> ServerWriter:
    return ServerWriter(opened.enter_context(connected(Address.read(address), key)))


def _of_server(events: Sequence[Event], tokens: Sequence[Token], report: ServerReport) -> Text:
    """Where the rounds of a stream cannot be separated, the server's totals are taken."""
    found = _of_events(events, tokens, report.notes)
    if found.drafted is not None:
        return found
    rounds = found.rounds if report.accepted is None else max(len(tokens) - 1 - report.accepted, 1)
    places = None
    if report.by_position and report.rounds:
        full = report.drafted == report.rounds * len(report.by_position)  # then one is tested if those before it passed
        reached = [report.rounds, *report.by_position]
        places = [(reached[place] if full else None, count) for place, count in enumerate(report.by_position)]
    return Text(tokens, found.stats, rounds, report.rounds, report.drafted, places, report.notes)


def _of_events(events: Sequence[Event], tokens: Sequence[Token] | None = None, notes: Sequence[str] = ()) -> Text:
    """Where each round tells what was drafted. `tokens` are by default those of the events."""
    stats = LaneFigures.of(events)
    tokens = [token for event in events for token in emitted_tokens(event)] if tokens is None else tokens
    places: Places = [*counts_by_place(events)]
    halves = _halves(events, len(tokens))
    return Text(tokens, stats, stats.rounds, stats.drafts, stats.drafted, places, notes, halves)


def _halves(events: Sequence[Event], tokens: int) -> list[tuple[int, int]]:
    """See `Text.halves`; a round belongs to where it begins."""
    halves: tuple[list[Event], list[Event]] = [], []
    at = 1
    for event in events:
        if isinstance(event, Round):
            halves[at >= tokens / 2].append(event)
            at += len(event.emitted)
    places = map(counts_by_place, halves)
    return [(sum(tested for tested, _ in each), sum(accepted for _, accepted in each)) for each in places]


class PresetWriter(Writer):
    """A `Writer`: the target of a loaded preset with a drafter, `none` for the target alone."""

    def __init__(self, loaded: Loaded, drafter: str, k: int | str) -> None:
        self.loaded, self.drafter, self.k = loaded, drafter, k
        named = {"engine": "specdemo", "version": loaded.engine, "model": loaded.preset.name}
        self.facts = {**named, "drafter": drafter, "k": k}

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Text:
        (events,) = write_in_turn({self: self._run(prompt, settings)}).values()
        return _of_events(events)

    def write_beside(self, other: Writer, prompt: str, settings: Settings) -> tuple[Text, Text]:
        """A round each in turn, or a busy moment of the machine would slow down only one of them."""
        assert isinstance(other, PresetWriter)
        mine, theirs = write_in_turn({writer: writer._run(prompt, settings) for writer in (self, other)}).values()
        return _of_events(mine), _of_events(theirs)

    def _run(self, prompt: str, settings: Settings) -> Iterator[Event]:
        return start(self.loaded, self.drafter, self.loaded.encode(prompt), replace(settings, k=self.k))

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        return None  # its tokens have margins
