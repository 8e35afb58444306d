"""The routes of the Replay tab: a recording is fetched, a trace is posted."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as WebRequest
from starlette.responses import Response
from starlette.routing import Route

from ..serving.stream import may_see
from ..values import to_json
from .opening import NOT_OPENED, OPENING_SECONDS, opened
from .recordings import prepared

OPENING = asyncio.Semaphore(2)  # files at the same time; whoever comes next is asked to try again


def replay_routes() -> list[Route]:
    """`/recordings/<file>`: a recording, to be kept by the browser. `/replays`: a trace is posted, and what the script
    plays comes back."""

    async def recording(request: WebRequest) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        found = prepared().get(request.path_params["file"])
        if found is None:
            return Response(status_code=404)
        headers = {"content-encoding": "gzip", "cache-control": "max-age=31536000, immutable"}
        return Response(found[1], media_type="application/json", headers=headers)

    async def replay(request: WebRequest) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        if OPENING.locked():
            return _json(to_json({"error": "Others are opening files just now. Try again in a moment."}))
        async with OPENING:
            try:
                return _json(await asyncio.wait_for(opened(request.stream()), OPENING_SECONDS))
            except asyncio.TimeoutError:
                return _json(to_json({"error": NOT_OPENED}))

    return [Route("/recordings/{file}", recording), Route("/replays", replay, methods=["POST"])]


def _json(told: bytes | str) -> Response:
    return Response(told, media_type="application/json")
