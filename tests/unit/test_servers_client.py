"""What a server may do to the client: one sentence each, and nothing is left running."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specdemo.errors import BadInput
from specdemo.racing.lanes import Lane
from specdemo.servers import address as addresses
from specdemo.servers import client as clients
from specdemo.servers import llamacpp, sglang, vllm
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.dialects import find_dialect
from specdemo.servers.race import server_lane
from specdemo.settings import Settings
from specdemo.system.progress import Stopped, attended

from ..fakes.server import (
    Answer,
    FakeServer,
    head,
    json_answer,
    llamacpp_answers,
    recorded,
    replayed,
    serving,
    status,
    stream_answer,
)
from ..sentences import refuses

KEY = "sk-very-secret-0123456789"
HELD = 0.3  # seconds of silence that these tests wait for


def stall(connection: socket.socket) -> None:
    connection.sendall(replayed("llamacpp-ended")[:700])
    time.sleep(4 * HELD)


def close_midway(connection: socket.socket) -> None:
    connection.sendall(head("text/event-stream", more="Transfer-Encoding: chunked\r\n") + b"10\r\ndata: {")


def long_line(connection: socket.socket) -> None:
    connection.sendall(head("text/event-stream"))
    for _ in range(100):
        connection.sendall(b"data: " + b"x" * 1_000_000)


def endless(connection: socket.socket) -> None:
    connection.sendall(head("text/event-stream"))
    event = b"data: " + json.dumps(recorded("llamacpp-ended")[1][1].data).encode() + b"\n\n"
    while True:
        connection.sendall(event * 100)


def endless_comments(connection: socket.socket) -> None:
    connection.sendall(head("text/event-stream"))
    while True:
        connection.sendall(b": still here\n\n" * 1000)


def endless_tokens(connection: socket.socket) -> None:
    event = recorded("llamacpp-ended")[1][1].data
    connection.sendall(head("text/event-stream"))
    for count in range(1, 100_000):
        times = {**event["timings"], "predicted_n": count, "predicted_ms": 5.0 * count}
        connection.sendall(b"data: " + json.dumps({**event, "timings": times}).encode() + b"\n\n")


EVENT, NEXT = (chunk.data for chunk in recorded("llamacpp-ended")[1][:2])
FAULTS: dict[str, tuple[bytes | Answer, str]] = {
    "stall": (stall, "0.3 seconds,"),
    "close midway": (close_midway, "closed middle"),
    "ends early": (stream_answer(EVENT), "finished."),
    "done early": (head("text/event-stream") + b"data: [DONE]\n\n", "finished."),
    "half a character": (head("text/event-stream") + b'data: {"content": "\xe2\x98"}\n\n', "half"),
    "401": (status(401, "Unauthorized", json.dumps({"error": {"message": f"wrong key {KEY}"}}).encode()), "key 401"),
    "403": (status(403, "Forbidden"), "key (403)"),
    "404": (status(404, "Not Found"), "/completion (404)."),
    "429": (status(429, "Too Many Requests"), "much (429)."),
    "500": (status(500, "Oops", b'{"error": {"message": "out of memory"}}'), "failed (500: out of memory)."),
    "500 with a page": (status(500, "Oops", b"<html>"), "failed (500)."),
    "400": (status(400, "Bad", json.dumps({"error": {"message": f"no {KEY}\n\x1b[1m"}}).encode()), "(400: no *** [1m)"),
    "redirect": (head("text/html", "302 Found", "Location: http://127.0.0.1:1/\r\n"), "redirect,"),
    "HTML": (head("text/html") + b"<html><body>Hello", "text/html"),
    "no type": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {}\n\n", "without type"),
    "a line of 100 MB": (long_line, "line 1 MB."),
    "endless": (endless, "2 MB"),
    "endless comments": (endless_comments, "2 MB"),
    "endless tokens": (endless_tokens, "20 tokens"),
    "no JSON": (head("text/event-stream") + b"data: {oops\n\n", "no JSON"),
    "deep": (head("text/event-stream") + b"data: " + b"[" * 50_000 + b"\n\n", "no JSON"),
    "a list": (stream_answer([1]), "JSON object"),
    "an error in the stream": (stream_answer(EVENT, {"error": {"message": f"lost {KEY}"}}), "failed: lost ***."),
    "another stream": (stream_answer({"choices": []}), "stream llama.cpp"),
    "odd counts": (stream_answer({**EVENT, "tokens": [True]}, NEXT), "stream llama.cpp"),
    "huge counts": (stream_answer({**EVENT, "tokens": [10**400]}, NEXT), "stream llama.cpp"),
    "no HTTP": (b"hello\r\n\r\n", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence(fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answer, words = FAULTS[fault]
    monkeypatch.setattr(clients, "MAX_ANSWER", 2_000_000)
    caplog.set_level("DEBUG")
    threads = threading.active_count()
    with asked(answer, KEY, HELD) as (_, lane):
        began = time.perf_counter()
        with refuses(BadInput, words) as refused:
            list(lane.events)
        assert time.perf_counter() - began < 10
    assert not lane.events.gi_frame  # type: ignore[attr-defined]
    wait_until(lambda: threading.active_count() == threads)
    sentence = str(refused.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "\x1b" not in sentence
    assert KEY not in sentence + caplog.text + "".join(map(str, lane_state(lane)))


@pytest.mark.parametrize("kind", [llamacpp.LlamaCppEvent, vllm.VLLMEvent, sglang.SGLangEvent])
def test_an_error_in_the_stream_of_any_server_is_told(kind: type) -> None:
    with (
        serving({"/there": stream_answer({"error": {"message": "lost it"}})}) as (_, where),
        Client(Address.read(where)) as client,
        refuses(BadInput, "lost it."),
    ):
        list(client.stream(kind, "/there"))


COUNTED = {"num_spec_steps": 2, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5, "num_spec_tokens": 4}
LISTS = {"per_step_accepted": [1, 4], "per_step_drafted": [4, 4]}
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a round without a draft": ({"speculative_decoding": {**COUNTED, **LISTS, "per_step_drafted": []}}, ""),
    "no counts": ({"speculative_decoding": LISTS}, ""),
    "a time below 0": ({"time_to_first_token_ms": -1}, ""),
    "counters without end": ({}, "vllm:generation_tokens_total 1e999\n"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_vllm_cannot_have_sent_is_one_sentence(lie: str) -> None:
    metrics, counters = LIES[lie]
    choices = [{"token_ids": ids, "text": "a", "finish_reason": None} for ids in ([1], [2, 3], [4])]
    events = [{"choices": [choice]} for choice in [*choices, {"token_ids": [], "finish_reason": "length"}]]
    answers = {
        "/v1/models": json_answer({"data": [{"id": "toy", "owned_by": "vllm"}]}),
        "/version": json_answer({"version": "0.32"}),
        "/tokenize": json_answer({"tokens": [1, 2]}),
        "/metrics": head("text/plain") + counters.encode(),
        "/v1/completions": stream_answer(*events, {"choices": [], "metrics": metrics}),
    }
    with serving(answers) as (_, where), Client(Address.read(where)) as client:
        lane, _ = server_lane("server", find_dialect(client), "Hi", False, Settings(max_new_tokens=20))
        with refuses(BadInput, "vLLM"):
            list(lane.events)


@contextmanager
def asked(answer: bytes | Answer, key: str | None = None, silent: float = 30.0) -> Iterator[tuple[FakeServer, Lane]]:
    """A server with this answer, and a lane that is about to ask it."""
    with serving(llamacpp_answers(answer)) as (server, where):
        with Client(Address.read(where), key, silent_seconds=silent) as client:
            yield server, server_lane("server", find_dialect(client), "Hi", False, Settings(max_new_tokens=20))[0]
        wait_until(lambda: not server.open)


def lane_state(lane: Any) -> list[Any]:
    return [lane, lane.text, lane.text.text]


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.perf_counter() + seconds
    while not true():
        assert time.perf_counter() < until
        time.sleep(0.01)


def test_whoever_stops_a_lane_leaves_nothing_running() -> None:
    with asked(stall) as (server, lane):
        next(lane.events)
        lane.events.close()  # type: ignore[attr-defined]
        wait_until(lambda: not server.open)


@pytest.mark.parametrize("said", [b"", replayed("llamacpp-ended")[:700]], ids=["nothing", "a beginning"])
def test_a_server_that_is_silent_does_not_delay_a_stop(said: bytes) -> None:
    pressed: list[float] = []

    def silent(connection: socket.socket) -> None:
        connection.sendall(said)
        pressed.append(time.perf_counter() + HELD)
        connection.recv(1)  # waits until whoever asked has gone

    with asked(silent) as (server, lane):
        with pytest.raises(Stopped), attended(lambda: bool(pressed) and time.perf_counter() > pressed[0]):
            list(lane.events)
        seconds = time.perf_counter() - pressed[0]
        wait_until(lambda: not server.open)
    assert seconds < 1  # 0.1 on a machine that is not busy, and not the 30 seconds of silence


def test_the_key_goes_into_one_header_and_the_stream_is_read() -> None:
    with serving(llamacpp_answers(replayed("llamacpp-ended"))) as (server, where):
        with Client(Address.read(f"{where}/v1/"), KEY) as client:
            dialect = find_dialect(client)
            assert dialect.facts == {"engine": "llama.cpp", "version": "b1-test", "model": "toy.gguf"}
            lane, report = server_lane("server", dialect, "Hi", False, Settings(max_new_tokens=40))
            for event in lane.events:
                lane.text.read(event)
        assert lane.text.text == "The snow lies soft upon the hill"
        assert report.counted is None  # it shows no counters
        assert all(f"Authorization: Bearer {KEY}" in asked for _, asked, _ in server.asked)
        body = json.loads(next(body for path, _, body in server.asked if path == "/completion"))
        assert (body["prompt"], body["stream"], body["cache_prompt"]) == ("<user>Hi<end>", True, False)


@pytest.mark.parametrize("key", ["ключ", "two\nlines"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with refuses(BadInput, "printable"):
        Client(Address.read("http://127.0.0.1:1"), key)


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{"id": "x", "owned_by": "me"}]}, {"data": [3]}])
def test_another_program_is_told(models: object) -> None:
    with (
        serving({"/v1/models": json_answer(models)}) as (_, where),
        Client(Address.read(where)) as client,
        refuses(BadInput, "llama.cpp's vLLM SGLang."),
    ):
        find_dialect(client)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8080",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:99999",
        "http://a b",
        f"http://user:{KEY}@127.0.0.1:1",
        f"http://{KEY}@127.0.0.1",
        f"http://127.0.0.1:1/?key={KEY}",
        "http://127.0.0.1:1/#there",
        "http://127.0.0.1:1/elsewhere",
        "http://[::1",
        "http://" + "a" * 300,
        "http://exämple.org",
    ],
)
def test_an_address_that_is_none_is_refused_without_being_quoted(text: str) -> None:
    with refuses(BadInput, "http://127.0.0.1:8080") as refused:
        Address.read(text)
    assert KEY not in str(refused.value)


def test_addresses_are_read() -> None:
    assert str(Address.read(" http://Localhost:8080/v1/ ")) == "http://localhost:8080"
    assert Address.read("https://example.org") == Address("https", "example.org", 443)
    assert Address.read("http://[::1]:81").url == "http://[::1]:81"


# From a public Space ----------------------------------------------------------------------------------------


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("SPACE_ID", "somebody/specdemo")
    monkeypatch.setattr(addresses, "_pinned", {})
    return lambda allowed: monkeypatch.setenv("SPECDEMO_ALLOW", allowed)


def test_a_space_asks_only_what_its_owner_allows(space: Callable[[str], None]) -> None:
    for allowed in ("", "https://example.org, http://127.0.0.1:81", "http://127.0.0.1"):
        space(allowed)
        with refuses(BadInput, "Space owner"):
            Address.read("http://127.0.0.1:8080")
    space("http://[oops, HTTP://127.0.0.1:8080/")
    assert Address.read("http://127.0.0.1:8080/v1").pinned == "127.0.0.1"
    space("http://127.0.0.1")
    assert Address.read("http://127.0.0.1:80").pinned == "127.0.0.1"


def test_a_name_that_leads_into_the_network_of_the_space_is_refused(
    space: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    space("http://models.example.org:8080")
    for ip in ("127.0.0.1", "10.0.0.7", "169.254.169.254", "::1", "fe80::1%eth0"):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, ip=ip, **__: [(0, 0, 0, "", (ip, 8080))])
        with refuses(BadInput, "private"):
            Address.read("http://models.example.org:8080")


def test_a_name_that_leads_to_loopback_the_second_time_is_asked_where_it_led_at_first(
    space: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public address stands for the internet: connections to it reach a fake server, others what is asked for."""
    public, looked_up, connected = "93.184.215.14", list[str](), list[tuple[str, int]]()
    connect, look_up = socket.create_connection, socket.getaddrinfo

    def rebinding(host: str, port: int, *args: Any, **named: Any) -> list[Any]:
        if host == "127.0.0.1":
            return look_up(host, port, *args, **named)
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (public if len(looked_up) == 1 else "127.0.0.1", port))]

    with serving(llamacpp_answers(replayed("llamacpp-ended"))) as (server, where):
        port = int(where.rpartition(":")[2])
        there = f"http://models.example.org:{port}"

        def routed(address: tuple[str, int], *args: Any, **named: Any) -> socket.socket:
            connected.append(address)
            return connect(("127.0.0.1", port) if address[0] == public else ("127.0.0.1", 1), *args, **named)

        space(there)
        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        monkeypatch.setattr(socket, "create_connection", routed)
        for _ in range(2):  # a second visitor as well
            with Client(Address.read(there)) as client:
                assert find_dialect(client).facts["model"] == "toy.gguf"
        monkeypatch.undo()
        assert looked_up == ["models.example.org"]
        assert {host for host, _ in connected} == {public}
        assert all(f"Host: models.example.org:{port}" in asked for _, asked, _ in server.asked)
