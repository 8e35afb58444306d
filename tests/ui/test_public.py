"""What a stranger can send and see: odd headers and numbers, a login, failures that are not ours."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from specdemo.errors import BadInput
from specdemo.settings import SETTINGS
from specdemo.studies.explain import tried
from specdemo.studies.lab import STUDIES
from specdemo.ui.race import tab as race_tab
from specdemo.ui.race.form import FIELDS
from specdemo.ui.race.run import RaceRun
from specdemo.ui.serving import stream
from specdemo.ui.serving.head import PageHead
from specdemo.ui.serving.request_guard import RequestGuard
from tests.harness.ui_classes import Runs

from ..fakes.engine import Script, asked_by_form
from ..sentences import refuses, tells
from .browser import Caller, in_a_loop_of_its_own, served
from .test_messages import ask

ODD_NUMBERS: list[Any] = [
    *(math.nan, math.inf, -math.inf, float("1e400"), 1e308, -1, -0.5, 4.5, True, None),
    *(10**20, 10**400, -(10**400), 10**5000, "4 ", "²", "١", "1e400", "", [], {}, [4]),
]
NUMBERS = ["k", "temperature", "max_new_tokens", "seed", "top_k", "top_p", "ahead"]


def taken(read: Callable[[], Any]) -> Any:
    """What is read; None if it is refused in a short sentence."""
    refusal = ""
    try:
        return read()
    except BadInput as error:
        refusal = str(error)
    assert len(refusal) < 200
    assert refusal.endswith(".")
    return None


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ODD_NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_a_number_of_the_race_is_taken_as_it_is_or_refused_in_a_sentence(name: str, value: Any) -> None:
    kept = taken(lambda: getattr(asked_by_form(**{name: value}).settings, name))
    whole = SETTINGS[name].kind == "whole" or name == "k"
    assert kept is None or (kept == value and type(kept) in ([int] if whole else [int, float]))


@pytest.mark.parametrize("view", STUDIES)
@pytest.mark.parametrize("value", ODD_NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_a_number_of_the_lab_is_taken_as_it_is_or_refused_in_a_sentence(view: str, value: Any) -> None:
    for field in STUDIES[view].form():
        if field.kind in ("whole", "number"):
            kept = taken(partial(field.read, value))
            assert kept is None or (kept == value and field.low <= kept <= field.high)


@pytest.mark.parametrize("number", [math.nan, math.inf, -1, 10**400, "1", None, True, [1]])
@pytest.mark.parametrize("name", ["draft_ms", "target_ms", "alpha"])
def test_a_number_of_the_theory_that_cannot_be_is_refused(name: str, number: Any) -> None:
    with refuses(BadInput, "number"):
        tried({"draft_ms": 1, "target_ms": 10, "alpha": 0.5, name: number})


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Runs]]:
    runs = Runs()
    with served(Script(), runs=runs) as url:
        yield url, runs


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("place", "number"),
    [
        *((3, number) for number in ("1e400", "-1e400", "NaN", "9" * 5000, "9" * 400, '"4 "', "true", "[[4]]", "{}")),
        *((4, number) for number in ("1e400", "NaN", "Infinity", "-Infinity", "9" * 400, '"4 "', "true")),
        *((place, "1e400") for place in (5, 6, 7, 8)),
    ],
    ids=range(20),
)
def test_a_number_in_a_call_is_refused_without_a_word_of_pythons(
    site: tuple[str, Runs], place: int, number: str
) -> None:
    data = [*('"one"', '"scripted"', '"none"', "1", "0", "4", "0", "0", "1.0"), *("null", "false", "false")]
    data += ['"match"', "false", "1", "0", '""', "1"]
    data[place] = number
    with Caller(site[0]) as caller:
        content, kind = f'{{"data": [{",".join(data)}]}}', {"content-type": "application/json"}
        joined = caller.http.post("/gradio_api/call/compare", content=content, headers=kind)
        assert joined.status_code in (200, 400, 422)
        text = joined.text
        if joined.status_code == 200:
            event = joined.json()["event_id"]
            text = caller.http.get(f"/gradio_api/call/compare/{event}").text
            assert re.search("event: error\ndata: .*must", text)
    assert not re.search("Traceback|Exceeds the limit|OverflowError|File ", text)


@pytest.mark.parametrize("path", ["queue/join", "call/replays", "component_server", "cancel", "upload"])
def test_a_request_that_is_too_large_is_not_read(site: tuple[str, Runs], path: str) -> None:
    whole = b" " * 4_000_001
    for content in (whole, iter([whole[:1_000_000], whole[1_000_000:]])):  # the second does not say how much comes
        answer = httpx.post(f"{site[0]}gradio_api/{path}", content=content, timeout=60)
        assert answer.status_code == 413
        assert tells(answer.json()["detail"], "request 4 MB.")


def test_a_prompt_of_the_most_characters_in_the_most_bytes_is_read(site: tuple[str, Runs]) -> None:
    content, kind = json.dumps({"data": ["\U0001f600" * 200_000]}), {"content-type": "application/json"}
    assert len(content) > 2_000_000
    answer = httpx.post(f"{site[0]}gradio_api/call/unknown", content=content, headers=kind, timeout=60)
    assert answer.status_code != 413


def test_a_trace_may_be_larger(site: tuple[str, Runs]) -> None:
    answer = httpx.post(f"{site[0]}replays", content=b"x" * 4_000_001, timeout=60)
    assert tells(answer.json()["error"], "not trace")


def test_the_large_answers_on_a_race_are_made_one_at_a_time(
    site: tuple[str, Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, runs = site
    run, making, together = runs.begin(RaceRun(ask()), "anyone"), list[int](), list[int]()

    def trace(run: RaceRun) -> str:
        making.append(1)
        together.append(len(making))
        time.sleep(0.05)
        making.pop()
        return ""

    monkeypatch.setattr(RaceRun, "trace", trace)
    parts = httpx.get(f"{url}config").json()["components"]
    ids = {name: part["id"] for part in parts for name in part["props"].get("server_fns", ())}

    def ask_for(name: str) -> int:
        body = {"component_id": ids[name], "fn_name": name, "session_hash": "anyone", "data": run.id}
        return httpx.post(f"{url}gradio_api/component_server", json=body, timeout=60).status_code

    with ThreadPoolExecutor(9) as threads:
        assert {*threads.map(ask_for, ["trace", "saved", "race"] * 3)} == {200}
    assert together == [1] * 9


def at_host(url: str, host: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{url}gradio_api/queue/status", headers={"host": host, **headers}, timeout=60)


def test_a_page_of_this_machine_answers_no_other_name(site: tuple[str, Runs]) -> None:
    """The name of a stranger's page can be made to lead to this machine, and its scripts could then use this page."""
    url = site[0]
    port = httpx.URL(url).port
    for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "127.0.0.1:8080"):
        assert at_host(url, host).status_code == 200
    for host in ("stranger.example", f"stranger.example:{port}", "localhost.stranger.example", "[", "a:b", ""):
        refused = at_host(url, host)
        assert refused.status_code == 403
        assert tells(refused.json()["detail"], f"machine http://127.0.0.1:{port}/.")


