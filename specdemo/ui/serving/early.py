"""Puts a script before Gradio's own scripts. The `head` of `launch` would come after them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runs import Runs


class EarlyScript:
    """Middleware that puts a script at the beginning of the page. Serving it counts as work besides the engine."""

    def __init__(self, app: ASGIApp, script: str, runs: Runs) -> None:
        self.app, self.runs = app, runs
        self.head = f"<head><script>{script}</script>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0] != b"content-length"]
            elif message["type"] == "http.response.body":
                message["body"] = message.get("body", b"").replace(b"<head>", self.head, 1)
            await send(message)

        if scope["type"] == "http" and scope["path"] == "/":
            with self.runs.engine.beside.work():
                await self.app(scope, receive, send_on)
        else:
            await self.app(scope, receive, send)
