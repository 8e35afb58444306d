"""Who may join the line for the model, what others hear, 64 programs that call at once, and who leaves."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import gradio as gr
import httpx
import psutil
import pytest
from gradio_client import Client
from playwright.sync_api import expect

from specdemo.errors import BadInput
from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.ui import line
from specdemo.ui.jobs import RACE
from specdemo.ui.line import LOOK_SECONDS, MAX_OF_ADDRESS, MAX_WAITING, REPORT_SECONDS, SEEN_IN, address_of
from specdemo.ui.look import launch_options
from specdemo.ui.page import build_page
from specdemo.ui.race.run import RaceRun
from specdemo.ui.runs import GRACE_SECONDS
from tests.harness.ui_classes import Runs

from ..fakes.engine import PROMPTS, Script
from ..fakes.network import Network
from ..sentences import refuses, telling, tells
from .browser import Caller, run, served, tokens_of, tokens_shown, wait_until
from .conftest import Visit
from .test_messages import ask

CLIENTS = 64


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, Script, Runs]]:
    script, runs = Script(), Runs()
    with served(script, runs=runs) as url:
        yield url, script, runs


@pytest.fixture
def held(place: tuple[str, Script, Runs]) -> Iterator[str]:
    """The address of a page whose races stand still until the test is over."""
    url, script, _ = place
    script.reset()
    script.gate.clear()
    yield url
    script.gate.set()
    with Caller(url, 250) as last:  # behind all others in the line
        wait_until(lambda: httpx.get(f"{url}gradio_api/queue/status").json()["queue_size"] < MAX_WAITING)
        assert last.outcome(last.join("last"))


def test_of_a_session_one_waits_for_the_other_and_a_third_is_refused(held: str, place: Any) -> None:
    _, script, _ = place
    with Caller(held, 1) as first, Caller(held, 2) as second:
        assert first.join("one", "mine").status_code == 200
        wait_until(lambda: script.open_races == 1)
        waits = first.join("two", "mine")
        assert waits.status_code == 200
        refused = first.join("three", "mine")
        assert refused.status_code == 429
        assert tells(refused.json()["detail"], "2 requests")
        answers = [second.join("one", "theirs") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        script.gate.set()
        assert first.outcome(waits)["plain"]["text"]  # and it ran in its turn


def fill(caller: Caller, script: Script) -> None:
    """As many races of an address as may be, the first of which runs."""
    for number in range(MAX_OF_ADDRESS):
        assert caller.join("one", f"session {number}").status_code == 200
        wait_until(lambda: script.open_races == 1)


def test_an_address_has_three_in_the_line(held: str, place: Any) -> None:
    with Caller(held, 1) as first, Caller(held, 2) as second:
        fill(first, place[1])
        refused = first.join("one", "session 4")
        assert refused.status_code == 429
        assert tells(refused.json()["detail"], "3 address")
        assert first.join("no session").status_code == 429
        assert second.join("one").status_code == 200


def test_an_address_has_three_loads_in_the_line(held: str, place: Any) -> None:
    with Caller(held, 1) as first, Caller(held, 2) as second:
        assert first.join("one", "mine").status_code == 200
        wait_until(lambda: place[1].open_races == 1)
        fns = first.http.get("/config").json()["dependencies"]
        load = next(fn["id"] for fn in fns if "retry" in [event for _, event in fn["targets"]])

        def choose(caller: Caller, session: str) -> httpx.Response:
            body = {"fn_index": load, "data": ["scripted"], "session_hash": session}
            return caller.http.post("/gradio_api/queue/join", json=body)

        assert [choose(first, "mine").status_code for _ in range(MAX_OF_ADDRESS + 1)] == [200, 200, 200, 429]
        assert choose(second, "theirs").status_code == 200
        assert first.join("one", "other").status_code == 200  # a race besides them


def test_a_function_is_counted_however_its_number_is_written() -> None:
    """Gradio takes "1", " 1", 1.0 and true for the function 1."""
    runs, gate = Runs(), threading.Event()
    runs.engine = Script().engine()

    @line.job(RACE)
    def race() -> None:
        gate.wait(30)

    with gr.Blocks() as page:
        for name in ("zero", "one"):
            gr.api(race, api_name=name, **line.MODEL)
    page._queue = runs.line = line.Line(runs.engine, page)
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options(runs))
    try:
        with Caller(url) as caller:
            bodies: list[dict[str, Any]] = [
                {"fn_index": number, "data": [], "session_hash": "mine"} for number in ("1", " 1", 1.0, True)
            ]
            assert caller.http.post("/gradio_api/queue/join", json=bodies[0] | {"fn_index": 1}).status_code == 200
            answers = [caller.http.post("/gradio_api/queue/join", json=body) for body in bodies]
            assert [answer.status_code for answer in answers] == [200, *[422] * 3]
            assert all(tells(answer.text, "2 requests") for answer in answers[1:])
    finally:
        gate.set()
        page.close(verbose=False)


def test_a_full_line_says_how_many_wait_and_how_long_that_may_take(held: str, place: Any) -> None:
    engine = place[2].engine
    recent = engine._took[RACE]
    recent.clear()
    callers = [Caller(held, number) for number in range(1, 4 + MAX_WAITING)]
    assert callers[0].join("one").status_code == 200
    wait_until(lambda: place[1].open_races == 1)
    answers = [caller.join("one") for caller in callers[1:]]
    assert [answer.status_code for answer in answers] == [200] * MAX_WAITING + [429] * 2
    assert tells(answers[-1].json()["detail"], "16 waiting")
    engine._current = None  # however long the race in progress has been going on
    for seconds, when in ((0.5, "8 s."), (11.0, "3 minutes.")):
        recent.append(seconds)
        assert tells(callers[-1].join("one").json()["detail"], f"16 waiting again {when}")
        recent.clear()
    for caller in callers:
        caller.http.close()


def test_a_python_client_is_told_the_sentence(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    client = Client(held, verbose=False, analytics_enabled=False)
    waiting = client.submit(prompt="one", api_name="/race")
    with Caller(held, 2) as other:
        wait_until(lambda: other.join("one", client.session_hash).status_code == 429)
        for endpoint in ("/race", "/compare"):
            with refuses(Exception, "2 requests"):
                client.predict(prompt="two", api_name=endpoint)
    waiting.cancel()
    client.close()


def test_what_is_no_call_is_left_to_gradio(held: str) -> None:
    for body in (b"", b"[", b"[]", b"{}", b'{"fn_index": []}', b'{"fn_index": 1e400}', b"[" * 100_000):
        for path in ("queue/join", "call/compare", "call/unknown", "call/v2/compare"):
            with Caller(held) as caller:
                headers = {"content-type": "application/json"}
                answer = caller.http.post(f"/gradio_api/{path}", content=body, headers=headers)
            assert 400 <= answer.status_code <= 500
            assert "Traceback" not in answer.text


def test_a_direct_call_does_not_pass_the_line_by(held: str) -> None:
    body = {"data": ["one", "scripted", "none", 1, 0, 4, 0, 0, 1.0, None, False, False]}
    assert httpx.post(f"{held}gradio_api/api/compare", json=body).status_code == 404
    assert httpx.post(f"{held}gradio_api/run/compare", json=body).status_code == 404


def scope(client: str, *forwarded: str) -> Any:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    return {"client": (client, 1234), "headers": [(b"host", b"x"), *headers]}


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ([], "10.16.3.80"),
        (["93.184.216.34"], "93.184.216.34"),
        (["93.184.216.34, 10.1.2.3"], "93.184.216.34"),
        (["1.1.1.1, 93.184.216.34"], "93.184.216.34"),  # what a caller writes itself stands to the left
        (["1.1.1.1", "93.184.216.34, 10.0.0.1"], "93.184.216.34"),
        (["2606:4700::1111"], "2606:4700::1111"),
        (["unknown, é, 10.0.0.1"], "10.16.3.80"),
    ],
)
def test_behind_a_proxy_an_address_is_whom_the_proxy_names(forwarded: list[str], address: str) -> None:
    assert address_of(scope("10.16.3.80", *forwarded), proxied=True) == address
    assert address_of(scope("10.16.3.80", *forwarded), proxied=False) == "10.16.3.80"  # anyone can write it


def test_a_gradio_that_keeps_its_queue_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    page = build_page(Script().engine(), runs := Runs(), PROMPTS)
    assert page._queue is runs.line
    assert (runs.line.sleep_when_free, runs.line.progress_update_sleep_when_free) == (LOOK_SECONDS, REPORT_SECONDS)
    monkeypatch.setattr(line, "DONE", ("push", "enter"))
    with refuses(BadInput, f"Gradio {gr.__version__} {SEEN_IN}: enter. gradio=={SEEN_IN}."):
        build_page(Script().engine(), Runs(), PROMPTS)


@pytest.mark.slow
def test_the_page_says_why_it_may_not_join(held: str, place: Any, visit: Visit) -> None:
    page = visit(at=held, forgive="429")
    with Caller(held, 1) as neighbour:
        fill(neighbour, place[1])
        run(page, "one two three", until="failed")
        words = telling("3 address")
        expect(page.locator(".sd-sentence").first).to_contain_text(words)
        page.get_by_role("tab", name="Lab").click()
        page.click("#lab-profile .lab-run")
        expect(page.locator("#lab-profile [role=status]")).to_contain_text(words)
        expect(page.locator("#lab-profile .lab-run")).to_be_enabled()
    page.close()


# 64 at once ------------------------------------------------------------------------------------------------


def call(url: str, number: int) -> tuple[int, str]:
    """One race of a prompt of its own: the status, and the target's text or the sentence."""
    with Caller(url, 10 + number) as caller:
        joined = caller.join(f"w{number}x y{number}z", f"visitor {number}", max_new_tokens=8)
        if joined.status_code != 200:
            return joined.status_code, joined.json()["detail"]
        return 200, caller.outcome(joined)["plain"]["text"]


