"""The browser and the server of the tests in this folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import axe_playwright_python
import gradio.http_server
import httpx
from playwright.sync_api import Browser, Locator, Page, Playwright, expect

from specdemo.decoding.events import Finished, Round, emitted_tokens
from specdemo.racing.trace import Entry
from specdemo.studies.lab import STUDIES
from specdemo.tokens import DraftOutcome
from specdemo.ui.budgets import Budgets
from specdemo.ui.lab.tab import FRONT, lab_tabs
from specdemo.ui.look import launch_options
from specdemo.ui.page import build_page
from tests.harness.ui_classes import Engine, Runs
from tools.page import ARGUMENTS, executable

from ..fakes.engine import PROMPTS, Script

T = TypeVar("T")

# The servers of a process have the same few addresses again and again, for which its browser keeps compiled scripts.
gradio.http_server.INITIAL_PORT_VALUE += 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])


def launched(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=executable(), args=ARGUMENTS)


@contextmanager
def served(script: Script, **options: Any) -> Iterator[str]:
    """The address of the page on a scripted engine, for as long as the context lasts."""
    script.used = script.engine()
    script.begin()
    with served_engine(script.used, PROMPTS, **options) as url:
        yield url


@contextmanager
def served_engine(
    engine: Engine,
    prompts: Mapping[str, Sequence[str]],
    runs: Runs | None = None,
    budgets: Budgets = Budgets(),  # noqa: B008  # frozen
    proxied: bool = False,
    auth: tuple[str, str] | None = None,
    tools: bool = False,
    metrics: bool = False,
    login: bool = False,
) -> Iterator[str]:
    """The same on any engine."""
    runs = runs or Runs()
    page = build_page(engine, runs, prompts, budgets=budgets, tools=tools, login=login)
    options = {"server_name": "127.0.0.1", "auth": auth, **launch_options(runs, proxied, tools, metrics)}
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, **options)
    try:
        yield url
    finally:
        page.close(verbose=False)


def parts_by_id(budgets: Budgets = Budgets()) -> dict[str, Any]:  # noqa: B008  # frozen
    """The parts of a page that is built now."""
    page = build_page(Script().engine(), Runs(), PROMPTS, budgets=budgets)
    return {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def show_recordings(page: Page) -> None:
    """Show the recordings in the place of the race."""
    open_tab(page, "Race")
    if page.locator("#race").is_visible():
        page.click("#race [data-part=recordings]")


def more_settings(page: Page) -> None:
    """Open those below the settings, too."""
    settings(page)
    if not page.locator("#stop-strings").is_visible():
        page.click("#more > button")
        page.locator("#stop-strings").wait_for()


def settings(page: Page) -> None:
    """Open the settings below Run."""
    open_tab(page, "Race")
    button = page.locator("#settings > button")
    if "open" not in (button.get_attribute("class") or "").split():
        button.click()
        page.locator("#preset input").wait_for()  # and what it begins with is written into it
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def fill(page: Page, k: int | None = None, temperature: float | None = None, max_new_tokens: int | None = None) -> None:
    """Fill in numbers of the form."""
    settings(page)
    for part, number in (("k", k), ("temperature", temperature), ("max-new-tokens", max_new_tokens)):
        if number is not None:
            page.fill(f"#{part} input[type=number]", str(number))


def run(page: Page, prompt: str | None = None, until: str = "ended") -> None:
    """Fill in a prompt, press Run and wait for a state of the arena."""
    open_tab(page, "Race")
    if prompt is not None:
        page.fill("#prompt textarea", prompt)
    page.click("#run")
    page.locator(f".sd-arena[data-state={until}]").wait_for()


def shared(page: Page, way: str) -> None:
    """Share the race by a button of the dialog."""
    page.click("#race .sd-share-open")
    page.click(f".sd-share .sd-{way}")
    page.keyboard.press("Escape")


def wait_until(true: Callable[[], object], seconds: float = 20) -> None:
    """Wait for something that happens on the server, which no element of a page shows."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def tokens_shown(page: Page, lane: str) -> list[list[str]]:
    """[text, code] of every token span of a lane, in the order of the page."""
    return page.evaluate(
        """lane => [...document.querySelectorAll(`[data-lane=${lane}] .sd-text .tok`)]
           .map(t => [t.textContent, t.classList[1]])""",
        lane,
    )


def tokens_of(entries: list[Entry], lane: str) -> list[list[str]]:
    """The same from the events that the engine gave out, put together independently of the page's own code."""
    shown: list[tuple[str, str]] = []
    for entry in entries:
        if entry.lane != lane:
            continue
        emitted = [token.text for token in emitted_tokens(entry.event)]
        if isinstance(entry.event, Round):
            accepted = sum(token.outcome is DraftOutcome.ACCEPTED for token in entry.event.drafted)
            kinds = [token.kind.value[0] for token in entry.event.emitted]
            shown += zip(emitted[:accepted], kinds[:accepted], strict=True)
            thrown = entry.event.drafted[accepted:]
            shown += [(token.text, "x" if token.outcome is DraftOutcome.REJECTED else "u") for token in thrown]
            shown += zip(emitted[accepted:], kinds[accepted:], strict=True)
        else:
            shown += [(text, "t") for text in emitted]
            if isinstance(entry.event, Finished) and entry.event.text:
                shown.append((entry.event.text, "t"))
    return [list(pair) for pair in shown]


