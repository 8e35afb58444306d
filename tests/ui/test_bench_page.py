"""What `bench page` measures, on the scripted engine: the figures must be those of the race, whoever asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import harmonic_mean

import pytest
from playwright.sync_api import Browser

from specdemo.lab import bench_page
from specdemo.lab.bench_page import BOTH, Asked, in_a_program, opened, table, threads_of, waiting, without_page
from specdemo.race import PLAIN, SPECULATIVE
from specdemo.stats import Stats
from specdemo.types import BadInput

from .scripted import Script

ASKED = Asked("one two three four five six seven", "scripted", "prompt-lookup", 4, 60)


def rates(script: Script) -> dict[str, float]:
    """Tokens per second of the latest race, by the script's own events."""
    lanes = {lane: [entry.event for entry in script.entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)}
    return {lane: Stats.of(events).tokens_per_second or 0.0 for lane, events in lanes.items()}


def test_every_way_reports_the_rates_of_the_race(chromium: Browser, url: str, script: Script) -> None:
    for way in (without_page, in_a_program):
        assert way(url, ASKED) == pytest.approx(rates(script))

    def twice() -> None:
        with opened(url, ASKED) as show:
            for _ in "12":
                assert show() == pytest.approx(rates(script), abs=0.05)
                time.sleep(bench_page.SETTLE_SECONDS)

    with ThreadPoolExecutor(1) as apart:  # this thread has a Playwright of its own
        apart.submit(twice).result()
    assert len(script.races) == 4


def test_ratios_are_taken_turn_by_turn() -> None:
    alone = [{PLAIN: 10.0, SPECULATIVE: 20.0}, {PLAIN: 20.0, SPECULATIVE: 40.0}]
    shown = [{PLAIN: 9.0, SPECULATIVE: 19.0}, {PLAIN: 19.0, SPECULATIVE: 36.0}]
    bases = {"ratio_to_alone": alone, "ratio_to_no_page": shown[::-1]}
    row = bench_page._row("a browser", PLAIN, shown, bases)
    assert row["tokens_per_second"] == 14.0
    assert row["ratio_to_no_page"].mean == pytest.approx((9 / 19 + 19 / 9) / 2)
    ratio = row["ratio_to_alone"]
    assert (ratio.mean, ratio.count) == (pytest.approx(0.925), 2)
    assert ratio.low == pytest.approx(0.925 - 0.025 * 12.7062, abs=1e-5)  # Student's t of one degree of freedom
    assert "0.925 (0.607 to 1.243)" in table([row])
    both = bench_page._row("a browser", BOTH, shown[:1], {name: runs[:1] for name, runs in bases.items()})
    assert both["tokens_per_second"] == harmonic_mean([9.0, 19.0])
    assert both["ratio_to_alone"].mean == pytest.approx((1 / 10 + 1 / 20) / (1 / 9 + 1 / 19))
    assert table([both]).split()[-2:] == ["0.916", "0.491"]


@pytest.mark.skipif(not threads_of(os.getpid()), reason="This system does not tell how long its threads wait.")
def test_who_computes_with_others_waits_for_a_core() -> None:
    """Twice as many processes as cores, so that each has to wait about half of the time."""
    many = 2 * len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(many)]
    try:
        time.sleep(0.2)
        before = threads_of(spinning[0].pid)
        time.sleep(0.5)
        share = waiting(before, threads_of(spinning[0].pid))
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert share is not None
    assert 0.2 < share < 0.8


def test_only_threads_that_computed_count_as_the_engines() -> None:
    before = {"worker": (1000, 500), "helper": (1000, 500), "server": (1000, 500)}
    after = {"worker": (1900, 600), "helper": (1800, 1000), "server": (1010, 1400), "client": (90, 900)}
    assert waiting(before, after) == pytest.approx((100 / 1000 + 500 / 1300) / 2)
    assert waiting({}, {}) is None


def test_a_missing_browser_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_page, "executable", lambda: None)
    with pytest.raises(BadInput, match="No browser was found"):
        bench_page.check_browser()