def all_at_once(url: str) -> list[tuple[int, str]]:
    start = threading.Barrier(CLIENTS)

    def one(number: int) -> tuple[int, str]:
        start.wait(30)
        return call(url, number)

    with ThreadPoolExecutor(CLIENTS) as threads:
        return list(threads.map(one, range(CLIENTS)))


@pytest.mark.slow
def test_64_at_once_are_served_or_told_their_place_and_leave_no_memory_behind() -> None:
    """Clients and server are one process here, so that the memory of both is seen."""
    script = Script()
    script.pace = 0.005
    process = psutil.Process()
    with served(script) as url:
        all_at_once(url)  # what is imported and grown once
        gc.collect()
        before = process.memory_info().rss
        began = time.monotonic()
        answers = all_at_once(url)
        assert time.monotonic() - began < 30
        served_ones = [number for number, (status, _) in enumerate(answers) if status == 200]
        for number, (status, text) in enumerate(answers):
            if status == 200:  # its own prompt's, and whole
                assert text == (f"w{number}x y{number}z" * 4)
            else:
                assert (status, tells(text, f"{MAX_WAITING} waiting")) == (429, True)
        assert MAX_WAITING <= len(served_ones) < CLIENTS
        assert script.open_races == 0
        gc.collect()
        assert process.memory_info().rss < 1.05 * before


