"""The one model of this process: loading presets with progress, and letting one user at a time have it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..events import Entry
from ..imports import import_quickly
from ..presets import Preset
from ..types import BadInput, Settings

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
CPU_SECONDS, GPU_SECONDS = 0.33, 0.05  # between two batches
SHARED_SECONDS = 0.66  # where the browser draws on the engine's own cores, which then stand still: see `bench page`
OPENING_SECONDS = 0.03  # there, to clear the page and draw the first token
NOTHING_LOADED = "No model is loaded yet"
END = object()  # follows the last item of a stream
T = TypeVar("T")


class EngineTrouble(RuntimeError):
    """The model cannot be had or failed; the message is a sentence for the person."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What does the work. `real_backend` is the product's; the tests of the page put a scripted one here."""

    load: Callable[[Preset, Callable[[float | None, str], None]], Any]
    race: Callable[[Any, str, Sequence[int], Settings, bool], Iterator[Entry]]
    summary: Callable[[Any, Sequence[int], Settings, Sequence[Entry]], dict[str, Any]]
    trace_header: Callable[[Any, str, str, bool, Settings], dict[str, Any]]
    explain: Callable[[BaseException], str | None]


def real_backend() -> Backend:
    """The real models. Imports transformers only when it is needed, so that the page is up sooner."""
    from .. import race

    def load(preset: Preset, progress: Callable[[float | None, str], None]) -> Any:
        loaded = import_quickly("specdemo.models").load(preset, progress=progress)
        try:
            race.costs_of(loaded, Settings(k=preset.defaults.k, temperature=preset.defaults.temperature))
        except BaseException:
            loaded.release()
            raise
        return loaded

    def explain(error: BaseException) -> str | None:
        from .. import failures

        return failures.explain(error)

    return Backend(load, race.race, race.summary, race.trace_header, explain)


