"""Watching along: who sees the races of a page that is shared, and for how long."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.ui.budgets import Budgets
from specdemo.ui.race.run import Run
from specdemo.ui.runs import Runs
from specdemo.ui.watch.routes import ENDED, _events
from specdemo.ui.watch.watches import Watch, Watches

from ..fakes.engine import Script
from ..sentences import tells
from .browser import Caller, in_a_loop_of_its_own, run, served, tokens_of, tokens_shown, wait_until
from .conftest import HIDE, Visit, listening
from .test_messages import ask
from .test_page import serious

SAID = ".sd-watch-said"
LIVE, OVER = "Watching along, live", "The sender has stopped sharing."
GONE = "Nobody shares a race here. The link is wrong, or the sender has stopped sharing."


# The messages ----------------------------------------------------------------------------------------------------


def raced(script: Script, runs: Runs, session: str = "page", **values: Any) -> Run:
    """A race of the session that has ended."""
    job = runs.begin(Run(ask(**values)), session)
    list(runs.play(job, script.engine()))
    return job


def shared(runs: Runs) -> tuple[Watches, Watch]:
    """The races of a page, which is open for as long as the process lives."""
    watches = Watches(runs)
    runs._pages["page"] = 1
    watch = watches.share("page")
    assert watch
    return watches, watch


async def until(events: AsyncIterator[bytes], last: Callable[[str], bool]) -> list[tuple[int, dict[str, Any]]]:
    """The numbers and messages that a watcher gets, up to the first that fits."""
    text = ""
    while not last(text):
        text += (await asyncio.wait_for(anext(events), 20)).decode()
    return [(int(number), json.loads(data)) for number, data in re.findall("id: (.*)\ndata: (.*)\n\n", text)]


def messages(*races: Run) -> list[dict[str, Any]]:
    """Those of the senders' own streams, without the ids."""
    return [{**json.loads(message), "run": ""} for race in races for message in race.messages]


def test_a_watcher_gets_the_latest_race_and_those_that_begin_afterwards() -> None:
    script, runs = Script(), Runs()
    _, other = raced(script, runs, max_new_tokens=3), raced(script, runs, "other", max_new_tokens=2)
    latest = raced(script, runs, max_new_tokens=4)
    watches, watch = shared(runs)

    async def follow() -> Any:
        events, stranger = _events(watch, 0), "".join(other.messages)
        first = await until(events, lambda text: '"end"' in text)
        coming = asyncio.create_task(until(events, lambda text: text.count('"end"') == 2 and ENDED.decode() in text))
        later = []
        for most in (5, 6):
            later.append(await asyncio.to_thread(raced, script, runs, max_new_tokens=most))
            await asyncio.to_thread(raced, script, runs, "other", max_new_tokens=2)
        watches.end(watch)
        assert other.id in stranger
        return first, later, await coming

    first, later, rest = in_a_loop_of_its_own(follow())
    assert [message for _, message in first] == messages(latest)
    assert [message for _, message in rest] == messages(*later)
    assert [number for number, _ in (*first, *rest)] == list(range(len(first) + len(rest)))
    assert watches.find(watch.token) is None


def test_a_watcher_cannot_learn_the_id_with_which_a_race_is_stopped() -> None:
    script, runs = Script(), Runs()
    job = raced(script, runs, max_new_tokens=4)
    _, watch = shared(runs)
    told = b"".join(watch.feed.update())
    assert job.id in job.messages[0]
    assert told
    assert job.id.encode() not in told


def test_a_connection_that_was_lost_goes_on_where_it_was() -> None:
    script, runs = Script(), Runs()
    raced(script, runs, max_new_tokens=4)
    watches, watch = shared(runs)
    of_first = len(watch.feed.update())
    raced(script, runs, max_new_tokens=4)
    watches.end(watch)
    count = len(watch.feed.update())

    async def numbers(first: int) -> list[int]:
        return [number for number, _ in await until(_events(watch, first), lambda text: ENDED.decode() in text)]

    every = list(range(of_first, of_first + count))
    for first, told in ((0, every), (of_first, every), (of_first + 2, every[2:]), (of_first + count, []), (10**9, [])):
        assert in_a_loop_of_its_own(numbers(first)) == told, first


