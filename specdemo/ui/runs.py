"""One race from the request to the summary, as messages for a page, and the races of the last minutes."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

from ..events import Entry, write_trace
from ..race import PLAIN, SPECULATIVE
from .engine import Engine, EngineTrouble
from .form import Request
from .lanes import Lanes

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
            EngineTrouble: whatever went wrong, as a sentence, which is also the last of `messages`.
        """
        try:
            for message in self._play(engine):
                self.messages.append(message)
                yield message
        except Exception as error:
            sentence = engine.sentence(error)
            self.messages.append(self._lanes.message(error=sentence))
            raise EngineTrouble(sentence) from error
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
        batches = engine.stream(request.preset, lambda loaded: self._race(engine, loaded))
        with closing(batches):
            for number, entries in enumerate(batches):
                if not number:  # only now: a request that the preset cannot serve leaves the last race on the page
                    yield self._lanes.message(start=request.as_dict())
                for entry in entries:
                    self._lanes.add(entry)
                yield self._lanes.message(lanes=self._lanes.news())
        yield self._lanes.message(end=self._ending())

    def _race(self, engine: Engine, loaded: Any) -> Generator[Entry]:
        """The race itself and then its summary, in the engine's thread."""
        request, backend = self.request, engine.backend
        prompt_ids = loaded.encode(request.prompt, request.raw)
        header = backend.trace_header(loaded, request.drafter, request.prompt, request.raw, request.settings)
        self.header = {**header, "isolated": request.isolated}
        race = backend.race(loaded, request.drafter, prompt_ids, request.settings, request.isolated)
        with closing(race) as entries:  # type: ignore[type-var]
            for entry in entries:
                self.entries.append(entry)
                yield entry
                if self.stop.is_set():
                    break
        self.summary = backend.summary(loaded, prompt_ids, request.settings, self.entries)

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
