"""One race, from the request to its trace."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from sys import getsizeof
from typing import Any

from ...decoding.events import Round, emitted_tokens
from ...drafters.names import DRAFTERS
from ...racing.bandwidth import MEASURED
from ...racing.outcome import Outcome
from ...racing.remembered import Memory, memory_note, remembering
from ...racing.request import Request, fitted
from ...racing.trace import Entry, write_trace
from ..engine import Engine, has_every_core
from ..jobs import RACE, Job
from .messages import Lanes, shown_request

# About what each takes in memory, measured.
ENTRY_BYTES, TOKEN_BYTES, PLACE_BYTES, CANDIDATE_BYTES = 300, 260, 200, 220
MOST_BYTES = 48_000_000  # of a race: all that are kept have to share memory, and Recordings has to open its trace


class RaceRun(Job):
    """A race that was asked for: its messages, see `lanes`, and its trace."""

    kind = RACE

    def __init__(self, request: Request, seconds: float | None = None) -> None:
        super().__init__(request.preset, seconds)
        self.request = request
        self.header: dict[str, Any] = {}
        self.outcome: Outcome | None = None
        self.entries: list[Entry] = []
        self._lanes = Lanes(request.pairs)
        self._shared = False
        self._entry_bytes = 0

    @property
    def size(self) -> int:
        texts = self.request.prompt, self.request.settings.grammar
        return super().size + sum(map(getsizeof, texts)) + self._entry_bytes

    def _play(self, engine: Engine) -> Iterator[str]:
        for status in self._load(engine):
            yield self.message(status=asdict(status))
        batches = engine.stream(
            self.preset, lambda loaded: self._race(engine, loaded), self.local, self.work, self.seconds_left
        )
        with closing(batches):
            announced = begun = False
            try:
                for batch in batches:
                    for item in batch:
                        if isinstance(item, str):
                            announced = True
                            status = replace(engine.status_for(self.session), stage="loading", words=item)
                            yield self.message(status=asdict(status))
                            continue
                        if not begun:  # only now: a request that cannot be served leaves the last race on the page
                            begun = True
                            news = {"status": asdict(engine.status_for(self.session))} if announced else {}
                            yield self.message(start=self._beginning(), **news)
                        self._lanes.add(item)
                    if self.outcome is None and (lanes := self._lanes.news()):
                        yield self.message(lanes=lanes)
            except Exception:
                if announced and not begun:  # the top of the page still shows what was said
                    yield self.message(status=asdict(engine.status_for(self.session)))
                raise
        assert self.outcome is not None
        end = self.outcome.ending(self.header.get("disturbed", False))
        yield self.message(lanes=self._lanes.news(), end=end)

    def _race(self, engine: Engine, loaded: Any) -> Generator[Entry]:
        """The race itself and then its outcome, in the engine's thread."""
        self.request, note = fitted(self.request, loaded)
        request = self.request
        if any(DRAFTERS[lane.drafter].remembers for lane in request.lanes.values()):
            loaded = remembering(loaded, self._memory(loaded))
        began = time.monotonic()
        race = engine.backend.race(loaded, request)
        self.header = race.header
        self._shared = self.local and has_every_core(loaded)
        with self._limited(), closing(race.entries()) as entries:  # type: ignore[type-var]
            yield from self._kept(entries)
        if not self.entries:
            raise self._before_it_began()
        if has_every_core(loaded) and engine.disturbed_until > began:
            self.header["disturbed"] = True
        found = race.outcome(self.entries)
        counted = {name: found.environment[name] for name in MEASURED if name in found.environment}
        self.header["environment"] |= counted
        sentence = " ".join(filter(None, [found.sentence, note, memory_note(self.header.get("lanes", ()))]))
        self._ended(replace(found, sentence=sentence))

    def _memory(self, loaded: Any) -> Memory:
        """What the target wrote in this session's earlier races: no other visitor's, and only with this preset, whose
        name can have stood for other weights."""
        races = (run for run in self.earlier() if isinstance(run, RaceRun) and run.preset == self.preset)
        same = (run for run in races if run.header.get("weights") == loaded.weights)
        return Memory(token_ids for run in same for token_ids in run.answers())

    def answers(self) -> Iterator[list[int]]:
        """The tokens of its texts, each once: those of the lanes without a drafter."""
        for name in (name for name in self.request.lanes if name not in self.request.drafted):
            events = (entry.event for entry in self.entries if entry.lane == name)
            yield [token.id for event in events for token in emitted_tokens(event) if token.id is not None]

    def _kept(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The entries of the race, each of them kept, until it has to stop."""
        for entry in entries:
            self.entries.append(entry)
            self._entry_bytes += size_of(entry)
            yield entry
            if self.stop.is_set() or self._entry_bytes > MOST_BYTES:
                break

    def _ended(self, found: Outcome) -> None:
        """Keep the outcome; it says so if a limit has ended the race."""
        size, cut = f"{MOST_BYTES / 1e6:g} MB", ("", "")
        if self._entry_bytes > MOST_BYTES:
            cut = f"It had taken {size} of memory, the most that a race may take here.", f"stopped at {size}"
        elif self.overdue:
            cut = f"It had run for {self.limit}.", f"stopped after {self.seconds:g} s"
        if found.stopped and cut[0]:
            title = f"{found.badge['title']}, {cut[1]}" if found.badge["title"] else cut[1].capitalize()
            sentence = f"{cut[0]} {found.sentence}".rstrip()
            found = replace(found, sentence=sentence, badge={**found.badge, "title": title})
        self.outcome = found

    def _beginning(self) -> dict[str, Any]:
        """What the page shows of the request, and the names of its lanes. `shared` says that the page, which is on this
        machine too, takes the time in which it draws from the engine."""
        return {**shown_request(self.request), "lanes": [*self.request.lanes], "shared": self._shared}

    @property
    def summary(self) -> dict[str, Any]:
        """The outcome, ready for JSON; empty before the race has ended."""
        return self.outcome.as_dict() if self.outcome else {}

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
