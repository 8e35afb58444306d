"""A busy machine says so: passes beside the best seen on it, the verdicts that are left out then, and the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.cli.main import table
from specdemo.racing.busy import BUSY, FEW_PASSES, FORGET, Pace, best_passes, remember
from specdemo.racing.figures import LaneFigures
from specdemo.racing.outcome import Outcome
from specdemo.racing.request import PLAIN, SPECULATIVE, DraftedLane
from specdemo.racing.trace import Entry
from specdemo.racing.verdict import LaneVerdict
from specdemo.racing.words import sentence
from specdemo.settings import Settings
from specdemo.studies.check import UNCLEAR, Check
from specdemo.studies.diagnosis import Diagnosis
from specdemo.studies.examination import Examination, Plan
from specdemo.studies.writers import _of_events

from ..fakes.writers import Scripted
from ..sentences import tells
from .test_advice import EAGLE, round_, run

BEST = 0.0128  # seconds of a median pass of the default model, on two cores
IDLE = [0.0126, 0.0132, 0.0149, 0.0157] * 12  # quartiles as they were on the same machine: 12.6, 13.2, 14.9
SLOW = [3.5 * BEST] * 48  # evenly slowed down
SHAKY = [0.013, 0.013, 0.014, 0.03, 0.038, 0.042, 0.06, 0.19] * 6  # other programs take turns
LONG = [0.0279, 0.0284, 0.0306] * 16  # after 6,500 tokens, idle


@pytest.fixture(autouse=True)
def never_busy() -> None:
    """Here times are given."""


def lane(times: list[float], prompt_tokens: int = 40) -> LaneFigures:
    return run([round_(0, 0, verify=seconds) for seconds in times], prompt_tokens)


@pytest.mark.parametrize(
    ("times", "prompt_tokens", "best", "busy", "words"),
    [
        (IDLE, 40, BEST, None, ""),
        (IDLE, 40, None, None, ""),
        (SLOW, 40, BEST, 3.5, "busy 3.5"),
        (SLOW, 40, None, None, ""),  # nothing is known, and passes are alike
        (SHAKY, 40, None, 60 / 13, "busy 13.0 60.0"),  # about, see below
        (SHAKY, 40, BEST, None, "busy 2.7"),
        (LONG, 6500, BEST, None, ""),  # another kind of pass
        ([3.5 * BEST] * (FEW_PASSES - 1), 40, BEST, None, ""),
        ([(BUSY - 0.01) * BEST] * 48, 40, BEST, None, ""),
        ([(BUSY + 0.01) * BEST] * 48, 40, BEST, BUSY + 0.01, "busy 1.8"),
        ([], 40, BEST, None, ""),  # a server
    ],
)
def test_when_a_machine_is_busy(
    times: list[float], prompt_tokens: int, best: float | None, busy: float | None, words: str
) -> None:
    pace = Pace.of([lane(times, prompt_tokens)], {"best_passes": {"1 at 1024": best}})
    assert bool(pace.busy) == bool(words)
    assert busy is None or pace.busy == pytest.approx(busy, rel=0.15)
    said = sentence("busy", SimpleNamespace(pace=pace))
    assert "busy" in said if words else said == ""
    if pace.best and words:
        assert tells(said, words)
    elif words:
        low, high = pace.quartiles
        assert tells(said, f"busy {low:.1f} {high:.1f} ms")


@pytest.mark.parametrize("bests", [None, [], {"1 at 1024": "fast"}, {"1 at 1024": -1.0}, {"1 at 1024": float("nan")}])
def test_a_trace_may_say_anything(bests: Any) -> None:
    assert Pace.of([lane(SLOW)], {"best_passes": bests}).busy is None


def test_contexts_and_readers_are_compared_with_their_like() -> None:
    kinds = [Pace.of([lane(IDLE, tokens)], {}).kind for tokens in (5, 900, 1024, 1900, 4000)]
    assert kinds == ["1 at 1024", "1 at 1024", "1 at 2048", "1 at 2048", "1 at 4096"]


def test_a_busy_machine_gets_no_verdict() -> None:
    rounds = [round_(4, 3, 0.001)] * 40
    busy = LaneVerdict(lane(SLOW), run(rounds), EAGLE, pace=Pace(SLOW, BEST))
    idle = LaneVerdict(lane(IDLE), run([round_(4, 0, 0.02)] * 40), EAGLE, pace=Pace(IDLE, BEST))
    assert tells(busy.finding, "busy 3.5")
    assert tells(idle.finding, "Slower")
    assert (busy.chips, busy.as_dict()["slower"], idle.as_dict()["slower"]) == ([], False, True)
    assert (busy.as_dict()["busy"], idle.as_dict()["busy"]) == (pytest.approx(3.5), None)
    for lanes in ({"a": busy}, {"a": busy, "b": busy}):
        outcome = Outcome({}, lanes)
        assert sentence("race", outcome) == busy.finding
        assert outcome.busy == pytest.approx(3.5)
        end = outcome.ending()
        assert (end["speed_up"], end["speed_up_in_all"], end["headline"], end["advice"]) == (None, None, "", "")
        assert {*end["speed_ups"].values(), *end["speed_ups_in_all"].values()} == {None}


@pytest.mark.parametrize(("times", "busy"), [(IDLE, None), (SLOW, 3.5)])
def test_the_outcome_of_a_race_and_its_table(times: list[float], busy: float | None) -> None:
    events = {PLAIN: lane(times).events, SPECULATIVE: run([round_(4, 3, 0.001)] * 12).events}
    entries = [Entry(name, event) for name, group in events.items() for event in group]
    lanes = {PLAIN: None, SPECULATIVE: DraftedLane("eagle", 4)}
    found = Outcome.of(Settings(), entries, lanes, environment={"best_passes": {"1 at 1024": BEST}})
    reports = {name: {"stats": figures.as_dict()} for name, figures in found.lanes.items()}
    answer = {**found.as_dict(), **reports}
    assert answer["busy"] == (busy and pytest.approx(busy))
    assert answer["speed_up"] is not None  # as it was measured
    assert ("×" in table(answer, "eagle")) == (busy is None)


@pytest.mark.parametrize(("times", "busy"), [(IDLE, False), (SLOW, True)])
def test_a_check_is_unclear(times: list[float], busy: bool) -> None:
    examination = Examination(Scripted([(4, 4)] * 12, 0.01), Scripted([(0, 0)] * 48, 0.02), Plan(1))
    for _ in examination.run():
        pass
    examination.samples = [
        replace(sample, alone=_of_events(lane([seconds * (1 + number / 100) for seconds in times]).events))
        for number, sample in enumerate(examination.samples)
    ]
    found = Diagnosis(examination, environment={"best_passes": {"1 at 1024": BEST}})
    check = Check(None, {"drafters": []})
    check.found = found
    assert (found.answer == UNCLEAR) == busy
    assert (found.as_dict()["busy"] is not None) == busy
    assert tells(check.words()[0], "Unclear busy") == busy
    assert ("busy" in check.in_short()) == busy
    assert check.result()["busy"] == found.as_dict()["busy"]


def model(**environment: Any) -> Any:
    return SimpleNamespace(weights={"target": {"sha": "a"}}, environment=lambda: environment)


def test_the_best_is_kept_by_model_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    mine, other = model(device="cpu"), model(device="cuda")
    pace = Pace(IDLE, None, "1 at 1024")
    assert best_passes(mine) == {}
    remember(mine, pace)
    assert best_passes(mine) == {pace.kind: pace.usual}
    assert best_passes(other) == {}
    remember(mine, Pace(SLOW, None, pace.kind))  # a busy race is not the best, and weighs little
    assert best_passes(mine) == {pace.kind: pytest.approx(FORGET * pace.usual)}
    for _ in range(100):  # a machine that is slower for good
        remember(mine, Pace(SLOW, None, pace.kind))
    assert best_passes(mine) == {pace.kind: pytest.approx(SLOW[0])}
    remember(mine, Pace([1.0] * 3, None, "1 at 2048"))  # too few
    assert {*best_passes(mine)} == {pace.kind}


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "[" * 100_000, '{"a": {"b": "c"}}'])
def test_a_damaged_file_knows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path))
    (tmp_path / "passes.checked").write_text(content, encoding="utf-8")
    assert best_passes(model()) == {}
    remember(model(), Pace(IDLE, None, "1 at 1024"))
    assert [*best_passes(model())] == ["1 at 1024"]


def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "file"))
    remember(model(), Pace(IDLE, None, "1 at 1024"))
    assert best_passes(model()) == {}
