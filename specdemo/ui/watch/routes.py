"""The routes of watching along: a page shares its races, and others watch them and vote. They need no login but the
link."""

from __future__ import annotations

import re
from asyncio import sleep
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from socket import AF_INET, SOCK_DGRAM, socket
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import segno
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...racing.game import Guess
from ..runs import Runs
from ..serving.head import script_tag
from ..serving.request_guard import LOOPBACK
from ..serving.stream import KEEP_ALIVE_SECONDS, after, following, is_set, may_see
from .watches import Watch, Watches

ENDED = b"event: ended\ndata:\n\n"
GONE = "Nobody shares a race here. The link is wrong, or the sender has stopped sharing."
NOT_OPEN = "The server does not know this page. Reload it and try again."
WAITED = 20  # times that a session is looked for: on a busy machine a new page takes seconds to report
LONGEST_ADDRESS = 500  # a QR code of it can still be read
SENT_PER_SECOND = 64  # at most, to all watchers of a page together: to send events takes time from the engine
EVERYWHERE = "0.0.0.0", "::"  # hosts of a page for the network
ELSEWHERE = "192.0.2.1", 9  # an address for documentation (RFC 5737): not of this machine
VOTER = re.compile("[0-9a-f]{16}")
PRIVATE = {"cache-control": "no-store", "referrer-policy": "no-referrer"}


@dataclass(frozen=True)
class Vote:
    """What a watcher sends: the number of the ballot, and the guess."""

    voter: str
    number: int
    guess: Guess


VOTE = TypeAdapter(Vote)


def watch_routes(runs: Runs, head: str) -> list[Route]:
    """`/watches?session=<hash>`: a page begins to share; `/watches/<token>?session=<hash>`: it stops.
    `/watch/<token>`: the page of a watcher; `/watched/<token>?voter=<id>`: its events, the messages of one race after
    the other, and when a vote opens and ends. `/votes/<token>`: a watcher guesses; `/votes/<token>?session=<hash>`: the
    page that shares opens a vote, counts the guesses, and ends it.

    The page that shares knows the `address` at which others reach the server, unless it is on the server's own machine.

    Args:
        head: the elements of style that the page of a watcher needs.
    """
    watches = Watches(runs)

    async def share(request: Request) -> Response:
        if not await may_see(request):
            return Response(status_code=401)
        session, address = (request.query_params.get(name, "") for name in ("session", "address"))
        watch = None
        for _ in range(WAITED if session and len(address) <= LONGEST_ADDRESS else 0):
            if watch := watches.share(session):
                break
            await sleep(0.2)  # a page that comes back into sight asks for its status again just now
        if watch is None:
            return JSONResponse({"error": NOT_OPEN}, 409)
        link = network_address(address, request.app.get_blocks()) + watch.token
        picture = segno.make(link, micro=False).svg_data_uri(scale=5, light="#fff")
        return JSONResponse({"token": watch.token, "link": link, "picture": picture})

    async def stop(request: Request) -> Response:
        if (watch := shared(request)) is None:
            return Response(status_code=404)
        watches.end(watch)
        return Response(status_code=204)

    def refused(watch: Watch | None) -> tuple[str, int]:
        """Why someone cannot watch, and the status of that answer; an empty text if they can."""
        if watch is None:
            return GONE, 404
        if watch.watchers >= runs.most_watchers:
            return f"{watch.watchers} people are already watching, and this is the limit. Try again later.", 503
        return "", 200

    async def page(request: Request) -> Response:
        sentence, status = refused(watches.find(request.path_params["token"]))
        return HTMLResponse(_page(head, sentence), status, PRIVATE)

    async def events(request: Request) -> Response:
        watch = watches.find(request.path_params["token"])
        sentence, status = refused(watch)
        if watch is None or sentence:
            return Response(sentence, status)
        voter = request.query_params.get("voter", "")
        return Events(watch, after(request.headers.get("last-event-id", "")), voter if VOTER.fullmatch(voter) else "")

    def shared(request: Request) -> Watch | None:
        """What the page that sends this shares: watchers have the token, but not the session."""
        watch = watches.find(request.path_params["token"])
        return watch if watch and watch.session == request.query_params.get("session") else None

    async def votes(request: Request) -> Response:
        if (watch := shared(request)) is None:
            return Response(status_code=404)
        if request.method == "POST":
            watch.open()
        elif request.method == "DELETE":
            return JSONResponse({"guesses": watch.close()})
        return JSONResponse({"votes": len(watch.ballot.guesses) if watch.ballot else 0, "watchers": watch.watchers})

    async def vote(request: Request) -> Response:
        watch = watches.find(request.path_params["token"])
        try:
            sent = VOTE.validate_json(await request.body(), strict=True)
        except ValidationError:
            return Response(status_code=400)
        if watch is None or sent.voter not in watch.known:
            return Response(status_code=404)
        if watch.ballot is None or watch.ballot.number != sent.number:
            return Response(status_code=409)
        return Response(status_code=204 if watch.ballot.take(sent.voter, sent.guess, watch.voters) else 429)

    return [
        Route("/votes/{token}", votes, methods=["GET", "POST", "DELETE"]),
        Route("/votes/{token}", vote, methods=["PUT"]),
        Route("/watches", share, methods=["POST"]),
        Route("/watches/{token}", stop, methods=["DELETE"]),
        Route("/watch/{token}", page),
        Route("/watched/{token}", events),
    ]


