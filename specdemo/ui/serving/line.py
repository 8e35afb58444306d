"""The line for the model: who may join it, and what others hear.

Gradio keeps the line: it starts one event after the other, tells each browser its rank and the expected time, and
removes events whose page is gone. It has no limits for a session or an address, and says of a full line only that it is
full. So each event passes through `Door` before it joins.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from gradio.data_classes import PredictBody
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...formats import formatted
from ..runs import QueuePosition, Runs
from .queue import events_of, ids_of

MODEL_LINE = "model"  # Gradio's concurrency_id of whatever uses the model
MODEL: dict[str, Any] = {"concurrency_id": MODEL_LINE, "concurrency_limit": 1}  # for an event that waits in the line
LOAD = "load"  # the work of an event that loads a preset
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}  # for an event of the page's own
MAX_WAITING = 16
MAX_OF_SESSION = 2  # one that runs, and one that waits its turn
MAX_OF_ADDRESS = 3
CANCELLING = ("/gradio_api/cancel", "/gradio_api/reset")  # Gradio's page calls both for the same event
JOINING = re.compile(r"/gradio_api/(?:queue/join|call/(?:v2/)?(?P<name>[^/]+))/?$")


def job(work: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a handler whose event is a race or a study, and not the loading of a preset.

    Args:
        work: what it is, see `durations.Timed`. What asks for it learns by this name why it may not join.
    """

    def mark(handler: Callable[..., Any]) -> Callable[..., Any]:
        handler.job = work  # type: ignore[attr-defined]
        return handler

    return mark


class Door:
    """Middleware that lets an event join the line, or answers 429 with a sentence on why it may not; and keeps Gradio
    from cancelling another event than the one that a page names.

    Two races or measurements of each session and three of each address can be waiting or running, besides three loads
    of presets for each address, and sixteen events can wait. The page asks for the sentence by `Runs.refusal`, because
    Gradio's script shows it for some seconds only.
    """

    def __init__(self, app: ASGIApp, runs: Runs, proxied: bool = False) -> None:
        """
        Args:
            proxied: whether every request comes through a proxy that says whose it is, as on a Space.
        """
        self.app, self.runs, self.proxied = app, runs, proxied
        self._one_by_one = asyncio.Lock()  # else several could join between the check and the joining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        called, cancels = JOINING.search(posted), posted.endswith(CANCELLING)
        if not called and not cancels:
            return await self.app(scope, receive, send)
        body = await Request(scope, receive).body()
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return read.pop() if read else await receive()

        async with self._one_by_one:
            if called is None:
                cancelled = _cancelled(scope["app"].get_blocks(), body)
                read[0]["body"] = cancelled or b""
                app = self.app if cancelled else JSONResponse({"success": True})
                return await app(scope, again, send)
            fn, session = _call(scope, called["name"], body)
            if _by_tools(scope):
                session = ""
            sentence = self._refusal(scope, fn, session) if fn is not None else ""
            if not sentence:
                return await self.app(scope, again, send)
        if session:
            self.runs.refuse(session, _work(fn), sentence)
        by_client = fn.api_visibility == "public" and called["name"] is None  # which reads no other answer
        problems = [{"__type__": "validate", "is_valid": False, "parameter_name": "line", "message": sentence}]
        answer = JSONResponse({"detail": problems if by_client else sentence}, 422 if by_client else 429)
        await answer(scope, again, send)

    def _refusal(self, scope: Scope, fn: Any, session: str) -> str:
        """A sentence if the event may not join, else an empty text."""
        waiting, running = events_of(scope["app"].get_blocks(), MODEL_LINE)
        alike = [event for event in (*running, *waiting) if _is_job(event.fn) == _is_job(fn)]
        own = [event for event in alike if session and event.session_hash == session]
        if _is_job(fn) and len(own) >= MAX_OF_SESSION:
            return f"{len(own)} of your requests are in the line: wait until one ends, or stop it."
        address = address_of(scope, self.proxied)
        theirs = [event for event in alike if address_of(event.request.scope, self.proxied) == address]
        if len(theirs) >= MAX_OF_ADDRESS:
            return f"{len(theirs)} requests from your address are in the line: wait until one ends."
        if len(waiting) >= MAX_WAITING:
            return f"{len(waiting)} requests are waiting. Try again {self._in(waiting)}."
        return ""

    def _in(self, waiting: Sequence[Any]) -> str:
        """When the line may have moved on, estimated from the last jobs."""
        seconds = self.runs.engine.expected_wait([_work(event.fn) for event in waiting])
        if not seconds:
            return "later"
        return f"in about {formatted(seconds, 'wait')}"


def _by_tools(scope: Scope) -> bool:
    """Whether Gradio's server of tools calls. It has one session for all language models, which so differ by
    address alone. Whoever says so without being that gains nothing: a program can name a new session in every call."""
    return (b"x-gradio-user", b"mcp") in scope["headers"]


def _is_job(fn: Any) -> bool:
    return hasattr(fn.fn, "job")


def _work(fn: Any) -> str:
    """What an event of the line is, see `durations.Timed`."""
    return fn.fn.job if _is_job(fn) else LOAD


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


def _call(scope: Scope, name: str | None, body: bytes) -> tuple[Any, str]:
    """The called function, None if it does not use the model's line, and the calling session."""
    try:
        call = json.loads(body)
        fns = scope["app"].get_blocks().fns
        if name is None:
            found = fns.get(PredictBody.model_validate(call).fn_index)  # which may be written "12", 12.0 or true
        else:
            found = next(fn for fn in fns.values() if fn.api_name == name)
        session = call.get("session_hash")
    except (ValueError, AttributeError, StopIteration, RecursionError):
        return None, ""  # Gradio refuses it
    in_line = found is not None and found.concurrency_id == MODEL_LINE
    return found if in_line else None, session if isinstance(session, str) else ""


def _cancelled(blocks: Any, body: bytes) -> bytes | None:
    """What Gradio has to cancel, None for nothing.

    If the named event is over, Gradio would cancel another one of the same function and session. And a page that has
    yet to hear the id of its last event names none.
    """
    try:
        call = json.loads(body)
        event, session, fn = (call.get(key) for key in ("event_id", "session_hash", "fn_index"))
    except (ValueError, AttributeError, RecursionError):
        return body  # which Gradio refuses
    waiting, running = events_of(blocks, MODEL_LINE)
    theirs = [ids_of(other) for other in (*running, *waiting) if other.session_hash == session]
    of_it = [one for one, function in theirs if function == fn]
    if event is None:
        return json.dumps({**call, "event_id": of_it[-1]}).encode() if of_it else None
    return None if of_it and event not in of_it else body


def place_of(blocks: Any, session: str) -> QueuePosition | None:
    """The place of the session's first race or study that waits; None if none does."""
    waiting, running = events_of(blocks, MODEL_LINE)
    places = [at for at, event in enumerate(waiting, 1) if event.session_hash == session and _is_job(event.fn)]
    if not places:
        return None
    works, place = [_work(event.fn) for event in waiting], places[0]
    return QueuePosition(place, len(waiting), [_work(event.fn) for event in running], works[: place - 1])


def is_heard(blocks: Any, session: str) -> bool:
    """Whether the page of a session still listens to the event that has the model."""
    return any(event.alive for event in events_of(blocks, MODEL_LINE)[1] if event.session_hash == session)
