"""Puts elements into the head of the page. The `head` of `launch` would come after Gradio has begun, one by one."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runs import Runs


class Head:
    """Middleware that puts elements at the beginning and at the end of the page's head.

    Serving the page counts as work besides the engine.
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

        if scope["type"] == "http" and scope["path"] == "/":
            with self.runs.engine.beside.work():
                await self.app(scope, receive, send_on)
        else:
            await self.app(scope, receive, send)
