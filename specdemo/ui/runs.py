"""One race from the request to the summary, as messages for a page, and the races of the last minutes."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

from ..events import Entry, write_trace
from ..race import PLAIN, SPECULATIVE
from .engine import Engine, EngineTrouble
from .form import Request
from .lanes import Lanes

FLUSH_SECONDS, LONGEST_FLUSH_SECONDS = 0.04, 0.15
SHOWING_SHARE = 0.04  # of a race's time may go to showing it
KEPT_RUNS = 16
NEAR_TIE = {"float32": 1e-3}  # a logit gap that rounding alone can turn; half precision is far coarser
NEAR_TIE_HALF = 0.5


class Run:
    """A race that was asked for: what it has shown so far, its trace, and a way to stop it.

    Its id cannot be guessed, so only those who were shown it can ask for its messages or its trace.
    """

    def __init__(self, request: Request) -> None:
        self.id = secrets.token_hex(8)
        self.request = request
        self.header: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.messages: list[str] = []
        self.stop = threading.Event()
        self.ended = threading.Event()
        self._lanes = Lanes(self.id)

    def play(self, engine: Engine) -> Iterator[str]:
        """Run the race and yield its messages, see `lanes`. Closing the generator ends the race and frees its caches.

        Raises:
            BadInput: the preset cannot do what was asked for.
            EngineTrouble: the preset could not be loaded.
        """
        try:
            for message in self._play(engine):
                self.messages.append(message)
                yield message
        finally:
            self.ended.set()

    def _play(self, engine: Engine) -> Iterator[str]:
        request = self.request
        for status in engine.follow(request.preset):
            yield self._lanes.message(status=asdict(status))
            if status.stage == "failed":
                raise EngineTrouble(status.words)
            if self.stop.is_set():
                return
        with engine.using(request.preset) as loaded:
            prompt_ids = loaded.encode(request.prompt, request.raw)
            header = engine.backend.trace_header(loaded, request.drafter, request.prompt, request.raw, request.settings)
            self.header = {**header, "isolated": request.isolated}
            race = engine.backend.race(loaded, request.drafter, prompt_ids, request.settings, request.isolated)
            with closing(race) as entries:  # type: ignore[type-var]
                yield from self._stream(entries)
            self.summary = engine.backend.summary(loaded, prompt_ids, request.settings, self.entries)
        yield self._lanes.message(lanes=self._lanes.news(), end=self._ending())

    def _stream(self, entries: Iterator[Entry]) -> Iterator[str]:
        """The first event of each lane at once, everything else in batches.

        The engine waits while a message is handed over, so the time that takes sets how soon the next may follow.
        """
        began: set[str] = set()
        due = 0.0
        for entry in entries:
            if not began:  # only now: a request that the preset cannot serve leaves the last race on the page
                yield self._lanes.message(start=self.request.as_dict())
            self.entries.append(entry)
            self._lanes.add(entry)
            if entry.lane not in began or time.monotonic() >= due:
                began.add(entry.lane)
                before = time.monotonic()
                yield self._lanes.message(lanes=self._lanes.news())
                after = time.monotonic()
                due = after + min(max(FLUSH_SECONDS, (after - before) / SHOWING_SHARE), LONGEST_FLUSH_SECONDS)
            if self.stop.is_set():
                return

    def _ending(self) -> dict[str, Any]:
        """What the page shows of the summary; the texts it has already."""
        summary, stopped = self.summary, self.stop.is_set()
        dtype = str(self.header["environment"].get("dtype", ""))
        return {
            "stopped": stopped,
            "speed_up": summary["speed_up"],
            "sentence": summary["sentence"],
            "exactness": exactness(summary, self.request.settings.temperature, dtype, stopped),
            "stats": {lane: summary[lane]["stats"] for lane in (PLAIN, SPECULATIVE)},
        }

    def trace(self) -> str:
        """The trace as JSON lines."""
        return "".join(write_trace(self.header, self.entries))


def exactness(summary: dict[str, Any], temperature: float, dtype: str, stopped: bool) -> dict[str, str]:
    """The badge: its `mark` (same, differs or chance), a `title` and a sentence that explains it."""
    if temperature > 0:
        return {
            "mark": "chance",
            "title": "Same law, other draws",
            "words": f"At temperature {temperature:g} each lane draws its own tokens from the same distribution, so "
            "the texts differ by chance. What the target would say, and how often, is unchanged.",
        }
    comparison = summary["comparison"]
    both = min(len(summary[lane]["token_ids"]) for lane in (PLAIN, SPECULATIVE))
    place, gap = comparison["first_difference"], comparison["logit_gap"]
    if comparison["identical"] or (stopped and gap is None):
        title = "Identical so far" if stopped else "Identical to the target alone"
        which = f"The first {both} tokens" if stopped else f"All {both} tokens"
        return {"mark": "same", "title": title, "words": f"{which} are exactly those that the target alone wrote."}
    words = f"The texts are the same for {place} tokens."
    if gap is not None:
        words += f" There the target's logits of the two next tokens are {gap:.2g} apart"
        if gap <= NEAR_TIE.get(dtype, NEAR_TIE_HALF):
            words += (
                f": a near-tie. In {dtype} the last digits depend on how many tokens go through the model at once, so "
                "either can win."
            )
        else:
            words += ", which is more than rounding explains. Please report this."
    return {"mark": "differs", "title": f"First difference at token {place + 1}", "words": words}


class Runs:
    """The latest runs by id, and the run in progress of each session."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._current: WeakValueDictionary[str, Run] = WeakValueDictionary()
        self._lock = threading.Lock()

    def begin(self, request: Request, session: str | None) -> Run:
        """A new run; the oldest one is forgotten when there are too many."""
        run = Run(request)
        with self._lock:
            self._runs[run.id] = run
            while len(self._runs) > KEPT_RUNS:
                self._runs.popitem(last=False)
            if session:
                self._current[session] = run
        return run

    def find(self, run_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(run_id)

    def stop(self, session: str | None) -> Run | None:
        """Tell the session's run, if it has one, to end after the event it is at."""
        with self._lock:
            run = self._current.pop(session or "", None)
        if run is not None:
            run.stop.set()
        return run
