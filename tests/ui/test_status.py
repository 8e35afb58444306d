"""What the top bar and a waiting race tell of the model, of the line for it, and of other visitors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import gradio as gr
import pytest
from playwright.sync_api import Page, expect

from specdemo.racing.race import PLAIN
from specdemo.studies.lab import STUDIES
from specdemo.ui.beside import Beside
from specdemo.ui.engine import EngineTrouble
from specdemo.ui.jobs import RACE
from specdemo.ui.lab import tab
from specdemo.ui.lab.results import Results
from specdemo.ui.page import build_page
from specdemo.ui.replay.routes import recordings
from specdemo.ui.runs import Runs
from specdemo.ui.serving.head import Head
from specdemo.ui.serving.line import MODEL
from specdemo.ui.serving.stream import _news

from ..fakes.engine import PROMPTS, Script, ScriptedLoaded
from .browser import in_a_loop_of_its_own, run, served_engine, settings, tokens_shown, wait_until
from .conftest import HIDE, Visit
from .test_loading import choose_preset

ONLOOKERS = 64


# The stream -------------------------------------------------------------------------------------------------


def test_nothing_but_the_model_occupies_a_worker_of_gradios_line() -> None:
    page = build_page(Script().engine(), Runs(), PROMPTS)
    queued = {fn.name: fn.concurrency_id for fn in page.fns.values() if fn.fn is not None and fn.queue is not False}
    del queued["leave"]  # which no page waits for
    assert queued.keys() == {"run", "load", "race", "compare"}
    assert {*queued.values()} == {MODEL["concurrency_id"]}


@pytest.mark.slow
def test_a_race_runs_while_many_pages_look_on() -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    engine.begin_loading("scripted")
    with served_engine(engine, PROMPTS) as url, ExitStack() as open_pages:
        pages = [open_pages.enter_context(urlopen(f"{url}status", timeout=30)) for _ in range(ONLOOKERS)]
        assert {status(page)["stage"] for page in pages} == {"loading"}
        assert len(engine.followers) == ONLOOKERS
        script.loading.set()
        told = [status_when(page, "ready") for page in pages]
        assert [*map(json.dumps, told)] == [json.dumps(told[0])] * ONLOOKERS
        data = ["one two", "scripted", "none", 1, 0, 5, 0, 0, 1, None, False, False, "match", False, 1, 0, "", 1]
        body = {"data": data}
        call = Request(f"{url}gradio_api/call/compare", json.dumps(body).encode(), {"content-type": "application/json"})
        urlopen(call).close()
        wait_until(lambda: script.ended_races == 1)
        open_pages.close()
        wait_until(lambda: not engine.followers)


def status(stream: Any) -> dict[str, Any]:
    """The next message of a stream."""
    for line in stream:
        if line.startswith(b"data: "):
            return json.loads(line[len(b"data: ") :])
    raise AssertionError("the stream ended")


def status_when(stream: Any, stage: str) -> dict[str, Any]:
    while (found := status(stream))["stage"] != stage:
        pass
    return found


def test_a_page_sleeps_until_something_changes() -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    runs = Runs()
    runs.engine = engine

    async def follow() -> list[str]:
        news = _news(runs, "session")
        said = [await anext(news)]
        following = asyncio.ensure_future(anext(news))
        await asyncio.sleep(0.2)
        assert not following.done()
        threading.Thread(target=engine.begin_loading, args=["scripted"]).start()
        said.append(await asyncio.wait_for(following, 20))
        script.loading.set()
        await news.aclose()  # type: ignore[attr-defined]
        return said

    told = [json.loads(message.removeprefix("data: ")) for message in in_a_loop_of_its_own(follow())]
    assert [message["stage"] for message in told] == ["idle", "loading"]
    assert not engine.followers


@pytest.mark.slow
def test_a_page_out_of_sight_does_not_hold_a_connection(visit: Visit, script: Script) -> None:
    followers = script.used.followers
    wait_until(lambda: not followers)  # those of earlier tests have left
    page = visit()
    wait_until(lambda: len(followers) == 1)
    page.evaluate(HIDE, True)
    wait_until(lambda: not followers)
    page.evaluate(HIDE, False)
    wait_until(lambda: len(followers) == 1)
    page.close()
    wait_until(lambda: not followers)


# The line ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_waits_is_told_the_place_in_the_line_and_the_wait(
    page: Page, other: Page, third: Page, script: Script
) -> None:
    first, second = page, other
    script.used._durations._recent[RACE] = deque([1200.0])  # from here on it is known how long a race takes
    script.gate.clear()
    run(first, "alpha beta", until="waiting")
    wait_until(lambda: script.open_races == 1)
    run(second, "gamma delta", until="waiting")
    expect(second.locator("#race .sd-sentence")).to_have_text("Waiting: number 1 of 1, about 20 min.")
    run(third, "epsilon zeta", until="waiting")
    expect(third.locator("#race .sd-sentence")).to_have_text("Waiting: number 2 of 2, about 40 min.")
    expect(third.locator("#race .sd-why-exact")).to_have_text("Your race starts when the 2 races before it have ended.")
    expect(second.locator("#race .sd-sentence")).to_have_text("Waiting: number 1 of 2, about 20 min.")
    second.click("#stop")
    expect(third.locator("#race .sd-sentence")).to_contain_text("Waiting: number 1 of 1")
    script.gate.set()
    third.locator(".sd-arena[data-state=ended]").wait_for()
    assert len(tokens_shown(third, PLAIN)) == 24


class Work:
    """Work of a name; how long it still takes is known if it is given."""

    def __init__(self, work: str, left: float | None = None) -> None:
        self.work, self.left = work, left

    def seconds_left(self) -> float | None:
        return self.left


RACING, STUDYING = Work(RACE), Work("study profile")


def test_the_wait_is_what_the_last_works_of_the_same_kind_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    engine = Script().engine()
    list(engine.follow("scripted"))
    assert engine.expected_wait([]) == 0.0  # nothing is being run
    assert engine.expected_wait([RACE]) is None  # nothing has been run yet
    monkeypatch.setattr("specdemo.ui.durations.time", type("Clock", (), {"monotonic": lambda: now[0]}))

    def expected(timed: Work, seconds: float, *before: str) -> Any:
        """What others are told when it has run for so many seconds; it then ends."""

        def work() -> Generator[float | None]:
            now[0] += seconds
            yield engine.expected_wait(before)

        ((told,),) = engine.stream("scripted", lambda _: work(), timed=timed)
        return told

    assert expected(RACING, 10.0) is None  # the first one
    assert engine.expected_wait([RACE, RACE]) == 20.0
    assert expected(RACING, 4.0, RACE, RACE) == 6.0 + 20.0  # what is left of the one in progress, and two more
    assert expected(STUDYING, 60.0) is None  # how long races take says nothing of studies
    assert engine.expected_wait([RACE]) == 7.0  # nor the other way round
    assert expected(STUDYING, 20.0, RACE) == 40.0 + 7.0
    assert expected(STUDYING, 61.0) is None  # it takes longer than any before: no one knows
    assert expected(Work("study sweep", left=16.0), 1.0, RACE) == 16.0 + 7.0  # it says itself how far it is
    with pytest.raises(EngineTrouble):
        list(engine.stream("other", lambda _: (_ for _ in "1"), timed=RACING))
    assert engine.expected_wait([RACE]) == 7.0  # one that failed says nothing of how long others take
    engine.status = engine.status.__class__("loading", "other", "downloading")
    assert engine.expected_wait([RACE]) is None


def test_a_wait_is_put_in_words(page: Page) -> None:
    for seconds, words in (
        (None, "Waiting: number 3 of 5."),
        (0, "Waiting: number 3 of 5, a few seconds."),
        (15, "Waiting: number 3 of 5, about 15 s."),
        (40, "Waiting: number 3 of 5, about 40 s."),
        (120, "Waiting: number 3 of 5, about 2 min."),
    ):
        assert page.evaluate("specdemo.placeInWords", {"place": 3, "of": 5, "seconds": seconds}) == words


def test_what_is_waited_for_is_named(page: Page) -> None:
    for before, words in (
        ({"race": 1}, "Your race starts when the race before it has ended."),
        ({"study": 1}, "Your race starts when the study before it has ended."),
        ({"race": 2}, "Your race starts when the 2 races before it have ended."),
        ({"race": 1, "study": 2}, "Your race starts when the race and the 2 studies before it have ended."),
        ({"load": 1, "race": 1}, "Your race starts when the race and the loading of a model before it have ended."),
        ({}, ""),
    ):
        assert page.evaluate("before => specdemo.beforeInWords('race', before)", before) == words


# Other visitors ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_top_bar_follows_what_others_load(visit: Visit, script: Script) -> None:
    mine, theirs = visit(), visit()
    top = mine.locator(".sd-top")
    expect(top).to_have_attribute("data-stage", "ready")
    script.loading.clear()
    choose_preset(theirs, "Other 1.7B")
    expect(theirs.locator(".sd-model")).to_have_text("Downloading, 10% done")
    expect(theirs.locator(".sd-progress")).to_have_attribute("value", "0.1")
    for page in (mine, visit()):
        expect(page.locator(".sd-model")).to_have_text("Other 1.7B")
        expect(page.locator(".sd-facts")).to_have_text("is being loaded for another visitor: downloading, 10% done")
        expect(page.locator(".sd-progress")).to_be_hidden()
    script.loading.set()
    expect(theirs.locator(".sd-top")).to_have_attribute("data-stage", "ready")
    expect(top).to_have_attribute("data-stage", "other")
    expect(mine.locator(".sd-facts")).to_have_text("Scripted 135M is loaded when you press Run")
    run(mine, "one two")
    expect(top).to_have_attribute("data-stage", "ready")
    expect(mine.locator(".sd-model")).to_have_text("Scripted 135M")
    expect(theirs.locator(".sd-top")).to_have_attribute("data-stage", "other")


def test_a_load_that_failed_is_told_to_who_chose_it(page: Page) -> None:
    """By a status as the server sends it, since the scripted engine keeps nothing after a failed load."""
    for status, shown in (
        ({"preset": "scripted"}, ["failed", "Too large.", ""]),
        ({"preset": "other"}, ["idle", "No model is loaded yet", ""]),
        ({"preset": "other", "loaded": "scripted", "facts": ["float32"]}, ["ready", "Scripted 135M", "float32"]),
    ):
        told = page.evaluate(
            """status => {
              specdemo.showStatus({ stage: "failed", words: "Too large.", fraction: null, ...status });
              const top = document.querySelector(".sd-top");
              const text = (part) => top.querySelector(part).textContent;
              return [top.dataset.stage, text(".sd-model"), text(".sd-facts")];
            }""",
            status,
        )
        assert told == shown


# Work beside a race -----------------------------------------------------------------------------------------


def test_work_beside_the_engine_is_seen_if_it_overlaps() -> None:
    beside = Beside()
    with beside.work():
        pass
    seen = beside.watch()
    assert not seen()
    with beside.work():
        during = beside.watch()
        assert during()
    assert seen()
    assert during()
    assert not beside.watch()()


def run_held(page: Page, script: Script) -> None:
    """A race that has begun and waits for the script's gate."""
    script.gate.clear()
    page.fill("#prompt textarea", "one two three")
    page.click("#run")
    wait_until(lambda: script.open_races == 1)


