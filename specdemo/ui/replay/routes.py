"""The recordings that ship, and the routes of their player: a recording is fetched, a trace is posted."""

from __future__ import annotations

import asyncio
import gzip
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest
from starlette.responses import Response
from starlette.routing import Route

from ...models.presets import DEFAULT_PRESET
from ...racing.trace import read_trace, trace_lines
from ..serving.request_guard import REPLAYS
from ..serving.stream import may_see
from ..values import to_json
from .opening import MAX_TRACE, NOT_OPENED, OPENING_SECONDS, TOO_LARGE, opened
from .playable import playable_json, playable_request

RECORDINGS = Path(__file__).resolve().parents[3] / "presets" / "recordings"
SUFFIX = ".jsonl.gz"
OPENING = "facts-4"  # of the prompt, the drafter and the K that the form begins with
AT_ONCE = asyncio.Semaphore(2)  # files that are read at the same time; whoever comes next is asked to try again
MOST_ARRIVING = 4 * MAX_TRACE  # bytes of all files that are being sent: those who send slowly hinder nobody
BUSY = "Others are opening files just now. Try again in a moment."


@cache
def prepared() -> dict[str, tuple[dict[str, Any], bytes]]:
    """The recordings that ship, by the name of the file that the page fetches: what `recordings` says of it, and what
    the script plays, as packed JSON. Made once in a process, so that a visit costs the engine nothing."""
    found = {}
    paths = {path.name.removesuffix(SUFFIX): path for path in RECORDINGS.glob(f"*{SUFFIX}")}
    for name in sorted(paths):
        lines = trace_lines(paths[name])
        header, _ = read_trace(lines[:1])
        request = playable_request(header)
        packed = gzip.compress(playable_json("recording", lambda lines=lines: lines).encode(), mtime=0)  # type: ignore[misc]
        file = f"{name}-{sha256(packed).hexdigest()[:12]}.json"  # so that browsers can keep it for good
        model = "" if header["preset"] == DEFAULT_PRESET else f"{header['preset']}, "
        tree = f"trees of {request.settings.k}, " if request.settings.tree else ""
        machine = header["environment"]
        where = f", {machine['device_name']}" if machine["device"].startswith("cuda") else ""
        settings = f"{model}{request.drafter}, {tree}temperature {request.settings.temperature:g}{where}"
        facts = {"name": name, "category": name.partition("-")[0], "prompt": request.prompt, "settings": settings}
        at_ease = not (model or tree or request.settings.temperature)
        found[file] = {**facts, "file": file, "at_ease": at_ease}, packed
    return found


def opening_file() -> str:
    """The file of the recording that the page opens with."""
    return next(file for file, (facts, _) in prepared().items() if facts["name"] == OPENING)


def attracting_files() -> list[str]:
    """Those that play when nobody is there: of the default preset, with chains at temperature 0."""
    return [facts["file"] for facts, _ in prepared().values() if facts["at_ease"]]


def recordings() -> list[dict[str, Any]]:
    """The recordings that ship: `name`, `category`, `prompt`, `settings` in a few words, and the `file` to fetch;
    `at_ease` is whether it is of the default preset, with chains at temperature 0."""
    return [facts for facts, _ in prepared().values()]


def replay_routes() -> list[Route]:
    """`/recordings/<file>`: a recording, to be kept by the browser. `/replays`: a trace is posted, and what the script
    plays comes back."""
    arriving = 0  # bytes

    async def recording(request: WebRequest) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        found = prepared().get(request.path_params["file"])
        if found is None:
            return Response(status_code=404)
        headers = {"content-encoding": "gzip", "cache-control": "max-age=31536000, immutable"}
        return Response(found[1], media_type="application/json", headers=headers)

    async def read(request: WebRequest, file: bytearray) -> bytes | str:
        nonlocal arriving
        async for part in request.stream():
            file += part
            arriving += len(part)
            if len(file) > MAX_TRACE:
                return to_json({"error": TOO_LARGE})
            if arriving > MOST_ARRIVING:
                return to_json({"error": BUSY})
        if AT_ONCE.locked():
            return to_json({"error": BUSY})
        async with AT_ONCE:
            return await opened(file)

    async def replay(request: WebRequest) -> Response:
        nonlocal arriving
        if not await may_see(request):
            return Response(status_code=401)
        file = bytearray()
        try:
            return _json(await asyncio.wait_for(read(request, file), OPENING_SECONDS))
        except asyncio.TimeoutError:
            return _json(to_json({"error": NOT_OPENED}))
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody hears
        finally:
            arriving -= len(file)

    return [Route("/recordings/{file}", recording), Route(REPLAYS, replay, methods=["POST"])]


def _json(content: bytes | str) -> Response:
    return Response(content, media_type="application/json")
