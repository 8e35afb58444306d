"""The named endpoints, as a program uses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from specdemo.racing.trace import PLAIN, SPECULATIVE
from specdemo.ui.race.run import RaceRun

from ..fakes.engine import PRESETS, Script
from ..sentences import gist, refuses, tells
from .browser import tokens_of


@pytest.fixture(scope="module")
def client(server: tuple[str, Script]) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        client = Client(server[0], verbose=False, analytics_enabled=False)
        yield client
        client.close()


def test_race_streams_every_token_in_order(client: Client, script: Script) -> None:
    script.pace = 0.02
    job = client.submit(prompt="one two three four five", max_new_tokens=20, api_name="/race")
    messages = [json.loads(message) for message in job]
    assert [message["seq"] for message in messages] == list(range(len(messages)))
    assert len({message["run"] for message in messages}) == 1
    assert messages[1]["start"]["prompt"] == "one two three four five"
    for lane in (PLAIN, SPECULATIVE):
        events = [event for message in messages for event in message.get("lanes", {}).get(lane, [])]
        rows = [event["row"] for event in events if event["row"]]
        assert [token[:2] for row in rows for token in row[2]] == tokens_of(script.entries, lane)
    assert messages[-1]["end"]["exactness"]["mark"] == "same"


def test_a_program_on_this_machine_is_known(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    local: list[bool] = []
    play = RaceRun.play
    monkeypatch.setattr(RaceRun, "play", lambda run, engine: local.append(run.local) or play(run, engine))  # type: ignore[func-returns-value]
    client.predict(prompt="one two three", max_new_tokens=3, api_name="/compare")
    assert local == [True]


def test_compare_returns_the_summary(client: Client, script: Script) -> None:
    outcome = client.predict(prompt="one two three", drafter="ngram", k=3, max_new_tokens=9, api_name="/compare")
    figures = {
        "verdicts",
        "speed_up",
        "speed_up_in_all",
        "busy",
        "sentence",
        "comparison",
        "memory_shares",
        "memory_rate",
    }
    assert set(outcome) == {PLAIN, SPECULATIVE, *figures}
    for lane in (PLAIN, SPECULATIVE):
        assert outcome[lane]["text"] == "one two threeone two threeone two three"
        assert outcome[lane]["stats"]["tokens"] == len(outcome[lane]["token_ids"]) == len(outcome[lane]["kinds"]) == 9
        assert outcome[lane]["finish_reason"] == "length"
    assert outcome["comparison"] == {"identical": True, "first_difference": None, "margin": None}
    assert outcome["speed_up"] > 1


def test_several_readers_are_asked_for_in_a_call(client: Client, script: Script) -> None:
    asked = {"prompt": "one two three", "drafter": "ngram", "k": 3, "max_new_tokens": 9, "api_name": "/compare"}
    outcome = client.predict(**asked, readers=2)
    assert {"alone 1", "alone 2", "ngram 1", "ngram 2", PLAIN, SPECULATIVE} < {*outcome}
    assert outcome["ngram 1"]["text"] == outcome["alone 1"]["text"] == "one two threeone two threeone two three"
    assert (outcome["comparison"]["identical"], [*outcome["verdicts"]]) == (True, [SPECULATIVE])
    with refuses(AppError, "readers 1 2 4 8 16, '3'"):
        client.predict(**asked, readers=3)


LANES = "prompt-lookup:2, ngram:4,lookup-ngram:auto"


@pytest.mark.parametrize("isolated", [False, True])
def test_a_race_takes_up_to_three_lanes_with_a_drafter(client: Client, script: Script, isolated: bool) -> None:
    asked = {"prompt": "one two three", "drafter": LANES, "max_new_tokens": 9, "isolated": isolated}
    messages = [json.loads(message) for message in client.submit(**asked, api_name="/race")]
    names = [PLAIN, "prompt-lookup:2", "ngram:4", "lookup-ngram:auto"]
    for lane in names:
        events = [event for message in messages for event in message.get("lanes", {}).get(lane, [])]
        rows = [event["row"] for event in events if event["row"]]
        assert [token[:2] for row in rows for token in row[2]] == tokens_of(script.entries, lane)
    end = messages[-1]["end"]
    assert [*end["stats"]] == names
    assert (end["exactness"]["mark"], end["stopped"]) == ("same", False)
    outcome = client.predict(**asked, api_name="/compare")
    assert [*outcome["verdicts"]] == names[1:]
    assert outcome["speed_up"] == max(verdict["speed_up"] for verdict in outcome["verdicts"].values())


def test_the_badge_names_the_lane_that_differs(client: Client, script: Script) -> None:
    script.differ_at = 2
    *_, last = client.submit(prompt="one two", drafter=LANES, max_new_tokens=6, api_name="/race")
    badge = json.loads(last)["end"]["exactness"]
    assert (badge["mark"], gist(badge["title"])) == ("differs", "First 3")
    assert badge["words"].startswith("prompt-lookup:2: ")


@pytest.mark.parametrize("asked", [{"drafter": "ngram:tree-6"}, {"drafter": "ngram", "k": 6, "tree": True}])
def test_a_lane_may_draft_trees(client: Client, script: Script, asked: dict[str, Any]) -> None:
    messages = [json.loads(message) for message in client.submit(prompt="one two three", **asked, api_name="/race")]
    settings = next(message["start"] for message in messages if "start" in message)["settings"]
    assert (settings["k"], settings["tree"]) == (6, True)
    events = [event for message in messages for event in message.get("lanes", {}).get(SPECULATIVE, [])]
    _, _, tokens = events[1]["row"]
    assert [token[6] for token in tokens if len(token) > 3] == [0, 1, 0, 3]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"drafter": "ngram:4,"}, "1 16 auto, eagle:4 ngram:auto,"),
        ({"drafter": "ngram:4,draft-model:2"}, "draft-model preset"),
        ({"drafter": "ngram:4", "k": 3}, "K: k."),
        ({"drafter": "ngram:4", "tree": True}, "trees"),
        ({"drafter": "ngram", "k": 4, "tree": "yes"}, "tree true false, 'yes'."),
        ({"prompt": " \n"}, "prompt empty:"),
        ({"prompt": 5}, "prompt text."),
        ({"prompt": "x" * 200_001}, "prompt 200,001 200,000"),
        ({"k": "4"}, "K 0 16, '4'."),
        ({"temperature": 2.1}, "temperature 0 2, 2.1."),
        ({"top_p": -1}, "top-p 0 1, -1."),
        ({"top_p": 0}, "top-p 0 1,"),
        ({"seed": -1}, "seed whole 0"),
        ({"top_k": -1}, "top-k whole"),
        ({"max_new_tokens": 0}, "max whole 1"),
        ({"drafter": "<b>"}, "'<b>'. none, prompt-lookup,"),
        ({"preset": "nope"}, "'nope'. scripted, other."),
        ({"stop": [""]}, "stop empty."),
        ({"stop": 3}, "stop list"),
        ({"raw": "yes"}, "raw true false, 'yes'."),
    ],
)
def test_bad_values_are_refused_in_words(client: Client, script: Script, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(AppError) as refusal:
        client.predict(**{"prompt": "one two", **asked}, api_name="/compare" if "drafter" in asked else "/race")
    assert tells(refusal.value, words)
    assert script.open_races == 0


def test_a_failure_in_the_engine_is_told_and_the_next_call_works(client: Client, script: Script) -> None:
    script.fail_at, script.failure = 5, MemoryError("Too little for 7.")
    with refuses(AppError, "Too 7"):
        client.predict(prompt="one two", api_name="/compare")
    script.fail_at = None
    assert client.predict(prompt="one two", max_new_tokens=4, api_name="/compare")[PLAIN]["stats"]["tokens"] == 4


def test_a_preset_is_loaded_when_a_call_names_it(client: Client, script: Script) -> None:
    for preset in ("other", "scripted"):
        first, *_ = map(json.loads, client.submit(prompt="one", preset=preset, max_new_tokens=2, api_name="/race"))
        assert first["status"]["stage"] in ("loading", "ready")
        assert first["status"]["preset"] == preset
    assert [loaded.released for loaded in script.loads[-2:]] == [True, False]


def test_what_a_call_leaves_out_is_as_the_preset_has_it(client: Client, script: Script) -> None:
    outcome = client.predict(prompt="one two", preset="other", api_name="/compare")
    assert outcome[PLAIN]["stats"]["tokens"] == PRESETS["other"].defaults.max_new_tokens
    assert outcome[SPECULATIVE]["stats"]["drafted"] == 0  # it begins with no drafter
    start = [json.loads(m) for m in client.submit(prompt="one", preset="other", k=3, api_name="/race")][1]["start"]
    assert (start["drafter"], start["raw"]) == ("none", True)
    assert (start["settings"]["k"], start["settings"]["temperature"]) == (3, 0.5)


def test_a_run_can_be_followed_from_any_message_on(url: str, client: Client, script: Script) -> None:
    messages = [json.loads(message) for message in client.submit(prompt="one two", max_new_tokens=9, api_name="/race")]
    stream = f"{url}races/{messages[0]['run']}"

    def follow(last: str | None) -> tuple[int, list[Any]]:
        with urlopen(Request(stream, headers={"last-event-id": last} if last else {})) as answer:
            events = answer.read().decode().split("\n\n")[:-1]
            return answer.status, [json.loads(event.partition("data: ")[2]) for event in events]

    assert follow(None) == (200, messages)
    assert follow("1") == (200, messages[2:])
    assert follow("not a number") == (200, messages)
    assert follow(str(len(messages) - 1)) == (204, [])
    with urlopen(f"{url}races/unknown") as answer:
        assert answer.status == 204


def test_nothing_else_is_offered(client: Client, script: Script) -> None:
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/race", "/compare"}