def test_messages_are_made_once_for_all_watchers_who_keep_no_race_alive() -> None:
    script, runs = Script(), Runs()
    _, watch = shared(runs)
    woken: list[int] = []
    for number in range(2):
        watch.followers.add(lambda number=number: woken.append(number))  # type: ignore[misc]
    job = raced(script, runs, max_new_tokens=4)
    assert not job.followers
    assert sorted(woken) == sorted([0, 1] * (len(job.messages) + 2))  # and as it begins and when it has ended
    before = list(watch.feed.update())
    assert all(one is other for one, other in zip(before, watch.feed.update(), strict=True))


def test_all_watchers_together_are_sent_no_more_than_so_many_events_in_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, runs, slept = Script(), Runs(), list[float]()
    raced(script, runs, max_new_tokens=4)
    watches, watch = shared(runs)
    watches.end(watch)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("specdemo.ui.watch.routes.sleep", sleep)
    for watch.watchers in (1, 64):
        in_a_loop_of_its_own(until(_events(watch, 0), lambda text: ENDED.decode() in text))
    assert slept == [1 / 64, 1.0]


# The routes ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(url: str, session: str, client: httpx.Client) -> Iterator[None]:
    """What a page that is open does: it follows the status."""
    with client.stream("GET", f"{url}status", params={"session": session}) as status:
        lines = status.iter_lines()  # which would be closed if nobody held it
        next(lines)
        yield


def share(url: str, session: str, client: httpx.Client, address: str = "http://here/watch/") -> httpx.Response:
    return client.post(f"{url}watches", params={"session": session, "address": address})


def test_only_a_page_that_is_open_is_shared_and_only_it_can_stop(url: str) -> None:
    with httpx.Client(timeout=20) as client:
        assert [share(url, session, client).status_code for session in ("closed", "")] == [409, 409]
        with opened(url, "mine", client):
            assert share(url, "mine", client, "x" * 1000).status_code == 409
            told = share(url, "mine", client).json()
            token = told["token"]
            assert len(token) >= 22
            assert told["link"] == f"http://here/watch/{token}"
            assert told["picture"].startswith("data:image/svg+xml")
            assert share(url, "mine", client).json() == told  # not a second one
            for query in ({}, {"session": "other"}, {"session": token}):
                assert client.delete(f"{url}watches/{token}", params=query).status_code == 404
            page = client.get(f"{url}watch/{token}")
            assert (page.status_code, page.headers["referrer-policy"]) == (200, "no-referrer")
            assert client.delete(f"{url}watches/{token}", params={"session": "mine"}).status_code == 204
            for path in ("watch", "watched"):
                gone = client.get(f"{url}{path}/{token}")
                assert (gone.status_code, GONE in gone.text) == (404, True)
            assert share(url, "mine", client).json()["token"] != token


@pytest.mark.slow
def test_one_watcher_too_many_is_refused() -> None:
    assert Budgets().watchers == 64
    with ExitStack() as stack:
        url = stack.enter_context(served(Script(), budgets=Budgets(watchers=2)))
        client = stack.enter_context(httpx.Client(timeout=20))
        with opened(url, "mine", client):
            token = share(url, "mine", client).json()["token"]
            with Caller(url) as caller:
                assert caller.outcome(caller.join("one two", "mine"))
            watched = f"{url}watched/{token}"
            with client.stream("GET", watched) as one, client.stream("GET", watched) as two:
                told = [watcher.iter_lines() for watcher in (one, two)]
                for lines in told:
                    assert [next(lines), '"seq":0' in next(lines)] == ["id: 0", True]
                for path in ("watch", "watched"):
                    refused = client.get(f"{url}{path}/{token}")
                    assert refused.status_code == 503
                    assert tells(refused.text, "2 watching")
            wait_until(lambda: client.get(f"{url}watch/{token}").status_code == 200)  # they have left


def test_who_shares_may_need_a_login_but_who_watches_does_not() -> None:
    with served(Script(), auth=("me", "secret")) as url, httpx.Client(timeout=20) as sender:
        assert share(url, "mine", sender).status_code == 401
        sender.post(f"{url}login", data={"username": "me", "password": "secret"})
        with opened(url, "mine", sender):
            token = share(url, "mine", sender).json()["token"]
            assert httpx.get(f"{url}watch/{token}").status_code == 200
            with Caller(url) as stranger:
                assert stranger.join("one", "mine").status_code == 401
                with stranger.http.stream("GET", f"watched/{token}") as events:
                    assert events.status_code == 200


