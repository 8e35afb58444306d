"""Drafts that branch, on the page: chosen in the form, shown where they were tried, and stepped through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from gradio_client import Client
from playwright.sync_api import Browser, Page, expect

from specdemo.decoding.events import Round
from specdemo.models.presets import Defaults
from specdemo.racing.race import SPECULATIVE
from specdemo.racing.summary import CAUSES
from specdemo.racing.text import LaneText
from specdemo.types import AUTO, DraftedToken, DraftOutcome, Token, TokenKind
from specdemo.ui.race.messages import CODES

from ..fakes.engine import PRESETS, Script
from ..sentences import tells
from .browser import run, sentence, settings, shared
from .conftest import Tabs, Visit, visits
from .test_loading import choose_preset
from .test_page import SHIFTS, granted, serious

TREE = "?drafter=ngram&k=40&tree=true&prompt=one+two+three+four+five&max_new_tokens=24"
LANE = "#race [data-lane=speculative]"


def rounds_of(script: Script) -> list[Round]:
    return [e.event for e in script.entries if e.lane == SPECULATIVE and isinstance(e.event, Round)]


def test_a_tokens_text_is_read_behind_the_one_it_follows() -> None:
    """The bytes of one character on two branches: the text of a token must not depend on the branch before it."""

    class Bytes:
        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", "replace")

    snow, ice = "é".encode(), "è".encode()
    text = LaneText(Bytes(), [*b"one "])
    tree = [(snow[0], -1), (snow[1], 0), (ice[1], 0), (ord("x"), -1)]
    drafted = tuple(DraftedToken(token, DraftOutcome.REJECTED, parent=parent) for token, parent in tree)
    spans = text.read(Round(0, drafted, (Token(ord("a"), TokenKind.RESAMPLED),), 0.0, 0.0, 0.0))
    assert spans.drafted == ("", "é", "è", "x")


@pytest.mark.slow
def test_a_tree_is_chosen_by_a_link_or_a_box_and_carried_on(visit: Visit, script: Script) -> None:
    page = visit(TREE + "&lane2=prompt-lookup&k2=tree-8&lane3=ngram&k3=2")
    settings(page)
    box, k = page.locator("#tree input"), page.locator("#k input[type=number]")
    expect(box).to_be_checked()
    expect(k).to_have_value("40")
    assert granted(page)
    query = parse_qs(urlsplit(page.evaluate("navigator.clipboard.readText()")).query)
    assert (query["tree"], query["k"], query["k2"]) == (["true"], ["40"], ["tree-8"])
    run(page)
    assert (script.settings[-1].tree, script.settings[-1].k) == (True, 40)
    titles = ["Target alone", "ngram, trees of 40", "prompt-lookup, trees of 8", "ngram, K 2"]
    assert page.locator("#race .sd-lane h2").all_inner_texts() == titles
    with page.expect_download() as download:
        shared(page, "trace")
    header = json.loads(download.value.path().read_text(encoding="utf-8").partition("\n")[0])
    assert [(lane.get("tree"), lane.get("k")) for lane in header["lanes"][1:]] == [(True, 40), (True, 8), (False, 2)]
    box.uncheck()
    expect(k).to_have_value("16")  # the longest chain
    page.locator("#k input[type=range]").evaluate("range => range.max === '16'")
    box.check()
    page.locator("#drafter input").fill("none")
    page.locator("#drafter input").press("Enter")
    expect(box).to_be_disabled()
    expect(box).not_to_be_checked()


@pytest.fixture(scope="module")
def ended(chromium: Browser, tabs: Tabs, server: tuple[str, Script]) -> Iterator[tuple[Page, list[Round]]]:
    url, script = server
    script.reset()
    with visits(chromium, tabs, url) as visit:
        page = visit(TREE + "&temperature=0.5")
        run(page)
        yield page, rounds_of(script)


@pytest.fixture
def raced(ended: tuple[Page, list[Round]], script: Script) -> tuple[Page, list[Round]]:
    """A page whose race of trees is over, and the rounds of the drafted lane."""
    ended[0].get_by_role("tab", name="Race").click()
    return ended


@pytest.mark.slow
def test_what_was_tried_at_a_token_is_shown_where_the_reader_points(raced: tuple[Page, list[Round]]) -> None:
    page, rounds = raced
    assert page.locator(f"{LANE} h2").inner_text() == "With ngram, trees of 40"
    assert page.locator(f"{LANE} .sd-strip-row b").inner_text() == f"{sum(len(r.drafted) for r in rounds)} nodes"
    emitted = page.locator(f"{LANE} .sd-text .tok:is(.a, .r, .b, .t)")
    assert "".join(emitted.all_inner_texts()).startswith("one two three four five")

    fork = page.locator(f"{LANE} .sd-rd").nth(1).locator(".sd-fork").nth(1)  # one token passed, two failed after it
    ghost, tip = fork.locator(".sd-ghost"), page.locator(".sd-tip.open")
    expect(fork.locator(".sd-pair > .x")).to_be_visible()  # the likelier one
    expect(ghost).to_be_hidden()
    fork.locator(".sd-pair > .r").hover()
    expect(ghost).to_be_visible()
    assert ghost.locator(".tok").count() == 1
    expect(page.locator(f"{LANE} .sd-ghost:visible")).to_have_count(1)  # none of another place
    assert tells(tip.inner_text(), "draft branches")
    last = [token for token in rounds[1].drafted if token.parent == 2]  # after the accepted token
    assert tip.locator(".sd-tree li").count() == len(last) == 2
    assert tip.locator(".sd-tree li").first.locator(".tok").evaluate_all("all => all.map(t => t.classList[1])") == [
        "x",
        "u",
    ]
    assert "min(1, p/q)" not in tip.inner_text()
    page.keyboard.press("Escape")
    page.locator(f"{LANE} .sd-pane").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")  # the first token, then the two of the first round's place
    expect(tip).to_be_visible()
    assert page.evaluate("document.activeElement.closest('.sd-fork') !== null")


def test_a_round_is_stepped_through_as_a_tree(raced: tuple[Page, list[Round]]) -> None:
    page, rounds = raced
    event = rounds[1]  # one token passes, then two fail
    page.locator("#race .sd-again").click()
    page.locator(".sd-play:enabled").wait_for()
    page.keyboard.press("t")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".sd-steps li")).to_have_text(["draft", "test 1", "test 2", "cache"])
    nodes = page.locator(".sd-step .sd-node")
    assert nodes.count() == len(event.drafted)
    assert codes(page) == [""] * len(event.drafted)
    assert f"a tree of {len(event.drafted)} tokens" in page.locator(".sd-step-words").inner_text()
    assert "q 0.25" in nodes.first.inner_text()
    page.keyboard.press("ArrowRight")
    assert tells(page.locator(".sd-step-words").inner_text(), "2 accepted")
    assert sorted(codes(page)) == sorted(["a", "x", "u", "", "", "", ""])
    assert "p 0.125" in nodes.first.inner_text()
    page.keyboard.press("ArrowRight")
    assert tells(page.locator(".sd-step-words").inner_text(), "2 drafted")
    assert sorted(codes(page)) == sorted([*(CODES[token.outcome] for token in event.drafted), "r"])
    page.keyboard.press("ArrowRight")
    kept, trimmed = page.locator(".sd-kept").count(), page.locator(".sd-trimmed").count()
    assert (kept, trimmed) == (2, len(event.drafted) - 1)  # the pending token and the one that passed


def codes(page: Page) -> list[str]:
    """What the tree says of each of its nodes."""
    return page.locator(".sd-step .sd-node .sd-chip-of").evaluate_all("all => all.map(chip => chip.classList[2] ?? '')")


@pytest.mark.slow
def test_a_tree_moves_nothing_and_reads_well_on_a_phone(visit: Visit, script: Script) -> None:
    page = visit(TREE, width=390, before=SHIFTS)
    run(page)
    left, right = page.locator(f"{LANE} .sd-fork .tok.r").first.evaluate(
        """token => {  // at once, because scrolling, which may go on here, hides it
            token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            const { left, right } = document.querySelector(".sd-tip.open:has(.sd-tree)").getBoundingClientRect();
            return [left, right];
        }"""
    )
    assert 0 <= left < right <= 390
    page.wait_for_timeout(300)
    assert page.evaluate("window.shifts") == []
    page.locator("#race .sd-again").click()
    page.locator(".sd-play:enabled").wait_for()
    page.locator(".sd-through").click()
    for _ in range(3):
        page.get_by_role("button", name="Next step").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert serious(page) == []


@pytest.mark.slow
def test_a_preset_begins_with_trees_and_goes_on_with_chains_where_there_can_be_none(
    visit: Visit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = replace(PRESETS["other"], defaults=Defaults("prompt-lookup", AUTO, max_new_tokens=24, tree=True))
    monkeypatch.setitem(PRESETS, "other", begun)
    page = visit()
    settings(page)
    box = page.locator("#tree input")
    expect(box).not_to_be_checked()
    choose_preset(page, begun.title)
    expect(box).to_be_checked()
    run(page, "one two three")
    assert (script.settings[-1].tree, script.settings[-1].k) == (True, AUTO)
    assert page.locator(f"{LANE} h2").inner_text() == "With prompt-lookup, trees, K auto"
    script.loads[-1].chains_only = "it is too old"
    run(page, "one two three")
    assert script.settings[-1].tree is False
    assert page.locator(f"{LANE} h2").inner_text() == "With prompt-lookup"
    assert tells(sentence(page), "chains trees")
    call = {"prompt": "one two", "preset": "other", "api_name": "/compare"}
    client = Client(page.url, verbose=False, analytics_enabled=False)
    assert client.predict(**call)["sentence"].endswith("it is too old.")
    script.loads[-1].chains_only = None
    for given, tree in ({}, True), ({"tree": False}, False):
        client.predict(**call, **given)
        assert script.settings[-1].tree is tree
    client.close()


@pytest.mark.slow
def test_a_head_that_is_always_wrong_is_doubted_on_the_page_with_the_causes_in_order(
    visit: Visit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = script.loads[-1]
    monkeypatch.setattr(loaded, "head_formats", {"eagle": "EAGLE-3"})
    monkeypatch.setattr(loaded, "parts", replace(loaded.parts, head_files={"eagle": Path("a head")}))
    page = visit("?drafter=eagle&tree=true&prompt=one+two+three&max_new_tokens=60")
    run(page)
    told = sentence(page)
    assert tells(told, "0% EAGLE-3 65% 85%")
    assert told.endswith(f" Likely causes, in this order: {', '.join(CAUSES)}.")
