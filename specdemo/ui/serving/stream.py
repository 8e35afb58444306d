"""Server-sent events: of a run its place in the line and then its messages, and for every open page the status.

They do not go through Gradio, whose stream makes the browser visit every control of the form for each message. On a
small machine that costs the engine a tenth of its speed. Each page that follows the status would also occupy one of 40
workers; here it is a coroutine that sleeps until the status changes, and only places in line are read every second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..jobs import Job
from ..runs import Runs
from ..values import to_json

KEEP_ALIVE_SECONDS = 15.0  # proxies drop connections that are silent for longer
MAX_DIGITS = 10  # of the number of a message
LOGIN_CHECK = "/gradio_api/login_check"
LINE_SECONDS = 1.0  # between two reads of a place in line
JOINING_SECONDS = 5.0  # until a run is in the line, for which its page sends another request
PAUSE_SECONDS = 0.2  # the least time between two messages, since a download's progress changes more often


def stream_route(runs: Runs) -> Route:
    """`/races/<id>`: the place of a run in the line while it waits, as `line`, and its messages, from the first or
    after the last one that the browser has."""

    async def follow(request: Request) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        run_id, first = request.path_params["run"], after(request.headers.get("last-event-id", ""))
        end = time.monotonic() + JOINING_SECONDS
        while (run := runs.find(Job, run_id)) is None and runs.line.place(run_id) is None:
            if time.monotonic() > end:
                return Response(status_code=204)  # which tells the browser not to ask again
            await asyncio.sleep(PAUSE_SECONDS)
        if run and run.ended.is_set() and first >= len(run.messages):
            return Response(status_code=204)
        events = _events(run, first) if run else _in_turn(runs, run_id)
        return StreamingResponse(events, media_type="text/event-stream")

    return Route("/races/{run}", follow)


async def _in_turn(runs: Runs, run_id: str) -> AsyncIterator[str]:
    sent = None
    with following(runs.engine.followers) as changed:
        while (run := runs.find(Job, run_id)) is None and (place := runs.line.place(run_id)):
            changed.clear()
            at, of, before = place
            seconds = runs.engine.expected_wait(before)
            line = {"place": at, "of": of, "seconds": None if seconds is None else _in_steps(seconds)}
            yield f"data: {to_json({'line': line})}\n\n" if at and line != sent else ":\n\n"
            sent = line
            await is_set(changed, LINE_SECONDS)
    if run:
        async with aclosing(_events(run, 0)) as events:
            async for event in events:
                yield event


async def may_see(request: Request) -> bool:
    """Whether Gradio would serve this visitor, who may need a login (`auth` of `launch`).

    Asks Gradio's own route, with the cookies of the request.
    """
    root, cookies = request.scope.get("root_path", ""), {"cookie": request.headers.get("cookie", "")}
    gradio = httpx.ASGITransport(request.app, root_path=root)
    async with httpx.AsyncClient(transport=gradio, trust_env=False, base_url="http://localhost") as client:
        return (await client.get(root + LOGIN_CHECK, headers=cookies)).status_code == 200


def after(last: str) -> int:
    """The number of the message after the last one that the browser has; 0 if it has none."""
    short = last.isascii() and last.isdecimal() and len(last) < MAX_DIGITS
    return int(last) + 1 if short else 0


@contextmanager
def following(followers: set[Callable[[], None]]) -> Iterator[asyncio.Event]:
    """An event that is set whenever the followers are called, by any thread."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the server was closed meanwhile
            loop.call_soon_threadsafe(news.set)

    followers.add(wake)
    try:
        yield news
    finally:
        followers.discard(wake)


async def is_set(news: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, but no longer than this; whether it was set. Takes less time than `asyncio.wait_for`."""
    loop = asyncio.get_running_loop()
    end = loop.call_later(seconds, news.set)
    try:
        await news.wait()
    finally:
        end.cancel()
    return loop.time() < end.when()


async def _events(run: Job, first: int) -> AsyncGenerator[str]:
    """Sleeps until the run has news. Polling would take time from the engine, which uses every core."""
    try:
        with following(run.followers) as news:
            ended = False
            while not ended:
                news.clear()
                ended = run.ended.is_set()  # read before the messages, so that none is missed
                while first < len(run.messages):
                    yield f"id: {first}\ndata: {run.messages[first]}\n\n"
                    first += 1
                if not ended and not await is_set(news, KEEP_ALIVE_SECONDS):
                    yield ": still here\n\n"
    finally:
        run.stop_unless_followed()


# The status ----------------------------------------------------------------------------------------------------


def status_route(runs: Runs) -> Route:
    """`/status?session=<hash>`: the status now and at every change."""

    async def follow(request: Request) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        news = _news(runs, request.query_params.get("session", ""))
        return StreamingResponse(news, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return Route("/status", follow)


async def _news(runs: Runs, session: str) -> AsyncIterator[str]:
    sent = ""
    with following(runs.engine.followers) as changed, runs.present(session):
        while True:
            changed.clear()
            message = to_json(asdict(runs.engine.status_for(session)))
            yield f"data: {message}\n\n" if message != sent else ":\n\n"
            sent = message
            await asyncio.sleep(PAUSE_SECONDS)
            await is_set(changed, KEEP_ALIVE_SECONDS)


def _in_steps(seconds: float) -> int:
    """Round to 5 or 30 seconds, so that a page gets few messages."""
    step = 5 if seconds < 60 else 30
    return round(seconds / step) * step
