"""The line for the model: who may join it, and who is where in it.

Gradio keeps the line: it starts one event after the other and removes those whose page is gone. It has no limits for a
session or an address, and says of a full line only that it is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import gradio as gr
from gradio.queueing import Queue
from gradio.server_messages import ProcessCompletedMessage
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Scope

from ..errors import BadInput
from ..formats import formatted
from .engine import Engine

MODEL_LINE = "model"  # Gradio's concurrency_id of whatever uses the model
MODEL: dict[str, Any] = {"concurrency_id": MODEL_LINE, "concurrency_limit": 1}  # for an event that waits in the line
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}  # for an event of the page's own
MAX_WAITING = 16
MAX_OF_ALL = 4 * MAX_WAITING  # that wait in all lines of the page, where Gradio says so
MAX_OF_SESSION = 2  # one that runs, and one that waits its turn
MAX_OF_ADDRESS = 3
LOOK_SECONDS = 0.05  # between two looks into the line: 0.4% of a core; Gradio's thousand a second take 3%
REPORT_SECONDS = 1.0  # and between two looks for reports of progress, of which nothing here makes any
SEEN_IN = "6.31.0"  # the version of Gradio whose queue this is
KEPT = "event_queue_per_concurrency_id", "active_jobs", "sleep_when_free", "progress_update_sleep_when_free"
DONE = "push", "send_message", "remove_from_queue"


def job(work: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a handler whose event is a race or a study, and not the loading of a preset. See `Job.work`."""

    def mark(handler: Callable[..., Any]) -> Callable[..., Any]:
        handler.job = work  # type: ignore[attr-defined]
        return handler

    return mark


class Line(Queue):
    """Gradio's queue with limits. Gradio makes nothing of it public: nothing else of ours looks into it.

    Two races or measurements of each session and three of each address can be waiting or running, besides three loads
    of presets for each address, and sixteen events can wait.
    """

    def __init__(self, engine: Engine, blocks: gr.Blocks) -> None:
        """Refuses a version of Gradio that keeps its queue otherwise."""
        super().__init__(True, blocks.max_threads, 1, MAX_OF_ALL, blocks)
        if missing := [name for name in (*KEPT, *DONE) if not hasattr(self, name)]:
            raise BadInput(
                f"Gradio {gr.__version__} has another queue than {SEEN_IN}: it lacks {', '.join(missing)}. "
                f"Install gradio=={SEEN_IN}."
            )
        self.engine = engine
        self.proxied = False  # whether every request comes through a proxy that says whose it is, as on a Space
        self.sleep_when_free, self.progress_update_sleep_when_free = LOOK_SECONDS, REPORT_SECONDS
        self._one_by_one = asyncio.Lock()  # else several could join between the check and the joining

    @property
    def waiting(self) -> list[Any]:
        """The events that wait for the model, in order."""
        line = self.event_queue_per_concurrency_id.get(MODEL_LINE)
        return list(line.queue) if line else []

    @property
    def running(self) -> list[Any]:
        """The event that has the model, if one has."""
        started = [event for events in self.active_jobs for event in events or ()]
        return [event for event in started if event.concurrency_id == MODEL_LINE]

    async def push(self, body: Any, request: Any, username: str | None) -> Any:
        """What is called to join any line, with a body that Gradio has read."""
        fn = self.blocks.fns.get(body.fn_index)
        async with self._one_by_one:
            if fn and fn.concurrency_id == MODEL_LINE:
                # Gradio's server of tools has one session for all language models. Whoever says so without being that
                # gains nothing: a program can name a new session in every call.
                by_tools = request.headers.get("x-gradio-user") == "mcp"
                sentence = self.refusal(_is_job(fn), "" if by_tools else body.session_hash, request)
                if sentence and fn.api_visibility == "public" and not body.simple_format:  # Gradio's own clients
                    problem = {"__type__": "validate", "is_valid": False, "parameter_name": "line", "message": sentence}
                    raise HTTPException(422, [problem])  # type: ignore[arg-type]  # they read no other answer
                if sentence:
                    raise HTTPException(429, sentence)
            return await super().push(body, request, username)

    def refusal(self, is_job: bool, session: str | None, request: Request) -> str:
        """A sentence if a job, or the loading of a preset, may not join; else an empty text."""
        waiting = self.waiting
        alike = [event for event in (*self.running, *waiting) if _is_job(event.fn) == is_job]
        own = [event for event in alike if session and event.session_hash == session]
        if is_job and len(own) >= MAX_OF_SESSION:
            return f"{len(own)} of your requests are waiting or running: wait until one ends, or stop it."
        address = address_of(request.scope, self.proxied)
        theirs = [event for event in alike if address_of(event.request.scope, self.proxied) == address]
        if len(theirs) >= MAX_OF_ADDRESS:
            return f"{len(theirs)} requests from your address are waiting or running: wait until one ends."
        if len(waiting) >= MAX_WAITING:
            seconds = self.engine.expected_wait(list(map(_work, waiting)))
            when = f"in about {formatted(seconds, 'wait')}" if seconds else "later"
            return f"{len(waiting)} requests are waiting. Try again {when}."
        return ""

    def place(self, run_id: str) -> tuple[int, int, Sequence[str]] | None:
        """The place of a run in the line, from 1, of how many, and the works before it; place 0 while it is being
        started, None if it is not in the line."""
        waiting = self.waiting
        for at, event in enumerate(waiting):
            if _run_of(event) == run_id:
                return at + 1, len(waiting), list(map(_work, waiting[:at]))
        return (0, len(waiting), ()) if run_id in map(_run_of, self.running) else None

    def is_heard(self, session: str) -> bool:
        """Whether a client of this session still listens to the running event."""
        return any(event.alive for event in self.running if event.session_hash == session)

    async def leave(self, run_id: str) -> None:
        """Take a run that waits out of the line; its page hears that it is over."""
        for event in self.waiting:
            if _run_of(event) == run_id:
                await self.remove_from_queue(event._id)
                self.send_message(event, ProcessCompletedMessage(output={}, success=True))


def _is_job(fn: Any) -> bool:
    return hasattr(fn.fn, "job")


def _work(event: Any) -> str:
    """See `Job.work`; empty for the loading of a preset."""
    return getattr(event.fn.fn, "job", "")


def _run_of(event: Any) -> Any:
    """The id of the run that the page has asked for, see `run_and_stop`."""
    return next(iter(event.data.data), None) if event.data else None


def address_of(scope: Scope, proxied: bool) -> str:
    """The address that a request comes from: that of the connection, or the one that a proxy names.

    Each proxy adds its caller to the right of `x-forwarded-for`, and a caller can write anything to the left of that.
    So it is the last address there outside private networks, which the host's own proxies are in.
    """
    if proxied:
        headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
        for address in reversed(",".join(headers).split(",")):
            with suppress(ValueError):  # no address
                if ip_address(address.strip()).is_global:
                    return address.strip()
    return str((scope.get("client") or ("",))[0])
