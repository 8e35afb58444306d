"""The tools of the page, called by the protocol's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from specdemo.decoding.events import emitted_tokens
from specdemo.errors import BadInput
from specdemo.ui import mcp as tools
from specdemo.ui.budgets import Budgets
from specdemo.ui.engine import Backend
from specdemo.ui.line import Line
from tests.harness.files import full_preset
from tests.harness.ui_classes import Engine

from ..fakes.engine import PROMPTS, Script
from ..sentences import gist, refuses, tells
from .browser import in_a_loop_of_its_own, served, served_engine, wait_until

mcp = pytest.importorskip("mcp")
from mcp.client.streamable_http import streamablehttp_client  # noqa: E402


@pytest.fixture(scope="module")
def scripted() -> Script:
    return Script()


@pytest.fixture(scope="module")
def site(scripted: Script) -> Iterator[str]:
    with served(scripted, budgets=Budgets(new_tokens=40), tools=True) as url:
        yield url


async def _calls(url: str, asked: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], list[Any]]:
    async with (
        streamablehttp_client(f"{url}gradio_api/mcp/") as (reading, writing, _),
        mcp.ClientSession(reading, writing) as session,
    ):
        await session.initialize()
        offered = (await session.list_tools()).tools
        return offered, [await session.call_tool(name, arguments) for name, arguments in asked]


def call(url: str, name: str, **arguments: Any) -> Any:
    """The answer of a tool; its sentence if it refuses."""
    _, (answer,) = in_a_loop_of_its_own(_calls(url, [(name, arguments)]))
    (content,) = answer.content
    return content.text if answer.isError else json.loads(content.text)


def test_the_tools_are_these_and_each_says_what_it_takes(site: str) -> None:
    offered, _ = in_a_loop_of_its_own(_calls(site, []))
    assert tuple(tool.name for tool in offered) == tools.TOOLS
    for tool in offered:
        assert len(tool.description) > 100
        assert all(field["description"] for field in tool.inputSchema.get("properties", {}).values())
    taken = {tool.name: tool.inputSchema for tool in offered}
    assert [*taken["race"]["properties"]] == [
        "prompt",
        "preset",
        "drafter",
        "k",
        "temperature",
        "max_new_tokens",
        "seed",
    ]
    assert taken["race"]["required"] == ["prompt"]
    assert taken["explain_round"]["required"] == ["round"]
    schema = httpx.get(f"{site}gradio_api/mcp/schema").json()  # what the hub reads
    assert [tool["name"] for tool in schema] == [*tools.TOOLS]


def test_a_race_is_run_and_explained(site: str, scripted: Script) -> None:
    asked = {"prompt": "one two three four five", "drafter": "ngram", "k": 3, "max_new_tokens": 40}
    found = call(site, "race", **asked)
    assert (found["drafter"], found["k"], found["comparison"]["identical"], found["stopped"]) == (
        "ngram",
        3,
        True,
        False,
    )
    assert found["speed_up"] > 1
    plain, drafted = found["plain"], found["speculative"]
    assert drafted["stats"]["tokens_per_round"] / found["break_even"] == pytest.approx(found["speed_up"], abs=0.02)
    assert plain["stats"]["tokens"] == drafted["stats"]["tokens"] == 40
    assert plain["text"] == drafted["text"]
    assert len(json.dumps(found)) < 2_000
    rounds = [call(site, "explain_round", round=index, race=found["race"]) for index in (0, 1, 3)]
    assert [[guess["outcome"] for guess in one["drafted"]] for one in rounds] == [
        ["rejected", "untested", "untested"],
        ["accepted", "rejected", "untested"],
        ["accepted", "accepted", "accepted"],
    ]
    assert [one["written"][-1]["kind"] for one in rounds] == ["corrected", "corrected", "bonus"]
    guess = rounds[0]["drafted"][0]
    assert tells(guess.pop("why"), "not likeliest")
    assert guess == {"text": " wrong", "outcome": "rejected", "target_probability": 0.125, "drafter_probability": 0.5}
    assert gist(rounds[1]["why"]) == "One 2 it 1 3"
    assert rounds[1]["text_before"].startswith("one two")
    assert "not 500" in call(site, "explain_round", round=500, race=found["race"])


@pytest.mark.parametrize(("given", "k"), [("3", 3), (3, 3), (3.0, 3), ("auto", "auto")])
def test_k_is_a_number_a_text_of_one_or_auto(site: str, given: Any, k: Any) -> None:
    """Its type in the tool's schema is a text."""
    found = call(site, "race", prompt="one two", k=given, max_new_tokens=8)
    assert found["k"] == k


def test_a_recording_is_explained_without_a_race(site: str) -> None:
    found = call(site, "explain_round", round=2, preset="smollm2-135m")
    assert found["drafted"]
    assert found["written"]
    assert tells(call(site, "explain_round", round=0), "'scripted' recorded")
    assert tells(call(site, "explain_round", round=0, race="0" * 16), "finished race")


