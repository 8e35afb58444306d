"""Stage mode: the race alone, large, by the keys of a clicker."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from specdemo.racing.race import PLAIN, SPECULATIVE

from ..fakes.engine import PROMPTS, Script
from .browser import run, tokens_of, tokens_shown, wait_until
from .conftest import Visit
from .test_page import serious

ENDED = "#race .sd-arena[data-state=ended]"
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
        page.locator(ENDED).wait_for()
        assert page.locator("#prompt textarea").input_value() == prompt
        assert tokens_shown(page, SPECULATIVE) == tokens_of(script.entries, SPECULATIVE)


def test_the_next_key_goes_on_to_the_end_of_a_race(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two+three+four+five+six", motion=True)
    page.keyboard.press("f")
    page.keyboard.press("1")
    page.locator("#race .sd-arena[data-state=showing]").wait_for()
    page.keyboard.press("PageDown")
    page.locator(ENDED).wait_for()
    assert len(script.races) == 1
    assert tokens_shown(page, SPECULATIVE) == tokens_of(script.entries, SPECULATIVE)


@pytest.mark.slow
def test_recordings_play_when_nobody_is_there(visit: Visit, script: Script) -> None:
    page = visit("?prompt=one+two")
    run(page)
    page.keyboard.press("f")
    page.wait_for_timeout(700)  # longer than between two looks at the time
    assert page.locator(ENDED).count() == 1
    page.evaluate("Object.assign(specdemo.stage, { idle: 0, rest: 0 })")
    page.locator("#race .sd-arena[data-state=opening]").wait_for()
    first = page.evaluate("specdemo.stage.played")
    page.evaluate("specdemo.race.opening.end()")
    page.wait_for_function("first => specdemo.stage.played > first", arg=first)
    page.locator("#race .sd-arena[data-state=opening]").wait_for()
    page.keyboard.press("f")
    run(page)  # whatever played
    assert tokens_shown(page, PLAIN) == tokens_of(script.entries, PLAIN)
