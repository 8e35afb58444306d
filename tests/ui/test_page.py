"""What all tabs have in common: the form, links, keys, the line, sharing, the stage, watching, and how it looks."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import gradio as gr
import httpx
import psutil
import pytest
from playwright.sync_api import Browser, Download, Locator, Page, expect

from specdemo import race
from specdemo.drafters.names import DRAFTERS
from specdemo.models.presets import load_prompts
from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, trace_lines
from specdemo.studies.lab import STUDIES
from specdemo.ui.budgets import Budgets
from specdemo.ui.engine import EngineTrouble
from specdemo.ui.jobs import RACE
from specdemo.ui.lab import tab
from specdemo.ui.lab.results import Results
from specdemo.ui.lab.run import LabRun
from specdemo.ui.line import MAX_WAITING, MODEL
from specdemo.ui.page import build_page
from specdemo.ui.race.run import RaceRun
from specdemo.ui.replay.playable import playable_json
from specdemo.ui.replay.routes import RECORDINGS, recordings
from specdemo.ui.serving.head import PageHead, files
from specdemo.ui.serving.joined import script as joined
from specdemo.ui.serving.stream import _news
from specdemo.ui.share.saved import saved_page
from specdemo.ui.watch.routes import ENDED, _events, network_address
from specdemo.ui.watch.watches import Watch, Watches
from tests.harness.ui_classes import Runs

from ..fakes.engine import PRESETS, PROMPTS, Script, ScriptedLoaded, stand_in
from ..fakes.study import Counting, Long
from ..fakes.traces import traced
from ..sentences import gist, telling, tells
from .browser import (
    SHIFTS,
    Caller,
    choose,
    choose_preset,
    fill,
    granted,
    headline,
    in_a_loop_of_its_own,
    more_settings,
    replayed,
    run,
    sentence,
    serious,
    served,
    served_engine,
    settings,
    shared,
    show_recordings,
    tokens_of,
    tokens_shown,
    wait_until,
    waiting,
)
from .conftest import HIDE, Tabs, Used, Visit, listening, reused
from .test_messages import ask


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_nothing_moves_while_the_page_opens_and_a_race_runs(visit: Visit, script: Script, width: int) -> None:
    script.pace = 0.001
    page = visit("?max_new_tokens=400&k=8&prompt=one+two+three+four+five+six+seven", width=width, before=SHIFTS)
    expect(page.locator("#prompt textarea")).not_to_be_empty()
    run(page)
    page.wait_for_timeout(300)
    assert page.evaluate("window.shifts") == []


@pytest.mark.slow
def test_a_page_whose_script_fails_shows_its_form(tabs: Tabs, url: str, script: Script) -> None:
    page = tabs.take()
    page.route("**/main.js", lambda route: route.fulfill(body="throw 0;", content_type="text/javascript"))
    page.goto(url)
    expect(page.locator("#prompt textarea")).to_be_visible()
    page.fill("#prompt textarea", "one two")
    assert page.evaluate("window.specdemo === undefined")
    tabs.give_back(page)


def test_browsers_keep_the_scripts_and_styles(page: Page) -> None:
    loaded = page.evaluate("performance.getEntriesByType('resource').map(({ name }) => name)")
    name, found = files()
    ours = [address for address in loaded if "/modules/" in address]
    assert {address.partition(f"/modules/{name}/")[2] for address in ours} == {"main.js", "page.css"} <= found.keys()
    gradios = [address for address in loaded if "/assets/" in address]
    assert len(gradios) > 20
    for address in (*ours, *gradios[:2]):
        with urlopen(address) as answer:
            assert answer.headers["cache-control"].endswith("max-age=31536000, immutable")
            assert answer.headers["content-type"].partition(";")[0].endswith(("/javascript", "/css"))
    assert "/modules/" in page.content()
    with pytest.raises(HTTPError, match="404"):
        urlopen(ours[0].replace(name, "0" * len(name)))  # of another version


@pytest.mark.slow
def test_a_page_that_is_only_open_draws_next_to_nothing(page: Page) -> None:
    page.evaluate(
        """() => {
          const next = window.requestAnimationFrame;
          window.asked = 0;
          window.requestAnimationFrame = (draw) => { window.asked += 1; return next.call(window, draw); };
        }"""
    )
    page.wait_for_timeout(2000)
    for _ in range(5):
        before = page.evaluate("window.asked")
        page.wait_for_timeout(1000)
        if (asked := page.evaluate("window.asked") - before) < 20:
            break
    assert asked < 20  # Gradio's own loading sign asks for 60 a second


# What the keyboard reaches in the window, footer and legend included.
CONTROLS = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')]
    .filter(part => !part.disabled && part.tabIndex >= 0 && !part.closest('[inert]') && part.checkVisibility({
        opacityProperty: true, visibilityProperty: true }))
    .filter(part => { const { top, bottom, width } = part.getBoundingClientRect();
        return width && top < innerHeight && bottom > 0; })
    .map(part => part.textContent.trim() || part.ariaLabel || part.id || part.tagName)"""


@pytest.mark.parametrize("motion", [True, False])
def test_there_are_few_controls_at_first_sight(visit: Visit, script: Script, motion: bool) -> None:
    page = visit(height=800, motion=motion, until=f"#race .sd-arena[data-state={'opening' if motion else 'opened'}]")
    page.locator("body.sd-open").wait_for()
    controls = page.evaluate(CONTROLS)
    assert {"Race", "Check", "Lab", "Run", "TEXTAREA"} <= {*controls}
    assert len(controls) <= 14 if motion else len(controls) <= 20, controls


LONGEST = "some words " * 5, "prompt-lookup and other words " * 9  # of as many letters as those that are said


