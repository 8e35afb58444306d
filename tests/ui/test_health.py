"""What the operator of a page sees of it, which holds nothing of its visitors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import httpx
import pytest

from specdemo import __version__
from specdemo.ui import health
from specdemo.ui.engine import EngineTrouble
from specdemo.ui.race.run import Run
from specdemo.ui.runs import Runs

from ..fakes.engine import PRESETS, Script
from .browser import served, wait_until
from .test_messages import ask

PROMPT = "secret words of mine"


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Script, Runs]]:
    pytest.importorskip("prometheus_client")
    script, runs = Script(), Runs()
    with served(script, runs=runs, metrics=True) as url:
        wait_until(lambda: script.used.status.loaded)
        yield url, script, runs


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, health.log.name)
    return lambda: [json.loads(record.message) for record in caplog.records if record.name == health.log.name]


def play(runs: Runs, **asked: Any) -> Run:
    run = runs.begin(Run(replace(ask(), prompt=PROMPT, **asked)), "a session of mine")
    with suppress(EngineTrouble):
        for _ in runs.play(run, runs.engine):
            pass
    return run


def test_health_says_whether_the_page_is_ready(site: tuple[str, Script, Runs]) -> None:
    url, script, runs = site
    answer = httpx.get(f"{url}health")
    told = {"ready": True, "preset": "scripted", "version": __version__, "waiting": 0, "running": 0}
    assert (answer.status_code, answer.json()) == (200, told)
    script.used.add(replace(PRESETS["other"], name="/home/me/a-model"), "me")
    play(runs, preset="/home/me/a-model")
    assert httpx.get(f"{url}health").json()["preset"] == "own"


def test_health_says_that_nothing_is_loaded() -> None:
    script = Script()
    script.load_failure = MemoryError("Too little memory.")
    with served(script) as url:
        wait_until(lambda: script.used.status.stage == "failed")
        answer = httpx.get(f"{url}health")
        assert (answer.status_code, answer.json()["ready"], answer.json()["preset"]) == (503, False, None)
        assert httpx.get(f"{url}metrics").status_code == 404


def test_each_race_is_a_line_without_anything_of_the_visitor(site: tuple[str, Script, Runs], lines: Any) -> None:
    _, script, runs = site
    run = play(runs, drafter="ngram")
    script.fail_at, script.failure = 5, MemoryError("Too little memory.")
    play(runs)
    script.fail_at = None
    stopped = runs.begin(Run(replace(ask(), prompt=PROMPT)), "a session of mine")
    with closing(runs.play(stopped, runs.engine)) as messages:  # type: ignore[type-var]
        assert len(list(islice(messages, 2))) == 2
    script.used.add(replace(PRESETS["other"], name="/home/me/a-model"), "me")
    play(runs, preset="/home/me/a-model")
    first, failed, ended, own = lines()
    assert [*first] == ["preset", "drafter", "tokens", "seconds", "outcome"]
    assert run.outcome is not None
    stats = run.outcome.stats.values()
    assert first == {
        "preset": "scripted",
        "drafter": "ngram",
        "tokens": sum(lane.tokens for lane in stats),
        "seconds": round(sum(lane.seconds for lane in stats), 3),
        "outcome": "finished",
    }
    assert (failed["outcome"], ended["outcome"], own["preset"]) == ("failed", "stopped", "own")
    written = json.dumps([first, failed, ended, own])
    assert not [word for word in (*PROMPT.split(), "session", "127.0.0.1", "/home") if word in written]


def test_the_counters_add_up(site: tuple[str, Script, Runs], lines: Any) -> None:
    url, _, runs = site

    def counted() -> dict[str, float]:
        answer = httpx.get(f"{url}metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert PROMPT.split(maxsplit=1)[0] not in answer.text
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
        }

    labels = 'drafter="none",preset="scripted"'
    races = 'specdemo_races_total{drafter="none",outcome="finished",preset="scripted"}'
    before = counted()
    play(runs)
    after, (line,) = counted(), lines()
    assert after[races] - before.get(races, 0) == 1
    for name, what in (("tokens", "tokens"), ("engine_seconds", "seconds")):
        counter = f"specdemo_{name}_total{{{labels}}}"
        assert after[counter] - before.get(counter, 0) == pytest.approx(line[what])
    assert (after["specdemo_ready"], after["specdemo_waiting"]) == (1, 0)


def test_behind_a_login_the_counters_are_not_shown_to_strangers() -> None:
    pytest.importorskip("prometheus_client")
    with served(Script(), auth=("me", "secret"), metrics=True) as url, httpx.Client(base_url=url) as own:
        assert own.get("/metrics").status_code == 401
        assert own.post("/login", data={"username": "me", "password": "secret"}).status_code == 200
        assert "specdemo_ready" in own.get("/metrics").text


def test_a_missing_package_is_told_in_a_sentence(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "find_spec", lambda name: None)
    status, _, said = command("serve", "--preset", "nanogpt-shakespeare", "--metrics")
    assert (status, said) == (
        2,
        "specdemo: --metrics needs the package prometheus-client: pip install prometheus-client.\n",
    )
