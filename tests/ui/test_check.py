"""Models and servers of a visitor's own, to be checked and raced: described, then loaded, kept, asked, and refused."""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from specdemo.errors import BadInput
from specdemo.models import report as reporting
from specdemo.models.presets import read_preset
from specdemo.models.sources import Folder, Hub
from specdemo.racing.request import Request
from specdemo.racing.trace import PLAIN, SPECULATIVE, read_trace
from specdemo.servers.address import Address
from specdemo.servers.race import TURNS
from specdemo.settings import Settings
from specdemo.studies.lab import STUDIES
from specdemo.ui.budgets import Budgets
from specdemo.ui.engine import MOST_OWN, Backend, EngineTrouble
from specdemo.ui.lab.run import LabRun
from specdemo.ui.mcp import tools
from specdemo.ui.race.own_servers import ServerAddress, ServerRun, read_servers
from specdemo.ui.replay.playable import uploaded
from tests.harness.files import make_tokenizer, write_gguf
from tests.harness.models import preset_of, save, tiny
from tests.harness.ui_classes import Engine, Runs

from ..fakes.engine import PRESETS, PROMPTS, Script, asked_by_form
from ..fakes.server import FakeServer, head, llamacpp_answers, replayed, replayed_alone, serving
from ..sentences import gist, refuses, telling, tells
from .browser import (
    SHIFTS,
    open_tab,
    parts_by_id,
    run,
    sentence,
    serious,
    served,
    served_engine,
    settings,
    shared,
    tokens_of,
    tokens_shown,
)
from .conftest import Visit


def name_models(page: Page, target: str, draft: str = "") -> None:
    """Open the fields, fill them in, and ask what they take."""
    open_tab(page, "Check")
    field = page.locator("#own-target input, #own-target textarea")
    if not field.is_visible():
        page.get_by_role("button", name="Your own model").click()
    field.fill(target)
    page.locator("#own-draft input, #own-draft textarea").fill(draft)
    page.click("#own-check")


def said(page: Page) -> str:
    open_tab(page, "Check")
    return page.locator("#own-message textarea").input_value()


def expect_said(page: Page, words: str) -> None:
    open_tab(page, "Check")
    expect(page.locator("#own-message textarea")).to_have_value(telling(words))


def chosen(page: Page) -> str:
    settings(page)
    return page.locator("#preset input").input_value()


def test_a_named_pair_is_told_of_first_then_loaded_and_races(visit: Visit, script: Script) -> None:
    page = visit()
    loads = len(script.loads)
    settings(page)
    assert not page.locator("#own-target").is_visible()
    name_models(page, "someone/big", "someone/small")
    expect_said(page, "someone/big someone/small: 1.0 GB.")
    assert len(script.loads) == loads
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.click("#own-load")
    expect(page.locator(".sd-model")).to_have_text("big + small")
    expect(page.locator("#preset input")).to_have_value("big + small")
    expect(page.locator("#drafter input")).to_have_value(re.compile(r"\(draft-model\)"))
    expect(page.locator("#own-cancel")).to_be_disabled()
    assert (script.loads[-1].preset.target, script.loads[-1].preset.draft_model) == (
        Hub("someone/big"),
        Hub("someone/small"),
    )
    settings(page)
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile(r"\(prompt-lookup\)")).click()
    run(page, "one two three")
    assert tokens_shown(page, "speculative") == tokens_of(script.entries, "speculative")
    open_tab(page, "Check")
    page.locator("#own-draft input, #own-draft textarea").fill("")
    expect(page.locator("#own-load")).to_be_disabled()  # what was said is not of these names
    loads = len(script.loads)
    page.reload()
    settings(page)
    expect(page.locator("#preset input")).to_have_value("Scripted 135M")
    expect(page.locator(".sd-model")).to_have_text("someone/big + someone/small")
    page.click("#preset input")
    page.get_by_role("option", name="big + small").click()  # the menu of a page that is opened anew has it
    expect(page.locator("#drafter input")).to_have_value(re.compile(r"\(draft-model\)"))
    expect(page.locator(".sd-model")).to_have_text("big + small")
    run(page, "one two three")
    assert tokens_shown(page, "speculative") == tokens_of(script.entries, "speculative")
    assert len(script.loads) == loads
    page.click("#preset input")
    page.get_by_role("option", name="Scripted 135M").click()
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")


