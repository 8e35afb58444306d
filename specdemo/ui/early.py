"""A script that runs before Gradio's own; what `launch` takes as the head of the page comes after them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EarlyScript:
    """Middleware that puts a script at the beginning of the page."""

    def __init__(self, app: ASGIApp, script: str) -> None:
        self.app = app
        self.head = f"<head><script>{script}</script>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0] != b"content-length"]
            else:
                message["body"] = message["body"].replace(b"<head>", self.head, 1)
            await send(message)

        is_page = scope["type"] == "http" and scope["path"] == "/"
        await self.app(scope, receive, send_on if is_page else send)
