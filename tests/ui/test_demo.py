"""`docs/demo.html`, opened from the disk in a browser without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from .browser import serious

DEMO = (Path(__file__).resolve().parents[2] / "docs" / "demo.html").as_uri()
RACES = ["Easy to guess", "Hard to guess", "A small model guesses"]


def watch(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    expect(page.locator(".sd-picks [aria-pressed=true]")).to_have_text(name)


def test_the_demo_plays_from_a_disk_without_a_network(alone: Page) -> None:
    """It fails on errors of scripts, on words in the console and on requests: see `alone`."""
    alone.goto(DEMO)
    expect(alone.locator("#race .sd-sentence")).to_contain_text("The target wrote the same text")  # no motion is wanted
    expect(alone.locator("#race .sd-ratio")).to_be_visible()
    for name in RACES:
        watch(alone, name)
        alone.get_by_role("button", name="4×", exact=True).click()
        alone.get_by_role("button", name="Play", exact=True).click()
        alone.locator("#replay [data-state=ended]").wait_for()
        texts = [alone.locator(f"#replay [data-lane={lane}] .sd-text") for lane in ("plain", "speculative")]
        shown = [text.locator(".tok:not(.x, .u)").all_inner_texts() for text in texts]
        assert "".join(shown[0]) == "".join(shown[1]) != ""
        expect(alone.locator("#replay .sd-badge")).to_have_text("Same text, word for word")
        assert f"measured {alone.locator('#replay .sd-ratio').inner_text()}" in alone.locator("#why").inner_text()


def test_a_round_is_stepped_through_by_keyboard(alone: Page) -> None:
    alone.goto(DEMO)
    alone.get_by_role("button", name="Step through a round").focus()
    alone.keyboard.press("Enter")
    words = alone.locator(".sd-step-words")
    expect(words).to_contain_text("guesses")
    seen = [words.inner_text()]
    steps = alone.locator(".sd-steps li")
    for at in range(1, steps.count()):
        alone.keyboard.press("ArrowRight")
        expect(steps.nth(at)).to_have_attribute("aria-current", "step")
        seen.append(words.inner_text())
    assert len({*seen}) == steps.count() > 3
    assert "rejected" in "".join(seen)
    alone.keyboard.press("Escape")
    expect(alone.locator(".sd-step")).to_be_hidden()


def test_keys_hold_and_end_the_opening(chromium: Browser) -> None:
    page = chromium.new_page(reduced_motion="no-preference")
    page.goto(DEMO)
    expect(page.locator("#race")).to_have_attribute("data-state", "opening")
    expect(page.locator(".sd-figure .sd-chip-of").first).to_be_visible()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Go on")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#race")).to_have_attribute("data-state", "opened")
    page.locator("#race .sd-strip").last.focus()
    page.keyboard.press("Enter")  # the last round of this race
    expect(page.locator(".sd-step h3")).to_have_text("Round 37 of 37")
    watch(page, "How it works")
    expect(page.locator("#race")).to_have_attribute("data-state", "opening")
    watch(page, RACES[0])
    expect(page.locator("#replay .sd-play")).to_have_text("Pause")  # it plays by itself
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("shade", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_demo_fits_and_can_be_read(chromium: Browser, shade: str, width: int) -> None:
    context = chromium.new_context(
        color_scheme=shade,  # type: ignore[arg-type]
        viewport={"width": width, "height": 900},
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(DEMO)
    for name in ("How it works", *RACES, "Step through a round"):
        watch(page, name)
        page.wait_for_timeout(500)
        assert page.evaluate("document.body.classList.contains('dark')") == (shade == "dark")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert serious(page) == []
    context.close()
