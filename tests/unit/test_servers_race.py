"""Races of servers: fake ones that replay recorded streams, and llama.cpp's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdemo.cli import main as cli
from specdemo.cli.servers import BASELINE_KEY, SERVER_KEY
from specdemo.errors import BadInput
from specdemo.racing.compare import OWN_DRAFTER
from specdemo.racing.figures import counts_by_place
from specdemo.racing.request import Request
from specdemo.racing.trace import PLAIN, SPECULATIVE, read_trace, trace_lines
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.dialects import Dialect, find_dialect
from specdemo.servers.race import outcome, race_servers
from specdemo.settings import Settings
from specdemo.ui.replay.playable import playable
from tests.harness.classes import LaneFigures

from ..fakes.server import FakeServer
from ..sentences import gist, refuses, tells

KEY = "sk-very-secret-0123456789"
RACE = ["race", "--prompt", "Hi", "--max-new-tokens", "40", "--server"]


def run(*args: str) -> str:
    result = CliRunner().invoke(cli.app, args)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def request(prompt: str, settings: Settings, raw: bool = False) -> Request:
    return Request(prompt, "", OWN_DRAFTER, settings, raw)


def test_two_servers_race(
    drafting: tuple[FakeServer, str], plain: tuple[FakeServer, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SERVER_KEY, KEY)
    trace = tmp_path / "race.jsonl"
    said = run(*RACE, drafting[1], "--baseline", plain[1], "--json", "--out", str(trace))
    found = json.loads(said)
    assert [found[lane]["text"] for lane in (PLAIN, SPECULATIVE)] == ["The snow lies soft upon the hill"] * 2
    assert found["comparison"] == {"identical": True, "first_difference": None, "margin": None}
    stats = {lane: found[lane]["stats"] for lane in (PLAIN, SPECULATIVE)}
    assert (stats[PLAIN]["drafted"], stats[SPECULATIVE]["drafted"]) == (0, 5)
    assert stats[SPECULATIVE]["verify_seconds"] is None
    speeds = [stats[lane]["tokens_per_second"] for lane in (SPECULATIVE, PLAIN)]
    assert found["speed_up"] == pytest.approx(speeds[0] / speeds[1])
    assert found[SPECULATIVE]["server"]["clock"] == "server"
    assert 0 <= found[SPECULATIVE]["server"]["network_seconds"] < found[SPECULATIVE]["server"]["seconds"] + 1
    assert KEY not in said + trace.read_text()
    assert drafting[1].partition("//")[2] not in trace.read_text()
    assert all(f"Bearer {KEY}" in head for _, head, _ in drafting[0].asked)
    assert not any("Bearer" in head for _, head, _ in plain[0].asked)  # a key goes to its own server only
    header, entries = read_trace(trace_lines(trace))
    assert [*map(gist, [lane["drafter"] for lane in header["lanes"]])] == ["none", "the server's"]
    assert {entry.lane for entry in entries} == {PLAIN, SPECULATIVE}


def test_the_baseline_has_its_own_key(
    drafting: tuple[FakeServer, str], plain: tuple[FakeServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BASELINE_KEY, KEY)
    said = run(*RACE, drafting[1], "--baseline", plain[1])
    assert tells(said, "texts same turns")
    assert all(f"Bearer {KEY}" in head for _, head, _ in plain[0].asked)
    assert not any("Bearer" in head for _, head, _ in drafting[0].asked)


def test_a_trace_can_be_the_baseline(
    drafting: tuple[FakeServer, str], plain: tuple[FakeServer, str], tmp_path: Path
) -> None:
    trace = tmp_path / "alone.jsonl.gz"
    alone = run(*RACE, plain[1], "--out", str(trace))
    assert tells(alone, "baseline compare")
    found = json.loads(run(*RACE, drafting[1], "--baseline", str(trace), "--json"))
    assert found["comparison"]["identical"]
    assert found["speed_up"] is not None
    with refuses(BadInput, "prompt settings"):
        run("race", "--prompt", "Ho", "--server", drafting[1], "--baseline", str(trace))
    run(*RACE, drafting[1], "--out", str(trace))
    with refuses(BadInput, "drafted"):
        run(*RACE, drafting[1], "--baseline", str(trace))


def test_above_temperature_0_the_servers_draws_are_their_own(
    drafting: tuple[FakeServer, str], plain: tuple[FakeServer, str], tmp_path: Path
) -> None:
    """Whatever rule they test drafts by: a server does not tell it."""
    trace = tmp_path / "race.jsonl"
    said = run(*RACE, drafting[1], "--baseline", plain[1], "--temperature", "0.7", "--out", str(trace))
    badge = playable(*read_trace(trace_lines(trace)))["end"]["exactness"]
    assert (badge["mark"], badge["title"]) == ("chance", "Same text")
    assert tells(badge["words"], "server could differ,")
    assert badge["words"] in said
    assert "ejection" not in said + str(badge)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["race", "--server", "http://127.0.0.1:9", "--prompt", "Hi", "-k", "3", "--eager"], "-k, --eager"),
        (["race", "--server", "http://127.0.0.1:9"], "race"),
        (["race", "--prompt", "Hi", "--baseline", "http://127.0.0.1:9"], "--server"),
        ([*RACE, "http://127.0.0.1:9"], "http://127.0.0.1:9 reached"),
        ([*RACE, "http://127.0.0.1:9", "--out", "/no/such/folder/x"], "/no/such/folder folder"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], words: str) -> None:
    with refuses(BadInput, words):
        run(*args)


# llama.cpp's own server -------------------------------------------------------------------------------------

REPEAT = "Repeat the following text word for word:"
TEXTS = [
    f"{REPEAT}\n\nThe snow lies soft upon the hill, the wind is low, the night is still.",
    "Repeat this word for word: 🦄🐉 is not 🦄🐉 and 日本語 is 日本語 and 🦄🐉 is not 🦄🐉",
    "List the months of the year.",
]


@pytest.mark.real
@pytest.mark.parametrize(
    ("prompt", "temperature"),
    [
        (TEXTS[0], 0.0),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((TEXTS[0], 0.7), (TEXTS[1], 0.0), (TEXTS[2], 0.0))),
    ],
)
def test_the_rounds_of_the_real_server_are_those_that_it_counted(
    real: dict[str, Dialect], prompt: str, temperature: float
) -> None:
    before = {lane: dialect.counters() for lane, dialect in real.items()}
    settings = Settings(max_new_tokens=64, temperature=temperature, seed=3)
    race = race_servers(request(prompt, settings), real[SPECULATIVE], real[PLAIN])
    ended = outcome(race)
    found = ended.as_dict()
    for lane, dialect in real.items():
        now, then = dialect.counters(), before[lane]
        assert now is not None
        assert then is not None
        counted, events = now.since(then), ended.lanes[lane].events
        stats, server = LaneFigures.of(events), found[lane]["server"]
        assert server["counters_agree"] is True
        assert stats.tokens == counted.tokens
        totals = server["totals"]
        assert (totals["drafted"], totals["accepted"]) == (counted.drafted, counted.accepted)
        if stats.drafted is not None:
            assert (stats.drafts, stats.drafted) == (counted.rounds, counted.drafted)
            if found[lane]["finish_reason"] == "length":
                assert stats.accepted == counted.accepted
                assert [passed for _, passed in counts_by_place(events)][: len(counted.by_position)] == [
                    *counted.by_position
                ]
        assert server["server_seconds"] == pytest.approx(stats.seconds, abs=1e-4)
        assert server["first_token_seconds"] <= server["seconds"]
    assert (found[PLAIN]["stats"]["drafted"], found[PLAIN]["stats"]["rounds"]) == (
        0,
        found[PLAIN]["stats"]["tokens"] - 1,
    )
    if prompt == TEXTS[0] and not temperature:
        assert found[SPECULATIVE]["stats"]["accepted"] > 0


@pytest.mark.real
def test_the_real_server_reads_a_chat_as_its_template_says(real: dict[str, Dialect]) -> None:
    prompt = real[PLAIN].prompt_of("Hi", False)
    assert isinstance(prompt, str)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert real[PLAIN].prompt_of("Hi", True) == "Hi"
    with refuses(BadInput, "(400: context"):
        race_servers(request("word " * 3000, Settings(max_new_tokens=4), raw=True), real[PLAIN], None)


@pytest.mark.servers
@pytest.mark.skipif("SPECDEMO_VLLM" not in os.environ, reason="SPECDEMO_VLLM names no running vLLM that speculates")
def test_the_rounds_of_a_running_vllm_are_those_that_it_counted() -> None:
    """Nobody else may use it meanwhile."""
    with Client(Address.read(os.environ["SPECDEMO_VLLM"])) as client:
        dialect = find_dialect(client)
        assert dialect.facts["engine"] == "vLLM"
        for prompt in TEXTS:
            before = dialect.counters()
            race = race_servers(request(prompt, Settings(max_new_tokens=64)), dialect, None)
            now, stats = dialect.counters(), outcome(race).lanes[SPECULATIVE]
            assert before is not None
            assert now is not None
            counted = now.since(before)
            assert stats.tokens == counted.tokens
            assert race.servers[SPECULATIVE]["counters_agree"] is True
            if stats.drafted is not None:
                assert (stats.drafts, stats.drafted) == (counted.rounds, counted.drafted)