class Events(StreamingResponse):
    """What is watched, to one watcher, who counts as long as it is sent."""

    def __init__(self, watch: Watch, first: int, voter: str = "") -> None:
        """`voter` is the watcher's id; "" cannot vote."""
        super().__init__(_events(watch, first), media_type="text/event-stream", headers=PRIVATE)
        self.watch, self.voter = watch, voter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.watch.watchers += 1
        if self.voter:
            self.watch.admit(self.voter)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.watch.watchers -= 1
            self.watch.voters -= Counter([self.voter])


async def _events(watch: Watch, first: int) -> AsyncIterator[bytes]:
    """From the event of this number on if it is of the latest race, else from the beginning of that."""
    feed = watch.feed
    asked: Any = watch  # no ballot: a watcher hears of the one that is open, or that none is
    place = max(0, first - feed.first)
    while True:
        with following(watch.followers) as news:
            ended, next_feed, ballot = watch.ended, feed.next, watch.ballot  # read before the events: none is missed
            events = feed.update()
            idle = place >= len(events) and not next_feed and not ended and ballot is asked
            if idle and not await is_set(news, KEEP_ALIVE_SECONDS):
                yield b":\n\n"
        if place < len(events):
            fresh, place = events[place:], len(events)
            yield b"".join(fresh)
            await sleep(watch.watchers / SENT_PER_SECOND)
        elif next_feed:
            feed, place = next_feed, 0
        elif ballot is not asked:
            asked = ballot
            yield f"event: vote\ndata: {ballot.number if ballot else 0}\n\n".encode()
            await sleep(watch.watchers / SENT_PER_SECOND)
        elif ended:
            yield ENDED
            return


def network_address(address: str, blocks: Any) -> str:
    """An address of this machine for itself, as the network knows it, if the page of `blocks` is for the network."""
    with suppress(OSError, ValueError), socket(AF_INET, SOCK_DGRAM) as probe:  # no network, or no address
        parts = urlsplit(address)
        if parts.hostname in LOOPBACK and blocks.server_name in EVERYWHERE:
            probe.connect(ELSEWHERE)  # nothing is sent: it chooses the interface
            return urlunsplit(parts._replace(netloc=f"{probe.getsockname()[0]}:{parts.port or blocks.server_port}"))
    return address


def _page(head: str, sentence: str) -> str:
    """The page of a watcher, or of a sentence on why there is nothing to watch. It is no page of Gradio's."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>specdemo: watching along</title>
<base href="../">
{head}{script_tag("watch.js")}
</head>
<body class="sd-watching">
<main class="gradio-container">
<header class="sd-top">
<h1 class="sd-brand">spec<b>demo</b></h1>
<p class="sd-watch-state" role="status">{escape(sentence)}</p>
</header>
</main>
</body>
</html>
"""
