"""`specdemo serve`, on a preset that needs no download, and what tells of its health."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from specdemo import __version__
from specdemo.errors import BadInput
from specdemo.ui import health
from specdemo.ui.engine import EngineTrouble
from specdemo.ui.race.run import RaceRun
from specdemo.ui.serve import read_logins
from tests.harness.ui_classes import Engine, Runs

from ..fakes.engine import PRESETS, Script
from ..sentences import refuses, tells
from .browser import served, wait_until
from .test_messages import ask

PRESET = "nanogpt-shakespeare"


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "begin_loading", lambda engine, preset: None)


@pytest.mark.usefixtures("loads_nothing")
def test_where_others_reach_the_page_without_a_login_nobody_names_models(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[gr.Blocks, dict[str, Any]]] = []
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: served.append((page, options)))
    for host, named in (("127.0.0.1", True), ("0.0.0.0", False)):
        assert command("serve", "--preset", PRESET, "--host", host)[0] == 0
        page, options = served.pop()
        ids = {str(getattr(block, "elem_id", None)) for block in page.blocks.values()}
        assert (options["server_name"], options["auth"]) == (host, None)
        assert "preset" in ids
        assert any(name.startswith("own-") for name in ids) == named
        targets = [page.blocks.get(at) for fn in page.fns.values() for at, _ in fn.targets]
        wired = {str(getattr(target, "elem_id", None)) for target in targets}
        assert any(name.startswith("own-") for name in wired) == named


@pytest.mark.usefixtures("loads_nothing")
def test_it_opens_with_the_preset_that_was_asked_for_and_only_those_who_log_in_see_it(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "logins"
    file.write_text("me:a:secret\n\nyou:another\n")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch, served = gr.Blocks.launch, list[gr.Blocks]()

    def begin(page: gr.Blocks, **options: Any) -> None:
        served.append(page)
        launch(page, prevent_thread_lock=True, **options)

    monkeypatch.setattr(gr.Blocks, "launch", begin)
    options = ["--preset", PRESET, "--host", "0.0.0.0", "--port", str(port), "--auth", str(file)]
    assert command("serve", *options)[0] == 0
    with closing(served[0]), httpx.Client(base_url=f"http://127.0.0.1:{port}") as visitor:
        assert visitor.get("/config").status_code == 401
        assert visitor.post("/login", data={"username": "me", "password": "another"}).status_code == 400
        assert visitor.post("/login", data={"username": "me", "password": "a:secret"}).status_code == 200
        parts = {part["props"].get("elem_id"): part["props"] for part in visitor.get("/config").json()["components"]}
        assert parts["preset"]["value"] == PRESET
        assert "own-target" in parts


@pytest.mark.slow
@pytest.mark.usefixtures("loads_nothing")
def test_a_port_that_is_taken_is_refused_in_a_sentence(command: Any) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, said = command("serve", "--preset", PRESET, "--port", str(port))
    assert (status, len(said.splitlines())) == (2, 1), said
    assert tells(said, f"port {port} 127.0.0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "65535"),
        (["--preset", "nobody"], "preset 'nobody'"),
        (["--auth", "/nowhere/logins"], "/nowhere/logins"),
        (["--preset", PRESET, "--metrics"], "--metrics prometheus-client: prometheus-client."),  # which is missing
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    options: list[str], words: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "find_spec", lambda name: None)
    status, _, said = command("serve", *options)
    assert (status, len(said.splitlines())) == (2, 1)
    assert tells(said, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"me:secret\nonly-a-name\n", "2 user:password"),
        (b":secret\n", "Line 1"),
        (b"me:\n", "Line 1"),
        (b"\n\n", "empty"),
        (b"\xff\xfe:secret", "logins read"),
    ],
)
def test_a_file_of_logins_that_is_none_is_refused_without_its_passwords(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "logins"
    file.write_bytes(content)
    with refuses(BadInput, words) as refusal:
        read_logins(file)
    assert not re.search("secret|only-a-name", str(refusal.value))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "weights"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_models_are_loaded_with_the_weights_that_were_asked_for(
    command: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, weights: str
) -> None:
    """The page's engine loads the preset while the page is served."""
    begun: list[Engine] = []
    monkeypatch.setattr(Engine, "begin_loading", lambda engine, preset: begun.append(engine))
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: None)
    assert command("serve", "--preset", PRESET, "--weights", dtype)[0] == 0
    (engine,) = begun
    loaded = engine.backend.load(engine.presets[PRESET], lambda share, words: None, None)
    assert loaded.environment()["weights_dtype"] == weights
    loaded.release()


def test_a_type_of_weights_that_does_not_exist_is_refused(command: Any) -> None:
    status, _, said = command("serve", "--weights", "int3")
    assert status == 2
    assert tells(said, "'int3' float32")


# What the operator of a page sees of it, which holds nothing of its visitors --------------------------------

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


def play(runs: Runs, **asked: Any) -> RaceRun:
    run = runs.begin(RaceRun(replace(ask(), prompt=PROMPT, **asked)), "a session of mine")
    with suppress(EngineTrouble):
        for _ in runs.play(run, runs.engine):
            pass
    return run


def test_health_says_whether_the_page_is_ready(site: tuple[str, Script, Runs]) -> None:
    url, script, runs = site
    answer = httpx.get(f"{url}health")
    state = {"ready": True, "preset": "scripted", "version": __version__, "waiting": 0, "running": 0}
    assert (answer.status_code, answer.json()) == (200, state)
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
    stopped = runs.begin(RaceRun(replace(ask(), prompt=PROMPT)), "a session of mine")
    with closing(runs.play(stopped, runs.engine)) as messages:  # type: ignore[type-var]
        assert len(list(islice(messages, 2))) == 2
    script.used.add(replace(PRESETS["other"], name="/home/me/a-model"), "me")
    play(runs, preset="/home/me/a-model")
    first, failed, ended, own = lines()
    assert [*first] == ["preset", "drafter", "tokens", "seconds", "outcome"]
    assert run.outcome is not None
    stats = run.outcome.lanes.values()
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
