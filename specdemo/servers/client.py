"""Asks a server over HTTP, and limits its answers in size and kind.

Keys are sent in a header and appear nowhere else: in no error, log or trace.

>>> with Client(Address.read("http://127.0.0.1:8080")) as client:
...     client.get("/props")["model_path"]
'/models/toy.gguf'
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import AliasPath, Field, Strict, ValidationError

from ..errors import BadInput
from ..formats import clipped
from ..models.tables import json_as, table_as
from ..system.progress import Stopped, check_stopped
from .address import Address

T = TypeVar("T")
CONNECT_SECONDS, SILENT_SECONDS = 5.0, 30.0  # to connect, and between two pieces of an answer
MAX_LINE, MAX_ANSWER = 1_000_000, 64_000_000  # bytes
LOOK_SECONDS = 0.1  # between two checks for Stop while a server is waited for
MAX_QUOTED = 200  # characters of a server's error message
STATUSES = {
    401: "asks for an API key, or does not know the one it was given",
    403: "does not let this API key ask",
    404: "has no {path}",
    408: "took too long to read the request",
    429: "has too much to do, or too many requests with this key: try again later",
}
# Types of fields. Each kind of server has dataclasses with the fields of its answers that are read here.
Count = Annotated[int, Strict(), Field(ge=0, lt=2**53)]
Number = Annotated[float, Strict(), Field(ge=0, lt=1e12)]
Ids = tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """An answer with token ids."""

    tokens: Ids


def at(name: str, *path: str | int) -> Any:
    """The place of a field in an answer."""
    return Field(validation_alias=AliasPath(name, *path))


class Client:
    """One server. Close it at the end.

    Args:
        key: the API key, if it asks for one.
    """

    def __init__(self, address: Address, key: str | None = None, silent_seconds: float = SILENT_SECONDS) -> None:
        self.address = address
        self._key = key
        headers = {"Accept-Encoding": "identity"}
        if address.pinned:
            headers["Host"] = address.netloc
        if key:
            if not key.isascii() or not key.isprintable():
                raise BadInput("An API key consists of plain printable characters.")
            headers["Authorization"] = f"Bearer {key}"
        timeout = httpx.Timeout(silent_seconds, connect=CONNECT_SECONDS)
        # Environment variables and .netrc are ignored: they could send a key or the request elsewhere.
        self._http = httpx.Client(base_url=address.url, headers=headers, timeout=timeout, trust_env=False)
        self._sockets: list[socket.socket] = []

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str) -> dict[str, Any]:
        """The server's answer, a JSON object."""
        return self._object("GET", path, None)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """As `get`."""
        return self._object("POST", path, body)

    def read(self, kind: type[T], answer: dict[str, Any], otherwise: str) -> T:
        """An answer as an instance of a dataclass."""
        try:
            return table_as(kind, answer)
        except ValidationError:
            raise self.wrong(otherwise) from None

    def text(self, path: str) -> str:
        """A page of plain text, such as the counters."""
        with self._answer("GET", path, None) as response:
            return self._read(response).decode(errors="replace")

    def stream(self, kind: type[T], path: str, **body: Any) -> Generator[tuple[float, T], None, None]:
        """The server-sent events of an answer, up to its end or `[DONE]`, as instances of a dataclass. To be closed.

        Yields:
            The seconds from the request to the event, and the event.
        Raises:
            ValueError: an event is not of this kind.
        """
        began = time.perf_counter()
        with self._answer("POST", path, body) as response:
            self._check_type(response, "text/event-stream", "instead of a stream")
            for line in self._lines(response):
                seconds = time.perf_counter() - began
                if not line.startswith(b"data:"):
                    continue  # comments, and the names and ids of events
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    event = json_as(kind, data)
                except ValidationError:  # it quotes the data, which may hold the key
                    self._parsed(data)  # says what else it is, such as an error
                    raise ValueError("an event of another kind") from None
                yield seconds, event

    def _object(self, how: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._answer(how, path, body) as response:
            self._check_type(response, "json", "where JSON belongs")
            return self._parsed(self._read(response))

    @contextmanager
    def _answer(self, how: str, path: str, body: dict[str, Any] | None) -> Iterator[httpx.Response]:
        """An answer of which only the head has been read."""
        request = self._http.build_request(how, path, json=body, extensions={"trace": self._note_socket})
        if self.address.pinned:
            request.extensions["sni_hostname"] = self.address.host
        try:
            with self._ended_by_stop():
                response = self._http.send(request, stream=True, follow_redirects=False)
                try:
                    if not response.is_success:
                        raise self.wrong(self._status(response, path))
                    yield response
                finally:
                    response.close()
        except httpx.ConnectTimeout:
            raise self.wrong(f"does not answer within {CONNECT_SECONDS:g} seconds") from None
        except httpx.TimeoutException:
            seconds = self._http.timeout.read
            raise self.wrong(f"has said nothing for {seconds:g} seconds, so the request was given up") from None
        except httpx.ConnectError as error:
            raise self.wrong(f"cannot be reached: {self._brief(error)}") from None
        except httpx.RemoteProtocolError:
            raise self.wrong("closed the connection in the middle of its answer") from None
        except httpx.HTTPError as error:
            raise self.wrong(f"cannot be asked: {self._brief(error)}") from None

    @contextmanager
    def _ended_by_stop(self) -> Iterator[None]:
        """Shut down the connections once the work is stopped: a thread may wait for a server that says nothing, such as
        in a long prefill."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                try:
                    check_stopped()
                except Stopped:
                    for connection in self._sockets:
                        with suppress(OSError):  # it is closed
                            connection.shutdown(socket.SHUT_RDWR)

        watcher = threading.Thread(target=copy_context().run, args=(watch,), daemon=True)
        watcher.start()
        try:
            yield
        except (httpx.HTTPError, BadInput):
            check_stopped()
            raise
        else:
            check_stopped()  # the end of the connection may look like that of an answer
        finally:
            over.set()
            watcher.join()

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        """Called by httpx for each step of a request."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def _status(self, response: httpx.Response, path: str) -> str:
        """A sentence on the status of a failure, with the server's own words if they cannot hold the key."""
        code = response.status_code
        if response.is_redirect:
            return "answers with a redirect, which is not followed: give the address it leads to"
        if code in (401, 403):  # some servers quote a part of the key
            return f"{STATUSES[code]} ({code})"
        words = STATUSES.get(code, "refuses the request" if code < 500 else "has failed").format(path=path)
        try:
            message = json.loads(self._read(response))
            message = message.get("error", message) if isinstance(message, dict) else message
            message = message.get("message", "") if isinstance(message, dict) else message
        except (BadInput, ValueError, RecursionError, httpx.HTTPError):
            message = ""
        return f"{words} ({code}{f': {self._brief(message)}' if message else ''})"

    def _check_type(self, response: httpx.Response, wanted: str, otherwise: str) -> None:
        found = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if wanted not in found:
            raise self.wrong(f"answers {self._brief(found or 'without a content type')} {otherwise}")

    def _pieces(self, response: httpx.Response, most: int) -> Iterator[bytes]:
        """An answer of at most so many bytes."""
        size = 0
        for piece in response.iter_bytes():
            size += len(piece)
            if size > most:
                raise self.wrong(f"does not end its answer: more than {most // 1_000_000} MB came")
            yield piece

    def _lines(self, response: httpx.Response) -> Iterator[bytes]:
        """The lines of a stream. Those of httpx also end at other characters, which JSON may hold."""
        rest = b""
        for piece in self._pieces(response, MAX_ANSWER):
            *lines, rest = (rest + piece).split(b"\n")
            if max(map(len, (*lines, rest))) > MAX_LINE:
                raise self.wrong(f"sends a line of more than {MAX_LINE // 1_000_000} MB")
            yield from lines
        if rest:
            yield rest

    def _read(self, response: httpx.Response) -> bytes:
        """A whole answer that is not a stream."""
        return b"".join(self._pieces(response, MAX_LINE))

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data.decode("utf-8"))
        except UnicodeDecodeError:
            raise self.wrong("sends half a character") from None
        except (ValueError, RecursionError):
            raise self.wrong("sends something that is no JSON") from None
        if not isinstance(value, dict):
            raise self.wrong("sends something else than a JSON object")
        if value.get("error"):  # an error in the middle of a stream comes after the status
            error = value["error"]
            raise self.wrong(f"has failed: {self._brief(error.get('message') if isinstance(error, dict) else error)}")
        return value

    def wrong(self, words: str) -> BadInput:
        """An error that says what the server does."""
        return BadInput(f"The server at {self.address} {words}.")

    def _brief(self, words: object) -> str:
        """The words of a server or a library on one short line, without the key."""
        text = str(words).replace(self._key, "***") if self._key else str(words)
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split()).rstrip(".")
        return clipped(line, MAX_QUOTED)
