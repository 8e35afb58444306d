"""The head of the page with our scripts and style sheets, and these as files that browsers keep.

The `head` of `launch` would come after Gradio has begun, one by one.
"""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runs import Runs

UI = Path(__file__).resolve().parents[1]
PARTS = "assets/page", "race/race", "replay/replay", "share/share", "watch/watch"
STYLES = tuple(f"{part}.css" for part in (*PARTS, "lab/lab", "race/stage"))
TEMPLATES = tuple(f"{part}.html" for part in PARTS)
MAIN = "main.js"  # imports the other scripts
EARLY = "early.js"  # stands in the page itself
TYPES = {".js": "text/javascript", ".css": "text/css"}
TELLING = "/config", "/gradio_api/info"  # what Gradio makes anew for every program that comes to call
KEEP = (b"cache-control", b"public, max-age=31536000, immutable")  # what has its content's hash in its name


class PageHead:
    """Middleware that puts elements at the beginning and at the end of the page's head.

    Serving the page, or telling a program what it is made of, counts as work besides the engine. Browsers would ask for
    Gradio's hundred files at every visit whether they have changed, as long as these are young.
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
def sources() -> dict[str, bytes]:
    """The scripts and style sheets by their paths."""
    paths = [*(UI / style for style in STYLES), *(path for path in UI.rglob("*.js") if path.name != EARLY)]
    files = {path.relative_to(UI).as_posix(): path.read_bytes() for path in paths}
    # Not as elements of the page: Gradio empties the `template` elements that it is given.
    html = json.dumps("".join((UI / name).read_text(encoding="utf-8") for name in TEMPLATES))
    files["templates.js"] = f"export const html = {html};\n".encode()
    return dict(sorted(files.items()))


@cache
def modules() -> tuple[str, dict[str, bytes]]:
    """A name that changes when any of the files does, and the files by their paths, packed.

    They refer to each other by relative paths, so the name stands before the paths of all of them.
    """
    name = sha256(repr([*sources().items()]).encode()).hexdigest()[:12]
    return name, {path: gzip.compress(content, mtime=0) for path, content in sources().items()}


def script_tags() -> str:
    """For the beginning of the page: scripts of modules run in the order of the page, so ours run before Gradio's."""
    name, files = modules()
    early = (UI / "assets" / EARLY).read_text(encoding="utf-8")
    ahead = [f'<link rel="modulepreload" href="./modules/{name}/{path}">' for path in files if path.endswith(".js")]
    main = f'<script type="module" src="./modules/{name}/{MAIN}"></script>'
    return "".join([f"<script>{early}</script>", *ahead, main])


def style_tags() -> str:
    """For the end of the page's head: after Gradio's own style sheet."""
    name, _ = modules()
    return "".join(f'<link rel="stylesheet" href="./modules/{name}/{style}">' for style in STYLES)


def modules_route() -> Route:
    """`/modules/<name>/<path>`: one of the files. They hold nothing that needs a login."""

    async def module(request: Request) -> Response:
        name, files = modules()
        path = request.path_params["path"]
        if request.path_params["name"] != name or path not in files:
            return Response(status_code=404)
        headers = {"content-encoding": "gzip", "cache-control": "max-age=31536000, immutable"}
        return Response(files[path], media_type=TYPES[Path(path).suffix], headers=headers)

    return Route("/modules/{name}/{path:path}", module)
