"""What one request may take: tokens, seconds, memory; and that what is kept can be opened again."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from gradio_client import Client
from playwright.sync_api import expect

from specdemo.decoding.events import Finished, Prefilled, Round
from specdemo.errors import BadInput
from specdemo.models.presets import Defaults
from specdemo.racing.request import read_request
from specdemo.racing.trace import (
    PLAIN,
    SPECULATIVE,
    Candidate,
    Entry,
    Request,
    TokenProbabilities,
    read_trace,
    write_trace,
)
from specdemo.settings import MAX_K, MAX_NODES, Settings
from specdemo.studies.lab import STUDIES
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from specdemo.ui.budgets import Budgets, starting
from specdemo.ui.engine import EngineTrouble
from specdemo.ui.jobs import Job
from specdemo.ui.lab.run import LabRun
from specdemo.ui.race import run as run_module
from specdemo.ui.race.run import MOST_BYTES, RaceRun, size_of
from specdemo.ui.replay.opening import MAX_TRACE
from specdemo.ui.replay.playable import uploaded
from specdemo.ui.runs import KEPT_BYTES
from tests.harness.texts import with_text
from tests.harness.ui_classes import Runs

from ..fakes.engine import PRESETS, Script, stand_in
from ..fakes.study import Endless
from ..sentences import gist, refuses, telling, tells
from .browser import choose, run, served, settings, tokens_shown
from .conftest import Visit
from .test_jobs import slow_engine

SHORT = Budgets(new_tokens=40, race_seconds=1.0, lab_seconds=0.3)


def ask(**settings: Any) -> Request:
    return Request("one two three", "scripted", "prompt-lookup", Settings(**settings))


def ready(script: Script) -> Any:
    engine = script.engine()
    *_, status = engine.follow("scripted")
    assert status.stage == "ready"
    return engine


# Tokens and seconds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "budgets"),
    [
        ({}, Budgets(2000, 120.0, 600.0)),
        ({"SPACE_ID": ""}, Budgets()),
        ({"SPACE_ID": "a/b"}, Budgets(512, 60.0, 120.0, watchers=32)),
    ],
)
def test_a_space_grants_less_than_a_page_of_ones_own(environment: Mapping[str, str], budgets: Budgets) -> None:
    assert Budgets.of(environment) == budgets


def test_a_preset_begins_within_the_budget() -> None:
    assert starting(Defaults(max_new_tokens=128), SHORT).max_new_tokens == 40
    assert starting(Defaults(max_new_tokens=24), SHORT).max_new_tokens == 24


def test_a_race_ends_with_what_it_has_when_its_time_is_up() -> None:
    script = Script()
    script.pace = 0.01
    race = RaceRun(ask(max_new_tokens=500), seconds=0.4)
    began = time.monotonic()
    *_, last = map(json.loads, race.play(ready(script)))
    assert 0.4 < time.monotonic() - began < 3
    assert last["end"]["stopped"]
    assert tells(last["end"]["sentence"], "0.4 take")
    assert last["end"]["sentence"] == race.summary["sentence"]  # which /compare returns
    assert tells(last["end"]["exactness"]["title"], "Same 0.4 stopped")
    assert 1 < last["end"]["stats"][PLAIN]["tokens"] < 100
    assert read_trace(race.trace().split("\n"))[1] == race.entries


@pytest.mark.parametrize("before", [0, 1])
def test_a_pass_that_takes_longer_is_cut_short(before: int) -> None:
    race = RaceRun(ask(max_new_tokens=20), seconds=0.3)
    engine = slow_engine("measuring", threading.Event(), before)
    assert [status.stage for status in engine.follow("scripted")][-1] == "ready"
    began = time.monotonic()
    if before:
        *_, last = map(json.loads, race.play(engine))
        assert gist(last["end"]["exactness"]["title"]) == "Stopped 0.3"
    else:
        with refuses(EngineTrouble, "0.3 race before"):
            list(race.play(engine))
    assert time.monotonic() - began < 5  # not the ten seconds of the race


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_a_race_that_ends_in_time_says_nothing_of_it(seconds: float | None) -> None:
    race = RaceRun(ask(max_new_tokens=20), seconds)
    *_, last = map(json.loads, race.play(ready(Script())))
    assert not last["end"]["stopped"]
    assert "most" not in last["end"]["sentence"]
    assert tells(last["end"]["exactness"]["title"], "Same word")


def test_a_race_ends_with_what_it_has_when_it_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MOST_BYTES", 20_000)
    race = RaceRun(ask(max_new_tokens=500), seconds=60)
    *_, last = map(json.loads, race.play(ready(Script())))
    assert last["end"]["stopped"]
    assert tells(last["end"]["sentence"], "0.02 MB")
    assert gist(last["end"]["exactness"]["title"]) == "Same 0.02 MB"
    assert 1 < last["end"]["stats"][PLAIN]["tokens"] < 100
    assert read_trace(race.trace().split("\n"))[1] == race.entries


def test_a_race_that_a_person_stopped_says_nothing_of_a_limit() -> None:
    script = Script()
    script.pace = 0.01
    race = RaceRun(ask(max_new_tokens=500), seconds=77)
    for number, _ in enumerate(messages := race.play(ready(script))):
        if number == 2:
            race.stop.set()
    assert list(messages) == []
    end = json.loads(race.messages[-1])["end"]
    assert end["stopped"]
    assert not tells(end["sentence"], "77")
    assert tells(end["exactness"]["title"], "Same text")


def test_a_study_ends_with_what_it_has_when_its_time_is_up() -> None:
    view = LabRun("scripted", Endless, {"drafter": "ngram"}, seconds=0.3)
    began = time.monotonic()
    *_, last = view.play(ready(Script()))
    assert 0.3 < time.monotonic() - began < 3
    assert json.loads(last)["end"] == view.outcome
    assert tells(view.outcome, "Stopped 0.3 study")
    assert view.picture[0]
    assert view.picture[0][0].verdict.endswith(" steps")
    assert json.loads(view.files["json"])["rows"][0]["steps"] > 5


@pytest.mark.slow
def test_what_exceeds_the_budget_is_refused_or_cut_on_the_page(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, STUDIES["domains"], Endless)
    script = Script()
    with served(script, budgets=SHORT) as url:
        page = visit("?max_new_tokens=41&prompt=one+two+three", at=url)
        settings(page)
        expect(page.locator("#max-new-tokens")).to_contain_text(telling("1 40."))
        run(page, until="failed")
        expect(page.locator("#problem")).to_contain_text(telling("max 1 40 41"))
        assert not script.races
        script.pace = 0.1
        page.fill("#max-new-tokens input", "40")
        run(page)
        expect(page.locator("#race [data-part=finding]")).to_contain_text(telling("1 take"))
        expect(page.locator(".sd-badge").first).to_contain_text(telling("Same 1 stopped"))
        expect(page.locator(".sd-again").first).to_be_visible()
        assert 2 < len(tokens_shown(page, PLAIN)) < 20
        choose(page, "domains")
        lab = page.locator("#lab-domains")
        lab.locator(".lab-run").click()
        expect(lab.locator("[role=status]")).to_contain_text(telling("0.3 study"))
        expect(lab.locator(".lab-section")).to_contain_text("steps")
        expect(lab.get_by_text("Download JSON")).to_be_visible()
        page.close()  # before its server, which it would miss


def test_a_call_is_held_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    script = Script()
    with served(script, budgets=Budgets(new_tokens=10, race_seconds=0.5)) as url:
        client = Client(url, verbose=False, analytics_enabled=False)
        for endpoint in ("/race", "/compare"):
            with refuses(Exception, "1 10, 11"):
                client.predict(prompt="one two", max_new_tokens=11, api_name=endpoint)
        assert (
            client.predict(prompt="one two", api_name="/compare")[PLAIN]["stats"]["tokens"] == 10
        )  # the preset has 24
        script.pace = 0.1
        outcome = client.predict(prompt="one two", api_name="/compare")
        assert tells(outcome["sentence"], "0.5 take")
        assert 0 < outcome[PLAIN]["stats"]["tokens"] < 10
        client.close()


# Memory and files ------------------------------------------------------------------------------------------


def largest(tokens: int, k: int = MAX_K) -> list[Entry]:
    """A race of as many tokens whose every round drafts `k` and accepts none, with all that a place can hold."""
    chance = Random(0)

    def share() -> float:
        return chance.random() or 0.5

    def token(kind: TokenKind) -> Token:
        return Token(chance.randrange(10_000, 150_000), kind, share())

    def text() -> str:
        return f" {chance.randrange(1000)}雨雨"

    entries = []
    for lane in (PLAIN, SPECULATIVE):
        entries.append(Entry(lane, with_text(Prefilled(100, token(TokenKind.TARGET), share()), (text(),))))
        for index in range(tokens - 1):
            drafted: tuple[DraftedToken, ...] = ()
            places: tuple[TokenProbabilities, ...] = ()
            if lane == SPECULATIVE:
                outcomes = [DraftOutcome.REJECTED, *[DraftOutcome.UNTESTED] * (k - 1)]
                drafted = tuple(DraftedToken(chance.randrange(150_000), f, share(), share(), share()) for f in outcomes)
                candidates = [
                    Candidate(chance.randrange(150_000), text(), share(), share(), share()) for _ in range(22)
                ]
                places = (TokenProbabilities(share(), tuple(candidates)),)
            kind = TokenKind.RESAMPLED if drafted else TokenKind.TARGET
            event = Round(index, drafted, (token(kind),), share(), share(), share(), k)
            entries.append(Entry(lane, with_text(event, (text(),), tuple(text() for _ in drafted)), places))
        entries.append(Entry(lane, Finished(FinishReason.LENGTH)))
    return entries


@pytest.mark.slow
def test_the_largest_race_of_the_page_can_be_opened_again() -> None:
    race = RaceRun(ask(max_new_tokens=Budgets().new_tokens, temperature=1.0, k=MAX_K))
    script = Script()
    loaded = script.load(PRESETS["scripted"], lambda *_: None)
    race.header = script.header(loaded, race.request)
    race.entries = largest(Budgets().new_tokens)
    trace = race.trace()
    assert 8_000_000 < len(trace) < MAX_TRACE  # more than the page once opened
    replay = json.loads(uploaded(trace))
    assert "error" not in replay
    assert len(replay["lanes"][SPECULATIVE]["events"]) == Budgets().new_tokens + 1


@pytest.mark.parametrize("k", [MAX_K, MAX_NODES])
def test_a_race_that_is_not_cut_short_can_be_kept_and_opened_however_many_lanes_it_has(k: int) -> None:
    entries = largest(50, k)
    trace = sum(map(len, write_trace({}, entries)))
    assert trace / sum(map(size_of, entries)) * MOST_BYTES < MAX_TRACE
    assert MOST_BYTES < KEPT_BYTES


def test_the_estimate_of_a_race_is_near_what_it_takes() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        entries = largest(300)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 < sum(map(size_of, entries)) / taken < 1.5


class Sized(Job):
    """A job of a given size."""

    def __init__(self, size: int) -> None:
        super().__init__("scripted")
        self._size = size

    @property
    def size(self) -> int:
        return self._size


def kept(runs: Runs, jobs: list[Sized]) -> list[int]:
    return [place for place, made in enumerate(jobs) if runs.find(Job, made.id)]


def test_runs_are_kept_by_what_they_take() -> None:
    runs = Runs(most_bytes=100)
    assert len(kept(runs, [runs.begin(Sized(1), f"visitor {n}") for n in range(100)])) == 100
    large = [runs.begin(Sized(60), f"another {n}") for n in range(2)]
    assert kept(runs, large) == [1]  # both do not fit


def test_the_oldest_give_way_and_never_the_newest() -> None:
    runs = Runs(most_bytes=100)
    made = [runs.begin(Sized(30), f"visitor {n}") for n in range(6)]
    assert kept(runs, made) == [3, 4, 5]
    assert kept(runs, [runs.begin(Sized(1000), "last")]) == [0]
    assert kept(runs, made) == []


def test_a_run_counts_with_what_it_has_become_when_it_ends() -> None:
    runs, engine = Runs(most_bytes=20_000), ready(Script())
    first, second = (runs.begin(RaceRun(ask(max_new_tokens=200)), f"visitor {n}") for n in range(2))
    for race in (first, second):
        list(runs.play(race, engine))
        assert race.size > 20_000
    assert (runs.find(RaceRun, first.id), runs.find(RaceRun, second.id)) == (None, second)


def test_what_is_too_much_is_refused_before_it_begins() -> None:
    values: dict[str, Any] = {"prompt": "one", "preset": "scripted", "drafter": "none"}
    assert read_request(**values, max_new_tokens=2000, most_new_tokens=2000).settings.max_new_tokens == 2000
    for wrong in (2001, 0, -5):
        with refuses(BadInput, f"1 2,000, {wrong}"):
            read_request(**values, max_new_tokens=wrong, most_new_tokens=2000)
    assert read_request(**values, max_new_tokens=100_000).settings.max_new_tokens == 100_000  # without a budget
