"""A real browser on a page with a scripted engine.

Every visit fails on script errors, on errors and warnings in the console, and on outside requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from specdemo.racing import summary
from specdemo.ui.replay import opening
from tests.harness.ui_classes import Runs
from tools.page import executable

from ..fakes.engine import MEMORY_RATE, Script
from .browser import launched, served

Visit = Callable[..., Page]
expect.set_options(timeout=20_000)  # the machine may be busy


@pytest.fixture(scope="package", autouse=True)
def memory() -> Iterator[None]:
    """Measured once and for all tests of the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "memory_rate", lambda device, pass_bytes: MEMORY_RATE)
        yield


@pytest.fixture(scope="session", autouse=True)
def urgent() -> Iterator[None]:
    """Files are opened as urgently as the other tests run, or they would wait for all of these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "NICE", 0)
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if executable() is None:
        message = "There is no Chromium on this machine; on Debian: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


class Tabs:
    """Tabs for many tests, as good as new for each; tabs that are taken at the same time share nothing.

    They keep the compiled scripts of the page, so that a visit takes less than half the time.
    """

    def __init__(self, chromium: Browser) -> None:
        self._chromium, self._free = chromium, list[Page]()

    def take(self, motion: bool = False) -> Page:
        """Without `motion` a race is shown as it is measured."""
        page = self._free.pop() if self._free else self._chromium.new_context().new_page()
        page.emulate_media(reduced_motion="no-preference" if motion else "reduce")
        return page

    def give_back(self, page: Page) -> None:
        """What a visitor leaves behind is cleared away: what is stored, allowed, intercepted and cut off."""
        page.context.set_offline(False)
        page.context.clear_permissions()
        page.context.clear_cookies()
        if page.is_closed():
            page = page.context.new_page()
        else:
            page.unroute_all()
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
            page.mouse.move(0, 0)
            page.goto("about:blank")
        self._free.append(page)


@pytest.fixture(scope="session")
def tabs(chromium: Browser) -> Tabs:
    return Tabs(chromium)


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, Script]]:
    script = Script()
    with served(script, runs=Runs(grace=1.0)) as url:
        yield url, script


@pytest.fixture
def script(server: tuple[str, Script]) -> Iterator[Script]:
    """The script of the shared server, as good as new."""
    script = server[1]
    script.reset()
    yield script
    script.reset()
    script.used._own = {}  # without those that visitors have named
    list(script.used.follow("scripted"))


@pytest.fixture
def unloaded(script: Script) -> Script:
    """The same, before its server has begun to load a model, which `script.begin` does."""
    script.forget()
    return script


@pytest.fixture
def url(server: tuple[str, Script]) -> str:
    return server[0]


@pytest.fixture
def visit(chromium: Browser, tabs: Tabs, url: str, script: Script) -> Iterator[Visit]:
    with visits(chromium, tabs, url) as visit:
        yield visit


# All that a visitor can leave on a page that no race goes on in: what it says of one that has ended is no hindrance.
LEFT = """() => JSON.stringify([
    location.href, document.body.className, localStorage.length, sessionStorage.length,
    ...document.querySelectorAll('.sd-arena:is([data-state=running], [data-state=waiting], [data-state=loading])'),
    ...[...document.querySelectorAll('input:not([type=file]), textarea, select, dialog[open], [aria-pressed]')]
        .filter(part => !part.closest('#prompt, .sd-board, .sd-why-pass') && (!part.closest('#replay') || part.checked
            || (part.ariaPressed === 'true' && part.textContent !== '1×')))
        .map(part => [part.value, part.checked, part.open, part.ariaPressed]),
])"""


HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


# What a test fills in, each part with what it holds at first.
FORM = """() => [...document.querySelectorAll('input:not([type=file]), textarea, select, [aria-pressed]')]
    .filter(part => !part.closest('#prompt, .sd-board, .sd-why-pass, #replay'))"""
# Gradio makes what is folded when it is unfolded first.
UNFOLD = """async () => {
    const press = (folded) => document.querySelector(`#${folded} > button`).click();
    for (const [folded, part] of [["settings", "#preset"], ["more", "#stop-strings"]]) {
        press(folded);
        while (!document.querySelector(`${part} :is(input, textarea)`))
            await new Promise((done) => requestAnimationFrame(done));
    }
    ["more", "settings"].forEach(press);
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""
RESTORE = f"""held => {{
    document.querySelector("#stage").removeAttribute("data-recordings");
    for (const folded of ["more", "settings"]) document.querySelector(`#${{folded}} > button.open`)?.click();
    if (document.body.classList.contains('dark')) document.querySelector('.sd-dark').click();
    const parts = ({FORM})();
    if (parts.length === held.length) parts.forEach((part, at) => {{
        const [value, checked, pressed] = held[at];
        if ((part.checked ?? null) !== checked || (pressed === 'true' && part.ariaPressed !== pressed)) part.click();
        else if (part.value !== value && part.role !== 'listbox') {{
            part.value = value;
            for (const event of ['input', 'change']) part.dispatchEvent(new Event(event, {{ bubbles: true }}));
        }}
    }});
    document.querySelector('#replay .sd-hide input:checked')?.click();
    const scrub = document.querySelector('#replay .sd-scrub');
    if (scrub) {{  // to the end of what is replayed
        const play = document.querySelector('#replay .sd-play');
        if (play.textContent === 'Pause') play.click();
        scrub.value = scrub.max;
        scrub.dispatchEvent(new Event('input', {{ bubbles: true }}));
    }}
    [...document.querySelectorAll('#replay .sd-speeds button')].find(part => part.textContent === '1×')?.click();
    localStorage.clear();
    sessionStorage.clear();
}}"""
HOLDS = f"() => ({FORM})().map(part => [part.value, part.checked, part.ariaPressed])"


@dataclass(frozen=True)
class Used:
    """A page that a test has left as it was, how that is, and whether recordings were shown on it.

    Once it was, there are two arenas on the page, which most tests do not tell apart.
    """

    page: Page
    left: str
    held: list[Any]
    replayed: bool = False

    def restore(self) -> bool:
        """Fill in what it held at first; whether all is as it was then."""
        if self.page.is_closed():
            return False
        self.page.context.set_offline(False)
        self.page.unroute_all()
        self.page.mouse.move(0, 0)
        self.page.keyboard.press("Escape")
        if self.page.evaluate(LEFT) != self.left:
            self.page.evaluate(RESTORE, self.held)
            end = time.monotonic() + 1
            while self.page.evaluate(LEFT) != self.left:
                if time.monotonic() > end:
                    return False
                self.page.wait_for_timeout(50)  # Gradio fills in a moment later
        return True


@pytest.fixture(scope="session")
def used(tabs: Tabs) -> Iterator[list[Used]]:
    """The pages that tests which use `page` have left as they were."""
    used: list[Used] = []
    yield used
    for last in used:
        tabs.give_back(last.page)


@pytest.fixture
def forgive() -> str:
    """A text that messages of the console of `page` may hold; a test may give another one as a parameter."""
    return "\0"


@contextmanager
def reused(tabs: Tabs, used: list[Used], url: str, forgive: str = "\0", replayed: bool = False) -> Iterator[Page]:
    """The page with nothing filled in. Earlier tests may have raced on it: to open it takes longer than most races.

    With `replayed` its recordings may have been shown.
    """
    troubles: list[str] = []
    fitting = [last for last in used if last.replayed == replayed] or (used if replayed else [])
    this = fitting[-1] if fitting else None
    if this:
        used.remove(this)
    page = this.page if this else tabs.take()
    with listening(page, troubles, forgive):
        page.set_viewport_size({"width": 1280, "height": 900})
        if this:
            page.evaluate(HIDE, False)
            page.get_by_role("tab", name="Race").click()
        else:
            page.set_default_timeout(20_000)
            page.goto(url)
            page.locator("#race .sd-board").wait_for()
            page.locator("[data-stage=ready]").wait_for()
            page.evaluate(UNFOLD)
            this = Used(page, page.evaluate(LEFT), page.evaluate(HOLDS))
        yield page
    if this.restore():
        page.evaluate(HIDE, True)  # out of sight it asks the server for nothing
        used.append(replace(this, replayed=page.locator("#replay .sd-arena").count() > 0))
    else:
        tabs.give_back(page)
    assert troubles == []


@pytest.fixture
def page(tabs: Tabs, used: list[Used], url: str, script: Script, forgive: str) -> Iterator[Page]:
    with reused(tabs, used, url, forgive) as page:
        yield page


@pytest.fixture
def other(tabs: Tabs, used: list[Used], url: str, page: Page) -> Iterator[Page]:
    """That of another visitor, beside `page`."""
    with reused(tabs, used, url) as other:
        yield other


@pytest.fixture
def third(tabs: Tabs, used: list[Used], url: str, other: Page) -> Iterator[Page]:
    with reused(tabs, used, url) as third:
        yield third


@contextmanager
def visits(chromium: Browser, tabs: Tabs, url: str) -> Iterator[Visit]:
    """Opens the page as a new visitor; `forgive` is a text that messages of the console may hold.

    If something is to happen `before` the page loads, it is in a browser that has never seen it.
    """
    pages: list[Page] = []
    own: list[Page] = []
    heard = ExitStack()
    troubles: list[str] = []

    def open_page(
        query: str = "",
        width: int = 1280,
        height: int = 900,
        forgive: str = "\0",
        at: str = url,
        before: str = "",
        motion: bool = False,
        until: str = "[data-stage]",
    ) -> Page:
        if before:
            page = chromium.new_page(reduced_motion="reduce")
            page.add_init_script(before)
            own.append(page)
        else:
            page = tabs.take(motion)
            pages.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.set_default_timeout(20_000)
        heard.enter_context(listening(page, troubles, forgive))
        page.goto(at + query)
        page.locator("#race .sd-board").wait_for()
        page.locator(until).wait_for()
        return page

    yield open_page
    heard.close()
    for page in own:
        page.context.close()
    for page in reversed(pages):
        tabs.give_back(page)
    assert troubles == []


@contextmanager
def listening(page: Page, troubles: list[str], forgive: str = "\0") -> Iterator[None]:
    """What is wrong with a page meanwhile is added to `troubles`."""

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and forgive not in message.text:
            troubles.append(message.text)

    heard: dict[str, Callable[[Any], None]] = {
        "pageerror": lambda error: troubles.append(f"script error: {error}"),
        "dialog": lambda dialog: troubles.append(f"dialog: {dialog.message}"),
        "console": console,
        "request": lambda request: troubles.extend(outside(request.url)),
    }
    for event, hear in heard.items():
        page.on(event, hear)  # type: ignore[call-overload]
    yield
    for event, hear in heard.items():
        page.remove_listener(event, hear)


@pytest.fixture
def alone(chromium: Browser) -> Iterator[Page]:
    """A browser without a network."""
    context = chromium.new_context(offline=True, reduced_motion="reduce")
    page = context.new_page()
    troubles: list[str] = []
    page.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
    with listening(page, troubles, forgive="file:///"):
        yield page
    context.close()
    assert [trouble for trouble in troubles if not trouble.startswith("request to file:///")] == []


def outside(address: str) -> list[str]:
    parts = urlsplit(address)
    local = parts.scheme in ("data", "blob") or parts.hostname in ("127.0.0.1", "localhost")
    return [] if local else [f"request to {address}"]