# In browsers -----------------------------------------------------------------------------------------------------


@contextmanager
def watcher(chromium: Browser, link: str, forgive: str = "\0", **options: Any) -> Iterator[Page]:
    """The page of someone who has the link."""
    troubles: list[str] = []
    page = chromium.new_page(reduced_motion="reduce", **options)
    page.set_default_timeout(20_000)
    with listening(page, troubles, forgive):
        page.goto(link)
        yield page
    page.context.close()
    assert troubles == []


def link_of(page: Page) -> str:
    """Begin to share; the dialog is closed again."""
    page.click("#race .sd-share")
    page.get_by_role("button", name="Start sharing").click()
    expect(page.locator(".sd-shared a")).to_have_text(re.compile("/watch/"))
    link = page.locator(".sd-shared a").inner_text()
    page.keyboard.press("Escape")
    expect(page.locator("#race .sd-share")).to_have_text("Sharing")
    return link


def stop(page: Page) -> None:
    """Stop sharing; the dialog is closed again."""
    page.click("#race .sd-share")
    page.get_by_role("button", name="Stop sharing").click()
    expect(page.get_by_role("button", name="Start sharing")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#race .sd-share")).to_have_text("Watch along")


def test_a_watcher_sees_the_race_that_runs_and_the_next_one_until_sharing_ends(
    page: Page, script: Script, chromium: Browser
) -> None:
    link = link_of(page)
    script.gate.clear()
    run(page, "one two three", until="waiting")
    with watcher(chromium, link) as other:
        expect(other.locator(SAID)).to_have_text(LIVE)
        expect(other.locator(".sd-sentence")).to_have_text("Waiting for a race.")
        script.gate.set()
        ended = other.locator(".sd-arena[data-state=ended]")
        for prompt in ("one two three", "four five"):
            if script.ended_races:
                run(page, prompt)
            expect(other.locator(".sd-asked")).to_have_text(prompt)
            ended.wait_for()
            wait_until(lambda: script.open_races == 0)
            for lane in (PLAIN, SPECULATIVE):
                assert tokens_shown(other, lane) == tokens_of(script.entries, lane)
            expect(other.locator(".sd-badge")).to_have_text("Same text, word for word")
        assert other.get_by_role("button").all_inner_texts() == ["Skip"]
        strip = other.locator(".sd-strip").last
        strip.click()
        expect(other.locator(".sd-tip")).to_contain_text("All lanes have the same scale.")
        expect(other.locator(".sd-tip")).not_to_contain_text("Press")  # there is nothing to step through
        stop(page)
        expect(other.locator(SAID)).to_have_text(OVER)


@pytest.mark.slow
def test_a_page_that_is_closed_is_no_longer_shared(visit: Visit, chromium: Browser) -> None:
    sender = visit()
    with watcher(chromium, link_of(sender), forgive="404") as other:
        expect(other.locator(SAID)).to_have_text(LIVE)
        sender.close()
        expect(other.locator(SAID)).to_have_text(OVER)
        other.reload()
        expect(other.locator(SAID)).to_have_text(GONE)
        expect(other.locator(".sd-arena")).to_have_count(0)


@pytest.mark.slow
def test_a_page_out_of_sight_goes_on_sharing(page: Page, chromium: Browser) -> None:
    with watcher(chromium, link_of(page)) as other:
        page.evaluate(HIDE, True)
        time.sleep(2.5)  # longer than the grace
        expect(other.locator(SAID)).to_have_text(LIVE)
        stop(page)
        expect(other.locator(SAID)).to_have_text(OVER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "shade"),
    [(390, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)],
)
def test_axe_finds_nothing_serious_and_a_watcher_needs_not_scroll_sideways(
    page: Page, script: Script, chromium: Browser, width: int, shade: Any
) -> None:
    link = link_of(page)
    page.click("#race .sd-share")
    assert serious(page, "dialog") == []
    page.keyboard.press("Escape")
    run(page, "one two three four five six seven " * 5)
    with watcher(chromium, link, viewport={"width": width, "height": 844}, color_scheme=shade) as other:
        other.locator(".sd-arena[data-state=ended]").wait_for()
        assert serious(other) == []
        assert other.evaluate("document.documentElement.scrollWidth") == width
    stop(page)
