"""A server on loopback that answers as a test says, byte by byte."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specdemo.models.tables import table_as

STREAMS = Path(__file__).parent / "streams"
T = TypeVar("T")
Answer = Callable[[socket.socket], None]


@dataclass(frozen=True)
class Chunk:
    """An event of a stream, which arrived `seconds` after the request was sent."""

    seconds: float
    data: dict[str, Any]


def sent(kind: type[T], chunks: Iterable[Chunk]) -> Iterator[tuple[float, T]]:
    """The events as the client reads them."""
    return ((chunk.seconds, table_as(kind, chunk.data)) for chunk in chunks)


class FakeServer:
    """Answers a path by what `answers` holds for it; keeps the heads and bodies that it was sent."""

    def __init__(self, answers: Mapping[str, bytes | Answer]) -> None:
        self.answers, self.asked = answers, list[tuple[str, str, bytes]]()
        self.open = 0  # connections

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,)).start()

    def answer(self, connection: socket.socket) -> None:
        self.open += 1
        try:
            with connection, connection.makefile("rb") as sent:
                head = b""
                while (line := sent.readline()) not in (b"\r\n", b""):
                    head += line
                length = next((int(row[15:]) for row in head.lower().splitlines() if row[:15] == b"content-length:"), 0)
                path = head.split(b" ", 2)[1].decode()
                self.asked.append((path, head.decode(), sent.read(length)))
                answer = self.answers.get(path, status(404, "Not Found"))
                if callable(answer):
                    answer(connection)
                else:
                    connection.sendall(answer)
        except OSError:  # whoever asked has gone
            pass
        finally:
            self.open -= 1


@contextmanager
def serving(answers: Mapping[str, bytes | Answer], host: str = "127.0.0.1") -> Iterator[tuple[FakeServer, str]]:
    """A fake server and its address."""
    server = FakeServer(answers)
    with socket.create_server((host, 0)) as listener:
        thread = threading.Thread(target=server.serve, args=(listener,))
        thread.start()
        try:
            yield server, f"http://{host}:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def head(kind: str, code: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {code}\r\nContent-Type: {kind}\r\n{more}Connection: close\r\n\r\n".encode()


def json_answer(value: Any) -> bytes:
    return head("application/json") + json.dumps(value).encode()


def status(code: int, words: str, body: bytes = b"") -> bytes:
    return head("application/json", f"{code} {words}") + body


def stream_answer(*data: Any) -> bytes:
    return head("text/event-stream") + b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in data)


def recorded(name: str) -> tuple[dict[str, Any], list[Chunk]]:
    """The head of a recorded stream, which says where it is from, and its chunks."""
    first, *lines = map(json.loads, (STREAMS / f"{name}.jsonl").read_text().splitlines())
    return first, [Chunk(line["seconds"], line["data"]) for line in lines]


def llamacpp_answers(stream: bytes | Answer, metrics: bytes | None = None) -> dict[str, bytes | Answer]:
    """What llama.cpp's server answers, with this stream as a text."""
    models = {"data": [{"id": "/models/toy.gguf", "owned_by": "llamacpp"}]}
    answers: dict[str, bytes | Answer] = {
        "/v1/models": json_answer(models),
        "/props": json_answer({"model_path": "/models/toy.gguf", "build_info": "b1-test"}),
        "/apply-template": json_answer({"prompt": "<user>Hi<end>"}),
        "/completion": stream,
    }
    return answers | ({} if metrics is None else {"/metrics": metrics})


def replayed(name: str) -> bytes:
    return stream_answer(*(chunk.data for chunk in recorded(name)[1]))


def replayed_alone(name: str) -> bytes:
    """The same text of llama.cpp without a draft: an event a round, in the same form."""
    events = []
    for chunk in recorded(name)[1]:
        count = chunk.data["timings"]["predicted_n"]
        timings = {"prompt_ms": 175.0, "predicted_n": count, "predicted_ms": 0.001 + 8 * (count - 1)}
        events.append({**chunk.data, "timings": timings})
    return stream_answer(*events)
