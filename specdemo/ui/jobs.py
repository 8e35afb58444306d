"""A job of the engine: from the request to its last message. The Race tab and the Lab tab each have one kind."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from sys import getsizeof
from typing import Any

from ..system.progress import Stopped, attended
from .engine import Engine, EngineTrouble, Status
from .values import to_json

RACE, STUDY = "race", "study"  # kinds of jobs
JOB_BYTES = 4_000  # the memory of a job without messages, roughly (measured)


class Job:
    """Work for the engine: its messages so far, and a way to stop it.

    Its id cannot be guessed, so that only those who were given it can read its messages and its result. `local` says
    whether it is followed on this machine. `grace` are the seconds without a follower after which it is stopped, None
    if it goes on. `seconds` is its time limit once the preset is loaded, None without one; `overdue` says whether that
    has stopped it.
    """

    kind = "job"  # in sentences

    def __init__(self, preset: str | None, seconds: float | None = None) -> None:
        self.id = secrets.token_hex(8)
        self.preset = preset
        self.seconds = seconds
        self.overdue = False
        self.session = ""
        self.grace: float | None = None
        self.local = False
        self.earlier: Callable[[], Sequence[Job]] = tuple
        self.messages: list[str] = []
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.followers: set[Callable[[], None]] = set()  # each is called for every message and at the end
        self.watchers: set[Callable[[], None]] = set()  # these too, but they do not keep it from being stopped
        self._leaving = threading.Timer(0, self.stop.set)  # runs while nobody follows it

    @property
    def work(self) -> str:
        """The kind of work; jobs of one kind take about the same time."""
        return self.kind

    def seconds_left(self) -> float | None:
        """Estimated seconds left, from its progress; None if unknown."""
        return None

    @property
    def size(self) -> int:
        """About how many bytes it takes in memory."""
        return JOB_BYTES + sum(map(getsizeof, self.messages))

    def stop_unless_followed(self) -> None:
        """Stop it in `grace` seconds, unless someone follows it by then or has followed it in between."""
        if self.grace is None or self.followers:
            return
        self._leaving.cancel()
        self._leaving = threading.Timer(self.grace, lambda: None if self.followers else self.stop.set())
        self._leaving.daemon = True
        self._leaving.start()

    def play(self, engine: Engine) -> Iterator[str]:
        """Run the job and yield its messages. Closing the generator ends the job and frees its caches.

        Raises:
            EngineTrouble: anything went wrong. The sentence is also the last of `messages`.
        """
        try:
            for message in self._play(engine):
                self.messages.append(message)
                self._wake()
                yield message
        except Exception as error:
            sentence = engine.sentence(error)
            self.messages.append(self.message(error=sentence, stopped=self.stop.is_set()))
            raise EngineTrouble(sentence) from error
        except GeneratorExit:  # tells the followers that it has ended
            self.messages.append(self.message(error="Stopped.", stopped=True))
            raise
        finally:
            self.ended.set()
            self._wake()

    def _wake(self) -> None:
        for follower in (*tuple(self.followers), *tuple(self.watchers)):
            follower()

    def message(self, **news: Any) -> str:
        """The next message as a JSON string; `seq` counts up from 0."""
        return to_json({"run": self.id, "seq": len(self.messages), **news})

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Within this context the job is stopped when its time is up. A stop ends it between two passes."""

        def end() -> None:
            self.overdue = not self.stop.is_set()
            self.stop.set()

        timer = threading.Timer(self.seconds or 0, end)
        timer.daemon = True
        if self.seconds is not None:
            timer.start()
        try:
            with suppress(Stopped), attended(self.stop.is_set):
                yield
        finally:
            timer.cancel()

    @property
    def limit(self) -> str:
        """The time limit in words, for an overdue job."""
        return f"{self.seconds:g} s, the most that a {self.kind} may take here"

    def _before_it_began(self) -> EngineTrouble:
        return EngineTrouble(f"Stopped {f'after {self.limit}, ' if self.overdue else ''}before it began.")

    def _play(self, engine: Engine) -> Iterator[str]:
        raise NotImplementedError

    def _load(self, engine: Engine) -> Iterator[Status]:
        """What the model is doing until the preset is loaded, if there is one to load."""
        if self.preset is None:
            return
        for status in engine.follow(self.preset, self.stop):
            yield status
            if status.stage == "failed":
                raise EngineTrouble(status.words)
        if self.stop.is_set():
            raise self._before_it_began()