@dataclass(frozen=True, slots=True)
class Status:
    """What the model is doing. `stage` is idle, loading, ready or failed; `words` are for the person.

    `facts` are short notes on what is loaded and what it runs on. `missing` says, for each drafter that
    the loaded preset cannot use, why.
    """

    stage: str
    preset: str
    words: str
    fraction: float | None = None
    facts: tuple[str, ...] = ()
    missing: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between two batches, for who follows them on this machine and for who does elsewhere.

    `opening` is how long the engine waits for a local follower after the first item. In a race the page then clears
    away the last one, which would otherwise be on the clock of the lane that goes second.
    """

    local: float = CPU_SECONDS
    remote: float = CPU_SECONDS
    opening: float = 0.0


class Engine:
    """Holds the loaded preset. One thread of its own loads it and runs it.

    One thread, because each thread that computes gets a team of helper threads, and teams that outnumber the
    cores put each other to sleep. Whoever waits for a preset follows `status`. The old preset is freed before
    the new one is loaded, so that both never need memory at once.
    """

    def __init__(self, presets: Mapping[str, Preset], backend: Backend) -> None:
        self.presets = presets
        self.backend = backend
        self.status = Status("idle", "", NOTHING_LOADED)
        self._loaded: Any = None
        self._pauses = Pauses()
        self._starting = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def begin_loading(self, preset: str) -> None:
        """Make sure that `preset` is loaded or being loaded. Returns at once; a failed load is tried again."""
        with self._starting:
            if self.status.preset == preset and self.status.stage in ("loading", "ready"):
                return
            self.status = Status("loading", preset, "waiting for the model to be free")
        self._jobs.put(lambda: self._load(preset))

    def follow(self, preset: str, stop: threading.Event | None = None) -> Iterator[Status]:
        """Load `preset` if it is not loaded; yield its status now and at every change, until it is ready or failed.

        Args:
            stop: set when whoever asked wants to follow it no longer.
        """
        stop = stop or threading.Event()
        seen = None
        while (seen is None or seen.stage == "loading") and not stop.is_set():
            if self.status.preset != preset or seen is None:
                self.begin_loading(preset)
            if self.status == seen:
                stop.wait(POLL_SECONDS)
            else:
                seen = self.status
                yield seen

    def stream(self, preset: str, run: Callable[[Any], Generator[T]], local: bool = False) -> Generator[list[T]]:
        """What `run(loaded)` yields, in batches: the first item at once, then now and then all that came since.

        The engine waits for nobody, except `Pauses.opening` after the first item. Closing this closes `run` after the
        item that it is at, and waits for that.

        Args:
            local: whether what shows the batches runs on this machine too.

        Raises:
            EngineTrouble: the preset is not loaded, with the sentence that says why.
            Exception: whatever `run` raises.
        """
        items: SimpleQueue[Any] = SimpleQueue()
        closed, finished = threading.Event(), threading.Event()
        failures: list[Exception] = []

        def work() -> None:
            try:
                if self._loaded is None or self._loaded.preset.name != preset:
                    raise EngineTrouble(self.status.words)
                with closing(run(self._loaded)) as source:
                    opening = self._pauses.opening if local else 0.0
                    for item in source:
                        items.put(item)
                        if closed.wait(opening):
                            break
                        opening = 0.0
            except Exception as error:
                failures.append(error)
            finally:
                items.put(END)
                finished.set()

        self._jobs.put(work)
        last = None
        try:
            while last is not END:
                batch = [items.get(), *_at_once(items)]
                last = batch[-1]
                if fresh := batch[:-1] if last is END else batch:
                    yield fresh
                finished.wait(self._pauses.local if local else self._pauses.remote)
        finally:
            closed.set()
            finished.wait()
        if failures:
            raise failures[0]

    def sentence(self, error: BaseException) -> str:
        """What to tell a person about a failure; a bug is logged with its traceback."""
        if isinstance(error, (BadInput, EngineTrouble)):
            return str(error)
        known = self.backend.explain(error)
        if known is None:
            log.error("The engine failed.", exc_info=error)
        return known or f"Something went wrong in the engine: {type(error).__name__}. The log of the server says more."

    def _load(self, preset: str) -> None:
        if self.status.preset != preset:  # someone wanted another one meanwhile
            return
        given_up = threading.Event()

        def progress(fraction: float | None, words: str) -> None:
            if self.status.preset != preset:  # the same, while gigabytes were on their way
                given_up.set()
                raise EngineTrouble("Another preset was chosen meanwhile.")
            self._tell(preset, "loading", words, fraction)

        try:
            if self._loaded is None or self._loaded.preset.name != preset:
                self._replace(preset, progress)
            self._pauses = pauses(self._loaded)
            self._tell(preset, "ready", self.presets[preset].title, facts=facts(self._loaded), missing=self._missing())
        except Exception as error:
            if not given_up.is_set():  # or else whoever wants it again by now waits for another load
                self._tell(preset, "failed", self.sentence(error))

    def _replace(self, preset: str, progress: Callable[[float | None, str], None]) -> None:
        if self._loaded is not None:
            old, self._loaded = self._loaded, None
            old.release()
        self._loaded = self.backend.load(self.presets[preset], progress)

    def _tell(self, preset: str, stage: str, words: str, fraction: float | None = None, **more: Any) -> None:
        with self._starting:
            if self.status.preset == preset:
                self.status = Status(stage, preset, words, fraction, **more)

    def _missing(self) -> dict[str, str]:
        from ..drafters import DRAFTERS

        reasons = {name: drafter.missing(self._loaded) for name, drafter in DRAFTERS.items()}
        return {name: reason for name, reason in reasons.items() if reason}


def pauses(loaded: Any) -> Pauses:
    """How often to tell what a loaded preset writes: here more seldom, if the engine has a thread on every core."""
    if loaded.device.type != "cpu":
        return Pauses(GPU_SECONDS, GPU_SECONDS)
    environment = loaded.environment()
    cores = environment.get("cores")  # None where the system does not tell
    shared = cores is not None and environment["threads"] >= cores
    return Pauses(SHARED_SECONDS, CPU_SECONDS, OPENING_SECONDS) if shared else Pauses(CPU_SECONDS, CPU_SECONDS)


def facts(loaded: Any) -> tuple[str, ...]:
    """Number types and hardware of a loaded preset, and whether it runs the slow way, in a few short notes."""
    environment = loaded.environment()
    dtype, weights = environment.get("dtype"), environment.get("weights_dtype")
    stored = f"{weights} weights" if weights and weights != dtype else None
    own = "transformers' own forward" if environment.get("engine") == "eager" else None
    return tuple(str(note) for note in (dtype, stored, environment.get("device_name"), own) if note)


def _at_once(items: SimpleQueue[Any]) -> Iterator[Any]:
    """What is in the queue already."""
    while True:
        try:
            yield items.get_nowait()
        except Empty:
            return
