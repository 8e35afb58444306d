"""Asks a server over HTTP, and limits its answers in size, time and kind.

Keys are sent in a header and appear nowhere else: in no error, log or trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpcore
import httpx
from pydantic import AliasPath, Field, Strict, ValidationError

from ..errors import BadInput
from ..models.tables import json_as, table_as
from ..system.progress import check_stopped
from .address import Address

T = TypeVar("T")
CONNECT_SECONDS, SILENT_SECONDS = 5.0, 30.0  # to connect, and between two pieces of an answer
ANSWER_SECONDS = 600.0  # for a whole answer
MAX_LINE, MAX_ANSWER = 1_000_000, 64_000_000  # bytes
LOOK_SECONDS = 0.2  # between two checks for Stop while the server is silent
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
        self._http = httpx.Client(
            base_url=address.url, headers=headers, timeout=timeout, trust_env=False, transport=_Transport()
        )

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

    def stream(self, kind: type[T], path: str, **body: Any) -> Iterator[tuple[float, T]]:
        """The server-sent events of an answer, up to its end or `[DONE]`, as instances of a dataclass.

        Yields:
            The seconds from the request to the event, and the event.
        Raises:
            ValueError: an event is not of this kind.
        """
        began = time.perf_counter()
        with self._answer("POST", path, body) as response:
            if not _type(response).startswith("text/event-stream"):
                raise self.wrong(f"answers {_brief(_type(response) or 'without a content type')} instead of a stream")
            for line in self._lines(response, began):
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
            if "json" not in _type(response):
                raise self.wrong(f"answers {_brief(_type(response) or 'without a content type')} where JSON belongs")
            return self._parsed(self._read(response))

    @contextmanager
    def _answer(self, how: str, path: str, body: dict[str, Any] | None) -> Iterator[httpx.Response]:
        """An answer of which only the head has been read."""
        request = self._http.build_request(how, path, json=body)
        if self.address.pinned:
            request.extensions["sni_hostname"] = self.address.host
        try:
            response = self._http.send(request, stream=True, follow_redirects=False)
            try:
                if not response.is_success:
                    raise self.wrong(self._status(response, path))
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise self.wrong("packs its answer, although it was asked not to")
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

    def _status(self, response: httpx.Response, path: str) -> str:
        """A sentence on the status of a failure, with the server's own words if they cannot hold the key."""
        code = response.status_code
        if response.is_redirect:
            return "answers with a redirect, which is not followed: give the address it leads to"
        if code in (401, 403):  # some servers quote a part of the key
            return f"{STATUSES[code]} ({code})"
        words = STATUSES.get(code, "refuses the request" if code < 500 else "has failed").format(path=path)
        try:
            said = json.loads(self._read(response))
            said = said.get("error", said) if isinstance(said, dict) else said
            said = said.get("message", "") if isinstance(said, dict) else said
        except (BadInput, ValueError, RecursionError, httpx.HTTPError):
            said = ""
        return f"{words} ({code}{f': {self._brief(said)}' if said else ''})"

    def _lines(self, response: httpx.Response, began: float) -> Iterator[bytes]:
        """The lines of an answer, which may not be too long, too many or too late."""
        line, size = bytearray(), 0
        for piece in response.iter_raw():
            check_stopped()
            size += len(piece)
            if size > MAX_ANSWER:
                raise self.wrong(f"does not end its answer: more than {MAX_ANSWER // 1_000_000} MB came")
            if time.perf_counter() - began > ANSWER_SECONDS:
                raise self.wrong(f"does not end its answer within {ANSWER_SECONDS:g} seconds")
            end, *others = piece.split(b"\n")
            line += end
            if max(map(len, (line, *others))) > MAX_LINE:
                raise self.wrong(f"sends a line of more than {MAX_LINE // 1_000_000} MB")
            if others:
                yield bytes(line)
                yield from others[:-1]
                line = bytearray(others[-1])
        if line:
            yield bytes(line)

    def _read(self, response: httpx.Response) -> bytes:
        """A whole answer that is not a stream."""
        parts, size, began = [], 0, time.perf_counter()
        for piece in response.iter_raw():
            size += len(piece)
            if size > MAX_LINE or time.perf_counter() - began > ANSWER_SECONDS:
                raise self.wrong("answers with more than was asked for")
            parts.append(piece)
        return b"".join(parts)

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

    def _brief(self, said: object) -> str:
        """The words of a server or a library on one line, without the key."""
        text = str(said).replace(self._key, "***") if self._key else str(said)
        return _brief(text)


def _type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _brief(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    words = " ".join(printable.split()).rstrip(".")
    return words if len(words) <= MAX_QUOTED else words[: MAX_QUOTED - 3] + "..."


# Connections that can be given up while a server says nothing, such as in a long prefill -----------------------


class _Stream(httpcore.NetworkStream):
    """A connection whose reads wait in short turns."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Raises: Stopped: the work was stopped. httpcore.ReadTimeout: nothing came in `timeout` seconds."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            check_stopped()
            left = until - time.monotonic()
            try:
                return self._stream.read(max_bytes, max(0.001, min(LOOK_SECONDS, left)))
            except httpcore.ReadTimeout:
                if left <= LOOK_SECONDS:
                    raise

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def start_tls(self, *args: Any, **named: Any) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(*args, **named))


class _Backend(httpcore.SyncBackend):
    def connect_tcp(self, *args: Any, **named: Any) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(*args, **named))


class _Transport(httpx.HTTPTransport):
    """The transport of httpx with such connections."""

    def __init__(self) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        self._pool = httpcore.ConnectionPool(context, max_connections=None, network_backend=_Backend())
