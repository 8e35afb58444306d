"""The fields for models that a visitor names: told before anything is fetched, loaded, cancelled, kept, and refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from specdemo.models import report as reporting
from specdemo.models.presets import read_preset
from specdemo.models.sources import Folder, Hub
from specdemo.types import BadInput
from specdemo.ui.budgets import Budgets
from specdemo.ui.engine import MOST_OWN, Engine, real_backend
from specdemo.ui.mcp import tools
from specdemo.ui.runs import Runs
from tests.unit.checkpoints import make_tokenizer, preset_of, save, tiny, write_gguf

from ..fakes.engine import PRESETS, PROMPTS, Script
from ..sentences import tells
from .browser import open_tab, parts_by_id, run, served, served_engine, settings, tokens_of, tokens_shown
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
    return page.locator("#own-said textarea").input_value()


def expect_said(page: Page, words: str) -> None:
    open_tab(page, "Check")
    expect(page.locator("#own-said textarea")).to_have_value(words)


def chosen(page: Page) -> str:
    settings(page)
    return page.locator("#preset input").input_value()


def test_a_named_pair_is_told_of_first_then_loaded_and_races(visit: Visit, script: Script) -> None:
    page = visit()
    loads = len(script.loads)
    settings(page)
    assert not page.locator("#own-target").is_visible()
    name_models(page, "someone/big", "someone/small")
    expect_said(page, "someone/big + someone/small: downloads up to 1.0 GB.")
    assert len(script.loads) == loads
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.click("#own-load")
    expect(page.locator(".sd-model")).to_have_text("big + small")
    expect(page.locator("#preset input")).to_have_value("big + small")
    expect(page.locator("#drafter input")).to_have_value(re.compile("· draft-model$"))
    expect(page.locator("#own-cancel")).to_be_disabled()
    assert (script.loads[-1].preset.target, script.loads[-1].preset.draft_model) == (
        Hub("someone/big"),
        Hub("someone/small"),
    )
    settings(page)
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile("· prompt-lookup$")).click()
    run(page, "one two three")
    assert tokens_shown(page, "speculative") == tokens_of(script.entries, "speculative")
    open_tab(page, "Check")
    page.locator("#own-draft input, #own-draft textarea").fill("")
    expect(page.locator("#own-load")).to_be_disabled()  # what was told is not of these names
    loads = len(script.loads)
    page.reload()
    settings(page)
    expect(page.locator("#preset input")).to_have_value("Scripted 135M")
    expect(page.locator(".sd-model")).to_have_text("someone/big + someone/small")
    page.click("#preset input")
    page.get_by_role("option", name="big + small").click()  # the menu of a page that is opened anew has it
    expect(page.locator("#drafter input")).to_have_value(re.compile("· draft-model$"))
    expect(page.locator(".sd-model")).to_have_text("big + small")
    run(page, "one two three")
    assert tokens_shown(page, "speculative") == tokens_of(script.entries, "speculative")
    assert len(script.loads) == loads
    page.click("#preset input")
    page.get_by_role("option", name="Scripted 135M").click()
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")


def told(url: str, session: str) -> dict[str, Any]:
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
        assert (told(url, "mine")["preset"], told(url, "mine")["words"]) == ("someone/secret", "secret")
        assert (told(url, "theirs")["preset"], told(url, "theirs")["loaded"]) == ("own", "own")
        listed = tools(engine, runs, Budgets())["list_models"]()
        assert json.loads(listed)["loaded"] == "own"
        seen = [json.dumps(told(url, "theirs")), listed, name("theirs", "other/one")]  # which may go back to what was
        script.load_failure = MemoryError("/home/me/secret is truncated.")
        name("mine", "someone/secret-2")
        list(engine.follow("someone/secret-2"))
        assert told(url, "mine")["words"] == "/home/me/secret is truncated."
        seen.append(json.dumps(told(url, "theirs")))
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
    expect_said(page, "Cancelled. What was already downloaded is kept.")
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
    "": "Name a model: a hub id, a folder, or a .gguf file.",
    "my model": "'my model' is neither a hub id (owner/name) nor a folder nor a .gguf file.",
    "a/b.bin": "a/b.bin is a pickle, which can run code when it is read: only safetensors and GGUF are loaded.",
    "./absent.gguf": "There is no file or folder ./absent.gguf.",
    "a/huge": "a/huge: downloads up to 1.0 GB.\nhuge would take 900.0 GB of memory.",
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
    script.load_failure = MemoryError("the weights of someone/broken are truncated.")
    name_models(page, "someone/broken")
    open_tab(page, "Check")
    page.click("#own-load")
    expect_said(page, "the weights of someone/broken are truncated.")
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
    expect_said(page, "A preset is named by letters, digits, dots and dashes, not ''.")
    page.locator("#own-name input, #own-name textarea").fill("mine")
    save.click()
    title = f"big + {tmp_path.name}"
    expect_said(page, f"Saved. In the menu it is {title}.")
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
    expect_said(
        page, "This Space loads its presets only, not someone/other. Its owner can allow more by SPECDEMO_ALLOW."
    )
    name_models(page, "someone/big")
    expect_said(page, "someone/big: downloads up to 1.0 GB.")


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
    engine = Engine({"toy": preset_of(first)}, real_backend())
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
        expect(page.locator(".sd-facts")).to_contain_text("drafts by text")
        settings(page)
        page.locator("#max-new-tokens input").fill("24")
        run(page, "the cat sat on the mat")
        plain, drafted = (text_shown(page, lane) for lane in ("plain", "speculative"))
        assert plain == drafted != ""
        name_models(page, str(tmp_path / "cache"))
        expect_said(page, f"There is no model in the folder {tmp_path / 'cache'}: it has no config.json.")
        run(page, "the dog sat there too")
        assert text_shown(page, "plain") == text_shown(page, "speculative")
        page.close()


def text_shown(page: Page, lane: str) -> str:
    """The text of a lane, without what was thrown away."""
    return "".join(text for text, code in tokens_shown(page, lane) if code not in "xu")