def status_of(url: str, session: str) -> dict[str, Any]:
    """The first message of a session's status."""
    with httpx.stream("GET", f"{url}status", params={"session": session}, timeout=30) as answer:
        return json.loads(next(answer.iter_lines()).removeprefix("data: "))


def test_what_a_visitor_names_is_told_to_that_visitor_alone() -> None:
    script, runs = Script(), Runs()
    with served(script, runs=runs) as url, httpx.Client(base_url=url, timeout=30) as client:
        config = client.get("/config").json()
        ids = {part["props"].get("elem_id"): part["id"] for part in config["components"]}
        begin = next(fn["id"] for fn in config["dependencies"] if [ids["own-load"], "click"] in fn["targets"])

        def name(session: str, target: str) -> str:
            body = {"fn_index": begin, "data": [target, "", ""], "session_hash": session}
            return client.post("/gradio_api/run/predict", json=body).text

        engine = script.used
        list(engine.follow("scripted"))
        assert "someone/secret" in name("mine", "someone/secret")
        list(engine.follow("someone/secret"))
        assert (status_of(url, "mine")["preset"], status_of(url, "mine")["words"]) == ("someone/secret", "secret")
        assert (status_of(url, "theirs")["preset"], status_of(url, "theirs")["loaded"]) == ("own", "own")
        listed = tools(engine, runs, Budgets())["list_models"]()
        assert json.loads(listed)["loaded"] == "own"
        seen = [json.dumps(status_of(url, "theirs")), listed]
        seen.append(name("theirs", "other/one"))  # which may go back to what was
        script.load_failure = MemoryError("/home/me/secret is truncated.")
        name("mine", "someone/secret-2")
        list(engine.follow("someone/secret-2"))
        assert status_of(url, "mine")["words"] == "/home/me/secret is truncated."
        seen.append(json.dumps(status_of(url, "theirs")))
        with pytest.raises(BadInput) as refused:
            engine.check("nothing")
        assert not any("secret" in text for text in [*seen, str(refused.value)])


def test_what_visitors_name_is_forgotten_in_the_end() -> None:
    engine = Script().engine()
    for number in range(2 * MOST_OWN):
        engine.add(replace(PRESETS["other"], name=f"someone/{number}"), "anyone")
    assert [*engine.presets][: len(PRESETS) + 1] == [*PRESETS, f"someone/{MOST_OWN}"]
    assert len(engine.presets) == len(PRESETS) + MOST_OWN


@pytest.mark.slow
def test_a_load_is_cancelled_and_the_preset_before_races(visit: Visit, script: Script) -> None:
    page = visit()
    expect(page.locator(".sd-top")).to_have_attribute("data-stage", "ready")
    before = chosen(page)
    name_models(page, "someone/slow")
    script.loading.clear()
    open_tab(page, "Check")
    page.click("#own-load")
    expect(page.locator(".sd-top")).to_have_attribute("data-stage", "loading")
    expect(page.locator(".sd-model")).to_contain_text("10% done")
    page.click("#own-cancel")
    expect_said(page, "Cancelled. kept.")
    script.loading.set()
    expect(page.locator(".sd-model")).to_have_text(before)
    expect(page.locator("#preset input")).to_have_value(before)
    assert script.loads[-1].preset.name != "someone/slow"
    run(page, "one two three")
    assert tokens_shown(page, "plain") == tokens_of(script.entries, "plain")
    open_tab(page, "Check")
    expect(page.locator("#own-load")).to_be_enabled()
    page.click("#own-load")  # again
    expect(page.locator(".sd-model")).to_have_text("slow")
    assert script.loads[-1].preset.target == Hub("someone/slow")


WRONG = {
    "": "Name .gguf",
    "my model": "'my model' owner/name .gguf",
    "a/b.bin": "a/b.bin pickle, safetensors GGUF",
    "./absent.gguf": "./absent.gguf.",
    "a/huge": "a/huge: 1.0 huge 900.0",
}


