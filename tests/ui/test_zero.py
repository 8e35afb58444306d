"""Races on ZeroGPU, with a stand-in of the package `spaces` that forks as it does. Not run on the real one."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import gradio as gr
import pytest

from specdemo.models.presets import load_presets
from specdemo.racing.request import read_request
from specdemo.racing.trace import Entry
from specdemo.ui import zero
from specdemo.ui.budgets import Budgets
from specdemo.ui.engine import Backend, EngineTrouble
from specdemo.ui.race.run import RaceRun
from tests.harness.ui_classes import Engine, Runs

from ..fakes.spaces import Spaces
from ..sentences import refuses

NAME = "nanogpt-shakespeare"
PRESETS = {NAME: load_presets()[0][NAME]}
BUDGETS = Budgets.of({"SPACE_ID": "me/mine"})


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> Spaces:
    found = Spaces()
    monkeypatch.setitem(sys.modules, "spaces", found)
    return found


def asked(**values: Any) -> Any:
    usual = {"prompt": "To be", "preset": NAME, "drafter": "ngram", "k": 4, "max_new_tokens": 40}
    return read_request(**{**usual, **values})


def played(engine: Engine, **values: Any) -> RaceRun:
    runs = Runs()
    run = runs.begin(RaceRun(asked(**values), BUDGETS.race_seconds), None)
    for _ in runs.play(run, engine):
        pass
    return run


def ids(run: RaceRun) -> list[list[int]]:
    assert run.outcome is not None
    return [report["token_ids"] for report in run.outcome.reports.values()]


def test_a_whole_race_is_one_call_in_a_fork_that_loads_the_preset_itself(spaces: Spaces) -> None:
    engine = Engine(PRESETS, zero.ZeroBackend("auto", BUDGETS))
    run = played(engine)
    assert run.outcome is not None
    assert ids(run) == ids(played(Engine(PRESETS, Backend("auto"))))
    assert (run.outcome.badge["mark"], run.outcome.stopped) == ("same", False)
    assert spaces.durations == [zero.expected_seconds(asked(), BUDGETS)]
    assert len(spaces.processes) == 1
    assert zero._kept == {}  # it was loaded in the fork alone
    assert run.header["environment"]["device"] == run.outcome.environment["device"]
    assert run.trace().count("\n") == len(run.entries) + 1


def test_a_race_that_is_stopped_gives_the_gpu_back(spaces: Spaces) -> None:
    engine, runs = Engine(PRESETS, zero.ZeroBackend("auto", BUDGETS)), Runs()
    run = runs.begin(RaceRun(asked(max_new_tokens=200)), None)
    entries = run._kept

    def few(race: Iterable[Entry]) -> Iterator[Entry]:
        yield from islice(entries(race), 6)
        run.stop.set()

    run._kept = few  # type: ignore[method-assign, assignment]
    for _ in runs.play(run, engine):
        pass
    assert run.outcome is not None
    assert run.outcome.stopped
    assert run.outcome.badge["title"].startswith("Same text")
    assert not spaces.processes[0].is_alive()
    assert ids(played(engine)) != []  # the next one has the GPU


@pytest.mark.parametrize("where", ["before", "in the fork"])
def test_what_keeps_it_from_racing_is_told_in_words(spaces: Spaces, where: str) -> None:
    engine = Engine(PRESETS, zero.ZeroBackend("auto", BUDGETS))
    if where == "before":
        spaces.refusal = gr.Error("You have exceeded your GPU quota.")
        with refuses(EngineTrouble, "quota"):
            played(engine)
        spaces.refusal = None
    else:
        with refuses(EngineTrouble, "characters"):
            played(engine, prompt="<>")
    assert ids(played(engine)) != []


def test_the_time_asked_for_grows_with_the_race_and_ends_with_the_budget() -> None:
    seconds = [zero.expected_seconds(asked(max_new_tokens=tokens), BUDGETS) for tokens in (40, 80, 500, 5000)]
    assert seconds[0] < seconds[1] < seconds[2]
    most = zero.LOADING_SECONDS + BUDGETS.race_seconds
    assert seconds[3] == most
    more = asked(drafter=None, k=None, lanes=["ngram:2", "ngram:4"])
    assert seconds[0] < zero.expected_seconds(more, BUDGETS) < most


def test_with_the_real_package_outside_a_space_the_race_runs_here() -> None:
    real = pytest.importorskip("spaces")
    assert not real.config.Config.zero_gpu
    try:
        assert ids(played(Engine(PRESETS, zero.ZeroBackend("auto", BUDGETS)))) != []
        assert len(zero._kept) == 1
    finally:
        for loaded in zero._kept.values():
            loaded.release()
        zero._kept.clear()


@pytest.mark.parametrize(
    ("asked", "name", "loaded"),
    [("auto", "smollm2-135m", "bfloat16"), ("auto", NAME, "float32"), ("stored", "smollm2-135m", "stored")],
)
def test_the_page_has_the_copy_of_the_weights_that_a_fork_will_read(
    spaces: Spaces, monkeypatch: pytest.MonkeyPatch, asked: str, name: str, loaded: str
) -> None:
    """Not the stored weights that auto takes on a CPU: a fork would fetch the file again."""
    seen: list[str] = []
    monkeypatch.setattr("specdemo.models.loaded.load", lambda preset, dtype, *_, **__: seen.append(dtype))
    zero.ZeroBackend(asked, BUDGETS).load(load_presets()[0][name], lambda *_: None, None)
    assert seen == [loaded]


def test_every_preset_can_be_sent_to_the_fork() -> None:
    for preset in load_presets()[0].values():
        assert pickle.loads(pickle.dumps(preset)) == preset


@pytest.mark.parametrize(("value", "zero_gpu"), [("true", True), ("1", True), ("", False), ("false", False)])
def test_it_is_known_by_the_variable_that_the_hub_sets(value: str, zero_gpu: bool) -> None:
    assert zero.is_zero({"SPACES_ZERO_GPU": value}) == zero_gpu
    assert not zero.is_zero({})
