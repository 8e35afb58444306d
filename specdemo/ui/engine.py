"""The one loaded preset of this process: loading with progress, and running one job at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from queue import SimpleQueue
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from ..drafters.names import DRAFTERS, drafter_class
from ..errors import BadInput
from ..models.hub_token import asking_with
from ..models.one_loaded import MadeOf, made_of
from ..models.presets import Preset
from ..racing.request import Request
from ..racing.trace import Entry
from ..settings import Settings, one_of
from ..system.imports import LazyModule, import_quickly
from ..system.progress import attended
from .access import Access
from .facts import facts

if TYPE_CHECKING:
    from ..racing import batch, race, summary
    from ..racing.outcome import Outcome
else:
    batch, race, summary = (LazyModule(f"specdemo.racing.{name}") for name in ("batch", "race", "summary"))

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
CPU_SECONDS, GPU_SECONDS = 0.33, 0.05  # between two batches of events
SHARED_SECONDS = 1.0  # where what the browser does takes cores from the engine: it only moves a bar meanwhile
OPENING_SECONDS = 0.2  # there, off the clocks: for the page to clear away the last race
MEANWHILE = "Another preset was chosen meanwhile."
NOTHING_LOADED = "No model is loaded yet"
OWN = "own"  # stands for a model or a server that another visitor has named
OF_OTHERS = "Another visitor's own model"
RECENT = 8  # jobs of a kind whose mean duration is expected of the next
MOST_OWN = 256  # presets that visitors have named, of which the oldest is forgotten
END = object()  # follows the last item of a stream
T = TypeVar("T")


class EngineTrouble(RuntimeError):
    """The model could not be loaded, or it failed. The message is a sentence for a person."""


@dataclass
class LoadedRace:
    """A race of a loaded preset: the header of its trace, its entries, and what came of those that there are."""

    loaded: Any
    request: Request
    header: dict[str, Any]

    def entries(self) -> Iterator[Entry]:
        return batch.race_request(self.loaded, self.request)

    def outcome(self, entries: Sequence[Entry]) -> Outcome:
        return summary.outcome_of(self.loaded, self.request, entries)


class Backend:
    """Where the page meets the models: it loads presets, and races what it has loaded. This one has the real models,
    with weights of the type `dtype`. `zero.ZeroBackend` races elsewhere, and tests of the page have a scripted one.
    """

    def __init__(self, dtype: str | None = None) -> None:
        self.dtype = dtype

    def load(self, preset: Preset, progress: Callable[[float | None, str], None], instead_of: Any) -> Any:
        """Transformers is imported here, so that the page opens sooner. `instead_of` is what is loaded now."""
        opened = import_quickly("specdemo.models.loaded")
        loaded = opened.load(preset, self.dtype, progress=progress, instead_of=instead_of)
        try:
            race.costs_of(loaded, Settings(k=preset.defaults.k, temperature=preset.defaults.temperature))
        except BaseException:
            loaded.release()
            raise
        return loaded

    def race(self, loaded: Any, request: Request) -> LoadedRace:
        return LoadedRace(loaded, request, summary.trace_header(loaded, request))


@dataclass(frozen=True, slots=True)
class Status:
    """What the model is doing. `stage` is idle, loading, ready or failed; `words` are for the person.

    `loaded` is the preset that is in memory and can be run, "" if there is none. It differs from `preset` while that
    one is loading and after it failed to. `facts` are short notes on what is loaded and what it runs on. `unavailable`
    says, for each drafter that the loaded preset cannot use, why; only where that is the one that was asked for.
    """

    stage: str
    preset: str
    words: str
    fraction: float | None = None
    facts: tuple[str, ...] = ()
    unavailable: Mapping[str, str] | None = None
    loaded: str = ""


class Engine:
    """Holds the loaded preset. One thread of its own loads it and runs it.

    One thread, because each computing thread has its own team of OpenMP threads, and teams that outnumber the cores
    slow each other down. Whoever waits for a preset follows `status`. Downloads run in that thread too, so they never
    disturb a race, and races wait for them. The old preset stays until the new one is ready or, where memory does not
    hold both, until the new one is downloaded and checked.
    """

    def __init__(
        self, presets: Mapping[str, Preset], backend: Backend, token: Callable[[], str | None] = lambda: None
    ) -> None:
        """`token` is that of whoever sends the request that is being handled, see `hub_login`; None without a login."""
        self.offered = presets  # to everyone
        self._own: dict[tuple[str, str], Preset] = {}  # those that visitors have named, by session and name
        self._token = token
        self._access = Access()
        self.backend = backend
        self.followers: set[Callable[[], None]] = set()  # each is called when the status or the work changes
        self.disturbed_until = -inf  # by the monotonic clock: infinity while there is other work
        self.status = Status("idle", "", NOTHING_LOADED)
        self._took: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))  # seconds, by work
        self._current: tuple[str, float, Callable[[], float | None]] | None = None  # work, when it began, what is left
        self._loaded: Any = None
        self._made_of: MadeOf | None = None  # what is loaded
        self._starting = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    @property
    def status(self) -> Status:
        """What the model is doing. Setting it wakes the followers."""
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        self._status = status
        self._wake()

    def _wake(self) -> None:
        for follower in tuple(self.followers):
            follower()

    @contextmanager
    def other_work(self) -> Iterator[None]:
        """Within this context the process does something besides, which could disturb a race that is timed."""
        self.disturbed_until = inf
        try:
            yield
        finally:
            self.disturbed_until = time.monotonic()

    def expected_wait(self, works: Sequence[str]) -> float | None:
        """The estimated seconds until a job begins, after the work in progress and the `works` in line before it.

        None if it cannot be estimated: nothing is known of one of them, or a preset is being loaded.
        """
        expected = list(map(self._usual, works))
        if current := self._current:
            work, began, seconds_left = current
            left, usual = seconds_left(), self._usual(work)
            expected.append(max(0.0, began + usual - time.monotonic()) if left is None and usual else left)
        known = [seconds for seconds in expected if seconds is not None]
        return None if self.status.stage == "loading" or len(known) < len(expected) else sum(known, 0.0)

    def _usual(self, work: str) -> float | None:
        took = tuple(self._took[work])
        return fmean(took) if took else None

    @property
    def presets(self) -> dict[str, Preset]:
        """All that can be loaded, by name. Who does not know the names of others gets none: see `shown`."""
        return {**self.offered, **{name: preset for (_, name), preset in self._own.items()}}

    def shown(self, session: str | None) -> dict[str, Preset]:
        """The presets that a session may know: those of everyone, and those that it has named."""
        own = {name: preset for (theirs, name), preset in self._own.items() if session and theirs == session}
        return {**self.offered, **own}

    def status_for(self, session: str | None) -> Status:
        """The status for the page of a session: without the names of models that others have named, and what is said of
        them."""
        status, shown = self.status, {"", *self.shown(session)}
        if status.preset not in shown:
            words = "it may take minutes" if status.stage == "loading" else OF_OTHERS
            status = replace(status, preset=OWN, words=words, facts=(), unavailable=None)
        if status.loaded not in shown:
            status = replace(status, loaded=OWN, facts=(), unavailable=None)
        return status

    def add(self, preset: Preset, session: str | None) -> None:
        """Have one more preset to load, or another one of the same name, which a session has named."""
        key = session or "", preset.name
        with self._starting:
            others = [(other, kept) for other, kept in self._own.items() if other != key]
            self._own = dict([*others, (key, preset)][-MOST_OWN:])

    def check(self, preset: Any) -> None:
        one_of("preset", preset, list(self.offered if preset not in [*self.presets] else self.presets))

    def begin_loading(self, preset: str) -> None:
        """Load `preset` unless it is loaded or being loaded. Returns at once. A failed load is tried again."""
        with self._starting:
            loading, ready = (self.status.preset == preset and self.status.stage == at for at in ("loading", "ready"))
            if loading or (ready and self._made_of == made_of(self.presets[preset])):
                return
            self.status = Status("loading", preset, "waiting for the model to be free", loaded=self.status.loaded)
        self._jobs.put(partial(self._load, preset, self._token()))

    def follow(self, preset: str, stop: threading.Event | None = None) -> Iterator[Status]:
        """Load `preset` if it is not loaded; yield its status now and at every change, until it is ready or failed.

        Args:
            stop: ends the iteration when it is set. Without it the choice of another preset ends it, too.
        Raises:
            LoadError: it was loaded with the token of a visitor, and this one may not read it on the hub.
        """
        token, seen = self._token(), None
        ending = stop or threading.Event()
        while (seen is None or seen.stage == "loading") and not ending.is_set():
            if seen is None or self.status.preset != preset:
                if seen and not stop:
                    return
                self.begin_loading(preset)
            status = self.status
            if status == seen or status.preset != preset:
                ending.wait(POLL_SECONDS)
            else:
                seen = status
                if seen.stage == "ready":
                    self._access.check(preset, token)
                yield seen

    def report(self, preset: Preset) -> Iterator[str]:
        """What a preset needs, asked with the token of whoever sends the request that is being handled."""
        with asking_with(self._token()):
            yield from import_quickly("specdemo.models.report").report_on(preset)

    def stream(
        self,
        preset: str | None,
        run: Callable[[Any], Generator[T]],
        local: bool = False,
        work: str = "",
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> Generator[list[T | str]]:
        """What `run(loaded)` yields, in batches: the first item at once, later ones at the intervals of `pauses`.

        Reports of the work (`progress.tell`), which are texts, are among the items. The engine does not wait for its
        followers, except after the first item. Closing this generator closes `run` after its current item, or stops it
        between two passes (`progress.check_stopped`), and waits for that.

        Args:
            preset: None for work that needs none; `loaded` is then whatever there is, perhaps None.
            local: whether the batches are shown on this machine.
            work, seconds_left: see `Job`; `expected_wait` counts with them.

        Raises:
            EngineTrouble: the preset is not loaded; the message says why.
            Exception: anything that `run` raises.
        """
        items: SimpleQueue[Any] = SimpleQueue()
        closed, finished = threading.Event(), threading.Event()
        failures: list[Exception] = []
        pause = 0.0

        def play() -> None:
            nonlocal pause
            began = time.monotonic()
            self._current = work, began, seconds_left
            self._wake()
            try:
                if preset is not None and (self._loaded is None or self._loaded.preset.name != preset):
                    status = self.status
                    raise EngineTrouble(status.words if status.preset in (preset, "") else MEANWHILE)
                pause, opening = pauses(self._loaded, local)
                waiting = attended(closed.is_set, items.put)
                with waiting, closing(run(self._loaded)) as source:
                    for item in source:
                        items.put(item)
                        if closed.wait(opening):
                            break
                        opening = 0.0
            except Exception as error:
                failures.append(error)
            finally:
                self._current = None
                if work and not failures:
                    self._took[work].append(time.monotonic() - began)
                items.put(END)
                finished.set()
                self._wake()

        # ZeroGPU looks up whose request it is.
        self._jobs.put(partial(copy_context().run, play))
        last = None
        try:
            while last is not END:
                batch = [items.get(), *(items.get() for _ in range(items.qsize()))]  # nobody else takes from it
                last = batch[-1]
                if fresh := batch[:-1] if last is END else batch:
                    yield fresh
                if not isinstance(batch[-1], str):  # the first event after a report is shown at once, too
                    finished.wait(pause)
        finally:
            closed.set()
            finished.wait()
        if failures:
            raise failures[0]

    def sentence(self, error: BaseException) -> str:
        """The sentence about a failure for a person. A bug is logged with its traceback."""
        if isinstance(error, (BadInput, EngineTrouble)):
            return str(error)
        known = import_quickly("specdemo.models.errors").explain(error)
        if known is None:
            log.error("The engine failed.", exc_info=error)
        return known or f"Something went wrong in the engine: {type(error).__name__}. The log of the server says more."

    def _load(self, preset: str, token: str | None) -> None:
        if self.status.preset != preset:  # someone has chosen another one since
            return
        given_up = threading.Event()

        def progress(fraction: float | None, words: str) -> None:
            if self.status.preset != preset:  # the same, during a download
                given_up.set()
                raise EngineTrouble(MEANWHILE)
            self._report(preset, "loading", words, fraction)

        try:
            old, wanted = self._loaded, made_of(self.presets[preset])
            if old is None or self._made_of != wanted:
                with asking_with(token):
                    self._loaded = self.backend.load(self.presets[preset], progress, old)
                self._made_of = wanted
                self._access.loaded(self._loaded.preset, token)
                if old is not None and not old.released:
                    old.release()
            self._report(
                preset, "ready", self._loaded.preset.title, facts=facts(self._loaded), unavailable=self._unavailable()
            )
            return
        except Exception as error:
            words = "" if given_up.is_set() else self.sentence(error)
        if self._loaded is not None and self._loaded.released:  # to make room
            self._loaded = None
        if words:  # without them the load was given up, and a new one may be waiting
            notes = () if self._loaded is None else facts(self._loaded)
            self._report(preset, "failed", words, facts=notes)

    def _report(self, preset: str, stage: str, words: str, fraction: float | None = None, **more: Any) -> None:
        with self._starting:
            if self.status.preset == preset:
                loaded = "" if self._loaded is None or self._loaded.released else self._loaded.preset.name
                self.status = Status(stage, preset, words, fraction, loaded=loaded, **more)

    def _unavailable(self) -> dict[str, str]:
        reasons = {name: drafter_class(name).needs(self._loaded.parts).missing for name in DRAFTERS}
        return {name: reason for name, reason in reasons.items() if reason}


def pauses(loaded: Any, local: bool) -> tuple[float, float]:
    """Seconds between two batches for a follower, on this machine if `local`, and those that the engine waits after the
    first item: to clear away the last race would slow this one down, where the engine has a thread on every core."""
    if loaded is not None and loaded.device.type != "cpu":
        return GPU_SECONDS, 0.0
    shared = local and loaded is not None and has_every_core(loaded)
    return (SHARED_SECONDS, OPENING_SECONDS) if shared else (CPU_SECONDS, 0.0)


def has_every_core(loaded: Any) -> bool:
    """Whether a loaded preset computes on every core of this machine, so that other work slows it down."""
    environment = loaded.environment() if loaded.device.type == "cpu" else {}
    cores = environment.get("cores")  # None if the system does not say
    return cores is not None and environment["threads"] >= cores
