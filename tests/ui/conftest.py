"""A real browser on a page with a scripted engine. Every visit fails on script errors and on outside requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from specdemo.ui.runs import Runs

from .browser import executable, launched, served
from .scripted import Script

Visit = Callable[..., Page]
expect.set_options(timeout=20_000)  # a file is read by a process that waits for whatever else runs on this machine


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


class Tab:
    """One tab for many tests, as good as new for each.

    The browser keeps the page's compiled scripts, so that a visit takes less than half the time.
    """

    def __init__(self, chromium: Browser) -> None:
        self._context = chromium.new_context(reduced_motion="reduce")  # so that a race is shown as it is measured
        self._page: Page | None = None

    def take(self) -> Page:
        if self._page is None or self._page.is_closed():
            self._page = self._context.new_page()
        return self._page

    def give_back(self, page: Page) -> None:
        """What a visitor leaves behind is cleared away: what is stored, allowed, intercepted and cut off."""
        self._context.set_offline(False)
        self._context.clear_permissions()
        self._context.clear_cookies()
        if page.is_closed():
            return
        page.unroute_all()
        page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.mouse.move(0, 0)
        page.goto("about:blank")


@pytest.fixture(scope="session")
def seeing(chromium: Browser) -> Iterator[BrowserContext]:
    """A browser of somebody who does not mind motion; it keeps the page's compiled scripts."""
    with chromium.new_context(reduced_motion="no-preference") as context:
        yield context


@pytest.fixture(scope="session")
def tab(chromium: Browser) -> Tab:
    return Tab(chromium)


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


@pytest.fixture
def url(server: tuple[str, Script]) -> str:
    return server[0]


@pytest.fixture
def visit(chromium: Browser, tab: Tab, url: str, script: Script) -> Iterator[Visit]:
    """Opens the page as a new visitor; `forgive` is a text that console errors may hold.

    The first visitor of a test has the tab that tests share, unless something is to happen `before` the page loads; all
    others have a browser of their own.
    """
    pages: list[Page] = []
    troubles: list[str] = []
    shared: Page | None = None

    def open_page(
        query: str = "", width: int = 1280, height: int = 900, forgive: str = "\0", at: str = url, before: str = ""
    ) -> Page:
        nonlocal shared
        if pages or before:
            page = chromium.new_page(accept_downloads=True, reduced_motion="reduce")
            page.add_init_script(before)
        else:
            page = shared = tab.take()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.set_default_timeout(20_000)
        for event, hear in listeners(troubles, forgive).items():
            page.on(event, hear)  # type: ignore[call-overload]
            heard.append((page, event, hear))
        page.goto(at + query)
        page.locator(".sd-board").wait_for()
        page.locator("[data-stage]").wait_for()
        return page

    heard: list[tuple[Page, str, Callable[[Any], None]]] = []
    yield open_page
    for page, event, hear in heard:
        page.remove_listener(event, hear)
    for page in pages:
        if page is shared:
            tab.give_back(page)
        else:
            page.context.close()
    assert troubles == []


def listeners(troubles: list[str], forgive: str) -> dict[str, Callable[[Any], None]]:
    """What is wrong with a page is added to `troubles`."""

    def console(message: ConsoleMessage) -> None:
        if message.type == "error" and forgive not in message.text:
            troubles.append(message.text)

    return {
        "pageerror": lambda error: troubles.append(f"script error: {error}"),
        "dialog": lambda dialog: troubles.append(f"dialog: {dialog.message}"),
        "console": console,
        "request": lambda request: troubles.extend(outside(request.url)),
    }


def outside(address: str) -> list[str]:
    parts = urlsplit(address)
    local = parts.scheme in ("data", "blob") or parts.hostname in ("127.0.0.1", "localhost")
    return [] if local else [f"request to {address}"]