def test_wrong_names_are_sentences_and_what_was_loaded_races(visit: Visit, script: Script) -> None:
    page = visit(width=390)
    for name, words in WRONG.items():
        name_models(page, name)
        expect_said(page, words)
        open_tab(page, "Check")
        expect(page.locator("#own-load")).to_be_disabled()
    run(page, "one two three")
    assert tokens_shown(page, "plain") == tokens_of(script.entries, "plain")


@pytest.mark.slow
def test_a_load_that_fails_says_why_and_goes_back(visit: Visit, script: Script) -> None:
    page = visit()
    expect(page.locator(".sd-top")).to_have_attribute("data-stage", "ready")
    before = chosen(page)
    script.load_failure = MemoryError("someone/broken truncated.")
    name_models(page, "someone/broken")
    open_tab(page, "Check")
    page.click("#own-load")
    expect_said(page, "someone/broken truncated.")
    expect(page.locator("#preset input")).to_have_value(before)
    script.load_failure = None
    run(page, "one two three")
    assert tokens_shown(page, "plain") == tokens_of(script.entries, "plain")


@pytest.mark.slow
def test_named_models_are_kept_as_a_preset(
    visit: Visit, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting.save_preset, "__defaults__", (tmp_path,))
    page = visit()
    name_models(page, "someone/big", str(tmp_path))
    open_tab(page, "Check")
    save = page.locator("#own-save")
    save.click()
    expect_said(page, "letters, ''.")
    page.locator("#own-name input, #own-name textarea").fill("mine")
    save.click()
    title = f"big + {tmp_path.name}"
    expect_said(page, f"Saved. {title}.")
    mine = read_preset(tmp_path / "mine.toml")
    assert (mine.target, mine.draft_model) == (Hub("someone/big"), Folder(tmp_path))
    settings(page)
    page.click("#preset input")
    page.get_by_role("option", name=title).click()
    expect(page.locator(".sd-model")).to_have_text(title)
    assert script.loads[-1].preset.name == "mine"


