"""One race, from the request to its trace."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from sys import getsizeof
from typing import Any

from ...decoding.events import Round, emitted_tokens
from ...racing.asked import PLAIN, Request, fitted
from ...racing.figures import weight_bytes
from ...racing.trace import Entry, write_trace
from ..engine import Engine, Said, has_every_core
from ..jobs import RACE, Job
from .exactness import exactness, is_whole
from .messages import Lanes
from .request import shown_request

# About what each takes in memory, measured.
ENTRY_BYTES, TOKEN_BYTES, PLACE_BYTES, CANDIDATE_BYTES = 300, 260, 200, 220
MOST_BYTES = 48_000_000  # of a race: all that are kept have to share memory, and Replay has to open its trace


class Run(Job):
    """A race that was asked for: its messages, see `lanes`, and its trace."""

    kind = RACE

    def __init__(self, request: Request, seconds: float | None = None) -> None:
        super().__init__(request.preset, seconds)
        self.request = request
        self.header: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self._lanes = Lanes()
        self._shared = False
        self._entry_bytes = 0

    @property
    def size(self) -> int:
        return super().size + getsizeof(self.request.prompt) + self._entry_bytes

    def _play(self, engine: Engine) -> Iterator[str]:
        for status in self._load(engine):
            yield self.message(status=asdict(status))
        batches = engine.stream(self.preset, lambda loaded: self._race(engine, loaded), self.local, self)
        with closing(batches):
            said = begun = False
            try:
                for batch in batches:
                    for item in batch:
                        if isinstance(item, Said):
                            said = True
                            yield self.message(status=asdict(replace(engine.status, stage="loading", words=item.words)))
                            continue
                        if not begun:  # only now: a request that cannot be served leaves the last race on the page
                            begun = True
                            news = {"status": asdict(engine.status)} if said else {}
                            yield self.message(start=self._beginning(), **news)
                        self._lanes.add(item)
                    if not self.summary and (lanes := self._lanes.news()):
                        yield self.message(lanes=lanes)
            except Exception:
                if said and not begun:  # the top of the page still shows what was said
                    yield self.message(status=asdict(engine.status))
                raise
        yield self.message(lanes=self._lanes.news(), end=self._ending())

    def _race(self, engine: Engine, loaded: Any) -> Generator[Entry]:
        """The race itself and then its summary, in the engine's thread."""
        self.request, told = fitted(self.request, loaded)
        request, backend = self.request, engine.backend
        others = engine.beside.watch()
        prompt_ids = loaded.encode(request.prompt, request.raw)
        header = backend.trace_header(
            loaded, request.drafter, request.prompt, request.raw, request.settings, request.more
        )
        self.header = {**header, "isolated": request.isolated}
        self._shared = self.local and has_every_core(loaded)
        race = backend.race(loaded, request.drafter, prompt_ids, request.settings, request.isolated, request.more)
        with self._limited(), closing(race) as entries:  # type: ignore[type-var]
            yield from self._kept(entries)
        if not self.entries:
            raise self._before_it_began()
        if has_every_core(loaded) and others():
            self.header["disturbed"] = True
        self.summary = backend.summary(loaded, prompt_ids, request.settings, self.entries, request.drafted)
        if rate := self.summary["memory_rate"]:
            self.header["environment"]["memory_rate"] = rate
        self.summary["sentence"] = f"{self.summary['sentence']} {told}".rstrip()
        if cut := self._cut_short:
            self.summary["sentence"] = f"{cut[0]} {self.summary['sentence']}"

    def _kept(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The entries of the race, each of them kept, until it is told to stop."""
        for entry in entries:
            self.entries.append(entry)
            self._entry_bytes += size_of(entry)
            yield entry
            if self.stop.is_set() or self._entry_bytes > MOST_BYTES:
                break

    @property
    def _cut_short(self) -> tuple[str, str] | None:
        """If a limit has ended the race: a sentence, and words for the badge."""
        if self._is_whole:
            return None
        if self._entry_bytes > MOST_BYTES:
            size = f"{MOST_BYTES / 1e6:g} MB"
            return f"It had taken {size} of memory, the most that a race may take here.", f"stopped at {size}"
        return (f"It had run for {self.limit}.", f"stopped after {self.seconds:g} s") if self.overdue else None

    @property
    def _is_whole(self) -> bool:
        return is_whole(self.entries, 1 + len(self.request.drafted))

    def _beginning(self) -> dict[str, Any]:
        """What the page shows of the request and the machine. `shared` says that the page, which is on this machine
        too, takes the time in which it draws from the engine."""
        return {
            **shown_request(self.request),
            "weight_bytes": weight_bytes(self.header["environment"]),
            "shared": self._shared,
        }

    def _ending(self) -> dict[str, Any]:
        """What the page shows of the summary; the texts it has already."""
        summary, stopped = self.summary, not self._is_whole
        badge = exactness(summary, self.request, self.header["environment"], stopped)
        if cut := self._cut_short:
            badge["title"] = f"{badge['title']}, {cut[1]}" if badge["title"] else cut[1].capitalize()
        return {
            "stopped": stopped,
            "speed_up": summary["speed_up"],
            "speed_ups": {lane: verdict["speed_up"] for lane, verdict in summary["verdicts"].items()},
            "sentence": summary["sentence"],
            "verdicts": summary["verdicts"],
            "exactness": badge,
            "stats": {lane: summary[lane]["stats"] for lane in (PLAIN, *self.request.drafted)},
            "memory_shares": summary.get("memory_shares", {}),
            "memory_rate": summary.get("memory_rate"),
            "disturbed": self.header.get("disturbed", False),
        }

    def trace(self) -> str:
        """The trace as JSON lines."""
        return "".join(write_trace(self.header, self.entries))


def size_of(entry: Entry) -> int:
    """About how many bytes an entry takes in memory; counted while the race's clock stands still, so cheaply."""
    event = entry.event
    tokens = len(emitted_tokens(event)) + (len(event.drafted) if isinstance(event, Round) else 0)
    candidates = sum(len(place.candidates) for place in entry.probabilities)
    places = PLACE_BYTES * len(entry.probabilities) + CANDIDATE_BYTES * candidates
    return ENTRY_BYTES + TOKEN_BYTES * tokens + places
