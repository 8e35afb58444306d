"""An examination: its bounds, its files, and real servers."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.cli.servers import BASELINE_KEY, SERVER_KEY, named
from specdemo.decoding.events import Event, emitted_tokens
from specdemo.errors import BadInput
from specdemo.racing.race import start
from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.servers.dialects import Dialect
from specdemo.settings import Settings
from specdemo.studies import examination
from specdemo.studies.check import ANSWERS
from specdemo.studies.diagnosis import Diagnosis
from specdemo.studies.examination import WARM_UP_TOKENS, Examination, Plan
from specdemo.studies.report import TABLES, html_page, tables_of
from specdemo.studies.study import LONG_PROMPTS
from specdemo.studies.writers import PresetWriter, ServerWriter
from specdemo.system.progress import Stopped, attended
from tests.harness.classes import Loaded

from ..conftest import Command
from ..fakes.server import Answer, head, json_answer, llamacpp_answers, replayed, replayed_alone, serving
from ..fakes.writers import ALONE, DRAFTED, SCRIPT, SMALL, Scripted, examined
from ..sentences import gist, refuses, tells

KEY = "sk-very-secret-0123456789"
VLLM = {"SPECDEMO_VLLM", "SPECDEMO_VLLM_ALONE"}


# Bounds -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time as the examination sees it: `now`."""
    found = SimpleNamespace(now=0.0)
    found.monotonic = found.perf_counter = lambda: found.now
    monkeypatch.setattr(examination, "time", found)
    return found


@pytest.mark.parametrize(
    ("texts", "at", "samples", "at_once"),
    [(0, "warm-up.", 0, 0), (4, "prompts.", 3, 0), (9 + 6, "requests once.", 8, 1)],
)
def test_when_the_time_is_over_it_ends_with_what_it_has(
    clock: SimpleNamespace, texts: int, at: str, samples: int, at_once: int
) -> None:
    def slow(number: int) -> None:
        clock.now += 0.01
        if number == texts:
            clock.now = 61.0

    alone = Scripted(ALONE, 0.1, lambda _: slow(-1))
    study, _ = examined(Scripted(DRAFTED, 0.1, slow), alone, replace(SMALL, seconds=60.0))
    assert (len(study.samples), len(study.at_once)) == (samples, at_once)
    assert [tells(sentence, f"60 {at}") for sentence in study.left_out] == [True]


def test_whoever_stops_it_is_not_taken_for_the_clock(clock: SimpleNamespace) -> None:
    stopped: list[bool] = []
    study = Examination(Scripted(DRAFTED, 0.1, lambda number: stopped.extend([True] * (number == 3))), None, SMALL)
    with pytest.raises(Stopped), attended(lambda: bool(stopped)):
        for _ in study.run():
            pass
    assert len(study.samples) == 2
    assert not study.left_out


def test_a_server_that_fails_midway_leaves_what_was_measured() -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise BadInput("The server at http://127.0.0.1:1 has failed (500).")

    study, found = examined(Scripted(DRAFTED, 0.1, fail), None)
    assert len(study.samples) == 2
    assert [*map(gist, found.left_out)] == ["It The 500"]
    with refuses(BadInput, "failed"):
        examined(Scripted(DRAFTED, 0.1, lambda _: fail(3)), None)


def test_a_server_that_drips_is_left_when_the_time_is_over() -> None:
    """Its second text never ends, though something comes all the time."""
    ended = replayed("llamacpp-ended")
    texts: list[int] = []

    def answer(connection: socket.socket) -> None:
        texts.append(len(texts))
        if len(texts) < 3:
            return connection.sendall(ended)
        connection.sendall(head("text/event-stream"))
        while True:
            connection.sendall(b": still here\n\n" * 100)

    with serving(llamacpp_answers(answer)) as (_, where), ExitStack() as opened:
        writer = ServerWriter(opened.enter_context(named(where, SERVER_KEY)))
        study = Examination(writer, None, replace(SMALL, seconds=1.0))
        assert [tells(step, "eight kinds, code") for step in study.run()] == [True] * len(study.samples)
        assert [*map(gist, study.left_out)] == ["The 1"]
        assert len(texts) <= 3


# Files --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.values, self.text = list[str](), list[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [f"{name}={value}" for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_is_one_page_that_needs_nothing_else() -> None:
    _, found = examined(Scripted(DRAFTED, 0.2), Scripted(ALONE, 0.1))
    text = html_page(["Yes.", found.verdict], "", found.measured(), tables_of(found))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {*page.tags}
    assert not [value for value in page.values if re.match(r"on|src|href|style|action", value)]
    assert not re.search(r"url\(|@import|//", text)
    assert page.tags.count("table") == 5
    assert SCRIPT in page.text  # as text, however a server calls its model
    assert found.verdict in page.text
    text.encode("utf-8")


@pytest.fixture
def servers() -> Iterator[tuple[str, str]]:
    """The same recorded text with drafts and without."""
    models = {"data": [{"id": f"/models/{SCRIPT}", "owned_by": "llamacpp"}]}
    named: dict[str, bytes | Answer] = {
        "/v1/models": json_answer(models),
        "/props": json_answer({"model_path": SCRIPT, "build_info": "b1"}),
    }
    with (
        serving(llamacpp_answers(replayed("llamacpp-ended")) | named) as (_, mine),
        serving(llamacpp_answers(replayed_alone("llamacpp-ended")) | named) as (_, plain),
    ):
        yield mine, plain