@pytest.mark.slow
def test_there_is_room_for_the_longest_result(visit: Visit, script: Script) -> None:
    page = visit("?temperature=0.75&k=auto&prompt=one+two")

    def places() -> list[list[int]]:
        """Where parts of the page begin, in windows of several widths."""
        found = []
        for width in (390, 1024, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            parts = "['.sd-legend', '.sd-lanes'].map(part => document.querySelector(part).offsetTop)"
            found.append(page.evaluate(parts))
        return found

    before = places()
    run(page)
    assert places() == before
    page.evaluate(
        """(words) => {
            const { race } = specdemo;
            const names = ["tokens per pass", "of a pass to draft", "of a pass to check"];
            race.words(...words);
            race.inShort(names.map((name) => ({ name, value: "100%", sentence: "" })), "");
        }""",
        LONGEST,
    )
    page.evaluate("Object.assign(specdemo.race.parts.badge, { textContent: 'Different text, same distribution' })")
    assert places() == before


FOCUSED = (
    *("#prompt textarea", "#drafter .wrap:has(> .wrap-inner)", "#k input[type=range]", "#k input[type=number]"),
    *("#auto input", "#run", "#examples button", ".sd-help", "#race .sd-pane"),
    *("#temperature input[type=range]", "#max-new-tokens input", "#preset .wrap:has(> .wrap-inner)"),
    *("#more button", "#tabs button[role=tab]:visible"),
)


@pytest.mark.slow
def test_it_can_be_seen_where_the_keyboard_is(visit: Visit, script: Script) -> None:
    page = visit("?__theme=light")
    settings(page)
    page.add_style_tag(content="* { transition: none !important; }")
    for colour in ("rgb(0, 114, 178)", "rgb(86, 180, 233)"):
        page.keyboard.press("Tab")
        for part in FOCUSED:
            page.locator(f"{part} input" if ".wrap" in part else part).first.focus()
            outline = page.locator(part).first.evaluate(
                "part => { const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(part);"
                " return [outlineStyle, outlineWidth, outlineColor]; }"
            )
            assert outline == ["solid", "3px", colour], part
        page.click(".sd-dark")


def test_axe_finds_nothing_serious(page: Page) -> None:
    run(page, "one two three four five six seven")
    more_settings(page)
    for dark in (False, True):
        if dark:
            page.click(".sd-dark")
        assert is_dark(page) == dark
        assert serious(page) == []


def test_the_page_fits_its_window_and_both_lanes_are_in_sight_on_a_phone(page: Page) -> None:
    run(page, "one two three four five six seven " + "x" * 300)
    for width, height in ((1920, 1080), (1280, 900), (853, 480), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for part in ("#run", ".sd-ratio", "[data-lane=plain]", "[data-lane=speculative]", ".sd-histogram"):
            box = page.locator(part).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
    top, bottom = (
        page.locator(f".sd-arena {part}").evaluate(f"part => part.getBoundingClientRect().{side}")
        for part, side in ((".sd-ratio", "top"), (".sd-lanes", "bottom"))
    )
    assert 0 < bottom - top < 844


def test_the_pane_stays_at_the_bottom_unless_the_reader_scrolled_up(page: Page, script: Script) -> None:
    script.pace = 0.002
    fill(page, max_new_tokens=400)
    run(page, "one two three four five six seven", until="running")
    pane = page.locator("[data-lane=plain] .sd-pane")
    page.wait_for_function("document.querySelector('[data-lane=plain] .sd-pane').scrollTop > 50")
    pane.evaluate("pane => pane.scrollTop = 10")
    before = page.locator("[data-lane=plain] .tok").count()
    page.wait_for_function(f"document.querySelectorAll('[data-lane=plain] .tok').length > {before + 20}")
    assert pane.evaluate("pane => pane.scrollTop") == 10
    pane.evaluate("pane => pane.scrollTop = pane.scrollHeight")
    before = page.locator("[data-lane=plain] .tok").count()
    page.wait_for_function(f"document.querySelectorAll('[data-lane=plain] .tok').length > {before + 20}")
    assert pane.evaluate("pane => pane.scrollHeight - pane.scrollTop - pane.clientHeight") < 100
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert pane.evaluate("pane => pane.scrollTop") == 0  # where the proof begins


def test_a_draft_that_is_read_before_the_browser_tells_of_the_scrolling_moves_no_pane(page: Page) -> None:
    """The event of a scroll comes a frame later, and the guesses that it made room for may be gone by then."""
    assert page.evaluate("""async () => {
        const lane = specdemo.race.lanes.speculative;
        const token = { text: "some words ", code: "a", emitted: true, p: 1, q: 0, draw: 0, place: 1, after: null };
        const seconds = { draft: 0, verify: 1, all: 1 };
        const round = (index, count) => ({ index, k: 16, tokens: Array(count).fill(token), at: 1, seconds, merged: 1 });
        lane.clear({ max_new_tokens: 400 });
        for (const index of [1, 2, 3]) {
            lane.take(round(index, 60));
            lane.guess(round(index + 1, 30));
            lane.draw(true);
            lane.scroll();
            lane.guess(null);
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        }
        lane.draw(true);
        lane.scroll();
        return lane.parts.pane.scrollTop > 100 && lane.atBottom();
    }""")


def test_bad_input_is_refused_in_words_and_nothing_is_lost(visit: Visit, script: Script) -> None:
    page = visit("?prompt=a&k=17&drafter=draft-model")
    expect(page.locator(".sd-sentence")).to_contain_text(telling("form link."))
    run(page, until="failed")
    assert tells(sentence(page), "0 16 17")
    fill(page, k=16)
    page.click("#run")
    expect(page.locator(".sd-sentence")).to_contain_text(telling("draft-model preset"))
    assert script.open_races == 0
    page.fill("#prompt textarea", "one two")
    assert page.locator("#prompt textarea").input_value() == "one two"


def test_refused_input_leaves_the_last_race_on_the_page(page: Page) -> None:
    run(page, "one two three")
    before = tokens_shown(page, PLAIN)
    result = story(page)
    run(page, "   ", until="failed")
    assert tokens_shown(page, PLAIN) == before
    assert story(page) == result
    expect(page.locator("#problem [role=alert]")).to_be_visible()
    run(page, "one two three")
    settings(page)
    page.fill("#max-new-tokens input", "")
    run(page, until="failed")
    assert gist(sentence(page)) == "max 1 2,000"
    expect(page.locator("#max-new-tokens")).to_contain_text(telling("1 2,000."))


def test_a_link_fills_the_form_and_does_not_run(visit: Visit, script: Script) -> None:
    page = visit(
        "?prompt=%3Cb%3Ehi%3C%2Fb%3E&drafter=ngram&k=7&temperature=0.5&max_new_tokens=9&seed=3&top_k=5&top_p=0.9"
        "&stop=x%0Ay&mode=raw&order=isolated&preset=other&rule=rejection&readers=2"
    )
    expect(page.locator("#prompt textarea")).to_have_value("<b>hi</b>")
    settings(page)
    expect(page.locator("#drafter input")).to_have_value(re.compile(r"\(ngram\)"))
    expect(page.locator("#k input[type=number]")).to_have_value("7")
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.5")
    expect(page.locator("#max-new-tokens input")).to_have_value("9")
    expect(page.locator("#preset input")).to_have_value("Other 1.7B")
    assert script.races == []
    assert granted(page)
    link = page.evaluate("navigator.clipboard.readText()")
    run(page)
    with page.expect_download() as download:
        shared(page, "trace")
    header = json.loads(download.value.path().read_text(encoding="utf-8").partition("\n")[0])
    assert header["settings"] == {
        **{"k": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "max_new_tokens": 9, "seed": 3, "stop": ["x", "y"]},
        **{"rule": "rejection", "tree": False, "ahead": 0, "grammar": ""},
    }
    assert (header["raw"], header["isolated"], header["preset"], header["readers"]) == (True, True, "other", 2)
    query = parse_qs(urlsplit(link).query)
    assert query["prompt"] == ["<b>hi</b>"]
    assert (query["drafter"], query["k"], query["stop"], query["mode"]) == (["ngram"], ["7"], ["x\ny"], ["raw"])
    assert (query["rule"], query["readers"]) == (["rejection"], ["2"])


def test_auto_is_carried_by_links_and_ended_by_the_slider(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two&k=auto")
    settings(page)
    box = page.locator("#auto input")
    expect(box).to_be_checked()
    assert granted(page)
    assert parse_qs(urlsplit(page.evaluate("navigator.clipboard.readText()")).query)["k"] == ["auto"]
    run(page)
    with page.expect_download() as download:
        shared(page, "trace")
    header = json.loads(download.value.path().read_text(encoding="utf-8").partition("\n")[0])
    assert header["settings"]["k"] == "auto"
    page.locator("#k input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(box).not_to_be_checked()


@pytest.mark.slow
def test_a_link_to_a_preset_begins_with_what_it_does_and_knows_its_drafters_later(visit: Visit, script: Script) -> None:
    page = visit("?preset=other&temperature=0.3")
    settings(page)
    expect(page.locator("#preset input")).to_have_value("Other 1.7B")
    other = PRESETS["other"].defaults
    expect(page.locator("#drafter input")).to_have_value(re.compile(rf"\({other.drafter}\)"))
    expect(page.locator("#k input[type=number]")).to_have_value(str(other.k))
    expect(page.locator("#max-new-tokens input")).to_have_value(str(other.max_new_tokens))
    expect(page.locator("#temperature input[type=number]")).to_have_value("0.3")
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")
    page.check("#all-drafters input")
    page.click("#drafter input")
    expect(page.get_by_role("option", name=re.compile(r"\(draft-model\)"))).to_be_visible()
    run(page, "one two three")
    page.click("#drafter input")
    expect(page.get_by_role("option", name=re.compile(r"^A smaller model .*preset"))).to_be_visible()


@pytest.mark.slow
def test_a_newcomer_is_told_nothing_of_the_failures_of_others(visit: Visit, unloaded: Script) -> None:
    unloaded.load_failure = MemoryError("Too large.")
    unloaded.begin()
    first = visit()
    expect(first.locator(".sd-model")).to_have_text("Too large.")
    second = visit("?preset=other")
    expect(second.locator(".sd-model")).to_contain_text(telling("No loaded"))
    settings(second)
    expect(second.locator("#preset")).to_contain_text(PRESETS["other"].description)
    unloaded.load_failure = None
    run(second, "one two three")
    expect(second.locator(".sd-model")).to_have_text("Other 1.7B")


def test_what_a_link_has_wrong_is_left_out_and_named(visit: Visit, script: Script) -> None:
    page = visit(f"?k={'many' * 500}&drafter=%3Cimg+src=x+onerror=window.pwned=1%3E&seed=5")
    expect(page.locator(".sd-sentence")).to_contain_text(telling("Part link left"))
    named = f"drafter=<img src=x onerror=window.pwned=1>, k={'many' * 15}…"
    assert page.locator(".sd-why-exact").inner_text() == named
    assert page.evaluate("window.pwned === undefined")
    settings(page)
    more_settings(page)
    expect(page.locator("#seed input")).to_have_value("5")
    expect(page.locator("#k input[type=number]")).to_have_value("4")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.fill("#prompt textarea", "雨" * 2000)  # of which no link can be made
    shared(page, "link")
    expect(page.locator(".sd-link")).to_contain_text(telling("long link"))


def test_an_example_fills_the_prompt(page: Page) -> None:
    field, first, second = page.locator("#prompt textarea"), *PROMPTS["facts"]
    page.get_by_role("button", name="Code", exact=True).click()
    expect(field).to_have_value(PROMPTS["code"][0])
    for prompt in (first, second, first):
        page.get_by_role("button", name="Facts", exact=True).click()
        expect(field).to_have_value(prompt)


def test_the_keys_work_except_while_typing(page: Page, script: Script) -> None:
    script.pace = 0.01
    fill(page, max_new_tokens=2000)
    dark = is_dark(page)
    page.fill("#prompt textarea", "")
    page.locator("#prompt textarea").press_sequentially("rsdh? ")
    assert page.locator("#prompt textarea").input_value() == "rsdh? "
    assert not script.races
    assert is_dark(page) == dark
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.locator(".sd-brand").click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Control+d")
    assert not page.evaluate("document.body.classList.contains('dark')")
    page.keyboard.press("d")
    assert is_dark(page)
    page.keyboard.press("?")
    page.get_by_role("heading", name="What you see").wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.keyboard.press("r")
    page.locator(".sd-arena[data-state=running]").wait_for()
    page.keyboard.press("s")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert headline(page).startswith("Stopped.")


def test_ctrl_enter_runs_the_prompt_from_inside_it_and_from_elsewhere(page: Page, script: Script) -> None:
    page.fill("#prompt textarea", "")
    page.locator("#prompt textarea").press_sequentially("one two")
    page.keyboard.press("Enter")
    assert not script.races
    page.keyboard.press("Control+Enter")
    wait_until(lambda: len(script.races) == 1)
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.locator("#prompt textarea").press_sequentially("three")
    page.locator("#prompt textarea").blur()
    page.keyboard.press("Meta+Enter")
    wait_until(lambda: len(script.races) == 2)
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.keyboard.press("?")
    page.keyboard.press("Control+Enter")  # behind the help
    page.wait_for_timeout(300)
    assert page.locator(".sd-arena").get_attribute("data-state") == "ended"
    assert len(script.races) == 2
    assert page.locator("#prompt textarea").input_value() == "one two\nthree"


def test_help_opens_at_its_top(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    for _ in range(2):
        page.click(".sd-help")
        heading = page.get_by_role("heading", name="What you see")
        box = heading.bounding_box()
        assert box is not None
        assert 0 < box["y"] < 100
        close = page.locator(".sd-dialog[open]").get_by_role("button", name="Close")
        for top in (0, 1e9):  # wherever it is scrolled to
            page.locator(".sd-dialog[open]").evaluate("(dialog, top) => dialog.scrollTop = top", top)
            expect(close).to_be_in_viewport(ratio=1)
        page.keyboard.press("Escape")
        expect(close).to_be_hidden()
    page.keyboard.press("?")
    close.click()
    expect(close).to_be_hidden()


def is_dark(page: Page) -> bool:
    return bool(page.evaluate("document.body.classList.contains('dark')"))


@pytest.mark.slow
def test_dark_or_light_is_kept_once_it_was_chosen(page: Page, url: str) -> None:
    assert page.evaluate("localStorage.length") == 0

    def again(query: str = "") -> bool:
        page.goto(url + query)
        page.locator("#race .sd-board").wait_for()
        return is_dark(page)

    page.click(".sd-dark")
    assert not again("?__theme=light")  # the address wins
    assert again()
    page.click(".sd-dark")
    assert not again()


def test_stop_is_there_while_there_is_a_race(page: Page, script: Script) -> None:
    script.gate.clear()
    expect(page.locator("#stop")).to_be_hidden()
    run(page, "one two", until="waiting")
    expect(page.locator("#stop")).to_be_visible()
    script.gate.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    expect(page.locator("#stop")).to_be_hidden()


@pytest.mark.slow
def test_a_full_line_is_told_politely(visit: Visit, script: Script, url: str) -> None:
    page = visit(forgive="429")
    script.gate.clear()
    page.fill("#prompt textarea", "one two")
    for number in range(MAX_WAITING + 1):
        with Caller(url, 2 + number) as caller:
            assert caller.join("a").status_code == 200
        if number == 0:
            wait_until(lambda: script.open_races == 1)
    run(page, until="failed")
    assert tells(sentence(page), "16 waiting again")
    expect(visit().locator(".sd-model")).to_have_text("Scripted 135M")  # for that there is room
    script.gate.set()
    wait_until(lambda: script.ended_races == MAX_WAITING + 1)
    run(page)
    assert len(tokens_shown(page, PLAIN)) == 24


# What the top bar and a waiting race tell of the model, of the line for it, and of other visitors -----------

ONLOOKERS = 64


# The stream -------------------------------------------------------------------------------------------------


def test_nothing_but_the_model_occupies_a_worker_of_gradios_line() -> None:
    page = build_page(Script().engine(), Runs(), PROMPTS)
    queued = {fn.name: fn.concurrency_id for fn in page.fns.values() if fn.fn is not None and fn.queue is not False}
    assert queued.keys() == {"run", "load", "race", "compare"}
    assert {*queued.values()} == {MODEL["concurrency_id"]}


@pytest.mark.slow
def test_a_race_runs_while_many_pages_look_on() -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    engine.begin_loading("scripted")
    with served_engine(engine, PROMPTS) as url, ExitStack() as open_pages:
        pages = [open_pages.enter_context(urlopen(f"{url}status", timeout=30)) for _ in range(ONLOOKERS)]
        assert {status(page)["stage"] for page in pages} == {"loading"}
        assert len(engine.followers) == ONLOOKERS
        script.loading.set()
        statuses = [status_when(page, "ready") for page in pages]
        assert [*map(json.dumps, statuses)] == [json.dumps(statuses[0])] * ONLOOKERS
        data = ["one two", "scripted", "none", 1, 0, 5, 0, 0, 1, None, False, False, "match", False, 1, 0, "", 1]
        body = {"data": data}
        call = Request(f"{url}gradio_api/call/compare", json.dumps(body).encode(), {"content-type": "application/json"})
        urlopen(call).close()
        wait_until(lambda: script.ended_races == 1)
        open_pages.close()
        wait_until(lambda: not engine.followers)


def status(stream: Any) -> dict[str, Any]:
    """The next message of a stream."""
    for line in stream:
        if line.startswith(b"data: "):
            return json.loads(line[len(b"data: ") :])
    raise AssertionError("the stream ended")


def status_when(stream: Any, stage: str) -> dict[str, Any]:
    while (found := status(stream))["stage"] != stage:
        pass
    return found


def test_a_page_sleeps_until_something_changes() -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    runs = Runs()
    runs.engine = engine

    async def follow() -> list[str]:
        news = _news(runs, "session")
        said = [await anext(news)]
        following = asyncio.ensure_future(anext(news))
        await asyncio.sleep(0.2)
        assert not following.done()
        threading.Thread(target=engine.begin_loading, args=["scripted"]).start()
        said.append(await asyncio.wait_for(following, 20))
        script.loading.set()
        await news.aclose()  # type: ignore[attr-defined]
        return said

    sent = [json.loads(message.removeprefix("data: ")) for message in in_a_loop_of_its_own(follow())]
    assert [message["stage"] for message in sent] == ["idle", "loading"]
    assert not engine.followers


@pytest.mark.slow
def test_a_page_out_of_sight_does_not_hold_a_connection(visit: Visit, script: Script) -> None:
    followers = script.used.followers
    wait_until(lambda: not followers)  # those of earlier tests have left
    page = visit()
    wait_until(lambda: len(followers) == 1)
    page.evaluate(HIDE, True)
    wait_until(lambda: not followers)
    page.evaluate(HIDE, False)
    wait_until(lambda: len(followers) == 1)
    page.close()
    wait_until(lambda: not followers)


# The line ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_waits_is_told_the_place_in_the_line_and_the_wait(
    page: Page, other: Page, third: Page, script: Script
) -> None:
    first, second = page, other
    script.used._took[RACE] = deque([1200.0])  # from here on it is known how long a race takes
    script.gate.clear()
    run(first, "alpha beta", until="waiting")
    wait_until(lambda: script.open_races == 1)
    run(second, "gamma delta", until="waiting")
    seconds, thirds = (shown.locator("#race .sd-sentence") for shown in (second, third))
    expect(seconds).to_have_text(waiting(1, 1))
    expect(seconds).to_have_text(telling("20 min."))
    run(third, "epsilon zeta", until="waiting")
    expect(thirds).to_have_text(waiting(2, 2))
    expect(thirds).to_have_text(telling("40 min."))
    expect(seconds).to_have_text(waiting(1, 2))
    expect(seconds).to_have_text(telling("20 min."))
    second.click("#stop")
    expect(thirds).to_have_text(waiting(1, 1))
    script.gate.set()
    third.locator(".sd-arena[data-state=ended]").wait_for()
    assert len(tokens_shown(third, PLAIN)) == 24


def test_the_wait_is_what_the_last_works_of_the_same_kind_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    engine = Script().engine()
    list(engine.follow("scripted"))
    assert engine.expected_wait([]) == 0.0  # nothing is being run
    assert engine.expected_wait([RACE]) is None  # nothing has been run yet
    monkeypatch.setattr("specdemo.ui.engine.time", type("Clock", (), {"monotonic": lambda: now[0]}))

    def expected(name: str, seconds: float, *before: str, left: float | None = None) -> Any:
        """What others hear when it has run for so many seconds; it then ends."""

        def work() -> Generator[float | None]:
            now[0] += seconds
            yield engine.expected_wait(before)

        ((status,),) = engine.stream("scripted", lambda _: work(), work=name, seconds_left=lambda: left)
        return status

    assert expected(RACE, 10.0) is None  # the first one
    assert engine.expected_wait([RACE, RACE]) == 20.0
    assert expected(RACE, 4.0, RACE, RACE) == 6.0 + 20.0  # what is left of the one in progress, and two more
    assert expected("study profile", 60.0) is None  # how long races take says nothing of studies
    assert engine.expected_wait([RACE]) == 7.0  # nor the other way round
    assert expected("study profile", 20.0, RACE) == 40.0 + 7.0
    assert expected("study profile", 61.0, RACE) == 0.0 + 7.0  # it takes longer than others did
    assert expected("study sweep", 1.0, RACE, left=16.0) == 16.0 + 7.0  # it says itself how far it is
    with pytest.raises(EngineTrouble):
        list(engine.stream("other", lambda _: (_ for _ in "1"), work=RACE))
    assert engine.expected_wait([RACE]) == 7.0  # one that failed says nothing of how long others take
    engine.status = engine.status.__class__("loading", "other", "downloading")
    assert engine.expected_wait([RACE]) is None


def test_a_wait_is_put_in_words(page: Page) -> None:
    for seconds, words in (
        (None, "5."),
        (0, "5, few seconds."),
        (15, "5, 15 s."),
        (40, "5, 40 s."),
        (120, "5, 2 min."),
    ):
        said = page.evaluate("specdemo.placeInWords", {"place": 3, "of": 5, "seconds": seconds})
        assert waiting(3, 5).match(said)
        assert tells(said, words)


# Other visitors ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_top_bar_follows_what_others_load(visit: Visit, script: Script) -> None:
    mine, theirs = visit(), visit()
    top = mine.locator(".sd-top")
    expect(top).to_have_attribute("data-stage", "ready")
    script.loading.clear()
    choose_preset(theirs, "Other 1.7B")
    expect(theirs.locator(".sd-model")).to_have_text("Downloading, 10% done")
    expect(theirs.locator(".sd-progress")).to_have_attribute("value", "0.1")
    for page in (mine, visit()):
        expect(page.locator(".sd-model")).to_have_text("Other 1.7B")
        expect(page.locator(".sd-facts")).to_contain_text(telling("is 10% downloading"))
        expect(page.locator(".sd-progress")).to_be_hidden()
    script.loading.set()
    expect(theirs.locator(".sd-top")).to_have_attribute("data-stage", "ready")
    expect(top).to_have_attribute("data-stage", "other")
    expect(mine.locator(".sd-facts")).to_contain_text(telling("Scripted 135M press"))
    run(mine, "one two")
    expect(top).to_have_attribute("data-stage", "ready")
    expect(mine.locator(".sd-model")).to_have_text("Scripted 135M")
    expect(theirs.locator(".sd-top")).to_have_attribute("data-stage", "other")


def test_a_load_that_failed_is_told_to_who_chose_it(page: Page) -> None:
    """By a status as the server sends it, since the scripted engine keeps nothing after a failed load."""
    for status, stage, words, facts in (
        ({"preset": "scripted"}, "failed", "Too large.", ""),
        ({"preset": "other"}, "idle", "No loaded", ""),
        ({"preset": "other", "loaded": "scripted", "facts": ["float32"]}, "ready", "Scripted 135M", "float32"),
    ):
        shown = page.evaluate(
            """status => {
              specdemo.showStatus({ stage: "failed", words: "Too large.", fraction: null, ...status });
              const top = document.querySelector(".sd-top");
              const text = (part) => top.querySelector(part).textContent;
              return [top.dataset.stage, text(".sd-model"), top.querySelector(".sd-status").title];
            }""",
            status,
        )
        assert (shown[0], shown[2]) == (stage, facts)
        assert tells(shown[1], words)


# Work beside a race -----------------------------------------------------------------------------------------


def test_work_beside_the_engine_is_seen_if_it_overlaps() -> None:
    engine, began = Script().engine(), time.monotonic()
    assert engine.disturbed_until < began
    with engine.other_work():
        during = time.monotonic()
        assert engine.disturbed_until > during
    assert began < during < engine.disturbed_until
    assert engine.disturbed_until < time.monotonic()


def run_held(page: Page, script: Script) -> None:
    """A race that has begun and waits for the script's gate."""
    script.gate.clear()
    page.fill("#prompt textarea", "one two three")
    page.click("#run")
    wait_until(lambda: script.open_races == 1)


@contextmanager
def every_core(has: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedLoaded, "environment", lambda _: {"threads": 2, "cores": 2 if has else 4})
        yield


@pytest.mark.parametrize("has", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_race_beside_which_another_page_was_served_says_so(page: Page, script: Script, url: str, has: bool) -> None:
    with every_core(has):
        run_held(page, script)
        urlopen(url).close()
        script.gate.set()
        page.locator(".sd-arena[data-state=ended]").wait_for()
        why, words = page.locator("#race .sd-why-exact"), telling("Disturbed: page race")
        expect(why).to_contain_text(words) if has else expect(why).not_to_contain_text("Disturbed")
        page.click("#race .sd-again")
        page.locator(".sd-step").wait_for()
        page.keyboard.press("Escape")
        page.keyboard.press("End")
        page.locator("#replay [data-state=ended]").wait_for()
        why = page.locator("#replay .sd-why-exact")
        expect(why).to_contain_text(words) if has else expect(why).not_to_contain_text("Disturbed")
        page.get_by_role("tab", name="Race").click()
        settings(page)
        page.fill("#max-new-tokens input", "7")
        page.click("#run")  # with nobody else
        expect(page.locator("#race .sd-tokens").first).to_have_text("7 of 7 tokens")
        expect(page.locator("#race .sd-why-exact")).to_contain_text("All 7 tokens")
        expect(page.locator("#race .sd-why-exact")).not_to_contain_text("Disturbed")


def test_what_a_page_is_answered_counts_as_work_beside_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs = Script().engine(), Runs()
    page = build_page(engine, runs, PROMPTS)
    answers = {
        name: getattr(block, name)
        for block in page.blocks.values()
        for name in ("trace", "race")
        if getattr(getattr(block, name, None), "_is_server_fn", False)
    }
    seen, began = list[bool](), time.monotonic()
    trace: Callable[[], str] = lambda: seen.append(engine.disturbed_until > began) or ""  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(runs, "find", lambda *_: SimpleNamespace(trace=trace))
    for answer in (answers["trace"], answers["race"]):
        began = time.monotonic()
        in_a_loop_of_its_own(answer({}))
    assert seen == [True, True]


def test_the_theory_and_the_check_of_models_count_as_work_beside_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs, seen = Script().engine(), Runs(), list[bool]()
    page, began = build_page(engine, runs, PROMPTS), time.monotonic()

    def noted(*_: Any) -> list[Any]:
        seen.append(engine.disturbed_until > began)
        return []

    monkeypatch.setattr(tab, "tried", noted)
    monkeypatch.setattr(runs, "latest", noted)
    handlers = [getattr(block.fn, "func", block.fn) for block in page.fns.values()]
    monkeypatch.setattr(engine, "report", lambda _: iter(noted()))  # for a check of a visitor's own models
    asked = (
        ("attempt", (gr.EventData(None, {}), None, 1, 1, 1)),
        ("take", (gr.Request(),)),
        ("look", ("a/b", "", "")),
    )
    for name, arguments in asked:
        began = time.monotonic()
        next(handler for handler in handlers if getattr(handler, "__name__", "") == name)(*arguments)
    assert seen == [True] * 3


def test_the_last_picture_of_the_lab_counts_as_work_beside_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runs, seen = Script().engine(), Runs(), list[bool]()
    page, began = build_page(engine, runs, PROMPTS), time.monotonic()
    done = SimpleNamespace(id="a", pictured=1, picture=[None], files={}, values={}, measured=None)
    monkeypatch.setattr(runs, "latest", lambda *_: done)
    monkeypatch.setattr(Results, "update", lambda *_: seen.append(engine.disturbed_until > began) or {})  # type: ignore[func-returns-value]
    for show in {block.fn for block in page.fns.values() if block.name == "show"}:
        done.study, began = getattr(show, "__self__").study, time.monotonic()  # noqa: B009
        show(gr.Request())
    assert seen == [True] * len(STUDIES)


@pytest.mark.parametrize(
    ("path", "counts"), [("/", True), ("/config", True), ("/config/", True), ("/gradio_api/info", True), ("/x", False)]
)
def test_what_gradio_makes_for_each_visitor_counts_as_work_beside_a_race(path: str, counts: bool) -> None:
    engine, seen, began = Script().engine(), list[bool](), time.monotonic()

    async def app(*_: Any) -> None:
        seen.append(engine.disturbed_until > began)

    runs: Any = SimpleNamespace(engine=engine)
    page: Any = PageHead(app, "", "", runs)
    in_a_loop_of_its_own(page({"type": "http", "path": path}, None, None))
    assert seen == [counts]


@pytest.mark.slow
def test_recordings_and_files_are_no_work_beside_a_race(url: str, script: Script, visit: Visit) -> None:
    page = visit()
    show_recordings(page)
    page.locator(".sd-play:enabled").wait_for()
    racer = visit()
    with every_core(True):
        run_held(racer, script)
        page.select_option(".sd-which", recordings()[3]["name"])
        expect(page.locator(".sd-facts-of")).to_contain_text(telling("recording ships"))
        page.locator(".sd-file").set_input_files({"name": "a.jsonl", "mimeType": "text/plain", "buffer": b"nothing"})
        expect(page.locator(".sd-choose [role=alert]")).to_contain_text(telling("not trace"))
        script.gate.set()
        racer.locator(".sd-arena[data-state=ended]").wait_for()
        expect(racer.locator("#race .sd-why-exact")).not_to_contain_text("Disturbed")


# What the page shows while presets load, and how one is chosen ----------------------------------------------


def test_loading_shows_progress_and_run_waits_for_it(visit: Visit, unloaded: Script) -> None:
    unloaded.loading.clear()
    unloaded.begin()
    page = visit()
    expect(page.locator(".sd-model")).to_have_text("Downloading, 10% done")
    expect(page.locator(".sd-progress")).to_have_attribute("value", "0.1")
    run(page, "one two three", until="loading")
    assert sentence(page) == "Downloading, 10% done."
    unloaded.loading.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")
    expect(page.locator(".sd-status")).to_have_attribute("title", "bfloat16 · a scripted processor")
    assert len(tokens_shown(page, PLAIN)) == 24


def test_a_failed_load_is_told_and_can_be_tried_again(visit: Visit, unloaded: Script) -> None:
    unloaded.load_failure = MemoryError("The <b>7</b> are missing.")
    unloaded.begin()
    page = visit()
    expect(page.locator(".sd-model")).to_contain_text(telling("The <b>7</b>"))
    run(page, "one two", until="failed")
    assert tells(sentence(page), "The <b>7</b>")
    unloaded.load_failure = None
    settings(page)
    page.fill("#max-new-tokens input", "9")
    page.click(".sd-retry")
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")
    run(page)
    assert len(tokens_shown(page, PLAIN)) == 9  # what was asked for stays


def test_choosing_a_preset_loads_it_and_frees_the_old_one(visit: Visit, unloaded: Script) -> None:
    unloaded.begin()
    page = visit()
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")
    choose_preset(page, "Other 1.7B")
    expect(page.locator(".sd-model")).to_have_text("Other 1.7B")
    settings(page)
    expect(page.locator("#max-new-tokens input")).to_have_value("12")
    expect(page.locator("#drafter input")).to_have_value(re.compile(r"\(none\)"))
    expect(page.locator("#k input[type=number]")).to_have_value("2")
    expect(page.locator("#preset")).to_contain_text("Much larger.")
    page.click("#more button")
    expect(page.get_by_label("Raw text")).to_be_checked()
    loads = [(loaded.preset.name, loaded.released) for loaded in unloaded.loads]
    assert loads == [("scripted", True), ("other", False)]
    run(page, "one two three")
    assert len(tokens_shown(page, PLAIN)) == 12


@pytest.mark.slow
def test_a_list_of_presets_that_is_only_looked_at_changes_nothing(visit: Visit, unloaded: Script) -> None:
    unloaded.begin()
    page, other = visit(), visit()
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")
    choose_preset(other, "Other 1.7B")
    expect(other.locator(".sd-model")).to_have_text("Other 1.7B")
    settings(page)
    page.fill("#max-new-tokens input", "7")
    for leave in (lambda: page.keyboard.press("Tab"), lambda: page.locator(".sd-brand").click()):
        page.click("#preset input")
        leave()
    page.fill("#prompt textarea", "one two three")
    page.wait_for_timeout(500)
    expect(page.locator("#max-new-tokens input")).to_have_value("7")
    expect(page.locator("#drafter input")).to_have_value(re.compile(r"\(prompt-lookup\)"))
    assert [loaded.preset.name for loaded in unloaded.loads] == ["scripted", "other"]
    choose_preset(page, "Other 1.7B")
    choose_preset(page, "Scripted 135M")  # the last of two choices counts
    expect(page.locator("#max-new-tokens input")).to_have_value("24")
    expect(page.locator("#preset")).to_contain_text(PRESETS["scripted"].description)
    expect(page.locator(".sd-model")).to_have_text("Scripted 135M")


@pytest.mark.slow
def test_a_preset_chosen_while_others_race_fills_the_form_at_once_and_only_once(visit: Visit, script: Script) -> None:
    first, second = visit(), visit()
    script.gate.clear()
    run(first, "one two three", until="waiting")
    wait_until(lambda: script.open_races == 1)
    choose_preset(second, "Other 1.7B")
    settings(second)
    expect(second.locator("#max-new-tokens input")).to_have_value("12")
    expect(second.locator("#drafter input")).to_have_value(re.compile(r"\(none\)"))
    second.check("#all-drafters input")
    second.click("#drafter input")  # what this preset can use is not known yet
    expect(second.get_by_role("option", name=re.compile(r"\(draft-model\)"))).to_be_visible()
    second.fill("#max-new-tokens input", "7")
    script.gate.set()
    expect(second.locator(".sd-model")).to_have_text("Other 1.7B")
    expect(second.locator("#max-new-tokens input")).to_have_value("7")
    expect(first.locator("[data-lane=plain] .tok")).to_have_count(24)


@pytest.mark.slow
def test_choosing_a_drafter_describes_it(page: Page) -> None:
    settings(page)
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile(r"\(ngram\)")).click()
    expect(page.locator("#drafter")).to_contain_text(telling("table follows"))


def test_a_few_drafters_are_offered_and_all_on_demand(page: Page) -> None:
    settings(page)
    page.wait_for_timeout(500)  # a list of Gradio's that is open goes wrong if its choices get fewer
    page.click("#drafter input")
    few = page.get_by_test_id("dropdown-option")
    expect(few).to_have_count(4)
    expect(page.get_by_role("option", name=re.compile(r"draft-model\)"))).to_have_count(0)  # not to be had here
    page.keyboard.press("Escape")
    page.check("#all-drafters input")
    page.click("#drafter input")
    expect(few).to_have_count(len(DRAFTERS))
    page.keyboard.press("Escape")
    run(page, "one two three")
    page.click("#drafter input")
    measured = re.compile(r"Copies earlier words \(prompt-lookup\), [0-9.]+× in your last race")
    expect(page.get_by_role("option", name=measured)).to_be_visible()


def test_a_drafter_that_the_preset_cannot_use_is_greyed_with_the_reason(page: Page) -> None:
    settings(page)
    page.check("#all-drafters input")
    before = page.locator("#drafter input").input_value()
    page.click("#drafter input")
    refused = page.get_by_role("option", name=re.compile(r"^A smaller model \(draft-model\) – not here: .*preset"))
    expect(refused).to_have_css("pointer-events", "none")
    page.fill("#drafter input", "(draft-model)")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#problem")).to_contain_text("draft-model cannot be used here")
    expect(page.locator("#drafter input")).to_have_value(before)


# What is said at once while a study has the model: what cannot be run, and what a race or a study waits for -


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Long]]:
    """A study that stays in the middle while the test goes on."""
    stand_in(monkeypatch, STUDIES["domains"], Long)
    monkeypatch.setattr(Long, "gate", False)
    yield Long
    Long.gate = True


def open_lab(page: Page, view: str = "domains") -> None:
    page.get_by_role("tab", name="Lab").click()
    choose(page, view)


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_at_once_and_what_waits_is_told_for_what(
    visit: Visit, script: Script, held: type[Long]
) -> None:
    measuring, racing, studying = (visit() for _ in range(3))
    open_lab(measuring)
    said = measuring.locator("#lab-domains .lab-says")
    measuring.click("#lab-domains .lab-run")
    expect(said.locator(".lab-progress")).to_contain_text("Counting")
    expect(said.locator("[role=status]")).to_be_empty()  # it does not wait for the model any more
    expect(said.locator("progress")).to_be_in_viewport()

    # Refused, each where the button is, while the study has the model.
    run(racing, "   ", until="failed")
    expect(racing.locator("#race .sd-sentence")).to_contain_text(telling("The empty something"))
    racing.fill("#prompt textarea", "one two")
    settings(racing)
    racing.fill("#max-new-tokens input", "-5")
    run(racing, until="failed")
    expect(racing.locator("#race .sd-sentence")).to_have_text(telling("max 1 2,000, -5."))
    open_lab(studying)
    studying.fill("#lab-domains-max_new_tokens input", "-5")
    studying.click("#lab-domains .lab-run")
    status = studying.locator("#lab-domains .lab-says [role=status]")
    expect(status).to_contain_text(telling('"Tokens text" 8 512 -5'))
    expect(status).to_be_in_viewport()

    # What waits for the study, and for the race behind it.
    racing.fill("#max-new-tokens input", "5")
    run(racing, until="waiting")
    expect(racing.locator("#race .sd-sentence")).to_have_text(waiting(1, 1))
    studying.fill("#lab-domains-max_new_tokens input", "8")
    studying.click("#lab-domains .lab-run")
    expect(status).to_contain_text(waiting(2, 2))
    held.gate = True
    racing.locator("#race .sd-arena[data-state=ended]").wait_for()
    expect(status).to_have_text("Done.")
    assert script.ended_races == 1


def test_a_study_says_how_long_it_still_takes(script: Script, held: type[Long]) -> None:
    """Those who wait for it know how long races take."""
    engine = script.used
    list(engine.follow("scripted"))
    job = LabRun("scripted", STUDIES["domains"], {"drafter": "ngram"})
    played = job.play(engine)
    heard = [next(played)]
    while job.seconds_left() is None:
        heard.append(next(played))
    wait_until(lambda: (left := job.seconds_left()) is not None and left < 5)
    expected = engine.expected_wait([])
    assert expected is not None
    assert expected == pytest.approx(job.seconds_left(), abs=1)
    assert engine.expected_wait(["study sweep"]) is None  # of which nothing is known
    held.gate = True
    heard += played
    assert any("s left" in message for message in heard)
    assert engine.expected_wait([]) == 0.0


@pytest.mark.slow
def test_a_study_is_added_by_its_class_alone(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "counting", Counting)
    with served(Script()) as url:
        page = visit(at=url)
        open_lab(page, "counting")
        lab = page.locator("#lab-counting")
        expect(lab).to_contain_text("This counts.")
        page.fill("#lab-counting-to input", "10")
        lab.get_by_role("button", name="Count").click()
        expect(lab.locator("[role=status]")).to_contain_text(telling('"Count to" 1 9 10'))
        page.fill("#lab-counting-to input", "4")
        lab.get_by_role("button", name="Count").click()
        expect(lab.locator("[role=status]")).to_have_text("Done.")
        expect(lab.locator(".lab-section")).to_contain_text("Up to 4.")
        lab.get_by_role("button", name="Counted").click()
        expect(lab.get_by_role("gridcell").last).to_have_text("4.0")
        found = []
        for kind in ("JSON", "CSV"):
            with page.expect_download() as download:
                lab.get_by_text(f"Download {kind}").click()
            found.append(download.value.path().read_text(encoding="utf-8"))
        whole = json.loads(found[0])
        assert (whole["view"], whole["asked"]["to"]) == ("counting", 4)
        assert found[1].split() == ["n", *"1234"]
        page.close()


# Stage mode: the race alone, large, by the keys of a clicker ------------------------------------------------

STAGED = "#race .sd-arena[data-state=ended]"
HIDDEN = "#controls", ".sd-results", ".sd-pacing", "#tabs > :first-child"


@pytest.mark.parametrize(
    ("width", "height"),
    [(853, 480), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1280, 720), (1920, 1080)))],
)
def test_the_race_alone_is_large_and_fits(visit: Visit, script: Script, width: int, height: int) -> None:
    page = visit("?prompt=one+two+three+four+five+six+seven")
    page.set_viewport_size({"width": width, "height": height})
    run(page)
    page.keyboard.press("f")
    for part in HIDDEN:
        expect(page.locator(part).first).to_be_hidden()
    plain, drafted = (page.locator(f"#race [data-lane={lane}]") for lane in (PLAIN, SPECULATIVE))
    boxes = [lane.bounding_box() for lane in (plain, drafted)]
    assert boxes[0]
    assert boxes[1]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert boxes[1]["x"] + boxes[1]["width"] <= width
    assert max(box["y"] + box["height"] for box in boxes if box) <= height
    for lane in (plain, drafted):
        assert lane.locator(".sd-text").evaluate("text => parseFloat(getComputedStyle(text).fontSize)") >= 32
    assert page.locator("#race .sd-legend li:visible .tok").all_inner_texts() == [
        *("accepted", "corrected", "bonus", "rejected")
    ]
    for part in (".sd-ratio", ".sd-sentence", ".sd-badge"):
        expect(page.locator(f"#race {part}")).to_be_visible()
    assert serious(page, "#race") == []
    page.keyboard.press("Escape")
    expect(page.locator("#controls")).to_be_visible()


