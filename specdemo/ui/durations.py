"""How long work takes, for those who wait in line."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

RECENT = 8  # works of a name whose mean duration estimates that of the next


class Timed(Protocol):
    """Work whose end can be foretold."""

    @property
    def work(self) -> str:
        """What it is; works of one name take about as long as each other."""
        raise NotImplementedError

    def seconds_left(self) -> float | None:
        """How long it still takes by how far it is; None if that is not known."""
        raise NotImplementedError


class Durations:
    """What the last works took, and when the one in progress began. They are reported here one after the other."""

    def __init__(self) -> None:
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))  # seconds
        self._current: tuple[Timed | None, float] | None = None  # None in it: work of which nothing is known

    def begin(self, timed: Timed | None) -> None:
        """The work in progress, of which nothing is known if it is None."""
        self._current = timed, time.monotonic()

    def end(self, whole: bool) -> None:
        """The work in progress is over. What has failed says nothing of how long others take."""
        if self._current is not None:
            timed, began = self._current
            if timed and whole:
                self._recent[timed.work].append(time.monotonic() - began)
        self._current = None

    def wait(self, works: Sequence[str]) -> float | None:
        """The estimated seconds until the work in progress and then these `works` have ended.

        None if nothing is known of one of them.
        """
        known = [self._left(), *(self._usual(work) for work in works)]
        found = [seconds for seconds in known if seconds is not None]
        return sum(found) if len(found) == len(known) else None

    def _left(self) -> float | None:
        if (current := self._current) is None:
            return 0.0
        timed, began = current
        left = timed.seconds_left() if timed else None
        if left is not None or timed is None:
            return left
        passed = time.monotonic() - began
        usual = self._usual(timed.work, passed)
        return None if usual is None else usual - passed

    def _usual(self, work: str, more_than: float = 0.0) -> float | None:
        """The mean duration of the last works of this name, of those that took more than so many seconds."""
        longer = [seconds for seconds in tuple(self._recent[work]) if seconds > more_than]
        return fmean(longer) if longer else None