def test_a_proxy_on_this_machine_may_have_a_name(site: tuple[str, Runs]) -> None:
    """A stranger's script can write what a proxy writes, but the port of its page is that of this server."""
    url = site[0]
    for header in ("x-forwarded-for", "x-forwarded-host", "forwarded"):
        assert at_host(url, "demo.example", **{header: "1.2.3.4"}).status_code == 200
        assert at_host(url, f"demo.example:{httpx.URL(url).port}", **{header: "1.2.3.4"}).status_code == 403


@pytest.mark.parametrize(
    ("name", "share", "status"), [("0.0.0.0", False, []), ("127.0.0.1", True, []), ("::1", False, [403])]
)
def test_a_page_that_others_reach_may_have_any_name(name: str, share: bool, status: list[int]) -> None:
    blocks = SimpleNamespace(server_name=name, server_port=7860, share=share)
    scope: Scope = {"type": "http", "path": "/", "headers": [(b"host", b"demo.example")]}
    scope["app"], sent = SimpleNamespace(get_blocks=lambda: blocks), list[Message]()

    async def receive() -> Message:
        return {"type": "http.request"}

    async def app(*_: Any) -> None:
        pass

    async def send(message: Message) -> None:
        sent.append(message)

    in_a_loop_of_its_own(RequestGuard(app)(scope, receive, send))
    assert [message["status"] for message in sent if "status" in message] == status


# The stream of a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["²", "-1", "9" * 5000, "١", "1.5", "1e3", "+1", "0x1"])
def test_an_odd_number_of_the_last_message_is_taken_for_none(site: tuple[str, Runs], last: str) -> None:
    url, runs = site
    run = runs.begin(RaceRun(ask()), "anyone")
    run.messages.append(run.message(status={}))
    run.ended.set()
    request = httpx.Request("GET", f"{url}races/{run.id}", headers=[(b"last-event-id", last.encode())])
    answer = httpx.Client().send(request)
    assert answer.status_code == 200
    assert answer.text == f"id: 0\ndata: {run.messages[0]}\n\n"


