"""A page whose network has a gap, and a page that is closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from playwright.sync_api import expect

from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.ui.jobs import GRACE_SECONDS
from specdemo.ui.race.run import Run
from specdemo.ui.serving.line import MODEL_LINE, is_heard
from tests.harness.ui_classes import Runs

from ..fakes.engine import Script
from ..fakes.network import Network
from ..sentences import telling
from .browser import in_a_loop_of_its_own, run, served, tokens_of, tokens_shown, wait_until
from .conftest import Visit
from .test_messages import ask


@contextmanager
def network(server: str) -> Iterator[Network]:
    between = Network(server)
    try:
        yield between
    finally:
        between.listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("gap", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_heartbeat_that_is_cut_for_seconds_ends_no_race(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    """The grace is shorter than the gap, so the race goes on because the page follows it."""
    script = Script()
    script.pace = 0.05
    runs, left = Runs(grace=1.0), []
    leave = runs.leave
    monkeypatch.setattr(runs, "leave", lambda session: left.append(session) or leave(session))  # type: ignore[func-returns-value]
    with served(script, runs=runs) as url, network(url) as between:
        page = visit(f"?max_new_tokens={16 * gap}", at=between.url, forgive="ERR_")
        run(page, "one two three", until="running")
        page.locator("[data-lane=plain] .tok").nth(3).wait_for()
        assert between.beats
        between.drop()
        time.sleep(gap)
        assert left  # Gradio has taken it for a closed tab
        assert script.open_races == 1
        between.cut = False
        page.locator(".sd-arena[data-state=ended]").wait_for()
        for lane in (PLAIN, SPECULATIVE):
            assert tokens_shown(page, lane) == tokens_of(script.entries, lane)
        assert len(tokens_shown(page, PLAIN)) == 16 * gap
        expect(page.locator(".sd-badge").first).to_contain_text(telling("Same text word"))
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


# Without a browser -----------------------------------------------------------------------------------------


def test_a_page_is_heard_while_gradio_has_a_live_event_of_its_session() -> None:
    events = [SimpleNamespace(session_hash=name, alive=alive, fn=None) for name, alive in (("a", True), ("b", False))]
    for event in events:
        event.concurrency_id = MODEL_LINE
    queue = SimpleNamespace(event_queue_per_concurrency_id={}, active_jobs=[events, None])
    assert [is_heard(SimpleNamespace(_queue=queue), name) for name in "abc"] == [True, False, False]


def test_a_run_is_stopped_only_if_nobody_follows_it_for_so_long() -> None:
    assert GRACE_SECONDS == 15.0
    runs = Runs(grace=0.3)
    runs.heard = lambda session: session == "heard"  # its page hears of it through Gradio
    left, back, away, heard = (runs.begin(Run(ask()), name) for name in ("left", "back", "away", "heard"))

    looks: list[Callable[[], None]] = []  # what the loop of the server would do after the grace

    def later(seconds: float, look: Callable[[], None]) -> None:
        assert seconds == runs.grace
        looks.append(look)

    async def follow() -> None:
        back.followers.add(lambda: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_later", later)
            for job in (left, back, away, heard):
                runs.leave(job.session)
            runs.leave("unknown")
            away.stop_unless_followed()  # it was followed in between, and lost again

    in_a_loop_of_its_own(follow())
    *first, second = looks
    for look in first:
        look()
    assert [job.stop.is_set() for job in (left, back, away, heard)] == [True, False, False, False]
    second()
    assert [job.stop.is_set() for job in (left, back, away, heard)] == [True, False, True, False]