def test_the_models_are_listed(site: str) -> None:
    found = call(site, "list_models")
    assert [preset["name"] for preset in found["presets"]] == ["scripted", "other"]
    assert found["loaded"] == "scripted"
    assert "eagle" in found["drafters"]
    assert found["most_new_tokens"] == 40


@pytest.mark.slow
def test_a_model_is_checked(tmp_path: Path) -> None:
    engine = Engine({"toy": full_preset(tmp_path)}, Backend())
    *_, status = engine.follow("toy")
    assert status.stage == "ready", status.words
    with served_engine(engine, PROMPTS, tools=True) as url:
        found = call(url, "check", seconds=10)
        assert found["answer"] in ("yes", "no", "unclear")
        assert found["trials"]
        assert tells(found["in_short"], "times fast")
        assert len(json.dumps(found)) < 5_000
        assert [row["drafter"] for row in call(url, "check", drafter="ngram", seconds=10)["trials"]] == ["ngram"]
        assert "from 10 to 600" in call(url, "check", seconds=5)
        assert tells(call(url, "check", preset="nothing"), "'nothing' called")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_new_tokens": 41}, "1 40,"),
        ({"prompt": " "}, "prompt empty:"),
        ({"k": "four"}, "K 0 16, 'four'. auto."),
        ({"k": "17"}, "K 0 16, 17."),
        ({"preset": "nothing"}, "preset 'nothing'."),
        ({"drafter": "ngram:4,eagle:2"}, "drafter 'ngram:4,eagle:2'."),
    ],
)
def test_a_model_is_refused_in_the_same_words_as_a_person(site: str, asked: dict[str, Any], words: str) -> None:
    assert tells(call(site, "race", **{"prompt": "one two", **asked}), words)


def test_models_wait_in_the_line_of_the_page(site: str, scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of one address may wait or run, as of people, though all have one session."""
    looks: list[Any] = []
    seen = Line.refusal
    monkeypatch.setattr(Line, "refusal", lambda *of: looks.append(of) or seen(*of))  # type: ignore[func-returns-value]
    one = [("race", {"prompt": "one two three", "max_new_tokens": 8})]
    scripted.gate.clear()

    async def four() -> list[Any]:
        waiting = [asyncio.ensure_future(_calls(site, one)) for _ in range(3)]
        while len(looks) < 3:  # each has asked to join
            await asyncio.sleep(0.02)
        _, (refused,) = await _calls(site, one)
        scripted.gate.set()
        return [refused, *(answers[0] for _, answers in await asyncio.gather(*waiting))]

    refused, *answers = in_a_loop_of_its_own(asyncio.wait_for(four(), 30))
    assert tells(refused.content[0].text, "3 requests")
    assert [answer.isError for answer in answers] == [False] * 3


def test_a_race_is_stopped_when_the_model_that_asked_closes_the_connection(site: str, scripted: Script) -> None:
    scripted.gate.clear()
    scripted.pace = 0.05

    async def leave() -> None:
        asked = [("race", {"prompt": "one two three four five", "max_new_tokens": 40})]
        calling = asyncio.ensure_future(_calls(site, asked))
        while not scripted.open_races:
            await asyncio.sleep(0.02)
        calling.cancel()
        await asyncio.wait([calling])

    try:
        in_a_loop_of_its_own(asyncio.wait_for(leave(), 30))
        wait_until(lambda: not tools.calls)
        scripted.gate.set()
        wait_until(lambda: not scripted.open_races)
    finally:
        scripted.gate.set()
        scripted.pace = 0.0
    assert sum(len(emitted_tokens(entry.event)) for entry in scripted.entries) < 40


def test_without_the_option_nothing_is_offered(url: str) -> None:
    assert httpx.post(f"{url}gradio_api/mcp/", json={}).status_code in (404, 405)


@pytest.mark.slow
def test_the_option_or_the_environment_offers_them_but_not_behind_a_login(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(Engine, "begin_loading", lambda engine, preset: None)
    monkeypatch.setattr(gr.Blocks, "launch", lambda page, **options: launched.append(options))
    here = ("serve", "--preset", "nanogpt-shakespeare")
    assert [command(*here)[0], command(*here, "--mcp")[0]] == [0, 0]
    monkeypatch.setenv("GRADIO_MCP_SERVER", "True")
    assert command(*here)[0] == 0
    assert [options["mcp_server"] for options in launched] == [False, True, True]
    logins = tmp_path / "logins"
    logins.write_text("me:secret")
    status, _, said = command(*here, "--auth", str(logins))
    assert (status, tells(said, "cannot"), len(said.splitlines())) == (2, True, 1)


def test_a_missing_package_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    with refuses(BadInput, '"gradio[mcp]"'):
        tools.check_available()
