"""How fast the page shows a race: `python -m tests.ui.bench_page`.

A scripted engine emits tokens at a fixed rate, and a real headless browser shows them. The page keeps up if the
last token is on the screen soon after the engine's last event, and if the engine was not held up.
"""

from __future__ import annotations

import argparse
import time

from playwright.sync_api import CDPSession, sync_playwright

from .browser import launched, served
from .scripted import Script

WATCH = """() => {
  window.seen = {};
  const arena = document.querySelector('.sd-arena');
  new MutationObserver(() => (window.seen[arena.dataset.state] ??= performance.now()))
    .observe(arena, { attributes: true, attributeFilter: ['data-state'] });
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each lane")
    parser.add_argument("--rate", type=float, default=400, help="tokens a second, both lanes together")
    asked = parser.parse_args()
    script = Script()
    script.pace = 1 / asked.rate
    with served(script) as url, sync_playwright() as playwright:
        browser = launched(playwright)
        page = browser.new_page()
        page.goto(f"{url}?prompt=one+two+three+four+five+six+seven&max_new_tokens={asked.tokens}")
        page.get_by_text("Press Run to start.").wait_for()
        page.evaluate(WATCH)
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable")
        page_before, server_before = busy_seconds(metrics), time.process_time()
        page.click("#run")
        page.locator("[data-state=ended]").wait_for(timeout=120_000)
        server, shown = time.process_time() - server_before, page.locator(".sd-text .tok:not(.x, .u)").count()
        busy = busy_seconds(metrics) - page_before
        seen = page.evaluate("window.seen")
        browser.close()
    wall = script.ended_at - script.began_at
    print(f"{shown} tokens at {asked.rate:g}/s: ideal {2 * asked.tokens / asked.rate:.2f} s, engine {wall:.2f} s")
    print(f"page, from the first token to the end: {(seen['ended'] - seen['running']) / 1000:.2f} s")
    print(f"busy: server {server / wall:.1%} of a core (the script included), page {busy / wall:.1%} of a core")


def busy_seconds(metrics: CDPSession) -> float:
    """How long the page's main thread has worked so far."""
    found = metrics.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in found if metric["name"] == "TaskDuration"))


if __name__ == "__main__":
    main()
