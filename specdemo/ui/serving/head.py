"""Puts elements into the head of the page, and has browsers keep Gradio's own scripts.

The `head` of `launch` would come after Gradio has begun, one by one.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runs import Runs

TELLING = "/config", "/gradio_api/info"  # what Gradio makes anew for every program that comes to call
KEEP = (b"cache-control", b"public, max-age=31536000, immutable")  # what has its content's hash in its name


class Head:
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

        if scope["type"] == "http" and scope["path"].startswith("/assets/"):
            await self.app(scope, receive, send_to_keep)
        elif scope["type"] == "http" and scope["path"] == "/":
            with self.runs.engine.beside.work():
                await self.app(scope, receive, send_on)
        elif scope["type"] == "http" and scope["path"].rstrip("/") in TELLING:
            with self.runs.engine.beside.work():
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)
