"""What `python -m tools.page` measures, on the scripted engine: the figures are those of the race, whoever asks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Error

from specdemo.errors import BadInput
from specdemo.racing.trace import PLAIN, SPECULATIVE
from tests.harness.classes import LaneFigures
from tools import page as bench_page
from tools.bench.tables import text_table
from tools.page import (
    ALONE,
    BOTH,
    BROWSER,
    COLUMNS,
    UNSEEN,
    Asked,
    in_a_program,
    measured,
    opened,
    shown,
    speed_rows,
    unseen,
)

from ..fakes.engine import Script
from ..sentences import refuses

ASKED = Asked("one two three four five six seven", "scripted", "prompt-lookup", 4, 60)


def rates(script: Script) -> dict[str, float]:
    """Tokens per second of the latest race, by the script's own events."""
    lanes = {lane: [entry.event for entry in script.entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)}
    return {lane: LaneFigures.of(events).tokens_per_second or 0.0 for lane, events in lanes.items()}


@pytest.mark.slow
def test_every_way_reports_the_rates_of_the_race_and_one_that_does_not_end_is_told(
    chromium: Browser, url: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in (unseen, in_a_program):
        assert way(url, ASKED) == pytest.approx(rates(script))

    def show() -> None:
        with opened(url, ASKED) as page:
            show = partial(shown, page)
            for pause in (0.0, bench_page.SETTLE_SECONDS):
                time.sleep(pause)
                assert show() == pytest.approx(rates(script), abs=0.05)
            assert len(script.races) == 4
            token = page.evaluate(bench_page.SHARE)
            with bench_page.watching(f"{url}watched/{token}"):
                assert show() == pytest.approx(rates(script), abs=0.05)
            with refuses(BadInput, "watch"), bench_page.watching(f"{url}watched/{token}s"):
                pass
            script.gate.clear()
            monkeypatch.setattr(bench_page, "RACE_SECONDS", 0.5)
            with refuses(Error, "time"):
                show()

    with ThreadPoolExecutor(1) as apart:  # this thread has a Playwright of its own
        apart.submit(show).result()


def test_ratios_are_taken_turn_by_turn() -> None:
    speeds = {ALONE: [(10, 20), (20, 40)], UNSEEN: [(19, 36), (9, 19)], BROWSER: [(9, 19), (19, 36)]}
    waits: dict[str, list[Any]] = {ALONE: [0.25, 0.5], UNSEEN: [None, None], BROWSER: [None, None]}
    turns = {way: [{PLAIN: float(one), SPECULATIVE: float(two)} for one, two in both] for way, both in speeds.items()}
    serves: dict[str, list[Any]] = {ALONE: [None, None], UNSEEN: [None, None], BROWSER: [0.01, 0.02]}
    rows = speed_rows({way: list(zip(turns[way], waits[way], serves[way], strict=True)) for way in turns})
    assert [(row["way"], row["lane"]) for row in rows[-3:]] == [(BROWSER, lane) for lane in (PLAIN, SPECULATIVE, BOTH)]
    plain, _, both = rows[-3:]
    assert plain["tokens_per_second"] == 14.0
    assert plain["ratio_to_unseen"].mean == pytest.approx((9 / 19 + 19 / 9) / 2)
    ratio = plain["ratio_to_alone"]
    assert (ratio.mean, ratio.count) == (pytest.approx(0.925), 2)
    assert ratio.low == pytest.approx(0.925 - 0.025 * 12.7062, abs=1e-5)  # Student's t of one degree of freedom
    first, second = (1 / 10 + 1 / 20) / (1 / 9 + 1 / 19), (1 / 20 + 1 / 40) / (1 / 19 + 1 / 36)
    assert both["ratio_to_alone"].mean == pytest.approx((first + second) / 2)
    assert both["waiting"] is None  # this kernel did not tell
    assert rows[2]["waiting"].mean == 0.375
    assert rows[-1]["serving"].mean == 0.015
    lines = text_table(rows, COLUMNS).splitlines()
    assert "0.925 (0.607 to 1.243)" in lines[7]
    assert "0.375 (0.000 to 1.000)" in lines[3]


@pytest.mark.skipif(
    not any(ran for ran, _ in bench_page.threads_of(os.getpid()).values()),
    reason="This system does not tell how long threads wait.",
)
def test_who_shares_a_core_waits_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os, time; os.sched_setaffinity(0, [{core}]); end = time.time() + 20\nwhile time.time() < end: pass"
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            spinning.append(subprocess.Popen([sys.executable, "-c", code]))
        time.sleep(0.3)
        found = [measured(spinning[0].pid, lambda: time.sleep(0.4) or {}) for _ in range(3)]  # type: ignore[func-returns-value]
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert all(rates == {} for rates, *_ in found)
    share = min(share for _, share, _ in found if share is not None)  # the others may want that core too, for a moment
    assert 0.3 < share < 0.9  # a half, and more if others want that core too


def test_only_threads_that_computed_count_as_the_engines() -> None:
    before = {"worker": (1000, 500), "helper": (1000, 500), "server": (1000, 500)}
    after = {"worker": (1900, 600), "helper": (1800, 1000), "server": (1010, 1400), "client": (90, 900)}
    assert bench_page.waiting(before, after) == pytest.approx((100 / 1000 + 500 / 1300) / 2)
    assert bench_page.waiting({}, {}) is None
    assert bench_page.serving(before, after, 1e-6) == pytest.approx((10 + 90) / 1000)
    assert bench_page.serving({}, {}, 1.0) is None


def test_a_missing_browser_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_page, "executable", lambda: None)
    with refuses(BadInput, "browser"):
        bench_page.check_browser()
