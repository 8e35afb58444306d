"""Progress and cancellation of long work: it says what it is doing, and learns when it should stop.

A prefill or a calibration is many calls below the page with its Stop button. Both callbacks are context variables, so
that they need not be handed down from call to call, and every thread has its own. Without them nothing is reported and
nothing is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Tell = Callable[[str], None]


class Stopped(Exception):
    """The work was stopped from outside."""


_stopped: ContextVar[tuple[Callable[[], bool], ...]] = ContextVar("stopped", default=())
_tell: ContextVar[Tell | None] = ContextVar("tell", default=None)


@contextmanager
def attended(stopped: Callable[[], bool], report: Tell | None = None) -> Iterator[None]:
    """Within this context work ends with `Stopped` soon after `stopped` returns true; `report` gets its messages.

    Contexts can be nested: each `stopped` can stop the work, and the innermost `report` gets them.
    """
    stopping = _stopped.set((*_stopped.get(), stopped))
    telling = _tell.set(report or _tell.get())
    try:
        yield
    finally:
        _tell.reset(telling)
        _stopped.reset(stopping)


def tell(words: str) -> None:
    if report := _tell.get():
        report(words)


def check_stopped() -> None:
    """Stop here if the work should stop. To be called between two passes, or between layers of a long pass.

    Raises:
        Stopped: it should.
    """
    if any(stopped() for stopped in _stopped.get()):
        raise Stopped("The work was stopped.")
