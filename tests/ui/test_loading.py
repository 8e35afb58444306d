"""What the page shows while presets load, and how one is chosen."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from specdemo.racing.race import PLAIN

from ..fakes.engine import PRESETS, Script
from ..sentences import tells
from .browser import run, sentence, settings, tokens_shown, wait_until
from .conftest import Visit


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
    assert page.locator(".sd-facts").inner_text() == "bfloat16 · a scripted processor"
    assert len(tokens_shown(page, PLAIN)) == 24


def test_a_failed_load_is_told_and_can_be_tried_again(visit: Visit, unloaded: Script) -> None:
    unloaded.load_failure = MemoryError("The disk is full: free some space <b>now</b>.")
    unloaded.begin()
    page = visit()
    expect(page.locator(".sd-model")).to_have_text("The disk is full: free some space <b>now</b>.")
    run(page, "one two", until="failed")
    assert tells(sentence(page), "The <b>now</b> space")
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
    expect(page.locator("#drafter input")).to_have_value(re.compile("· none$"))
    expect(page.locator("#k input[type=number]")).to_have_value("2")
    expect(page.locator("#preset")).to_contain_text("Much larger.")
    page.click("#more button")
    expect(page.get_by_label("Raw text")).to_be_checked()
    loads = [(loaded.preset.name, loaded.released) for loaded in unloaded.loads]
    assert loads == [("scripted", True), ("other", False)]
    run(page, "one two three")
    assert len(tokens_shown(page, PLAIN)) == 12


def choose_preset(page: Page, title: str) -> None:
    settings(page)
    page.click("#preset input")
    page.get_by_role("option", name=title).click()


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
    expect(page.locator("#drafter input")).to_have_value(re.compile("· prompt-lookup$"))
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
    expect(second.locator("#drafter input")).to_have_value(re.compile("· none$"))
    second.click("#drafter input")  # what this preset can use is not known yet
    expect(second.get_by_role("option", name=re.compile("· draft-model$"))).to_be_visible()
    second.fill("#max-new-tokens input", "7")
    script.gate.set()
    expect(second.locator(".sd-model")).to_have_text("Other 1.7B")
    expect(second.locator("#max-new-tokens input")).to_have_value("7")
    expect(first.locator("[data-lane=plain] .tok")).to_have_count(24)


@pytest.mark.slow
def test_choosing_a_drafter_describes_it(page: Page) -> None:
    settings(page)
    page.click("#drafter input")
    page.get_by_role("option", name=re.compile("· ngram$")).click()
    expect(page.locator("#drafter")).to_contain_text("A table of which token follows which")
    page.click("#drafter input")
    expect(page.get_by_role("option", name="· draft-model (this preset has no draft model)")).to_be_visible()
