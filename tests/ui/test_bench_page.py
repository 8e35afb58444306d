"""What `bench page` measures, on the scripted engine: the figures must be those of the race, whoever asks for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser

from specdemo.lab import bench_page
from specdemo.lab.bench_page import Asked, in_a_browser, in_a_program, table, without_page
from specdemo.race import PLAIN, SPECULATIVE
from specdemo.stats import Stats
from specdemo.types import BadInput

from .scripted import Script

ASKED = Asked("one two three four five six seven", "scripted", "prompt-lookup", 4, 60)


def rates(script: Script) -> dict[str, float]:
    """Tokens per second of the latest race, by the script's own events."""
    lanes = {lane: [entry.event for entry in script.entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)}
    return {lane: Stats.of(events).tokens_per_second or 0.0 for lane, events in lanes.items()}


def test_every_way_reports_the_rates_of_the_race(
    chromium: Browser, url: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_page, "SETTLE_SECONDS", 0)
    for way in (without_page, in_a_program):
        assert way(url, ASKED) == pytest.approx(rates(script))
    with ThreadPoolExecutor(1) as apart:  # this thread has a Playwright of its own
        shown = apart.submit(in_a_browser, url, ASKED).result()
    assert shown == pytest.approx(rates(script), abs=0.05)
    assert len(script.races) == 3


def test_ratios_are_taken_round_by_round() -> None:
    alone = [{PLAIN: 10.0, SPECULATIVE: 20.0}, {PLAIN: 20.0, SPECULATIVE: 40.0}]
    shown = [{PLAIN: 9.0, SPECULATIVE: 19.0}, {PLAIN: 19.0, SPECULATIVE: 36.0}]
    row = bench_page._row("a browser", PLAIN, shown, {"ratio_to_alone": alone, "ratio_to_no_page": shown[::-1]})
    assert row["ratio_to_no_page"] == pytest.approx({"min": 9 / 19, "median": (9 / 19 + 19 / 9) / 2, "max": 19 / 9})
    assert row["ratio_to_alone"] == pytest.approx({"min": 0.9, "median": 0.925, "max": 0.95})
    assert row["tokens_per_second"] == 14.0
    assert "0.925 (0.900 to 0.950)" in table([row])


def test_a_missing_browser_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_page, "executable", lambda: None)
    with pytest.raises(BadInput, match="No browser was found"):
        bench_page.check_browser()
