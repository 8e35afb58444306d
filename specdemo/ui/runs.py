"""The jobs of the last minutes, by id and by visitor."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any, TypeVar

from anyio import to_thread

from ..errors import BadInput
from .engine import Engine
from .jobs import Job
from .line import Line

GRACE_SECONDS = 15.0  # without a follower, for a job of the page
KEPT_BYTES = 64_000_000  # of all jobs together
PAGE_ID = re.compile("[0-9a-f]{16}")
J = TypeVar("J", bound=Job)
T = TypeVar("T")


def is_local(client: Any) -> bool:
    """Whether a request comes from this machine, by the address of its `client`. A tunnel hides this."""
    with suppress(ValueError):  # not an address
        return client is not None and ip_address(client.host).is_loopback  # None: a socket without an address
    return False


class Runs:
    """The latest jobs by id.

    `engine` plays them, after they have waited in `line`; `most_watchers` may watch a page that is shared: `build_page`
    sets these. `begun` is called with each new job, `ended` with each that was played and with whether it finished, was
    stopped or failed, `left` with a session whose page no longer follows the status.
    """

    engine: Engine
    line: Line

    def __init__(self, grace: float = GRACE_SECONDS, most_bytes: int = KEPT_BYTES) -> None:
        """
        Args:
            grace: see `Job`, for those of the page.
            most_bytes: the memory of all jobs that are kept, looked at when one begins or ends.
        """
        self.grace, self.most_bytes = grace, most_bytes
        self.most_watchers = 0
        self.begun: Callable[[Job], None] = lambda job: None
        self.ended: Callable[[Job, str], None] = lambda job, outcome: None
        self.left: Callable[[str], None] = lambda session: None
        self._pages: Counter[str] = Counter()
        self._runs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._large = asyncio.Lock()

    def begin(self, job: J, session: str | None, client: Any = None, page_id: str | None = None) -> J:
        """Keep a new job. The oldest ones are forgotten when all together take too many bytes.

        Args:
            client: the address it was asked from, as in `gr.Request.client`.
            page_id: the id that the page follows it by: it is stopped when nobody does.
        """
        job.local = is_local(client)
        if page_id is not None:
            job.id, job.grace = page_id, self.grace
        job.session = session or job.id
        job.earlier = lambda: [other for other in self._of(job.session, Job) if other is not job]
        with self._lock:
            if job.id in self._runs or not PAGE_ID.fullmatch(job.id):
                raise BadInput("This was asked for already.")
            self._runs[job.id] = job
            self._forget()
        job.stop_unless_followed()
        self.begun(job)
        return job

    def play(self, job: Job, engine: Engine) -> Iterator[Any]:
        """`job.play`, and what there is to do when it has ended."""
        outcome = "failed"
        try:
            yield from job.play(engine)
            outcome = "finished"
        except GeneratorExit:
            outcome = "stopped"
            raise
        finally:
            with self._lock:
                self._forget()
            self.ended(job, outcome)

    def _forget(self) -> None:
        """Forget the oldest jobs until the others fit. The latest, which may be running, stays."""
        over = sum(job.size for job in self._runs.values()) - self.most_bytes
        while over > 0 and len(self._runs) > 1:
            _, oldest = self._runs.popitem(last=False)
            over -= oldest.size

    async def large(self, make: Callable[[], T]) -> T:
        """A large answer, made in a thread of its own: one at a time, or they would take memory and the engine's time
        together."""
        async with self._large:
            with self.engine.other_work():
                return await to_thread.run_sync(make)

    def find(self, kind: type[J], run_id: str) -> J | None:
        """The job with this id, if it is kept and of this kind."""
        with self._lock:
            job = self._runs.get(run_id)
        return job if isinstance(job, kind) else None

    def _of(self, session: str | None, kind: type[J]) -> list[J]:
        """The kept jobs of a session and of that kind, the oldest first."""
        with self._lock:
            return [job for job in self._runs.values() if job.session == session and isinstance(job, kind)]

    def latest(self, session: str | None, kind: type[J], work: str | None = None) -> J | None:
        """The session's latest job of that kind, and of that `Job.work` if it is given, if it is kept."""
        return next((job for job in reversed(self._of(session, kind)) if work in (None, job.work)), None)

    @contextmanager
    def present(self, session: str) -> Iterator[None]:
        """The session's page is open within this context, see `is_present`."""
        self._pages[session] += 1
        try:
            yield
        finally:
            self._pages[session] -= 1
            if not self._pages[session]:
                del self._pages[session]
                self.left(session)

    def is_present(self, session: str) -> bool:
        """Whether a page of this session follows the status."""
        return session in self._pages
