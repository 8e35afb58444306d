"""The browser and the server that the tests and the bench of the page use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from playwright.sync_api import Page

from specdemo.events import Entry, Round
from specdemo.types import Fate
from specdemo.ui.engine import Engine
from specdemo.ui.look import launch_options
from specdemo.ui.page import build_page
from specdemo.ui.runs import Runs

from .scripted import PROMPTS, Script


@contextmanager
def served(script: Script) -> Iterator[str]:
    """The address of the page on a scripted engine, for as long as the context lasts."""
    engine = script.engine()
    engine.begin_loading("scripted")
    with served_engine(engine, PROMPTS) as url:
        yield url


@contextmanager
def served_engine(engine: Engine, prompts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The same on any engine."""
    runs = Runs()
    page = build_page(engine, runs, prompts)
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options(runs))
    try:
        yield url
    finally:
        page.close(verbose=False)


def run(page: Page, prompt: str | None = None, until: str = "ended") -> None:
    """Fill in a prompt, press Run and wait for a state of the arena."""
    if prompt is not None:
        page.fill("#prompt textarea", prompt)
    page.click("#run")
    page.locator(f".sd-arena[data-state={until}]").wait_for()


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
        emitted = list(entry.spans.emitted)
        if isinstance(entry.event, Round):
            accepted = sum(token.fate is Fate.ACCEPTED for token in entry.event.drafted)
            kinds = [token.kind.value[0] for token in entry.event.emitted]
            shown += zip(emitted[:accepted], kinds[:accepted], strict=True)
            thrown = list(zip(entry.event.drafted, entry.spans.drafted, strict=True))[accepted:]
            shown += [(text, "x" if token.fate is Fate.REJECTED else "u") for token, text in thrown]
            shown += zip(emitted[accepted:], kinds[accepted:], strict=True)
        else:
            shown += [(text, "t") for text in emitted]
    return [list(pair) for pair in shown]


def sentence(page: Page) -> str:
    return page.locator(".sd-sentence").inner_text()