def test_a_check_of_servers_tells_neither_key_nor_address(
    servers: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(SERVER_KEY, KEY)
    monkeypatch.setenv(BASELINE_KEY, f"{KEY}-other")
    html_file = tmp_path / "found.html"
    asked = ["--server", servers[0], "--baseline", servers[1]]
    more = ["--at-once", "2", "--context", "300", "--json", "--html", str(html_file)]
    status, out, err = command("doctor", *asked, *more)  # the older name of `check`
    assert status == 0, err
    found = json.loads(out)
    assert found["answer"] in ("yes", "no", "unclear")
    assert found["texts"]["compared"] == found["texts"]["same"] == 16 + LONG_PROMPTS  # two prompts of each kind
    assert [row["at_once"] for row in found["at_once"]] == [1, 2]
    assert [row["context"] for row in found["contexts"]] == [256]
    assert found["in_short"] == found["verdict"]
    assert tells(found["in_short"], "speculation")
    assert [html_file.read_text().count(f">{title}<") for title, _ in TABLES.values()] == [1] * 5
    everything = out + err + html_file.read_text() + caplog.text
    for secret in (KEY, *(where.partition("//")[2] for where in servers)):
        assert secret not in everything
    assert "<script" not in html_file.read_text()
    _, shown, _ = command("check", *asked, "--at-once", "0")
    assert tells(shown, ANSWERS[found["answer"]])


# A preset, and a real server ----------------------------------------------------------------------------------


def test_a_preset_and_its_target_alone_write_a_round_each_in_turn(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts and rounds are those that each writes by itself."""
    steps: list[tuple[str, int]] = []

    def watched(loaded: Loaded, drafter: str, *asked: Any) -> Iterator[Event]:
        for event in start(loaded, drafter, *asked):
            steps.append((drafter, len(emitted_tokens(event))))
            yield event

    settings = Settings(max_new_tokens=24)
    mine, alone = PresetWriter(loaded, "draft-model", 3), PresetWriter(loaded, "none", 0)
    apart = [writer.write("the cat sat", settings) for writer in (mine, alone)]
    monkeypatch.setattr("specdemo.studies.writers.start", watched)
    for together in (
        mine.write_beside(alone, "the cat sat", settings),
        alone.write_beside(mine, "the cat sat", settings)[::-1],
    ):
        for one, other in zip(apart, together, strict=True):
            assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
            assert (one.rounds, one.drafted, one.places) == (other.rounds, other.drafted, other.places)
    half = len(steps) // 2
    for first, turns in (("draft-model", steps[:half]), ("none", steps[half:])):
        assert turns[0][0] == first
        written = {"draft-model": 0, "none": 0}
        for drafter, tokens in turns:
            assert tokens == 0 or written[drafter] == min(written.values())
            written[drafter] += tokens
        assert set(written.values()) == {24}


def test_a_preset_is_examined_by_itself(loaded: Loaded) -> None:
    plan = Plan(1, Settings(3, max_new_tokens=8))
    study = Examination(PresetWriter(loaded, "draft-model", 3), PresetWriter(loaded, "none", 0), plan)
    for _ in study.run():
        pass
    found = Diagnosis(study)
    assert len(found.samples) == 8
    assert found.texts["same"] == 8
    assert not found.left_out
    assert sum(row["accepted"] for row in found.positions) == sum(s.with_drafts.stats.accepted for s in study.samples)
    assert None not in (found.round["draft_ms"], found.round["verify_ms"], found.round["other_ms"])


@pytest.mark.real
@pytest.mark.slow
def test_a_real_server_is_examined(real: dict[str, Dialect]) -> None:
    before = real[SPECULATIVE].counters()
    plan = Plan(1, Settings(0, max_new_tokens=10))
    study = Examination(ServerWriter(real[SPECULATIVE]), ServerWriter(real[PLAIN]), plan)
    study.prompts = study.prompts[:3]
    for _ in study.run():
        pass
    now, found = real[SPECULATIVE].counters(), Diagnosis(study)
    assert before is not None
    assert now is not None
    counted = now.since(before)
    texts = sum(len(sample.with_drafts.tokens) for sample in study.samples)
    assert counted.tokens == texts + WARM_UP_TOKENS
    assert counted.accepted >= sum(row["accepted"] for row in found.positions) >= 0
    assert len(found.samples) == len(found.kinds) == 3
    assert not found.left_out
    assert found.verdict
    for row in found.texts["differences"]:
        assert row["margin"] is not None
    study = Examination(study.with_drafts, study.alone, replace(plan, at_once=(2,)))
    study.prompts = study.prompts[:1]
    for _ in study.run():
        pass
    assert [row["tokens_per_second"] > 0 for row in study.at_once] == [True]


def is_checked(engine: str, where: list[str], command: Command) -> None:
    status, out, err = command("check", "--server", where[0], "--baseline", where[1], "--seconds", "60", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["answer"] in ("yes", "no", "unclear")
    assert found["speed_up"]["mean"] > 0
    assert found["engine"]["engine"] == engine
    assert found["texts"]["compared"] > 0


@pytest.mark.real
@pytest.mark.slow
def test_a_real_server_is_checked(real: dict[str, Dialect], command: Command) -> None:
    is_checked("llama.cpp", [real[lane].client.address.url for lane in (SPECULATIVE, PLAIN)], command)


@pytest.mark.servers
@pytest.mark.skipif(bool(VLLM - os.environ.keys()), reason=f"{' and '.join(sorted(VLLM))} name no running vLLM")
def test_vllm_is_checked(command: Command) -> None:
    """Nobody else may use the two servers meanwhile."""
    is_checked("vLLM", [os.environ[name] for name in ("SPECDEMO_VLLM", "SPECDEMO_VLLM_ALONE")], command)
