"""The files that the simplest run enters: those that docs/DEVELOPERS.md names, in their reading order."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdemo.decoding import sampling
from specdemo.decoding.events import Round
from specdemo.decoding.loop import Decoding
from specdemo.drafters.names import drafter_class
from specdemo.racing.lanes import race_lanes
from specdemo.racing.race import lanes_of, rule_for, start
from specdemo.settings import Settings
from specdemo.ui.race.colours import row_of
from tests.harness.classes import EagerRunner
from tests.harness.doubles import MODEL_VOCAB
from tests.harness.models import tiny
from tests.harness.toys import ModelToy

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "specdemo"
PROMPT = [5, 6, 7, 8, 5, 6, 7]
SETTINGS = Settings(max_new_tokens=8)


@contextmanager
def entered() -> Iterator[set[str]]:
    """The files of the package in which a function is called within this context."""
    files: set[str] = set()

    def called(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(called)
    try:
        yield files
    finally:
        sys.setprofile(None)


def named_under(heading: str) -> list[str]:
    """The files of the package in a section of the page for developers, in its order."""
    page = (PROJECT / "docs" / "DEVELOPERS.md").read_text(encoding="utf-8")
    section = page.split(f"\n### {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. \[`([\w/]+\.py)`\]", section, re.MULTILINE)


def lines_of(files: list[str]) -> int:
    return sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)


@pytest.fixture(autouse=True)
def set_up() -> None:
    """What is done once in a process, as when a preset is loaded."""
    sampling.library()
    drafter_class("prompt-lookup")


def test_from_the_loop_to_a_round() -> None:
    runner, drafter = EagerRunner(tiny("llama", MODEL_VOCAB), 64), drafter_class("prompt-lookup")()
    steps = Decoding(runner, drafter, PROMPT, rule_for(SETTINGS)).steps()
    with entered() as files:
        step = next(steps)
        while not isinstance(step, Round):
            step = steps.send(step.read()) if hasattr(step, "read") else next(steps)
    named = named_under("From the loop to a round")
    assert files == set(named)
    assert len(named) <= 10
    assert lines_of(named) <= 1500


def test_from_a_request_to_a_coloured_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the runner that a loaded preset has at hand."""
    loaded: Any = ModelToy(model=tiny("llama", MODEL_VOCAB))
    runner = loaded.target_runner(64)
    monkeypatch.setattr(loaded, "target_runner", lambda capacity: runner)
    with entered() as files:
        runs = {"drafted": start(loaded, "prompt-lookup", PROMPT, SETTINGS)}
        rows = [row_of(entry) for entry in race_lanes(lanes_of(loaded, PROMPT, runs))]
    assert any(row for row in rows)
    both = [*named_under("From a request to a coloured row"), *named_under("From the loop to a round")]
    assert files == set(both)
    assert len(both) <= 16  # one of them is Stop
    assert lines_of(both) <= 2400
