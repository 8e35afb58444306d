"""What the engine is asked to do, from the request to its last message, and the jobs of the last minutes."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..events import Entry, Event, Finished, write_trace
from ..race import PLAIN, SPECULATIVE, is_near_tie
from .engine import Engine, EngineTrouble
from .form import Request
from .lanes import Lanes, to_json

KEPT_RUNS = 16
J = TypeVar("J", bound="Job")


class Job:
    """Something asked of the engine: what it has said so far, and a way to stop it.

    Its id cannot be guessed, so only those who were shown it can ask for its messages and what came of it.
    `local` says whether who follows it does so on this machine, see `Runs.begin`.
    """

    def __init__(self, preset: str) -> None:
        self.id = secrets.token_hex(8)
        self.preset = preset
        self.local = False
        self.messages: list[str] = []
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.followers: set[Callable[[], None]] = set()  # each is called when there is news, and when it has ended

    def play(self, engine: Engine) -> Iterator[str]:
        """Do it and yield its messages. Closing the generator ends it and frees its caches.

        Raises:
            EngineTrouble: whatever went wrong, as a sentence, which is also the last of `messages`.
        """
        try:
            for message in self._play(engine):
                self.messages.append(message)
                self._tell()
                yield message
        except Exception as error:
            sentence = engine.sentence(error)
            self.messages.append(self.message(error=sentence, stopped=self.stop.is_set()))
            raise EngineTrouble(sentence) from error
        except GeneratorExit:  # whoever follows it has to be told that it is over
            self.messages.append(self.message(error="Stopped.", stopped=True))
            raise
        finally:
            self.ended.set()
            self._tell()

    def _tell(self) -> None:
        for follower in tuple(self.followers):
            follower()

    def message(self, **news: Any) -> str:
        """The next message as a JSON string; `seq` counts up from 0."""
        return to_json({"run": self.id, "seq": len(self.messages), **news})

    def _play(self, engine: Engine) -> Iterator[str]:
        raise NotImplementedError

    def _load(self, engine: Engine) -> Iterator[str]:
        """Tells what the model is doing until the preset is loaded."""
        for status in engine.follow(self.preset, self.stop):
            yield self.message(status=asdict(status))
            if status.stage == "failed":
                raise EngineTrouble(status.words)
        if self.stop.is_set():
            raise EngineTrouble("Stopped before it began.")


class Run(Job):
    """A race that was asked for: its messages, see `lanes`, and its trace."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.preset)
        self.request = request
        self.header: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self._lanes = Lanes()

    def _play(self, engine: Engine) -> Iterator[str]:
        request = self.request
        yield from self._load(engine)
        batches = engine.stream(request.preset, lambda loaded: self._race(engine, loaded), self.local)
        with closing(batches):
            for number, entries in enumerate(batches):
                if not number:  # only now: a request that the preset cannot serve leaves the last race on the page
                    yield self.message(start=request.as_dict())
                for entry in entries:
                    self._lanes.add(entry)
                yield self.message(lanes=self._lanes.news())
        yield self.message(end=self._ending())

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
        summary, stopped = self.summary, not is_whole(entry.event for entry in self.entries)
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


def is_whole(events: Iterable[Event]) -> bool:
    """Whether both lanes of a race came to their end, and were not stopped."""
    return sum(isinstance(event, Finished) for event in events) == 2


def exactness(summary: dict[str, Any], temperature: float, dtype: str, stopped: bool) -> dict[str, str]:
    """The badge: its `mark` (same, differs or chance), a `title` and a sentence that explains it."""
    plain, speculative = (summary[lane]["token_ids"] for lane in (PLAIN, SPECULATIVE))
    both = min(len(plain), len(speculative))
    if not both:  # stopped before the second lane had begun
        return {"mark": "", "title": "", "words": "There is nothing to compare yet."}
    if temperature > 0:
        same = plain[:both] == speculative[:both] if stopped else plain == speculative
        return {
            "mark": "chance",
            "title": "Same odds, same draws" if same else "Same odds, other draws",
            "words": f"At temperature {temperature:g} each lane draws its own tokens from the same distribution, so "
            f"the texts {'could differ, though these do not' if same else 'differ by chance'}. "
            "What the target would say, and how often, is unchanged.",
        }
    comparison = summary["comparison"]
    place, gap = comparison["first_difference"], comparison["logit_gap"]
    if comparison["identical"] or (stopped and place >= both):
        title = "Identical so far" if stopped else "Identical to the target alone"
        words = f"{'The first' if stopped else 'All'} {both} tokens are exactly those that the target alone wrote."
        if both == 1:
            words = "The one token is exactly that which the target alone wrote."
        return {"mark": "same", "title": title, "words": words}
    words = f"The texts are the same for {place} token{'' if place == 1 else 's'}."
    if gap is not None:
        words += f" There the target's logits of the two next tokens are {gap:.2g} apart"
        if is_near_tie(gap, dtype):
            words += (
                f": a near-tie. In {dtype} the last digits depend on how many tokens go through the model at once, so "
                "either can win."
            )
        else:
            words += ", which is more than rounding explains. Please report this."
    return {"mark": "differs", "title": f"First difference at token {place + 1}", "words": words}


def is_local(client: Any) -> bool:
    """Whether a request comes from this machine, as far as the address of its `client` tells: a tunnel hides it."""
    with suppress(ValueError):  # not an address
        return client is not None and ip_address(client.host).is_loopback  # None: it came by a socket without one
    return False


class Runs:
    """The latest jobs by id, and the one in progress of each session."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, Job] = OrderedDict()
        self._current: WeakValueDictionary[str, Job] = WeakValueDictionary()
        self._lock = threading.Lock()

    def begin(self, job: J, session: str | None, client: Any = None) -> J:
        """Keep a new job; the oldest one is forgotten when there are too many.

        Args:
            client: the address that asks for it, as of `gr.Request.client`.
        """
        job.local = is_local(client)
        with self._lock:
            self._runs[job.id] = job
            while len(self._runs) > KEPT_RUNS:
                self._runs.popitem(last=False)
            if session:
                self._current[session] = job
        return job

    def find(self, kind: type[J], run_id: str) -> J | None:
        """The job of that id, if it is kept and of that kind."""
        with self._lock:
            job = self._runs.get(run_id)
        return job if isinstance(job, kind) else None

    def stop(self, session: str | None, kind: type[J]) -> J | None:
        """Tell the session's job, if it has one of that kind, to end after the event or step it is at."""
        with self._lock:
            job = self._current.get(session or "")
            if not isinstance(job, kind):
                return None
            del self._current[session or ""]
        job.stop.set()
        return job
