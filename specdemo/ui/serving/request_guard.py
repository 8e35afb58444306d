"""What is refused before anything reads it."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 4_000_000  # bytes; JSON may write each of the 300,000 characters of a prompt and a grammar with twelve
LOOPBACK = "127.0.0.1", "localhost", "::1"
FORWARDED = {b"x-forwarded-for", b"x-forwarded-host", b"forwarded"}  # what proxies tell
REPLAYS = "/replays"  # whose files may be larger, see `replay.opening`


class RequestGuard:
    """Middleware that reads the body of a request, and refuses one that is too large, or that is not for this server.

    Gradio has no limit for bodies, and reads JSON in the server's event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        blocks = scope["app"].get_blocks()
        local = getattr(blocks, "server_name", "") in LOOPBACK and not blocks.share  # it has none while it starts
        if local and _is_strange(scope, blocks.server_port):
            words = f"This page opens only on the machine that runs it, at http://127.0.0.1:{blocks.server_port}/."
            return await JSONResponse({"detail": words}, 403)(scope, receive, send)
        if scope["path"].removeprefix(scope.get("root_path", "")) == REPLAYS:
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


def _is_strange(scope: Scope, port: int) -> bool:
    """Whether a request to a server of this machine names another host.

    Any page can have a name that leads to this machine, and its scripts may then use this one as if it were theirs. A
    proxy on this machine has a name, too, but not our port. A script can pass for a proxy, but not change its port.
    """
    headers = dict(scope["headers"])
    try:
        named = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}")
        return named.hostname not in LOOPBACK and (named.port == port or not FORWARDED & headers.keys())
    except ValueError:  # no address
        return True
