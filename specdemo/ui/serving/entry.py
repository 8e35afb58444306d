"""What is refused before anything reads it."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 4_000_000  # bytes; JSON may write each of the 300,000 characters of a prompt and a grammar with twelve
REPLAYS = "/replays"  # whose files may be larger, see `replay.opening`


class Entry:
    """Middleware that reads the body of a request, and refuses one that is too large.

    Gradio has no such limit, and reads JSON in the server's event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) == REPLAYS:
            return await self.app(scope, receive, send)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                refusal = JSONResponse({"detail": f"A request has at most {MAX_BODY / 1e6:g} MB."}, 413)
                return await refusal(scope, receive, send)
            more = message.get("more_body", False)
        read: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, again, send)