@contextmanager
def every_core(has: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedLoaded, "environment", lambda _: {"threads": 2, "cores": 2 if has else 4})
        yield


@pytest.mark.parametrize("has", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_race_beside_which_another_page_was_served_says_so(page: Page, script: Script, url: str, has: bool) -> None:
    with every_core(has):
        run_held(page, script)
        urlopen(url).close()
        script.gate.set()
        page.locator(".sd-arena[data-state=ended]").wait_for()
        why = page.locator("#race .sd-why-exact")
        words = "Disturbed: another page was served during this race, so its timing may be off."
        expect(why).to_contain_text(words) if has else expect(why).not_to_contain_text("Disturbed")
        page.get_by_role("button", name="Replay", exact=True).click()
        page.locator(".sd-play:enabled").wait_for()
        page.keyboard.press("End")
        page.locator("#replay [data-state=ended]").wait_for()
        why = page.locator("#replay .sd-why-exact")
        expect(why).to_contain_text(words) if has else expect(why).not_to_contain_text("Disturbed")
        page.get_by_role("tab", name="Race").click()
        settings(page)
        page.fill("#max-new-tokens input", "7")
        page.click("#run")  # with nobody else
        expect(page.locator("#race .sd-tokens").first).to_have_text("7 of 7 tokens")
        expect(page.locator("#race .sd-why-exact")).to_contain_text("All 7 tokens")
        expect(page.locator("#race .sd-why-exact")).not_to_contain_text("Disturbed")


def test_what_a_page_is_answered_counts_as_work_beside_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs = Script().engine(), Runs()
    page = build_page(engine, runs, PROMPTS)
    answers = {
        name: getattr(block, name)
        for block in page.blocks.values()
        for name in ("trace", "race")
        if getattr(getattr(block, name, None), "_is_server_fn", False)
    }
    seen, watch = list[bool](), engine.beside.watch()
    trace: Callable[[], str] = lambda: seen.append(watch()) or ""  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(runs, "find", lambda *_: SimpleNamespace(trace=trace))
    for answer in (answers["trace"], answers["race"]):
        watch = engine.beside.watch()
        in_a_loop_of_its_own(answer({}))
    assert seen == [True, True]


def test_the_theory_and_the_check_of_models_count_as_work_beside_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs, seen = Script().engine(), Runs(), list[bool]()
    page, watch = build_page(engine, runs, PROMPTS), engine.beside.watch()

    def noted(*_: Any) -> list[Any]:
        seen.append(watch())
        return []

    monkeypatch.setattr(tab, "theory_of", noted)
    monkeypatch.setattr(runs, "latest", noted)
    handlers = [getattr(block.fn, "func", block.fn) for block in page.fns.values()]
    engine.backend = replace(engine.backend, report=noted)  # which a check of a visitor's own models asks for
    asked = (
        ("attempt", (gr.EventData(None, {}), None, 1, 1, 1)),
        ("take", (gr.Request(),)),
        ("look", ("a/b", "", "")),
    )
    for name, arguments in asked:
        watch = engine.beside.watch()
        next(handler for handler in handlers if getattr(handler, "__name__", "") == name)(*arguments)
    assert seen == [True] * 3


def test_the_last_picture_of_the_lab_counts_as_work_beside_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs, seen = Script().engine(), Runs(), list[bool]()
    page, watch = build_page(engine, runs, PROMPTS), engine.beside.watch()
    done = SimpleNamespace(id="a", pictured=1, picture=[None], files={}, values={}, measured=None)
    monkeypatch.setattr(runs, "latest", lambda *_: done)
    monkeypatch.setattr(Results, "update", lambda *_: seen.append(watch()) or {})  # type: ignore[func-returns-value]
    for show in {block.fn for block in page.fns.values() if block.name == "show"}:
        done.study, watch = getattr(show, "__self__").study, engine.beside.watch()  # noqa: B009
        show(gr.Request())
    assert seen == [True] * len(STUDIES)


@pytest.mark.parametrize(
    ("path", "counts"), [("/", True), ("/config", True), ("/config/", True), ("/gradio_api/info", True), ("/x", False)]
)
def test_what_gradio_makes_for_each_visitor_counts_as_work_beside_a_race(path: str, counts: bool) -> None:
    beside = Beside()
    seen, watch = list[bool](), beside.watch()

    async def app(*_: Any) -> None:
        seen.append(watch())

    runs: Any = SimpleNamespace(engine=SimpleNamespace(beside=beside))
    page: Any = Head(app, "", "", runs)
    in_a_loop_of_its_own(page({"type": "http", "path": path}, None, None))
    assert seen == [counts]


@pytest.mark.slow
def test_recordings_and_files_are_no_work_beside_a_race(url: str, script: Script, visit: Visit) -> None:
    page = visit()
    page.get_by_role("tab", name="Replay").click()
    page.locator(".sd-play:enabled").wait_for()
    racer = visit()
    with every_core(True):
        run_held(racer, script)
        page.select_option(".sd-which", recordings()[3]["name"])
        expect(page.locator(".sd-facts-of")).to_contain_text("A recording that ships")
        page.locator(".sd-file").set_input_files({"name": "a.jsonl", "mimeType": "text/plain", "buffer": b"nothing"})
        expect(page.locator("#replay .sd-sentence")).to_have_text("This is not a trace of specdemo.")
        script.gate.set()
        racer.locator(".sd-arena[data-state=ended]").wait_for()
        expect(racer.locator("#race .sd-why-exact")).not_to_contain_text("Disturbed")
