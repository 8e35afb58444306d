"""What this process does besides the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OtherWork:
    """Counts the work that this process does besides the engine, which could disturb a race that is timed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._running = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The context of a piece of such work, which it counts."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, running: int) -> None:
        with self._lock:
            self._count += 1
            self._running += running

    def watch(self) -> Callable[[], bool]:
        """Returns a function that says whether there was such work since this call."""
        before = self._count
        return lambda: self._count != before or self._running > 0