# A page whose network has a gap, and a page that is closed -------------------------------------------------


@contextmanager
def network(server: str) -> Iterator[Network]:
    between = Network(server)
    try:
        yield between
    finally:
        between.listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("gap", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_heartbeat_that_is_cut_for_seconds_ends_no_race(visit: Visit, gap: int) -> None:
    """The grace is shorter than the gap, so the race goes on because the page follows it."""
    script = Script()
    script.pace = 0.05
    with served(script, runs=Runs(grace=1.0)) as url, network(url) as between:
        page = visit(f"?max_new_tokens={16 * gap}", at=between.url, forgive="ERR_")
        run(page, "one two three", until="running")
        page.locator("[data-lane=plain] .tok").nth(3).wait_for()
        assert between.beats
        between.drop()
        time.sleep(gap)
        assert script.open_races == 1
        between.cut = False
        page.locator(".sd-arena[data-state=ended]").wait_for()
        for lane in (PLAIN, SPECULATIVE):
            assert tokens_shown(page, lane) == tokens_of(script.entries, lane)
        assert len(tokens_shown(page, PLAIN)) == 16 * gap
        expect(page.locator(".sd-badge").first).to_contain_text(telling("Same word"))
        page.close()  # before its server, which it would miss


@pytest.mark.slow
def test_a_race_of_a_closed_page_ends_and_one_that_waits_leaves_the_line(
    visit: Visit, script: Script, url: str
) -> None:
    script.pace = 0.05
    first, second = visit("?max_new_tokens=2000"), visit("?max_new_tokens=5")
    run(first, "one two three", until="running")
    first.locator("[data-lane=plain] .tok").nth(3).wait_for()
    run(second, "four five", until="waiting")
    status = f"{url}gradio_api/queue/status"
    wait_until(lambda: httpx.get(status).json()["queue_size"] == 1)
    second.close()
    wait_until(lambda: httpx.get(status).json()["queue_size"] == 0, 12)
    assert script.open_races == 1
    closed = time.monotonic()
    first.close()
    wait_until(lambda: script.open_races == 0, 5)
    assert time.monotonic() - closed > 0.9  # and not at once
    assert len(script.races) == 1


# The same without a browser -----------------------------------------------------------------------------------------


def test_a_race_of_a_program_that_hangs_up_ends(place: Any) -> None:
    url, script, _ = place
    script.reset()
    script.pace = 0.05
    with Caller(url, 1) as caller:
        event = caller.join("one two three", max_new_tokens=500).json()["event_id"]
        with caller.http.stream("GET", f"/gradio_api/call/compare/{event}"):
            wait_until(lambda: script.open_races == 1)
    wait_until(lambda: script.ended_races == 1)
    script.pace = 0.0
    assert len(script.entries) < 500


def test_a_run_of_a_page_is_stopped_only_if_nobody_follows_it_for_so_long() -> None:
    assert GRACE_SECONDS == 15.0
    runs = Runs(grace=0.3)
    left, followed, away = (runs.begin(RaceRun(ask()), "a page", page_id=f"{n:016x}") for n in range(3))
    called = runs.begin(RaceRun(ask()), "a program")
    followed.followers.add(lambda: None)
    time.sleep(0.2)
    away.stop_unless_followed()  # it was followed in between, and lost again
    wait_until(left.stop.is_set)
    assert not any(run.stop.is_set() for run in (followed, away, called))
    wait_until(away.stop.is_set)
    assert not any(run.stop.is_set() for run in (followed, called))


def test_an_id_is_taken_once_and_is_none_that_can_be_guessed() -> None:
    runs = Runs()
    run = runs.begin(RaceRun(ask()), "mine", page_id="0123456789abcdef")
    for page_id in (run.id, "", "mine", "0" * 10_000):
        with refuses(BadInput, "already"):
            runs.begin(RaceRun(ask()), "theirs", page_id=page_id)
    assert runs.find(RaceRun, run.id) is run
