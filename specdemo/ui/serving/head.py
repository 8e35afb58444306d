"""The head of the page with our script and style sheet, and these as files that browsers keep.

The `head` of `launch` would come after Gradio has begun, one by one.
"""

from __future__ import annotations

import gzip
from contextlib import nullcontext
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runs import Runs
from .joined import script, style

TYPES = {".js": "text/javascript", ".css": "text/css"}
TELLING = "/config", "/gradio_api/info"  # what Gradio makes anew for every program that comes to call
KEEP = (b"cache-control", b"public, max-age=31536000, immutable")  # what has its content's hash in its name


class PageHead:
    """Middleware that puts elements at the beginning and at the end of the page's head.

    Serving the page, or telling a program what it is made of, counts as work besides the engine. Browsers keep Gradio's
    hundred files, too: they would ask whether one has changed as long as it is young, and Gradio would send it again.
    """

    def __init__(self, app: ASGIApp, first: str, last: str, runs: Runs) -> None:
        self.app, self.runs = app, runs
        self.first, self.last = f"<head>{first}".encode(), f"{last}</head>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0] != b"content-length"]
            elif message["type"] == "http.response.body":
                body = message.get("body", b"").replace(b"<head>", self.first, 1)
                message["body"] = body.replace(b"</head>", self.last, 1)
            await send(message)

        async def send_to_keep(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                message["headers"] = [*message["headers"], KEEP]
            await send(message)

        path = scope["path"] if scope["type"] == "http" else ""
        changed = send_to_keep if path.startswith("/assets/") else send_on if path == "/" else send
        with self.runs.engine.other_work() if path == "/" or path.rstrip("/") in TELLING else nullcontext():
            await self.app(scope, receive, changed)


@cache
def files() -> tuple[str, dict[str, bytes]]:
    """A name that changes when any of the files does, and the files by their names, packed."""
    found = {"main.js": script("main.js"), "watch.js": script("watch/watch.js"), "page.css": style()}
    name = sha256(repr(found).encode()).hexdigest()[:12]
    return name, {file: gzip.compress(content.encode(), mtime=0) for file, content in found.items()}


def script_tag(file: str = "main.js") -> str:
    """For the beginning of the page: scripts of modules run in the order of the page, so ours runs before Gradio's."""
    return f'<script type="module" src="./modules/{files()[0]}/{file}"></script>'


def style_tag() -> str:
    """For the end of the page's head: after Gradio's own style sheet."""
    return f'<link rel="stylesheet" href="./modules/{files()[0]}/page.css">'


def files_route() -> Route:
    """`/modules/<name>/<file>`: one of the files. They hold nothing that needs a login."""

    async def file(request: Request) -> Response:
        name, found = files()
        path = request.path_params["file"]
        if request.path_params["name"] != name or path not in found:
            return Response(status_code=404)
        headers = {"content-encoding": "gzip", "cache-control": "max-age=31536000, immutable"}
        return Response(found[path], media_type=TYPES[Path(path).suffix], headers=headers)

    return Route("/modules/{name}/{file}", file)
