"""What is said at once while a study has the model: what cannot be run, and what a race or a study waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from specdemo.studies.lab import STUDIES
from specdemo.ui.lab.run import LabRun

from ..fakes.engine import Script, stand_in
from ..fakes.study import Counting, Long
from .browser import choose, run, served, settings, wait_until
from .conftest import Visit


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Long]]:
    """A study that stays in the middle while the test goes on."""
    stand_in(monkeypatch, STUDIES["domains"], Long)
    monkeypatch.setattr(Long, "gate", False)
    yield Long
    Long.gate = True


def open_lab(page: Page, view: str = "domains") -> None:
    page.get_by_role("tab", name="Lab").click()
    choose(page, view)


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_at_once_and_what_waits_is_told_for_what(
    visit: Visit, script: Script, held: type[Long]
) -> None:
    measuring, racing, studying = (visit() for _ in range(3))
    open_lab(measuring)
    said = measuring.locator("#lab-domains .lab-says")
    measuring.click("#lab-domains .lab-run")
    expect(said.locator(".lab-progress")).to_contain_text("Counting")
    expect(said.locator("[role=status]")).to_be_empty()  # it does not wait for the model any more
    expect(said.locator("progress")).to_be_in_viewport()

    # Refused, each where the button is, while the study has the model.
    run(racing, "   ", until="failed")
    expect(racing.locator("#race .sd-sentence")).to_have_text("The prompt is empty: type something first.")
    racing.fill("#prompt textarea", "one two")
    settings(racing)
    racing.fill("#max-new-tokens input", "-5")
    run(racing, until="failed")
    words_of_limit = "max new tokens must be a whole number from 1 to 2,000, not -5."
    expect(racing.locator("#race .sd-sentence")).to_have_text(words_of_limit)
    open_lab(studying)
    studying.fill("#lab-domains-max_new_tokens input", "-5")
    studying.click("#lab-domains .lab-run")
    status = studying.locator("#lab-domains .lab-says [role=status]")
    expect(status).to_have_text('"Tokens per text" must be a whole number from 8 to 512, not -5.')
    expect(status).to_be_in_viewport()

    # What waits for the study, and for the race behind it.
    racing.fill("#max-new-tokens input", "5")
    run(racing, until="waiting")
    expect(racing.locator("#race .sd-sentence")).to_contain_text("Waiting: number 1 of 1")
    expect(racing.locator("#race .sd-why-exact")).to_have_text("Your race starts when the study before it has ended.")
    studying.fill("#lab-domains-max_new_tokens input", "8")
    studying.click("#lab-domains .lab-run")
    expect(status).to_contain_text("Waiting: number 2 of 2")
    expect(status).to_contain_text("Your study starts when the race and the study before it have ended.")
    held.gate = True
    racing.locator("#race .sd-arena[data-state=ended]").wait_for()
    expect(status).to_have_text("Done.")
    assert script.ended_races == 1


def test_a_study_says_how_long_it_still_takes(script: Script, held: type[Long]) -> None:
    """Those who wait for it were told how long races take."""
    engine = script.used
    list(engine.follow("scripted"))
    job = LabRun("scripted", STUDIES["domains"], {"drafter": "ngram"})
    played = job.play(engine)
    told = [next(played)]
    while job.seconds_left() is None:
        told.append(next(played))
    wait_until(lambda: (left := job.seconds_left()) is not None and left < 5)
    expected = engine.expected_wait([])
    assert expected is not None
    assert expected == pytest.approx(job.seconds_left(), abs=1)
    assert engine.expected_wait(["study sweep"]) is None  # of which nothing is known
    held.gate = True
    told += played
    assert any("s left" in message for message in told)
    assert engine.expected_wait([]) == 0.0


@pytest.mark.slow
def test_a_study_is_added_by_its_class_alone(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "counting", Counting)
    with served(Script()) as url:
        page = visit(at=url)
        open_lab(page, "counting")
        lab = page.locator("#lab-counting")
        expect(lab).to_contain_text("This counts.")
        page.fill("#lab-counting-to input", "10")
        lab.get_by_role("button", name="Count").click()
        expect(lab.locator("[role=status]")).to_have_text('"Count to" must be a whole number from 1 to 9, not 10.')
        page.fill("#lab-counting-to input", "4")
        lab.get_by_role("button", name="Count").click()
        expect(lab.locator("[role=status]")).to_have_text("Done.")
        expect(lab.locator(".lab-section")).to_contain_text("Up to 4.")
        lab.get_by_role("button", name="Counted").click()
        expect(lab.get_by_role("gridcell").last).to_have_text("4.0")
        found = []
        for kind in ("JSON", "CSV"):
            with page.expect_download() as download:
                lab.get_by_text(f"Download {kind}").click()
            found.append(download.value.path().read_text(encoding="utf-8"))
        whole = json.loads(found[0])
        assert (whole["view"], whole["asked"]["to"]) == ("counting", 4)
        assert found[1].split() == ["n", *"1234"]
        page.close()