def discarded(page: Page, code: str, at: int = 0, inside: str = "#race") -> Locator:
    """A token that was rejected (x) or untested (u), brought to sight as a reader does: by pointing at its round."""
    token = page.locator(f"{inside} [data-lane=speculative] .tok.{code}").nth(at)
    token.locator("xpath=ancestor::*[contains(@class, 'sd-rd')]").locator(
        ".tok:not(.sd-cut .tok, .sd-ghost .tok)"
    ).first.hover()
    return token


def headline(page: Page) -> str:
    return page.locator("#problem p").text_content() or page.locator("#race .sd-sentence").inner_text()


def sentence(page: Page) -> str:
    """What the page says of a race: the verdict's sentence, or what stands in the place of a verdict."""
    told = page.locator("#race [data-part=finding]").text_content()
    return page.locator("#problem p").text_content() or told or headline(page)


def choose(page: Page, view: str) -> Locator:
    """Open a view of Check or of the Lab."""
    front = STUDIES[view] in FRONT
    open_tab(page, "Check" if front else "Lab")
    if front and page.locator(f"#lab-{view}").is_visible():
        return page.locator(f"#lab-{view}")
    for group, studies in {} if front else lab_tabs().items():
        if STUDIES[view] in studies:
            _open_inner_tab(page, group)
    _open_inner_tab(page, STUDIES[view].title)
    shown = page.locator(f"#lab-{view}")
    shown.locator(".lab-run").wait_for()
    page.wait_for_timeout(250)  # what Gradio has put there it fills in a moment later
    return shown


def _open_inner_tab(page: Page, name: str) -> None:
    """Open a tab of Check or of the Lab, which Gradio puts into a menu where there is no room for it."""
    tab = page.get_by_role("tab", name=name, exact=True)
    page.wait_for_timeout(250)  # Gradio finds out a moment later what there is room for
    if not tab.is_visible():
        menus = page.locator("#lab .overflow-menu:visible").filter(has_text=name)
        menus.locator("> button").first.click()
        tab = menus.locator(".overflow-dropdown button", has_text=name).first
    tab.click()


def waiting(place: int, of: int) -> re.Pattern[str]:
    """What is said of a place in the line."""
    return re.compile(rf"^Waiting\D+{place}\D+{of}\b")


class Caller:
    """A program that speaks HTTP from one of this machine's addresses."""

    def __init__(self, url: str, number: int = 1) -> None:
        transport = httpx.HTTPTransport(local_address=f"127.0.0.{number}", verify=False)  # or it reads certificates
        self.http = httpx.Client(base_url=url, transport=transport, timeout=60)

    def join(self, prompt: str, session: str | None = None, **settings: Any) -> httpx.Response:
        asked = {"preset": "scripted", "drafter": "none", "k": 1, "temperature": 0, "max_new_tokens": 4, **settings}
        data = [prompt, *asked.values(), 0, 0, 1.0, None, False, False, "match", False, 1, 0, "", 1]
        body = {"data": data, **({"session_hash": session} if session else {})}
        return self.http.post("/gradio_api/call/compare", json=body)

    def outcome(self, joined: httpx.Response) -> Any:
        """The summary of the race that was joined for; None if it failed."""
        event = joined.json()["event_id"]
        with self.http.stream("GET", f"/gradio_api/call/compare/{event}") as answer:
            events = dict(re.findall("event: (.*)\ndata: (.*)\n", answer.read().decode()))
        return json.loads(events["complete"])[0] if "complete" in events else None

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()


def in_a_loop_of_its_own(work: Coroutine[Any, Any, T]) -> T:
    """In another thread, because the browser of other tests has a loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


FADED = "document.getAnimations().forEach((animation) => animation.finish())"


AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")


# Every layout shift from the first paint on, but for Gradio's own spinner, which is there before the page is, and for
# tokens: at the finish those that were rejected fold away.
SHIFTS = """
  window.shifts = [];
  const element = node => (node?.closest ? node : node?.parentElement);
  const own = ({ node }) => node && !element(node)?.closest('[data-testid=status-tracker], .sd-text');
  new PerformanceObserver(list => list.getEntries().filter(entry => entry.sources.some(own)).forEach(entry =>
    window.shifts.push([entry.value, ...entry.sources.map(({ node }) => (node?.parentElement || node)?.outerHTML)])))
    .observe({ type: 'layout-shift', buffered: true });
"""


def serious(page: Page, inside: str = "html") -> list[object]:
    """What axe finds in a part of a page, unless it is a trifle."""
    page.evaluate(FADED)  # or it meets colours that are half faded, on a machine that is slow enough
    if page.evaluate("window.axe === undefined"):
        page.evaluate(AXE)
    found = page.evaluate("part => axe.run(part, { resultTypes: ['violations'] })", inside)["violations"]
    return [
        (v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")
    ]


def granted(page: Page) -> bool:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shared(page, "link")
    expect(page.locator(".sd-link")).to_have_text("Copied")
    return True


def choose_preset(page: Page, title: str) -> None:
    settings(page)
    page.click("#preset input")
    page.get_by_role("option", name=title).click()


def replayed(page: Page, lane: str) -> list[list[str]]:
    """[text, code] of every token that the lane of the replay shows."""
    return page.evaluate(
        """lane => [...document.querySelectorAll(`#replay [data-lane=${lane}] .sd-text .tok`)]
           .map(t => [t.textContent, t.classList[1]])""",
        lane,
    )
