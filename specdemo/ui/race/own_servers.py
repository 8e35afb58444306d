"""Servers that a person runs and names in the tab Check: their race, sent to the page like any other."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import BadInput
from ...racing.compare import OWN_DRAFTER
from ...racing.request import PLAIN, SPECULATIVE, Request
from ...racing.trace import Entry
from ...servers.address import MAX_ADDRESS, Address
from ...servers.dialects import connected
from ...servers.race import TURNS, ServerRace, outcome, trace_header
from ...settings import REJECTION
from ..engine import Engine
from .run import RaceRun


def read_servers(request: Request, values: Sequence[Any], seconds: float | None = None) -> ServerRun:
    """The race of the servers that the `values` of the fields name."""
    if request.others:
        raise BadInput('A race with a server has one prompt: choose "a race" under "Readers at once".')
    server, baseline = read_addresses(values)
    return ServerRun(request, server, baseline, seconds)


def read_addresses(values: Sequence[Any]) -> tuple[ServerAddress, ServerAddress | None]:
    """Where the server is that is named, and its baseline, if one is.

    Args:
        values: the address of the server, its key, and both of its baseline.
    """
    server, key, baseline, other = values
    if (found := _server_address(server, key)) is None:
        raise BadInput("Type the address of your server in the tab Check, such as http://127.0.0.1:8080.")
    return found, _server_address(baseline, other)


def _server_address(address: Any, key: Any) -> ServerAddress | None:
    for text in (address, key):
        if not isinstance(text, str) or len(text) > MAX_ADDRESS:  # not quoted: it may be a key
            raise BadInput(f"An address or a key must be a text of at most {MAX_ADDRESS} characters.")
    return ServerAddress(Address.read(address), key.strip()) if address.strip() else None


# Their race --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and the key that it asks for, if any."""

    address: Address
    key: str = field(default="", repr=False)


class ServerRun(RaceRun):
    """A `RaceRun` for which no preset is loaded. It has the engine to itself all the same: what that computes would
    disturb servers on this machine. Addresses and keys are forgotten when it ends.

    Args:
        baseline: the same server without speculation, None without one.
    """

    def __init__(
        self,
        request: Request,
        server: ServerAddress,
        baseline: ServerAddress | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(replace(request, drafter=OWN_DRAFTER, more=(), isolated=True), seconds)
        self.preset = None
        self._servers = [server] if baseline is None else [server, baseline]

    def _race(self, engine: Engine, loaded: Any) -> Generator[Entry]:
        # What the servers draft, and how, is theirs.
        settings = replace(self.request.settings, k=0, tree=False, rule=REJECTION)
        race, began = ServerRace(replace(self.request, settings=settings)), time.monotonic()
        self.header = {"environment": {}}
        servers, self._servers = self._servers, []
        with self._limited(), ExitStack() as opened:
            server, *others = [opened.enter_context(connected(one.address, one.key)) for one in servers]
            self.request = replace(self.request, preset=server.facts["model"], settings=settings)
            entries = opened.enter_context(closing(race.run(server, others[0] if others else None)))  # type: ignore[type-var]
            yield from self._kept(entries)
        if not self.entries:
            raise self._before_it_began()
        self.header = {**trace_header(race), "isolated": True, "environment": {}}
        if engine.disturbed_until > began:
            self.header["disturbed"] = True
        found, alone = outcome(race), len(race.lanes) == 1
        if alone:
            found = replace(
                found, sentence="There is nothing to compare with: give the server without speculation, too."
            )
        words = [found.badge["words"], *[TURNS] * (not alone)]  # and where the time went
        for lane, title in ((PLAIN, "The server without speculation"), (SPECULATIVE, "The server")):
            if facts := found.reports.get(lane, {}).get("server"):
                words += [f"{title}: {_times(facts)}"] if facts["first_token_seconds"] is not None else []
                words += facts["notes"]
        self._ended(replace(found, badge={**found.badge, "words": " ".join(dict.fromkeys(words))}))


def _times(server: dict[str, Any]) -> str:
    """Server time, network time and first token, as far as they are known."""
    words = f"first token after {server['first_token_seconds']:.2f} s"
    if server["server_seconds"] is None or server["network_seconds"] is None:
        return f"{words}."
    return (
        f"{words}; it took {server['server_seconds']:.2f} s, the network and waiting {server['network_seconds']:.2f} s."
    )