def test_a_silent_run_keeps_its_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.05)
    run = RaceRun(ask())

    async def follow() -> list[str]:
        events = stream._events(run, 0)
        first = [await asyncio.wait_for(anext(events), 10) for _ in range(2)]
        run.messages.append(run.message(status={}))
        run._wake()
        return [*first, await asyncio.wait_for(anext(events), 10)]

    *comments, message = in_a_loop_of_its_own(follow())
    assert comments == [": still here\n\n"] * 2  # a comment: no browser shows it
    assert message.startswith("id: 0\n")


def test_behind_a_login_a_run_is_shown_to_no_one_else() -> None:
    runs = Runs()
    with served(Script(), runs=runs, auth=("me", "secret")) as url:
        run = runs.begin(RaceRun(ask()), "mine")
        run.messages.append(run.message(status={"words": "mine alone"}))
        run.ended.set()
        assert '"elem_id":"race"' not in httpx.get(url, timeout=60).text  # see ahead.js
        stranger = httpx.get(f"{url}races/{run.id}", timeout=60)
        assert (stranger.status_code, stranger.text) == (401, "")
        assert httpx.get(f"{url}races/{run.id}", headers={"cookie": "access-token=x"}).status_code == 401
        with httpx.Client(base_url=url, timeout=60) as own:
            assert own.post("/login", data={"username": "me", "password": "wrong"}).status_code == 400
            assert own.get(f"/races/{run.id}").status_code == 401
            assert own.post("/login", data={"username": "me", "password": "secret"}).status_code == 200
            shown = own.get(f"/races/{run.id}")
            assert shown.status_code == 200
            assert "mine alone" in shown.text
            assert own.get("/races/unknown").status_code == 204
            for method, path in (("GET", "/status"), ("GET", "/recordings/unknown"), ("POST", "/replays")):
                assert httpx.request(method, f"{url[:-1]}{path}").status_code == 401
            assert own.get("/recordings/unknown").status_code == 404
            assert tells(own.post("/replays", content=b"nothing").text, "trace")


# Failures that are not ours --------------------------------------------------------------------------------


def test_what_python_says_of_a_failure_does_not_reach_the_page(
    site: tuple[str, Runs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("/home/someone/secret")

    monkeypatch.setattr(race_tab, "describe", broken)
    monkeypatch.setattr(race_tab, "read_form", broken)
    with httpx.Client(base_url=site[0], timeout=30) as client:
        fns = client.get("/config").json()["dependencies"]
        # A handler outside the line, which Gradio itself answers for.
        index = {(fn["targets"][0][1], len(fn["inputs"])): fn["id"] for fn in fns if fn["targets"]}
        body = {"fn_index": index["change", 2], "data": ["scripted", "none"], "session_hash": "a"}
        answer = client.post("/gradio_api/run/predict", json=body)
        assert (answer.status_code, answer.json()) == (500, {"error": None})
        # The handler of Run.
        data = [*[None] * len(FIELDS), "preset", *[""] * 5]  # and what races, the guesses of a game, and the servers
        data[FIELDS.index("preset")] = "scripted"
        body = {"fn_index": index["ask", len(data)], "data": data, "session_hash": "a"}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
        text = client.get("/gradio_api/queue/data", params={"session_hash": "a"}).text
    assert tells(text, "RuntimeError engine")
    assert "secret" not in text
    assert "/home/someone/secret" in caplog.text


# The script at the beginning of the page -------------------------------------------------------------------


def to_device(messages: list[Message]) -> list[Message]:
    """What is sent when an application sends these for the page."""
    out: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def keep(message: Message) -> None:
        out.append(message)

    runs: Any = SimpleNamespace(engine=SimpleNamespace(other_work=nullcontext))
    page: Callable[..., Any] = PageHead(app, "<script>", "<style>", runs)
    in_a_loop_of_its_own(page({"type": "http", "path": "/"}, None, keep))
    return out


def test_elements_are_put_into_the_page_and_into_nothing_else() -> None:
    start: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]}
    body: Message = {"type": "http.response.body", "body": b"<head></head>", "more_body": True}
    first, page, end = to_device([start, body, {"type": "http.response.body"}])
    assert first["headers"] == []
    assert page["body"] == b"<head><script><style></head>"
    assert end["body"] == b""
    path = {"type": "http.response.pathsend", "path": "/tmp/index.html"}
    assert to_device([dict(start), dict(path)])[1] == path
    assert json.dumps(path)
