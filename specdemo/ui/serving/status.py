"""Server-sent events with the status of the model and a visitor's place in line, for every open page.

They do not go through Gradio, where each following page occupies one of 40 workers. Here a page is a coroutine that
sleeps until the engine's status changes; only places in line are read every second.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..runs import Runs
from ..values import to_json
from .stream import KEEP_ALIVE_SECONDS, following, may_see

LINE_SECONDS = 1.0  # between two reads of a visitor's place in line
PAUSE_SECONDS = 0.2  # the least time between two messages, since a download's progress changes more often


def status_route(runs: Runs) -> Route:
    """`/status?session=<hash>`: the status now and at every change, with the session's place in the line."""

    async def follow(request: Request) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        news = _news(runs, request.query_params.get("session", ""))
        return StreamingResponse(news, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return Route("/status", follow)


async def _news(runs: Runs, session: str) -> AsyncIterator[str]:
    loop, said, at = asyncio.get_running_loop(), "", 0.0
    with following(runs.engine.followers) as changed:
        while True:
            changed.clear()
            line = _line(runs, session)
            message = to_json({**asdict(runs.engine.status), "line": line})
            if message != said or loop.time() - at > KEEP_ALIVE_SECONDS:
                yield f"data: {message}\n\n" if message != said else ":\n\n"
                said, at = message, loop.time()
            await asyncio.sleep(PAUSE_SECONDS)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), LINE_SECONDS if line else KEEP_ALIVE_SECONDS)


def _line(runs: Runs, session: str) -> dict[str, Any] | None:
    """`place` of `of` in line, how many of each kind are `before` it, and the estimated `seconds` if they are known;
    None for a session that does not wait."""
    found = runs.place(session)
    if found is None:
        return None
    seconds = runs.engine.expected_wait(found.before)
    kinds = Counter(work.partition(" ")[0] for work in (*found.current, *found.before))
    told = {"place": found.place, "of": found.of, "before": kinds}
    return {**told, "seconds": None if seconds is None else _rounded(seconds)}


def _rounded(seconds: float) -> int:
    """Round to 5 or 30 seconds, so that a page gets few messages."""
    step = 5 if seconds < 60 else 30
    return round(seconds / step) * step
