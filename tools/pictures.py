"""The pictures and the demo of the docs, of recordings that ship: `python -m tools.pictures`.

The moving picture is what the page opens with. Its clock is the program's, so the pictures are the same however long a
frame takes. `python -m tools.pictures demo` makes `demo.html` alone, which changes with every script of the page.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdemo.ui.share.saved import demo_page

from .page import headless, served

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).resolve().parents[1] / "docs"
STEP = "story-2-eagle-match"  # the recording
FRAMES = 5  # in a second
LAST_SECONDS = 4.0  # that the last frame stays
SIZE = 1000, 700  # of a frame
QUALITY = 60
CLOCK = """() => {
  let now = performance.now();
  performance.now = () => now;
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  window.forward = async (seconds) => {
    now += 1000 * seconds;
    if (specdemo.race.state === "opening") specdemo.race.opening.tick();
    await frame();
    for (const animation of document.getAnimations()) {
      animation.pause();
      animation.currentTime += 1000 * seconds;
    }
    await frame();
    return specdemo.race.state;
  };
}"""
FILMED = """
  #controls, .sd-results, .sd-behind, .sd-why-pass, .sd-legend, .sd-pacing { display: none !important; }
  .sd-say { --large: 22px !important; min-height: 170px !important; }
"""


def demo() -> None:
    (DOCS / "demo.html").write_text(demo_page(), encoding="utf-8", newline="\n")


def pictures() -> None:
    with served() as (url, _), headless() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.goto(url)
        page.locator("[data-stage=ready]").wait_for(timeout=120_000)
        replay(page, STEP)
        step(page)
        page.locator(".sd-step").screenshot(path=DOCS / "step.png")
        moving = browser.new_page(viewport={"width": 1360, "height": 1000}, reduced_motion="no-preference")
        moving.goto(url)
        film(moving, DOCS / "race.webp")


def replay(page: Page, name: str) -> None:
    page.click("#race [data-part=recordings]")
    page.locator("#replay .sd-play:enabled").wait_for()
    page.select_option("#replay .sd-which", name)
    page.wait_for_function(
        "name => specdemo.replay.chosen === name && !document.querySelector('.sd-play').disabled", arg=name
    )


def step(page: Page) -> None:
    """Step to the first test of a guess that failed after one that passed."""
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("t")
    for _ in range(200):
        words = page.locator(".sd-step-words").inner_text()
        if "it is rejected" in words and not words.startswith("Guess 1 "):
            return
        page.keyboard.press("ArrowRight")


def film(page: Page, path: Path) -> None:
    """What the page opens with, as an animated WebP file."""
    from PIL import Image

    page.locator("#race .sd-arena[data-state=opening]").wait_for()
    page.evaluate(CLOCK)
    page.evaluate("specdemo.race.opening.play()")  # from its beginning
    page.add_style_tag(content=FILMED)
    box = page.locator("#arena").bounding_box()
    assert box
    clip: Any = {"x": box["x"] - 12, "y": box["y"] - 12, "width": SIZE[0], "height": SIZE[1]}
    page.set_viewport_size({"width": SIZE[0] + 24, "height": 1000})
    frames = []
    state = "opening"
    while state == "opening":
        state = page.evaluate("seconds => forward(seconds)", 1 / FRAMES)
        frames.append(Image.open(BytesIO(page.screenshot(clip=clip))).convert("RGB"))
    times = [1000 // FRAMES] * (len(frames) - 1) + [int(1000 * LAST_SECONDS)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0, quality=QUALITY)


if __name__ == "__main__":
    demo()
    if sys.argv[1:] != ["demo"]:
        pictures()