@pytest.mark.slow
def test_a_clicker_runs_examples(visit: Visit, script: Script) -> None:
    page = visit()
    page.get_by_role("button", name="Stage mode").click()
    first, second = PROMPTS["facts"][:2]
    presses = ("2", second), ("PageUp", second), (".", first), ("PageDown", first), ("1", first)
    for races, (key, prompt) in enumerate(presses, start=1):
        page.keyboard.press(key)
        wait_until(lambda races=races: len(script.races) == races)  # type: ignore[misc]
        page.locator(STAGED).wait_for()
        assert page.locator("#prompt textarea").input_value() == prompt
        assert tokens_shown(page, SPECULATIVE) == tokens_of(script.entries, SPECULATIVE)


def test_the_next_key_goes_on_to_the_end_of_a_race(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two+three+four+five+six", motion=True)
    page.keyboard.press("f")
    page.keyboard.press("1")
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    page.keyboard.press("PageDown")
    page.locator(STAGED).wait_for()
    assert len(script.races) == 1
    assert tokens_shown(page, SPECULATIVE) == tokens_of(script.entries, SPECULATIVE)


@pytest.mark.slow
def test_recordings_play_when_nobody_is_there(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two")
    run(page)
    page.keyboard.press("f")
    page.wait_for_timeout(700)  # longer than between two looks at the time
    assert page.locator(STAGED).count() == 1
    page.evaluate("Object.assign(specdemo.stage, { idle: 0, rest: 0 })")
    page.locator("#race .sd-arena[data-state=opening]").wait_for()
    first = page.evaluate("specdemo.stage.played")
    page.evaluate("specdemo.race.opening.end()")
    page.wait_for_function("first => specdemo.stage.played > first", arg=first)
    page.locator("#race .sd-arena[data-state=opening]").wait_for()
    page.keyboard.press("f")
    run(page)  # whatever played
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)


# What a visitor takes away from a race: a web page, a card, a film, links, and the list of the races run here

HOSTILE = "one </script><img src=x onerror=window.pwned=1> <b>two</b> </template> three"
PNG = b"\x89PNG\r\n\x1a\n"
KEY = "specdemo-races"
UNREADABLE = telling("race link damaged")


def download(page: Page, way: str) -> Download:
    with page.expect_download() as download:
        shared(page, way)
    return download.value


def story(page: Page, inside: str = "") -> str:
    """The text of the large number and of what stands beside it."""
    return "\n".join(page.locator(f"{inside} .sd-board :is(.sd-speed, .sd-headline)").all_inner_texts())


def opened(mine: Locator) -> None:
    mine.evaluate("mine => { mine.open = true; }")


# A web page ----------------------------------------------------------------------------------------------------


def test_a_saved_race_plays_from_a_disk_without_a_network(
    page: Page, alone: Page, script: Script, tmp_path: Path
) -> None:
    run(page, HOSTILE)
    found = story(page)
    file = download(page, "save-page")
    assert file.suggested_filename == "specdemo-race.html"
    file.save_as(tmp_path / "race.html")
    written = (tmp_path / "race.html").read_text(encoding="utf-8")
    assert "onerror" not in written
    alone.goto((tmp_path / "race.html").as_uri())
    expect(alone.locator(".sd-prompt")).to_have_text(HOSTILE)
    expect(alone.locator(".sd-facts-of")).to_contain_text(telling("saved scripted"))
    alone.get_by_role("button", name="4×", exact=True).click()
    alone.get_by_role("button", name="Play", exact=True).click()
    alone.locator("[data-state=ended]").wait_for()
    for lane in (PLAIN, SPECULATIVE):
        assert tokens_shown(alone, lane) == tokens_of(script.entries, lane)
    assert story(alone) == found
    alone.locator(".sd-behind summary").click()
    expect(alone.locator(".sd-behind dd").first).to_be_visible()
    alone.get_by_role("button", name="Step through").click()
    expect(alone.locator(".sd-step")).to_be_visible()
    assert alone.evaluate("window.pwned === undefined")


def test_a_saved_race_of_a_usual_length_is_small() -> None:
    prompt = " ".join(load_prompts()["story"])
    text, _ = traced(prompt, max_new_tokens=300)
    assert len(saved_page(playable_json("saved", lambda: text.split("\n")))) < 300_000
    recorded = trace_lines(RECORDINGS / "code-5-eagle-tree.jsonl.gz")  # with all that was possible at each token
    assert len(saved_page(playable_json("saved", lambda: recorded))) < 400_000


def test_a_saved_race_holds_only_what_it_needs() -> None:
    written = saved_page('{"error":"none"}')
    blocks = {*re.findall(r'^modules\["(.+)"\] =', joined("share/saved.js"), re.MULTILINE)}
    assert {"race/race.js", "replay/step.js", "templates.js"} <= blocks
    assert not [name for name in blocks if name.startswith("lab/") or name.endswith(("main.js", "share/share.js"))]
    for address in ("http:", "https:", "src=", "href=", "url("):
        assert address not in written.replace('src="data:text/javascript;base64,', "")


@pytest.mark.slow
@pytest.mark.parametrize("shade", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_saved_race_fits_and_can_be_read(chromium: Browser, tmp_path: Path, shade: str, width: int) -> None:
    text, _ = traced(HOSTILE)
    (tmp_path / "race.html").write_text(saved_page(playable_json("saved", lambda: text.split("\n"))), encoding="utf-8")
    context = chromium.new_context(color_scheme=shade, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    page = context.new_page()
    page.goto((tmp_path / "race.html").as_uri())
    page.get_by_role("button", name="Play", exact=True).click()
    page.locator("[data-state=ended]").wait_for()
    assert page.evaluate("document.body.classList.contains('dark')") == (shade == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert serious(page) == []
    assert page.evaluate("fetch('data:,x').then(() => true, () => false)") is False  # the page itself forbids it
    context.close()


# Pictures ------------------------------------------------------------------------------------------------------


def test_the_card_is_a_picture_of_the_race(page: Page, script: Script, tmp_path: Path) -> None:
    run(page, HOSTILE)
    file = download(page, "save-card")
    assert file.suggested_filename == "specdemo-race.png"
    drawn = file.path().read_bytes()
    assert drawn.startswith(PNG)
    assert (int.from_bytes(drawn[16:20], "big"), int.from_bytes(drawn[20:24], "big")) == (1200, 630)
    assert len(drawn) > 20_000
    label = page.locator(".sd-picture").get_attribute("aria-label") or ""
    speeds = page.locator("#race .sd-speed").inner_text().replace("\n", " ")
    assert label.startswith(speeds.removesuffix("."))  # both figures, in the same words
    assert tells(label, "same word scripted prompt-lookup. K 4,")
    script.differ_at = 5
    run(page)
    page.click(".sd-share-open")
    label = page.locator(".sd-picture").get_attribute("aria-label") or ""
    assert not tells(label, "same")
    assert page.locator("#race .sd-badge").get_attribute("data-mark") == "differs"
    assert page.locator("#race .sd-badge").inner_text() in label
    page.keyboard.press("Escape")


@pytest.mark.slow
def test_the_film_shows_the_race_in_eight_seconds(page: Page, script: Script, chromium: Browser) -> None:
    run(page, HOSTILE)
    page.click(".sd-share-open")
    with page.expect_download() as download:
        page.click(".sd-save-film")
        expect(page.locator(".sd-save-card")).to_be_disabled()
    name = download.value.suggested_filename
    film = download.value.path().read_bytes()
    assert name in ("specdemo-race.mp4", "specdemo-race.webm")
    assert len(film) > 20_000
    expect(page.locator(".sd-save-film")).to_have_text("Download film")
    watched = chromium.new_page()
    seen = watched.evaluate(
        """([type, film]) => new Promise((done) => {
          const video = document.createElement('video');
          video.onloadedmetadata = () => done([video.videoWidth, video.videoHeight]);
          video.onerror = () => done(video.error.message);
          video.src = `data:video/${type};base64,${film}`;
        })""",
        [name.rpartition(".")[2], b64encode(film).decode()],
    )
    watched.close()
    assert seen == [1200, 630]


def test_the_race_that_the_page_opens_with_can_be_shared(visit: Visit, script: Script) -> None:
    page = visit(until="#race .sd-arena[data-state=opened]")
    page.click("#race .sd-share-open")
    words = page.locator(".sd-picture").get_attribute("aria-label") or ""
    assert tells(words, "water cycle same word")
    for shown, names in ((True, ("card", "link")), (False, ("page", "trace", "raced"))):
        for name in names:
            assert page.locator(f".sd-share .sd-{'save-' * (name in ('card', 'page'))}{name}").is_visible() == shown
    page.keyboard.press("Escape")


def test_a_film_ends_when_the_dialog_is_closed(page: Page, script: Script) -> None:
    run(page, "one two three")
    page.evaluate(
        "() => { const save = URL.createObjectURL; window.saved = 0; "
        "URL.createObjectURL = (blob) => { window.saved += 1; return save.call(URL, blob); }; }"
    )
    shared(page, "save-film")
    expect(page.locator(".sd-save-film")).to_have_text("Download film")
    assert page.evaluate("window.saved") == 0
    page.evaluate("delete URL.createObjectURL")


@pytest.mark.slow
def test_without_a_race_there_are_only_the_settings_to_share(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one", before="delete window.MediaRecorder")
    shown = page.locator(".sd-share button:visible")
    page.click(".sd-share-open")
    expect(shown).to_have_text(["✕ Close", "Copy link to the settings"])
    page.keyboard.press("Escape")
    script.gate.clear()
    run(page, "one two", until="waiting")
    expect(page.locator(".sd-share-open")).to_be_hidden()
    script.gate.set()
    page.locator(".sd-arena[data-state=ended]").wait_for()
    page.click(".sd-share-open")
    expect(shown).to_have_text(
        [
            *("✕ Close", "Download card", "Download web page", "Download trace"),  # no film: this browser records none
            *("Copy link to this race", "Copy link to the settings"),
        ]
    )


@pytest.mark.slow
def test_the_dialog_is_accessible_and_fits(page: Page, script: Script) -> None:
    run(page, HOSTILE)
    opened(page.locator(".sd-mine"))
    page.click(".sd-share-open")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert serious(page) == []
        page.keyboard.press("Escape")
        assert serious(page) == []
        page.click(".sd-share-open")


# Links ---------------------------------------------------------------------------------------------------------


def copied(page: Page, way: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#race .sd-share-open")
    page.click(f".sd-share .sd-{way}")
    expect(page.locator(f".sd-{way}")).to_have_text("Copied")
    page.keyboard.press("Escape")
    return str(page.evaluate("navigator.clipboard.readText()"))


def plays(page: Page, entries: list[Entry], found: str) -> None:
    """The player shows the race of a link."""
    replay = page.locator("#replay")
    expect(replay.locator(".sd-facts-of")).to_contain_text(telling("link measured"))
    expect(replay.locator(".sd-prompt")).to_have_text(HOSTILE)
    replay.get_by_role("button", name="Play", exact=True).click()
    replay.locator("[data-state=ended]").wait_for()
    assert replayed(page, SPECULATIVE) == tokens_of(entries, SPECULATIVE)
    assert story(page, "#replay") == found


def test_a_link_holds_a_small_race(page: Page, script: Script) -> None:
    run(page, HOSTILE)
    entries, found = script.entries, story(page)
    link = urlsplit(copied(page, "raced"))
    assert link.query == ""
    assert 500 < len(link.fragment) < 6000
    page.evaluate("fragment => { window.location.hash = fragment; }", link.fragment)
    plays(page, entries, found)
    page.evaluate("history.replaceState(null, '', window.location.pathname)")


@pytest.mark.slow
def test_a_link_opens_a_page_with_its_race(page: Page, tabs: Tabs, url: str, script: Script) -> None:
    fill(page, temperature=0.7)
    page.uncheck("#match input")
    run(page, HOSTILE)
    fresh, troubles = tabs.take(), list[str]()
    with listening(fresh, troubles):
        fresh.goto(copied(page, "raced"))
        plays(fresh, script.entries, story(page))
    tabs.give_back(fresh)
    assert troubles == []


def test_a_link_that_was_cut_off_is_said(tabs: Tabs, used: list[Used], url: str, script: Script) -> None:
    said = "#replay [role=alert]"
    with reused(tabs, used, url, replayed=True) as page:
        for fragment in ("", "H4sIAAAA", "%3Cimg%20src=x%20onerror=window.pwned=1%3E", "H4sIAAAAAAAAA"):
            page.evaluate("fragment => { window.location.hash = fragment; }", f"#race={fragment}")
            expect(page.locator(said)).to_have_text(UNREADABLE)
            page.locator(said).evaluate("said => { said.textContent = ''; }")
        assert page.evaluate("window.pwned === undefined")
        page.evaluate("history.replaceState(null, '', window.location.pathname)")


@pytest.mark.slow
def test_a_long_race_is_too_long_for_a_link(page: Page, script: Script) -> None:
    fill(page, max_new_tokens=120)
    run(page, " ".join(sha256(bytes([at])).hexdigest() for at in range(120)))  # nothing to pack
    page.click(".sd-share-open")
    raced = page.locator(".sd-raced")
    raced.click()
    expect(raced).to_contain_text(telling("long link"))
    page.keyboard.press("Escape")
    fill(page, max_new_tokens=400)
    run(page)
    page.click(".sd-share-open")
    expect(page.locator(".sd-trace")).to_be_visible()
    expect(raced).to_be_hidden()


# The races of this browser -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_races_of_this_browser_are_kept_and_forgotten(page: Page, script: Script) -> None:
    mine, rows = page.locator(".sd-mine"), page.locator(".sd-mine li")
    for prompt in ("one two three", HOSTILE):
        run(page, prompt)
    ratio, badge = page.locator("#race .sd-ratio").inner_text(), page.locator("#race .sd-badge").inner_text()
    fill(page, temperature=0.5)
    page.reload()
    page.locator("[data-stage=ready]").wait_for()
    expect(mine.locator("summary")).to_have_text("Your races (2)")
    opened(mine)
    expect(rows.nth(0)).to_contain_text(HOSTILE)
    expect(rows.nth(0)).to_contain_text("scripted: prompt-lookup, K 4, temperature 0")
    expect(rows.nth(0)).to_contain_text(badge)
    expect(rows.nth(0).locator("b")).to_have_text(ratio)
    expect(rows.nth(1)).to_contain_text("one two three")
    rows.nth(0).get_by_role("button", name="Run again").click()
    expect(page.locator("#prompt textarea")).to_have_value(HOSTILE)
    expect(page.locator("#run")).to_be_focused()
    settings(page)
    expect(page.locator("#temperature input[type=number]")).to_have_value("0")
    assert len(script.races) == 2  # it runs nothing by itself
    assert page.evaluate("window.pwned === undefined")
    mine.get_by_role("button", name="Forget all").click()
    expect(mine).to_be_hidden()
    assert HOSTILE not in page.evaluate("Object.values(localStorage).join()")
    run(page)
    expect(mine.locator("summary")).to_have_text("Your races (1)")


@pytest.mark.slow
def test_a_race_that_was_stopped_is_not_kept(page: Page, script: Script) -> None:
    script.pace = 0.05
    run(page, "stopped " * 9, until="running")
    page.click("#stop")
    page.locator(".sd-arena[data-state=ended]").wait_for()
    assert page.evaluate("key => localStorage.getItem(key)", KEY) is None
    page.click(".sd-share-open")
    expect(page.locator(".sd-picture")).to_be_visible()
    assert not tells(page.locator(".sd-picture").get_attribute("aria-label"), "same")


@pytest.mark.slow
def test_only_the_last_twenty_are_kept(page: Page, script: Script) -> None:
    row = {"when": 1e12, "preset": "p", "how": "h", "ratio": 2, "exact": "e", "query": ""}
    kept = {"version": 1, "races": [{**row, "prompt": f"race {at}"} for at in range(20)]}
    page.evaluate("([key, kept]) => localStorage.setItem(key, kept)", [KEY, json.dumps(kept)])
    run(page, "the newest")
    rows = page.locator(".sd-mine li .sd-mine-prompt")
    texts = rows.all_text_contents()
    assert texts == ["the newest", *(f"race {at}" for at in range(19))]


FULL = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
FORBIDDEN = (
    "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })"
)


def races_on(page: Page) -> None:
    run(page, "one two three")
    expect(page.locator("#race .sd-badge")).to_have_attribute("data-mark", "same")
    expect(page.locator(".sd-mine summary")).to_have_text("Your races (1)")
    expect(page.locator(".sd-mine li")).to_contain_text("one two three")


@pytest.mark.slow
def test_what_else_is_kept_under_its_name_is_left_out(page: Page, script: Script) -> None:
    for odd in ('{"version": 1, "races": [null, 3, {}]}', '{"version": 2, "races": "all"}', "{", '"<b>"', "null"):
        page.evaluate("([key, odd]) => localStorage.setItem(key, odd)", [KEY, odd])
        races_on(page)


@pytest.mark.slow
@pytest.mark.parametrize("before", [FULL, FORBIDDEN], ids=["full", "forbidden"])
def test_a_storage_that_cannot_be_used_loses_nothing_else(visit: Visit, script: Script, before: str) -> None:
    races_on(visit(before=before))


@pytest.mark.slow
def test_run_again_describes_the_preset_of_its_race(page: Page, script: Script) -> None:
    query = "prompt=one&preset=other&drafter=ngram"
    race = {"when": 1e12, "prompt": "one", "preset": "other", "how": "", "ratio": 2, "exact": "", "query": query}
    page.evaluate(
        "([key, kept]) => localStorage.setItem(key, kept)", [KEY, json.dumps({"version": 1, "races": [race]})]
    )
    page.reload()
    page.locator("[data-stage=ready]").wait_for()
    opened(page.locator(".sd-mine"))
    page.get_by_role("button", name="Run again").click()
    settings(page)
    expect(page.locator("#preset input")).to_have_value("Other 1.7B")
    expect(page.locator("#preset")).to_contain_text(PRESETS["other"].description)
    expect(page.locator("#drafter input")).to_have_value(re.compile(r"\(ngram\)"))


def test_run_again_gives_the_query_of_a_link(page: Page, script: Script) -> None:
    fill(page, k=7)
    run(page, "one & two = three?")
    link = parse_qs(urlsplit(copied(page, "link")).query)
    kept = json.loads(page.evaluate("key => localStorage.getItem(key)", KEY))["races"][0]
    assert parse_qs(kept["query"]) == link
    assert link["prompt"] == ["one & two = three?"]


# Watching along: who sees the races of a page that is shared, and for how long ------------------------------

SAID = ".sd-watch-state"
LIVE, OVER, GONE = telling("Watching live"), re.compile("^The .* stopped"), "Nobody link"


# The messages ----------------------------------------------------------------------------------------------------


def raced(script: Script, runs: Runs, session: str = "page", **values: Any) -> RaceRun:
    """A race of the session that has ended."""
    job = runs.begin(RaceRun(ask(**values)), session)
    list(runs.play(job, script.engine()))
    return job


def share_of(runs: Runs) -> tuple[Watches, Watch]:
    """The races of a page, which is open for as long as the process lives."""
    watches = Watches(runs)
    runs._pages["page"] = 1
    watch = watches.share("page")
    assert watch
    return watches, watch


async def until(events: AsyncIterator[bytes], last: Callable[[str], bool]) -> list[tuple[int, dict[str, Any]]]:
    """The numbers and messages that a watcher gets, up to the first that fits."""
    text = ""
    while not last(text):
        text += (await asyncio.wait_for(anext(events), 20)).decode()
    return [(int(number), json.loads(data)) for number, data in re.findall("id: (.*)\ndata: (.*)\n\n", text)]


def messages(*races: RaceRun) -> list[dict[str, Any]]:
    """Those of the senders' own streams, without the ids."""
    return [{**json.loads(message), "run": ""} for race in races for message in race.messages]


def test_a_watcher_gets_the_latest_race_and_those_that_begin_afterwards() -> None:
    script, runs = Script(), Runs()
    _, other = raced(script, runs, max_new_tokens=3), raced(script, runs, "other", max_new_tokens=2)
    latest = raced(script, runs, max_new_tokens=4)
    watches, watch = share_of(runs)

    async def follow() -> Any:
        events, stranger = _events(watch, 0), "".join(other.messages)
        first = await until(events, lambda text: '"end"' in text)
        coming = asyncio.create_task(until(events, lambda text: text.count('"end"') == 2 and ENDED.decode() in text))
        later = []
        for most in (5, 6):
            later.append(await asyncio.to_thread(raced, script, runs, max_new_tokens=most))
            await asyncio.to_thread(raced, script, runs, "other", max_new_tokens=2)
        watches.end(watch)
        assert other.id in stranger
        return first, later, await coming

    first, later, rest = in_a_loop_of_its_own(follow())
    assert [message for _, message in first] == messages(latest)
    assert [message for _, message in rest] == messages(*later)
    assert [number for number, _ in (*first, *rest)] == list(range(len(first) + len(rest)))
    assert watches.find(watch.token) is None


def test_a_watcher_cannot_learn_the_id_with_which_a_race_is_stopped() -> None:
    script, runs = Script(), Runs()
    job = raced(script, runs, max_new_tokens=4)
    _, watch = share_of(runs)
    sent = b"".join(watch.feed.update())
    assert job.id in job.messages[0]
    assert sent
    assert job.id.encode() not in sent


def test_a_connection_that_was_lost_goes_on_where_it_was() -> None:
    script, runs = Script(), Runs()
    raced(script, runs, max_new_tokens=4)
    watches, watch = share_of(runs)
    of_first = len(watch.feed.update())
    raced(script, runs, max_new_tokens=4)
    watches.end(watch)
    count = len(watch.feed.update())

    async def numbers(first: int) -> list[int]:
        return [number for number, _ in await until(_events(watch, first), lambda text: ENDED.decode() in text)]

    every = list(range(of_first, of_first + count))
    for first, expected in (
        (0, every),
        (of_first, every),
        (of_first + 2, every[2:]),
        (of_first + count, []),
        (10**9, []),
    ):
        assert in_a_loop_of_its_own(numbers(first)) == expected, first


def test_messages_are_made_once_for_all_watchers_who_keep_no_race_alive() -> None:
    script, runs = Script(), Runs()
    _, watch = share_of(runs)
    woken: list[int] = []
    for number in range(2):
        watch.followers.add(lambda number=number: woken.append(number))  # type: ignore[misc]
    job = raced(script, runs, max_new_tokens=4)
    assert not job.followers
    assert sorted(woken) == sorted([0, 1] * (len(job.messages) + 2))  # and as it begins and when it has ended
    before = list(watch.feed.update())
    assert all(one is other for one, other in zip(before, watch.feed.update(), strict=True))


def test_all_watchers_together_are_sent_no_more_than_so_many_events_in_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, runs, slept = Script(), Runs(), list[float]()
    raced(script, runs, max_new_tokens=4)
    watches, watch = share_of(runs)
    watches.end(watch)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("specdemo.ui.watch.routes.sleep", sleep)
    for watch.watchers in (1, 64):
        in_a_loop_of_its_own(until(_events(watch, 0), lambda text: ENDED.decode() in text))
    assert slept == [1 / 64, 1 / 64, 1.0, 1.0]  # the race, and that no vote is open


# The routes ------------------------------------------------------------------------------------------------------


@contextmanager
def following(url: str, session: str, client: httpx.Client) -> Iterator[None]:
    """What a page that is open does: it follows the status."""
    with client.stream("GET", f"{url}status", params={"session": session}) as status:
        lines = status.iter_lines()  # which would be closed if nobody held it
        next(lines)
        yield


def share(url: str, session: str, client: httpx.Client, address: str = "http://here/watch/") -> httpx.Response:
    return client.post(f"{url}watches", params={"session": session, "address": address})


def test_only_a_page_that_is_open_is_shared_and_only_it_can_stop(url: str) -> None:
    with httpx.Client(timeout=20) as client:
        assert [share(url, session, client).status_code for session in ("closed", "")] == [409, 409]
        with following(url, "mine", client):
            assert share(url, "mine", client, "x" * 1000).status_code == 409
            shared = share(url, "mine", client).json()
            token = shared["token"]
            assert len(token) >= 22
            assert shared["link"] == f"http://here/watch/{token}"
            assert shared["picture"].startswith("data:image/svg+xml")
            assert share(url, "mine", client).json() == shared  # not a second one
            for query in ({}, {"session": "other"}, {"session": token}):
                assert client.delete(f"{url}watches/{token}", params=query).status_code == 404
            page = client.get(f"{url}watch/{token}")
            assert (page.status_code, page.headers["referrer-policy"]) == (200, "no-referrer")
            assert client.delete(f"{url}watches/{token}", params={"session": "mine"}).status_code == 204
            for path in ("watch", "watched"):
                gone = client.get(f"{url}{path}/{token}")
                assert (gone.status_code, tells(gone.text, GONE)) == (404, True)
            assert share(url, "mine", client).json()["token"] != token


def test_a_page_for_the_network_is_shared_by_its_address_there() -> None:
    address = "http://localhost:7860/watch/"
    everywhere, local = (SimpleNamespace(server_name=name, server_port=7860) for name in ("0.0.0.0", "127.0.0.1"))
    assert network_address(address, local) == address
    assert network_address("http://specdemo.example/watch/", everywhere) == "http://specdemo.example/watch/"
    assert network_address("http://[/watch/", everywhere) == "http://[/watch/"
    found = urlsplit(network_address(address, everywhere))
    assert (found.port, found.path) == (7860, "/watch/")
    addresses = {each.address for each in chain(*psutil.net_if_addrs().values())}
    assert found.hostname in addresses - {"127.0.0.1"} or addresses <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_one_watcher_too_many_is_refused() -> None:
    assert Budgets().watchers == 64
    with ExitStack() as stack:
        url = stack.enter_context(served(Script(), budgets=Budgets(watchers=2)))
        client = stack.enter_context(httpx.Client(timeout=20))
        with following(url, "mine", client):
            token = share(url, "mine", client).json()["token"]
            with Caller(url) as caller:
                assert caller.outcome(caller.join("one two", "mine"))
            watched = f"{url}watched/{token}"
            with client.stream("GET", watched) as one, client.stream("GET", watched) as two:
                streams = [watcher.iter_lines() for watcher in (one, two)]
                for lines in streams:
                    assert [next(lines), '"seq":0' in next(lines)] == ["id: 0", True]
                for path in ("watch", "watched"):
                    refused = client.get(f"{url}{path}/{token}")
                    assert refused.status_code == 503
                    assert tells(refused.text, "2 watching")
            wait_until(lambda: client.get(f"{url}watch/{token}").status_code == 200)  # they have left


def test_who_shares_may_need_a_login_but_who_watches_does_not() -> None:
    with served(Script(), auth=("me", "secret")) as url, httpx.Client(timeout=20) as sender:
        assert share(url, "mine", sender).status_code == 401
        sender.post(f"{url}login", data={"username": "me", "password": "secret"})
        with following(url, "mine", sender):
            token = share(url, "mine", sender).json()["token"]
            assert httpx.get(f"{url}watch/{token}").status_code == 200
            with Caller(url) as stranger:
                assert stranger.join("one", "mine").status_code == 401
                with stranger.http.stream("GET", f"watched/{token}") as events:
                    assert events.status_code == 200


# In browsers -----------------------------------------------------------------------------------------------------


@contextmanager
def watcher(chromium: Browser, link: str, forgive: str = "\0", **options: Any) -> Iterator[Page]:
    """The page of someone who has the link."""
    troubles: list[str] = []
    page = chromium.new_page(reduced_motion="reduce", **options)
    page.set_default_timeout(20_000)
    with listening(page, troubles, forgive):
        page.goto(link)
        yield page
    page.context.close()
    assert troubles == []


def link_of(page: Page) -> str:
    """Begin to share; the dialog is closed again."""
    page.click("#race [data-part=watch]")
    page.get_by_role("button", name="Start sharing").click()
    expect(page.locator(".sd-shared a")).to_have_text(re.compile("/watch/"))
    link = page.locator(".sd-shared a").inner_text()
    page.keyboard.press("Escape")
    expect(page.locator("#race [data-part=watch]")).to_have_text("Sharing")
    return link


def stop(page: Page) -> None:
    """Stop sharing; the dialog is closed again."""
    page.click("#race [data-part=watch]")
    page.get_by_role("button", name="Stop sharing").click()
    expect(page.get_by_role("button", name="Start sharing")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#race [data-part=watch]")).to_have_text("Watch along")


def test_a_watcher_sees_the_race_that_runs_and_the_next_one_until_sharing_ends(
    page: Page, script: Script, chromium: Browser
) -> None:
    link = link_of(page)
    script.gate.clear()
    run(page, "one two three", until="waiting")
    with watcher(chromium, link) as other:
        expect(other.locator(SAID)).to_have_text(LIVE)
        expect(other.locator(".sd-sentence")).to_contain_text(telling("Waiting race"))
        script.gate.set()
        ended = other.locator(".sd-arena[data-state=ended]")
        for prompt in ("one two three", "four five"):
            if script.ended_races:
                run(page, prompt)
            expect(other.locator(".sd-prompt")).to_have_text(prompt)
            ended.wait_for()
            wait_until(lambda: script.open_races == 0)
            for lane in (PLAIN, SPECULATIVE):
                assert tokens_shown(other, lane) == tokens_of(script.entries, lane)
            expect(other.locator(".sd-badge")).to_contain_text(telling("Same word"))
        assert other.get_by_role("button").all_inner_texts() == []
        strip = other.locator(".sd-strip").last
        strip.click()
        expect(other.locator(".sd-tip")).to_contain_text(telling("lanes scale"))
        expect(other.locator(".sd-tip")).not_to_contain_text("Press")  # there is nothing to step through
        stop(page)
        expect(other.locator(SAID)).to_have_text(OVER)


@pytest.mark.slow
def test_a_page_that_is_closed_is_no_longer_shared(visit: Visit, chromium: Browser) -> None:
    sender = visit()
    with watcher(chromium, link_of(sender), forgive="404") as other:
        expect(other.locator(SAID)).to_have_text(LIVE)
        sender.close()
        expect(other.locator(SAID)).to_have_text(OVER)
        other.reload()
        expect(other.locator(SAID)).to_have_text(telling(GONE))
        expect(other.locator(".sd-arena")).to_have_count(0)


@pytest.mark.slow
def test_a_page_out_of_sight_goes_on_sharing(page: Page, chromium: Browser) -> None:
    with watcher(chromium, link_of(page)) as other:
        page.evaluate(HIDE, True)
        time.sleep(2.5)  # longer than the grace
        expect(other.locator(SAID)).to_have_text(LIVE)
        stop(page)
        expect(other.locator(SAID)).to_have_text(OVER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "shade"),
    [(390, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)],
)
def test_axe_finds_nothing_serious_and_a_watcher_needs_not_scroll_sideways(
    page: Page, script: Script, chromium: Browser, width: int, shade: Any
) -> None:
    link = link_of(page)
    page.click("#race [data-part=watch]")
    assert serious(page, "dialog") == []
    page.keyboard.press("Escape")
    run(page, "one two three four five six seven " * 5)
    with watcher(chromium, link, viewport={"width": width, "height": 844}, color_scheme=shade) as other:
        other.locator(".sd-arena[data-state=ended]").wait_for()
        assert serious(other) == []
        assert other.evaluate("document.documentElement.scrollWidth") == width
    stop(page)


# The view of a race in a notebook, in a real browser --------------------------------------------------------


def test_the_view_plays_in_its_frame_and_cannot_reach_the_notebook(chromium: Browser) -> None:
    found = race("To be", preset="nanogpt-shakespeare", drafter="ngram", k=4, max_new_tokens=20)
    page = chromium.new_page(reduced_motion="reduce")
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.set_content(f"<title>a notebook</title>{found._repr_html_()}")
    view = page.frames[1]
    view.get_by_role("button", name="Play", exact=True).click()
    view.locator("[data-state=ended]").wait_for()
    assert found.text.strip()[:10] in view.locator("#replay").inner_text()
    assert troubles == []
    assert view.evaluate("(() => { try { return parent.document.title } catch { return 'no' } })()") == "no"
    page.context.close()