@pytest.mark.slow
def test_a_space_has_the_fields_only_for_what_its_owner_allows(
    visit: Visit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/space")
    assert not parts_by_id()["own"].visible
    monkeypatch.setenv("SPECDEMO_ALLOW", "someone/big")
    parts = parts_by_id()
    assert (parts["own"].visible, parts["own-save"].parent.visible) == (True, False)
    page = visit()
    name_models(page, "someone/other")
    expect_said(page, "someone/other. SPECDEMO_ALLOW.")
    name_models(page, "someone/big")
    expect_said(page, "someone/big: 1.0 GB.")


@pytest.mark.slow
def test_a_gguf_file_races_with_a_draft_model_of_another_tokenizer(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real models, tiny ones."""
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer, other = make_tokenizer(), make_tokenizer(["quite another text of other words altogether"])
    first = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "first")
    stranger = save(tiny("llama", len(other)), other, tmp_path / "stranger")
    engine = Engine({"toy": preset_of(first)}, Backend())
    engine.begin_loading("toy")
    with served_engine(engine, PROMPTS) as url:
        page = visit(at=url)
        expect(page.locator(".sd-model")).to_have_text("Toy")
        name_models(page, str(tmp_path / "tiny.gguf"), str(stranger))
        open_tab(page, "Check")
        expect(page.locator("#own-load")).to_be_enabled()
        assert tells(said(page), "nothing download")
        assert tells(said(page), "drafts text")
        page.click("#own-load")
        expect(page.locator(".sd-model")).to_have_text("tiny.gguf + stranger")
        expect(page.locator(".sd-status")).to_have_attribute("title", telling("drafts text"))
        settings(page)
        page.locator("#max-new-tokens input").fill("24")
        run(page, "the cat sat on the mat")
        plain, drafted = (text_shown(page, lane) for lane in ("plain", "speculative"))
        assert plain == drafted != ""
        name_models(page, str(tmp_path / "cache"))
        expect_said(page, f"{tmp_path / 'cache'}: config.json.")
        run(page, "the dog sat there too")
        assert text_shown(page, "plain") == text_shown(page, "speculative")
        page.close()


def text_shown(page: Page, lane: str) -> str:
    """The text of a lane, without what was thrown away."""
    return "".join(text for text, code in tokens_shown(page, lane) if code not in "xu")


# Servers that a visitor names: a race of them, a check of them, and what may never be seen of their keys ----

KEY, OTHER = "sk-very-secret-0123456789", "sk-another-secret-987654"
TEXT = "The snow lies soft upon the hill"
Pair = tuple[FakeServer, str]


def asked(**settings: Any) -> Request:
    return Request("Hi", "scripted", "none", Settings(max_new_tokens=40, **settings))


def server_at(pair: Pair, key: str = "") -> ServerAddress:
    return ServerAddress(Address.read(pair[1]), key)


def played(run: ServerRun, script: Script) -> dict[str, Any]:
    """All that its messages say."""
    collected: dict[str, Any] = {"lanes": {}}
    for message in map(json.loads, run.play(script.engine())):
        for lane, events in message.pop("lanes", {}).items():
            collected["lanes"].setdefault(lane, []).extend(events)
        collected |= message
    return collected


# A race ---------------------------------------------------------------------------------------------------------


def test_a_race_of_servers_is_told_like_any_other(drafting: Pair, plain: Pair) -> None:
    """No preset is loaded for it."""
    script = Script()
    run = ServerRun(asked(), server_at(drafting, KEY), server_at(plain, OTHER))
    sent = played(run, script)
    assert script.loads == []
    assert sent["start"]["preset"] == "toy.gguf"
    assert tells(sent["start"]["drafter"], "the server's")
    assert sent["start"]["settings"]["k"] is None  # what it drafts is its own
    assert json.loads(uploaded(run.trace()))["request"]["settings"]["k"] is None
    shown = {
        lane: "".join(
            text for event in events if event["row"] for text, code, *_ in event["row"][2] if code not in "xu"
        )
        for lane, events in sent["lanes"].items()
    }
    assert shown == {PLAIN: TEXT, SPECULATIVE: TEXT}
    end = sent["end"]
    assert (end["stats"][PLAIN]["drafted"], end["stats"][SPECULATIVE]["drafted"]) == (0, 5)
    assert end["exactness"]["mark"] == "same"
    assert TURNS in end["exactness"]["words"]
    assert tells(end["exactness"]["words"], "server after")
    assert not end["stopped"]
    header, entries = read_trace(run.trace().split("\n"))
    assert [lane["name"] for lane in header["lanes"]] == [PLAIN, SPECULATIVE]
    assert len(entries) == len(run.entries)
    everything = run.trace() + json.dumps(sent) + repr(vars(run))
    for secret in (KEY, OTHER, drafting[1].partition("//")[2], plain[1].partition("//")[2]):
        assert secret not in everything
    assert all(f"Bearer {KEY}" in heads and OTHER not in heads for _, heads, _ in drafting[0].asked)
    assert all(f"Bearer {OTHER}" in heads and KEY not in heads for _, heads, _ in plain[0].asked)


@pytest.mark.parametrize("beside", [True, False])
def test_work_beside_a_race_of_servers_is_told(beside: bool) -> None:
    engine = Script().engine()

    def answer(connection: socket.socket) -> None:
        if beside:
            with engine.other_work():
                pass
        connection.sendall(replayed_alone("llamacpp-ended"))

    with serving(llamacpp_answers(answer)) as found:
        run = ServerRun(asked(), server_at(found))
        *_, last = map(json.loads, run.play(engine))
    assert last["end"]["disturbed"] is beside
    assert json.loads(uploaded(run.trace()))["end"]["disturbed"] is beside


def test_without_a_baseline_it_says_so(drafting: Pair) -> None:
    sent = played(ServerRun(asked(), server_at(drafting)), Script())
    assert [*sent["lanes"]] == [SPECULATIVE]
    assert tells(sent["end"]["sentence"], "nothing to compare")
    assert (sent["end"]["speed_up"], sent["end"]["stopped"]) == (None, False)
    assert TURNS not in sent["end"]["exactness"]["words"]


def test_above_temperature_0_texts_are_not_compared(drafting: Pair, plain: Pair) -> None:
    sent = played(ServerRun(asked(temperature=0.7), server_at(drafting), server_at(plain)), Script())
    assert sent["end"]["exactness"]["mark"] == "chance"
    assert tells(sent["end"]["exactness"]["words"], "server could differ,")
    sent = json.loads(next(body for path, _, body in drafting[0].asked if path == "/completion"))
    assert (sent["temperature"], sent["n_predict"]) == (0.7, 40)


def test_a_server_that_fails_is_one_sentence_without_its_key(drafting: Pair, plain: Pair) -> None:
    plain[0].answers = {**plain[0].answers, "/completion": head("application/json", "500 No") + KEY.encode()}
    run = ServerRun(asked(), server_at(drafting), server_at(plain, KEY))
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
    run = ServerRun(asked(), server_at(drafting), server_at(plain), seconds)

    def stop() -> None:
        asked_for.wait(20)
        run.stop.set()

    if seconds is None:
        threading.Thread(target=stop).start()
    sent = played(run, Script())
    assert sent["end"]["stopped"]
    assert tells(sent["end"]["sentence"], "run 1 s, most") is bool(seconds)
    assert tells(sent["end"]["exactness"]["title"].lower(), "stopped 1 s") is bool(seconds)
    assert sent["end"]["stats"][PLAIN]["tokens"] > 0
    assert run.trace()


@pytest.mark.parametrize(
    ("values", "readers", "words"),
    [
        (("", "", "", ""), "1", "address"),
        (("localhost", KEY, "", ""), "1", "http://127.0.0.1:8080"),
        (("http://127.0.0.1:9", KEY * 20, "", ""), "1", "300"),
        (("http://127.0.0.1:9", "", f"http://{KEY}@127.0.0.1", ""), "1", "key"),
        ((None, "", "", ""), "1", "text"),
        (("http://127.0.0.1:9", ["x"], "", ""), "1", "text"),
        (("http://127.0.0.1:9", KEY, "", ""), "2", "one prompt"),
    ],
)
def test_what_cannot_be_asked_is_refused_without_being_quoted(
    values: tuple[Any, ...], readers: str, words: str
) -> None:
    with refuses(BadInput, words) as refused:
        read_servers(asked_by_form(readers=readers), values)
    assert KEY not in str(refused.value)


# On the page ----------------------------------------------------------------------------------------------------


def name_servers(page: Page, server: str, key: str = "", baseline: str = "") -> None:
    """Name them in Check, and press "Race it" by the keyboard."""
    open_tab(page, "Check")
    if not page.locator("#lab-check-server").is_visible():
        page.wait_for_function("specdemo.session")  # what the page opens with is there, and overwrites nothing any more
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
    expect(page.locator(".sd-mine-how")).to_contain_text(telling("server's own"))
    expect(page.locator(".sd-run-again")).to_be_hidden()  # no link can name the server
    open_tab(page, "Check")
    assert page.locator("#lab-check-server_key input").get_attribute("type") == "password"
    assert serious(page) == []


def test_a_server_that_is_not_there_is_said_and_the_preset_races_again(visit: Visit) -> None:
    page = visit()
    name_servers(page, "localhost", KEY)
    said = page.locator("#lab-check .lab-says [role=status]")  # beside the button
    expect(said).to_contain_text(telling("server's looks"))
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
    expect(page.get_by_role("button", name="Race it")).to_be_hidden()  # there is nothing to race yet
    page.get_by_role("button", name="Your own server").click()
    page.locator("#lab-check-server :is(input, textarea)").fill("localhost")
    expect(page.get_by_role("button", name="Race it")).to_be_visible()
    page.evaluate("window.shifts = []")
    name_servers(page, "")
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
    assert gist(parts_by_id()["lab-check-server"].info) == f"This Space {drafting[1]}"
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
    everything = "".join(run.files.values()) + repr(run.chosen) + str(run.picture)
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
