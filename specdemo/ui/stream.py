"""The messages of a run as server-sent events.

They do not go through Gradio, whose own stream makes the browser look at every control of the form for each message:
on a small machine that costs the engine a tenth of its speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from .runs import Job, Runs


def stream_route(runs: Runs) -> Route:
    """`/races/<id>`: the messages of a run, from the first or from after the one that the browser had last."""

    async def follow(request: Request) -> Response:
        run = runs.find(Job, request.path_params["run"])
        last = request.headers.get("last-event-id", "")
        first = int(last) + 1 if last.isdecimal() else 0
        if run is None or (run.ended.is_set() and first >= len(run.messages)):
            return Response(status_code=204)  # which tells the browser not to ask again
        return StreamingResponse(_events(run, first), media_type="text/event-stream")

    return Route("/races/{run}", follow)


async def _events(run: Job, first: int) -> AsyncIterator[str]:
    """Sleeps until the run has news: to look now and then would take from the engine, which has every core."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:  # called by the thread that plays the run
        with suppress(RuntimeError):  # the server was closed meanwhile
            loop.call_soon_threadsafe(news.set)

    run.followers.add(wake)
    try:
        ended = False
        while not ended:
            news.clear()
            ended = run.ended.is_set()  # asked before the messages, so that nothing said last is missed
            while first < len(run.messages):
                yield f"id: {first}\ndata: {run.messages[first]}\n\n"
                first += 1
            if not ended:
                await news.wait()
    finally:
        run.followers.discard(wake)
