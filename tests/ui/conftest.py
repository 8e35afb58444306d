"""A real browser on a page with a scripted engine. Every visit fails on script errors and on outside requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from specdemo.lab.bench_page import ARGUMENTS, executable

from .browser import served
from .scripted import Script

Visit = Callable[..., Page]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = executable()
    if path is None:
        message = "There is no Chromium on this machine; on Debian: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, Script]]:
    script = Script()
    with served(script) as url:
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
def visit(chromium: Browser, url: str, script: Script) -> Iterator[Visit]:
    """Opens the page as a new visitor; `forgive` is a text that console errors may hold."""
    pages: list[Page] = []
    troubles: list[str] = []

    def open_page(
        query: str = "", width: int = 1280, height: int = 900, forgive: str = "\0", at: str = url, before: str = ""
    ) -> Page:
        page = chromium.new_page(viewport={"width": width, "height": height}, accept_downloads=True)
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: troubles.append(f"script error: {error}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" and forgive not in m.text else None)
        page.on("request", lambda request: troubles.extend(outside(request.url)))
        page.add_init_script(before)
        page.goto(at + query)
        page.locator(".sd-board").wait_for()
        page.locator("[data-stage]").wait_for()
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert troubles == []


def outside(address: str) -> list[str]:
    parts = urlsplit(address)
    local = parts.scheme in ("data", "blob") or parts.hostname in ("127.0.0.1", "localhost")
    return [] if local else [f"request to {address}"]
