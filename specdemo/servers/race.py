"""The texts of servers as lanes, and a race between a server that speculates and one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..decoding.events import Event, text_of
from ..errors import BadInput
from ..racing.compare import OWN_DRAFTER
from ..racing.figures import LaneFigures
from ..racing.lanes import Lane, race_lanes
from ..racing.outcome import Outcome, report
from ..racing.request import PLAIN, SPECULATIVE, DraftedLane, Request
from ..racing.trace import Entry, request_of
from ..settings import REJECTION, Settings
from ..tokens import Token
from .dialects import Dialect
from .steps import Prompt, ServerReport, events_of

TURNS = "The two lanes took turns, so that neither slowed the other down: a server cannot be stopped between rounds."


Baseline = Dialect | tuple[dict[str, Any], list[Entry]] | None
"""Another server, the trace of one, or nothing."""


@dataclass(slots=True)
class ServerRace:
    """A race: what is asked of both servers, its lanes, their entries so far, and at the end what the servers said."""

    request: Request
    lanes: Sequence[str] = ()
    entries: list[Entry] = field(default_factory=list)
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, server: Dialect, baseline: Baseline) -> Iterator[Entry]:
        """One text by the baseline, then one by the server. If it is closed early, what there is stays."""
        request, lanes, answers = self.request, dict[str, Lane](), dict[str, tuple[Dialect, ServerReport]]()
        for name, side in ((PLAIN, baseline), (SPECULATIVE, server)):
            if isinstance(side, tuple):
                lanes[name], self.servers[name] = _recorded(request, server, *side)
            elif side is not None:
                lanes[name], answer = server_lane(name, side, request.prompt, request.raw, request.settings)
                answers[name] = side, answer
        self.lanes = tuple(lanes)
        try:
            with closing(race_lanes([*lanes.values()], isolated=True)) as entries:  # type: ignore[type-var]
                for entry in entries:
                    self.entries.append(entry)
                    yield entry
        finally:
            self.servers |= {name: facts_of(side, answer) for name, (side, answer) in answers.items()}

    @property
    def begun(self) -> list[str]:
        """The lanes that have an event."""
        return [lane for lane in self.lanes if any(entry.lane == lane for entry in self.entries)]


def race_servers(request: Request, server: Dialect, baseline: Baseline) -> ServerRace:
    """A whole race, see `ServerRace.run`."""
    race = ServerRace(request)
    for _ in race.run(server, baseline):
        pass
    return race


def _recorded(
    request: Request, server: Dialect, header: dict[str, Any], entries: Sequence[Entry]
) -> tuple[Lane, dict[str, Any]]:
    """The lane of a trace in which nothing was drafted, and the header's facts about its server."""
    lanes = {lane["name"]: lane.get("server") for lane in header["lanes"]}
    for name, facts in lanes.items():
        events = [entry for entry in entries if entry.lane == name]
        if isinstance(facts, dict) and events and LaneFigures.of(entry.event for entry in events).drafted == 0:
            break
    else:
        raise BadInput("The trace holds no lane of a server that drafted nothing, so it is no baseline.")
    before = request_of(header)
    if (before.prompt, before.raw, asdict(before.settings)) != (request.prompt, request.raw, asdict(request.settings)):
        raise BadInput("The trace was recorded with another prompt or other settings, so it is no baseline.")
    if facts.get("model") != server.facts["model"]:
        raise BadInput(f"The trace was recorded with another model than {server.facts['model']}, so it is no baseline.")
    return Lane(PLAIN, (entry.event for entry in events), ServerText()), facts


def outcome(race: ServerRace) -> Outcome:
    """What came of a race of servers; the report of each lane has the facts about its `server`.

    Unknown figures are None. Without a baseline there is no lane `plain`, and nothing to compare.
    """
    lanes = {name: DraftedLane(OWN_DRAFTER, 0) for name in race.lanes}  # the server's own drafter and K are unknown
    settings = replace(race.request.settings, rule=REJECTION)  # servers share no random numbers
    found = Outcome.of(settings, race.entries, lanes, alone=PLAIN if len(race.begun) == 2 else None)
    if PLAIN not in race.begun:
        sentence = "There is no baseline to compare with: give a second server, or a trace, with --baseline."
        found = replace(found, sentence=sentence)
    return replace(found, reports={lane: _report(race, lane, found) for lane in race.begun})


