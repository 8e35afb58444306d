"""Servers that a visitor names: a race of them, a check of them, and what may never be seen of their keys."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from specdemo.racing.asked import Request
from specdemo.racing.compare import other_draws
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.trace import read_trace
from specdemo.servers.address import Address
from specdemo.servers.race import TURNS
from specdemo.studies.lab import STUDIES
from specdemo.types import BadInput, Settings
from specdemo.ui.budgets import Budgets
from specdemo.ui.engine import EngineTrouble
from specdemo.ui.lab.run import LabRun
from specdemo.ui.race.own_servers import Place, ServerRun, read_servers
from specdemo.ui.replay.playable import uploaded

from ..fakes.engine import Script, asked_by_form
from ..fakes.server import FakeServer, head, llamacpp_answers, replayed, replayed_alone, serving
from ..sentences import gist, refuses, tells
from .browser import open_tab, parts_by_id, run, sentence, settings, shared, tokens_of, tokens_shown
from .conftest import Visit
from .test_page import SHIFTS, serious

KEY, OTHER = "sk-very-secret-0123456789", "sk-another-secret-987654"
TEXT = "The snow lies soft upon the hill"
Pair = tuple[FakeServer, str]


def asked(**settings: Any) -> Request:
    return Request("Hi", "scripted", "none", Settings(max_new_tokens=40, **settings))


def place(pair: Pair, key: str = "") -> Place:
    return Place(Address.read(pair[1]), key)


def played(run: ServerRun, script: Script) -> dict[str, Any]:
    """All that its messages say."""
    told: dict[str, Any] = {"lanes": {}}
    for message in map(json.loads, run.play(script.engine())):
        for lane, events in message.pop("lanes", {}).items():
            told["lanes"].setdefault(lane, []).extend(events)
        told |= message
    return told


# A race ---------------------------------------------------------------------------------------------------------


def test_a_race_of_servers_is_told_like_any_other(drafting: Pair, plain: Pair) -> None:
    """No preset is loaded for it."""
    script = Script()
    run = ServerRun(asked(), place(drafting, KEY), place(plain, OTHER))
    told = played(run, script)
    assert script.loads == []
    assert told["start"]["preset"] == "toy.gguf"
    assert tells(told["start"]["drafter"], "the server's")
    assert told["start"]["settings"]["k"] is None  # what it drafts is its own
    assert json.loads(uploaded(run.trace()))["request"]["settings"]["k"] is None
    shown = {
        lane: "".join(
            text for event in events if event["row"] for text, code, *_ in event["row"][2] if code not in "xu"
        )
        for lane, events in told["lanes"].items()
    }
    assert shown == {PLAIN: TEXT, SPECULATIVE: TEXT}
    end = told["end"]
    assert (end["stats"][PLAIN]["drafted"], end["stats"][SPECULATIVE]["drafted"]) == (0, 5)
    assert end["exactness"]["mark"] == "same"
    assert TURNS in end["exactness"]["words"]
    assert tells(end["exactness"]["words"], "server after")
    assert not end["stopped"]
    header, entries = read_trace(run.trace().split("\n"))
    assert [lane["name"] for lane in header["lanes"]] == [PLAIN, SPECULATIVE]
    assert len(entries) == len(run.entries)
    everything = run.trace() + json.dumps(told) + repr(vars(run))
    for secret in (KEY, OTHER, drafting[1].partition("//")[2], plain[1].partition("//")[2]):
        assert secret not in everything
    assert all(f"Bearer {KEY}" in heads and OTHER not in heads for _, heads, _ in drafting[0].asked)
    assert all(f"Bearer {OTHER}" in heads and KEY not in heads for _, heads, _ in plain[0].asked)


@pytest.mark.parametrize("beside", [True, False])
def test_work_beside_a_race_of_servers_is_told(beside: bool) -> None:
    engine = Script().engine()

    def answer(connection: socket.socket) -> None:
        if beside:
            with engine.beside.work():
                pass
        connection.sendall(replayed_alone("llamacpp-ended"))

    with serving(llamacpp_answers(answer)) as found:
        run = ServerRun(asked(), place(found))
        *_, last = map(json.loads, run.play(engine))
    assert last["end"]["disturbed"] is beside
    assert json.loads(uploaded(run.trace()))["end"]["disturbed"] is beside


def test_without_a_baseline_it_says_so(drafting: Pair) -> None:
    told = played(ServerRun(asked(), place(drafting)), Script())
    assert [*told["lanes"]] == [SPECULATIVE]
    assert tells(told["end"]["sentence"], "baseline compare")
    assert (told["end"]["speed_up"], told["end"]["stopped"]) == (None, False)
    assert TURNS not in told["end"]["exactness"]["words"]


def test_above_temperature_0_texts_are_not_compared(drafting: Pair, plain: Pair) -> None:
    told = played(ServerRun(asked(temperature=0.7), place(drafting), place(plain)), Script())
    assert told["end"]["exactness"]["mark"] == "chance"
    assert told["end"]["exactness"]["words"].startswith(other_draws(True))
    sent = json.loads(next(body for path, _, body in drafting[0].asked if path == "/completion"))
    assert (sent["temperature"], sent["n_predict"]) == (0.7, 40)


def test_a_server_that_fails_is_one_sentence_without_its_key(drafting: Pair, plain: Pair) -> None:
    plain[0].answers = {**plain[0].answers, "/completion": head("application/json", "500 No") + KEY.encode()}
    run = ServerRun(asked(), place(drafting), place(plain, KEY))
    with refuses(EngineTrouble, "failed (500)."):
        list(run.play(Script().engine()))
    assert KEY not in "".join(run.messages)
    assert run.ended.is_set()


@pytest.mark.parametrize("seconds", [None, 1.0])
def test_stop_or_a_limit_ends_it_between_two_pieces_of_an_answer(
    drafting: Pair, plain: Pair, seconds: float | None
) -> None:
    """The baseline has written its text; the server goes on for ever."""
    asked_for = threading.Event()

    def endless(connection: socket.socket) -> None:
        whole, *_ = replayed("llamacpp-ended")[:700].rpartition(b"\n\n")
        connection.sendall(whole + b"\n\n")
        asked_for.set()
        while True:
            connection.sendall(b": still here\n\n" * 100)

    drafting[0].answers = {**drafting[0].answers, "/completion": endless}
    run = ServerRun(asked(), place(drafting), place(plain), seconds)

    def stop() -> None:
        asked_for.wait(20)
        run.stop.set()

    if seconds is None:
        threading.Thread(target=stop).start()
    told = played(run, Script())
    assert told["end"]["stopped"]
    limit = "It had run for 1 s, the most that a race may take here."
    assert told["end"]["sentence"].startswith(limit) is bool(seconds)
    assert told["end"]["exactness"]["title"].lower().endswith("stopped after 1 s") is bool(seconds)
    assert told["end"]["stats"][PLAIN]["tokens"] > 0
    assert run.trace()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("", "", "", ""), "address"),
        (("localhost", KEY, "", ""), "http://127.0.0.1:8080"),
        (("http://127.0.0.1:9", KEY * 20, "", ""), "300"),
        (("http://127.0.0.1:9", "", f"http://{KEY}@127.0.0.1", ""), "key"),
        ((None, "", "", ""), "text"),
        (("http://127.0.0.1:9", ["x"], "", ""), "text"),
    ],
)
def test_what_cannot_be_asked_is_refused_without_being_quoted(values: tuple[Any, ...], words: str) -> None:
    with refuses(BadInput, words) as refused:
        read_servers(asked_by_form(), values)
    assert KEY not in str(refused.value)


def test_a_server_is_not_raced_with_several_readers() -> None:
    with refuses(BadInput, "1 reader"):
        read_servers(asked_by_form(readers="2"), ["http://127.0.0.1:9", "", "", ""])


# On the page ----------------------------------------------------------------------------------------------------


def name_servers(page: Page, server: str, key: str = "", baseline: str = "") -> None:
    """Name them in Check, and press "Race it" by the keyboard."""
    open_tab(page, "Check")
    if not page.locator("#lab-check-server").is_visible():
        page.get_by_role("button", name="Your own server").click()
    for name, value in (("server", server), ("server_key", key), ("baseline", baseline)):
        page.locator(f"#lab-check-{name} :is(input, textarea)").fill(value)
    page.get_by_role("button", name="Race it").press("Enter")


def test_a_race_of_servers_on_the_page(visit: Visit, drafting: Pair, plain: Pair) -> None:
    page = visit(before=SHIFTS)
    page.fill("#prompt textarea", "Hi")
    expect(page.locator("#raced")).not_to_be_attached()
    name_servers(page, drafting[1], KEY, plain[1])
    expect(page.locator("#run")).to_be_focused()
    expect(page.get_by_label("Your server")).to_be_checked()
    page.evaluate("window.shifts = []")
    page.keyboard.press("Enter")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert serious(page) == []
    assert page.evaluate("window.shifts") == []
    expect(page.locator("#race .sd-lanes")).to_be_in_viewport()
    for lane in (PLAIN, SPECULATIVE):
        written = [text for text, code in tokens_shown(page, lane) if code not in ("x", "u")]
        assert "".join(written) == TEXT
    assert page.locator(".sd-badge").inner_text().startswith("Same text")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    with page.expect_download() as download:
        shared(page, "trace")
    assert KEY not in download.value.path().read_text()
    assert KEY not in page.content() + page.url + str(page.evaluate("({ ...localStorage })"))
    expect(page.locator(".sd-mine-how")).to_contain_text("the server's own")
    expect(page.locator(".sd-run-again")).to_be_hidden()  # no link can name the server
    open_tab(page, "Check")
    assert page.locator("#lab-check-server_key input").get_attribute("type") == "password"
    assert serious(page) == []


def test_a_server_that_is_not_there_is_said_and_the_preset_races_again(visit: Visit) -> None:
    page = visit()
    name_servers(page, "localhost", KEY)
    said = page.locator("#lab-check .lab-says [role=status]")  # beside the button
    expect(said).to_contain_text("A server's address looks like")
    expect(said).to_be_in_viewport()
    name_servers(page, "http://127.0.0.1:9", KEY)
    run(page, "Hi", until="failed")
    assert tells(sentence(page), "http://127.0.0.1:9 reached")
    expect(said).to_be_empty()
    open_tab(page, "Check")
    page.locator("#lab-check-server :is(input, textarea)").fill("")
    run(page, until="failed")
    assert gist(sentence(page)) == "Type Check http://127.0.0.1:8080"
    name_servers(page, "")
    expect(page.get_by_label("The preset")).to_be_checked()
    run(page)


def test_a_model_that_was_checked_is_raced_by_the_same_button(visit: Visit, script: Script) -> None:
    page = visit(width=390, before=SHIFTS)
    open_tab(page, "Check")
    page.get_by_role("button", name="Race it").press("Enter")
    expect(page.locator("#run")).to_be_focused()
    assert page.evaluate("window.shifts") == []
    expect(page.locator("#run")).to_be_in_viewport()
    expect(page.locator("#raced")).not_to_be_attached()  # there is no choice
    run(page, "one two three")
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


@pytest.mark.slow
def test_choosing_a_preset_or_an_earlier_race_chooses_the_model(visit: Visit, drafting: Pair) -> None:
    page = visit()
    run(page, "one two three")
    name_servers(page, drafting[1])
    expect(page.get_by_label("Your server")).to_be_checked()
    page.locator(".sd-mine summary").click()
    page.locator(".sd-run-again").click()
    expect(page.get_by_label("The preset")).to_be_checked()
    page.get_by_label("Your server").check()
    settings(page)
    page.click("#preset input")
    page.get_by_role("option", name="Other 1.7B").click()
    expect(page.get_by_label("The preset")).to_be_checked()


@pytest.mark.slow
def test_a_public_page_has_the_fields_only_for_servers_that_its_owner_allows(
    monkeypatch: pytest.MonkeyPatch, drafting: Pair
) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/space")
    monkeypatch.setenv("SPECDEMO_ALLOW", "someone/big")
    parts = parts_by_id()
    assert not {"lab-check-server", "lab-check-at_once"} & parts.keys()
    monkeypatch.setenv("SPECDEMO_ALLOW", f"someone/big {drafting[1]}")
    assert parts_by_id()["lab-check-server"].info == f"This Space allows: {drafting[1]}."
    with refuses(BadInput, "Space owner"):
        read_servers(asked_by_form(), ["http://127.0.0.1:9", "", "", ""])
    assert played(read_servers(asked_by_form(), [drafting[1], "", "", ""]), Script())["end"]
    assert not {"lab-check-server", "lab-check-at_once"} & parts_by_id(Budgets(own_models=False)).keys()


# Check -----------------------------------------------------------------------------------------------------


def test_servers_are_checked_and_no_key_is_kept(drafting: Pair, plain: Pair) -> None:
    form = {field.name: field.value for field in STUDIES["check"].form()}
    form |= {"drafters": ["ngram"], "at_once": 2}
    form |= {"server": drafting[1], "server_key": KEY, "baseline": plain[1], "baseline_key": OTHER}
    engine = Script().engine()
    run = LabRun("scripted", STUDIES["check"], STUDIES["check"].read(form))
    list(run.play(engine))
    assert run.outcome == "Done."
    whole = json.loads(run.files["json"])
    assert whole["verdict"]
    assert whole["texts"]["same"] == whole["texts"]["compared"] == 16
    assert [row["at_once"] for row in whole["at_once"]] == [1, 2]
    assert run.files["html"].startswith("<!doctype html>")
    everything = "".join(run.files.values()) + repr(run.asked) + str(run.picture)
    for secret in (KEY, OTHER, drafting[1].partition("//")[2], plain[1].partition("//")[2]):
        assert secret not in everything
    assert any(f"Bearer {KEY}" in heads for _, heads, _ in drafting[0].asked)


def test_where_no_servers_may_be_named_none_is_asked() -> None:
    study = STUDIES["check"]
    read = study.read({field.name: field.value for field in study.form(servers=False)} | {"drafters": ["ngram"]})
    assert not {"server", "server_key", "baseline", "baseline_key"} & read.keys()


@pytest.mark.parametrize("given", [None, 3, [KEY], KEY * 20])
@pytest.mark.parametrize("name", ["server", "server_key", "baseline", "baseline_key"])
def test_a_field_for_a_key_never_quotes(name: str, given: Any) -> None:
    field = next(field for field in STUDIES["check"].form() if field.name == name)
    with refuses(BadInput, "300") as refused:
        field.read(given)
    assert KEY not in str(refused.value)


def test_a_baseline_needs_a_server(plain: Pair) -> None:
    form = {field.name: field.value for field in STUDIES["check"].form()}
    form |= {"drafters": ["ngram"], "baseline": plain[1]}
    run = LabRun("scripted", STUDIES["check"], STUDIES["check"].read(form))
    with refuses(EngineTrouble, "address"):
        list(run.play(Script().engine()))
