"""A race of servers that run elsewhere, told to the page like any other race."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

from ...racing.asked import PLAIN, SPECULATIVE, Request
from ...racing.compare import OWN_DRAFTER
from ...racing.trace import Entry
from ...servers.address import Address
from ...servers.dialects import connected
from ...servers.race import TURNS, ServerRace, outcome, trace_header
from ...types import REJECTION
from ..engine import Engine
from .run import Run


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is, and the key that it asks for, if any."""

    address: Address
    key: str = field(default="", repr=False)


class ServerRun(Run):
    """A `Run` for which no preset is loaded. It has the engine to itself all the same: what that computes would disturb
    servers on this machine. Addresses and keys are forgotten when it ends.

    Args:
        baseline: the same server without speculation, None without one.
    """

    def __init__(
        self, request: Request, server: Place, baseline: Place | None = None, seconds: float | None = None
    ) -> None:
        super().__init__(replace(request, drafter=OWN_DRAFTER, more=(), isolated=True), seconds)
        self.preset = None
        self._places = [server] if baseline is None else [server, baseline]

    def _race(self, engine: Engine, loaded: Any) -> Generator[Entry]:
        # What the servers draft, and how, is theirs.
        settings = replace(self.request.settings, k=0, tree=False, rule=REJECTION)
        race, disturbed = ServerRace(replace(self.request, settings=settings)), engine.beside.watch()
        self.header = {"environment": {}}
        places, self._places = self._places, []
        with self._limited(), ExitStack() as opened:
            server, *others = [opened.enter_context(connected(place.address, place.key)) for place in places]
            self.request = replace(self.request, preset=server.facts["model"], settings=settings)
            entries = opened.enter_context(closing(race.run(server, others[0] if others else None)))  # type: ignore[type-var]
            yield from self._kept(entries)
        if not self.entries:
            raise self._before_it_began()
        self.header = {**trace_header(race), "isolated": True, "environment": {}}
        if disturbed():
            self.header["disturbed"] = True
        found, alone = outcome(race), len(race.lanes) == 1
        if alone:
            found = replace(
                found, sentence="There is no baseline to compare with: give the server without speculation, too."
            )
        words = [found.badge["words"], *[TURNS] * (not alone)]  # and where the time went
        for lane, title in ((PLAIN, "The baseline"), (SPECULATIVE, "The server")):
            if told := found.reports.get(lane, {}).get("server"):
                words += [f"{title}: {_times(told)}"] if told["first_token_seconds"] is not None else []
                words += told["notes"]
        self._ended(replace(found, badge={**found.badge, "words": " ".join(dict.fromkeys(words))}))


def _times(server: dict[str, Any]) -> str:
    """Server time, network time and first token, as far as they are known."""
    words = f"first token after {server['first_token_seconds']:.2f} s"
    if server["server_seconds"] is None or server["network_seconds"] is None:
        return f"{words}."
    return (
        f"{words}; it took {server['server_seconds']:.2f} s, the network and waiting {server['network_seconds']:.2f} s."
    )