def _report(race: ServerRace, lane: str, outcome: Outcome) -> dict[str, Any]:
    text = "".join(text_of(entry.event) for entry in race.entries if entry.lane == lane)
    found = report(text, outcome.lanes[lane])
    figures, totals = found["stats"], race.servers[lane].get("totals") or {}
    if figures["drafted"] is None and totals.get("drafted"):  # the totals include rounds that cannot be separated
        figures |= {name: totals[name] for name in ("drafted", "accepted")}
        figures["draft_efficiency"] = totals["accepted"] / totals["drafted"]
    return {**found, "server": race.servers[lane]}


def trace_header(race: ServerRace) -> dict[str, Any]:
    """The header of a race's trace, which holds neither an address nor a key."""
    drafters = {PLAIN: "none", SPECULATIVE: OWN_DRAFTER}
    return {
        "lanes": [{"name": name, "drafter": drafters[name], "server": race.servers[name]} for name in race.begun],
        "preset": str(race.servers[SPECULATIVE]["model"]),
        "drafter": OWN_DRAFTER,
        "prompt": race.request.prompt,
        "raw": race.request.raw,
        "settings": asdict(race.request.settings),
    }


# Lanes ----------------------------------------------------------------------------------------------------------


class ServerText:
    """The `TextReader` of a server's lane. The server sent the text of the tokens with them."""

    def __init__(self) -> None:
        self.text = ""

    def read(self, event: Event) -> Event:
        self.text += text_of(event)
        return event

    def name(self, token_id: int) -> str:
        return f"token {token_id}"


def server_lane(
    name: str, dialect: Dialect, prompt: str, raw: bool, settings: Settings, alone: bool = True
) -> tuple[Lane, ServerReport]:
    """A lane that asks for one text when its first event is read, and what the server reports of that text.

    Args:
        alone: whether nobody else asks the server meanwhile, so that its counters count this text alone.
    """
    answer = ServerReport(alone)

    def events() -> Iterator[Event]:
        try:
            steps = dialect.steps(dialect.prompt_of(prompt, raw), settings, answer)
            with closing(steps):  # type: ignore[type-var]
                yield from events_of(steps, answer)
        except BadInput:
            raise
        except (ValueError, LookupError, OverflowError) as error:  # other programs may serve the same paths
            engine = dialect.facts["engine"]
            raise dialect.client.wrong(
                f"sends a stream that is not what {engine} sends, or too old a version does"
            ) from error

    return Lane(name, events(), ServerText()), answer


def gap(dialect: Dialect, prompt: Prompt, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
    """The gap of a server's logits of two tokens after a prompt and some tokens; None if it does not say."""
    if not all(isinstance(token.id, int) for token in (*before, *pair)):
        return None
    found = dialect.logprobs(prompt, [token.id for token in before if token.id is not None])
    known = [found[token.id] for token in pair if token.id in found]
    return abs(known[0] - known[1]) if len(known) == 2 else None


def facts_of(dialect: Dialect, answer: ServerReport) -> dict[str, Any]:
    """What is known of a server's lane besides its events, ready for JSON.

    `seconds` and `first_token_seconds` count from the request, by our clock. `server_seconds` are by the server's
    clock, if it says so. `network_seconds` are the difference: the network, and the server's queue. `totals` are the
    server's own and include what it drafted after the end of the text.
    """
    network = None
    if answer.seconds is not None and answer.server_seconds is not None:
        network = max(0.0, answer.seconds - answer.server_seconds)
    return {
        **dialect.facts,
        "clock": "server" if dialect.facts["engine"] == "llama.cpp" else "client",
        "first_token_seconds": answer.first_seconds,
        "seconds": answer.seconds,
        "server_seconds": answer.server_seconds,
        "network_seconds": network,
        "totals": {"rounds_with_draft": answer.rounds, "drafted": answer.drafted, "accepted": answer.accepted},
        "counters_agree": answer.counted,
        "notes": answer.notes,
    }
