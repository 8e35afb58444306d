"""One race of the real default model on the page."""

from __future__ import annotations

import pytest

from specdemo.models.presets import DEFAULT_PRESET, load_presets, load_prompts
from specdemo.racing.race import PLAIN, SPECULATIVE
from specdemo.racing.trace import read_trace
from specdemo.ui.engine import Engine, real_backend

from .browser import run, served_engine, shared, tokens_of, tokens_shown
from .conftest import Visit

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_real_race_is_shown_as_it_was(visit: Visit) -> None:
    engine = Engine(load_presets()[0], real_backend())
    *_, status = engine.follow(DEFAULT_PRESET)
    assert status.stage == "ready", status.words
    prompts = load_prompts()
    try:
        with served_engine(engine, prompts) as url:
            page = visit("?max_new_tokens=32&drafter=prompt-lookup", at=url)
            page.get_by_role("button", name="quoting", exact=True).click()
            page.get_by_role("button", name=prompts["quoting"][0]).click()
            page.set_default_timeout(180_000)
            run(page)
            with page.expect_download() as download:
                shared(page, "trace")
            lines = download.value.path().read_text(encoding="utf-8").splitlines()
            shown = {lane: tokens_shown(page, lane) for lane in (PLAIN, SPECULATIVE)}
            facts = page.locator(".sd-facts").inner_text()
    finally:
        list(engine.stream(DEFAULT_PRESET, lambda loaded: (loaded.release() for _ in "1")))
    header, entries = read_trace(lines)
    assert header["prompt"] == prompts["quoting"][0]
    assert header["weights"]["target"]
    assert facts.startswith(header["environment"]["dtype"])
    for lane in (PLAIN, SPECULATIVE):
        assert shown[lane] == tokens_of(entries, lane)
        assert shown[lane]
