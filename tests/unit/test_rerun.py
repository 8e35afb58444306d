"""The race of a trace, run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from specdemo.decoding.drafter import Drafter
from specdemo.decoding.either import source_of
from specdemo.decoding.events import Round
from specdemo.decoding.loop import Form
from specdemo.errors import BadInput
from specdemo.racing.again import again, differences, other_environment
from specdemo.racing.guesses import guessed_by
from specdemo.racing.race import race
from specdemo.racing.request import Request
from specdemo.racing.summary import trace_header
from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, read_trace, write_trace
from specdemo.settings import AUTO, REJECTION, Settings
from tests.harness.classes import DraftLengthController, Loaded
from tests.harness.toys import DRAFTER_NAMES

from ..sentences import refuses

ASKED = [Settings(k=k, temperature=t, max_new_tokens=24, seed=5) for k in (AUTO, 3) for t in (0.8, 0.0)]
WORDS = "the cat sat on the mat and the dog sat"


@pytest.fixture
def fickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """K = auto chooses anything from 0 to 4, and never the same twice."""
    choices = random.Random(3)

    def pick(self: object, most: int, drafter: Drafter, ids: Sequence[int]) -> tuple[Drafter, Form]:
        return source_of(drafter, ids), Form(min(choices.randrange(5), most))

    monkeypatch.setattr(DraftLengthController, "_pick", pick)


def traced(loaded: Loaded, drafter: str, settings: Settings, events: int | None = None) -> tuple[Any, list[Entry]]:
    """The header and the entries of a race, stopped after some events, as they are read back from its trace."""
    header = trace_header(loaded, Request(WORDS, loaded.preset.name, drafter, settings, raw=True))
    entries = list(islice(race(loaded, drafter, loaded.encode(WORDS, True), settings), events))
    return read_trace(write_trace(header, entries))


def changed(entries: list[Entry], **fields: Any) -> list[Entry]:
    """The entries with other values of fields that their events have; None as of a trace that does not tell them."""
    return [
        replace(entry, event=replace(entry.event, **fields)) if {*fields} <= {*entry.event.__slots__} else entry
        for entry in entries
    ]


def same_again(loaded: Loaded, header: Any, recorded: list[Entry]) -> bool:
    entries = list(again(loaded, header, recorded))
    assert [(e.lane, getattr(e.event, "k", None)) for e in entries if e.lane == PLAIN] == [
        (e.lane, 0 if isinstance(e.event, Round) else None) for e in recorded if e.lane == PLAIN
    ]
    places, theirs = (
        {lane: [e.probabilities for e in race if e.lane == lane] for lane in (PLAIN, SPECULATIVE)}
        for race in (entries, recorded)
    )
    assert places == theirs
    return differences(recorded, entries) == {PLAIN: None, SPECULATIVE: None}


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("fickle")
@pytest.mark.parametrize("settings", [ASKED[0], ASKED[3]], ids=lambda s: f"{s.k}, T {s.temperature}")
@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_the_race_of_a_trace_is_run_again_token_for_token(loaded: Loaded, drafter: str, settings: Settings) -> None:
    asked = guessed_by(loaded, lambda text: ["the", " cat"][: len(text) % 3])
    header, recorded = traced(asked, drafter, settings)
    traced(asked, drafter, replace(settings, seed=6))  # which teaches auto something else
    assert same_again(loaded, header, recorded)


@pytest.mark.usefixtures("fickle")
def test_a_race_run_again_with_another_seed_or_other_k_would_differ(loaded: Loaded) -> None:
    settings = replace(ASKED[2], rule=REJECTION)  # whose text depends on K
    header, recorded = traced(loaded, "draft-model", settings)
    assert same_again(loaded, header, recorded)
    for change in ({"seed": 1}, {"k": 0}):
        others = changed(recorded, **change)
        assert differences(recorded, list(again(loaded, header, others)))[SPECULATIVE] is not None


@pytest.mark.usefixtures("fickle")
def test_a_race_that_was_stopped_is_run_again_as_far_as_it_went(loaded: Loaded) -> None:
    for events in (1, 9):
        header, recorded = traced(loaded, "draft-model", ASKED[0], events)
        assert len(recorded) == events
        again_ = list(again(loaded, header, recorded))
        assert len(again_) == events
        assert not any(differences(recorded, again_).values())


@pytest.mark.usefixtures("fickle")
def test_an_old_trace_is_run_again_where_it_tells_enough(loaded: Loaded) -> None:
    for settings in ASKED:
        header, recorded = traced(loaded, "draft-model", settings)
        assert same_again(loaded, header, changed(recorded, seed=None))
        if settings.k == AUTO:
            with refuses(BadInput, "K"):
                list(again(loaded, header, changed(recorded, k=None)))
        else:
            assert same_again(loaded, header, changed(recorded, k=None))
        older = {**header, "lanes": [{"name": lane["name"]} for lane in header["lanes"]]}  # of other random numbers
        if settings.temperature:
            with refuses(BadInput, "random"):
                list(again(loaded, older, recorded))
        else:
            assert same_again(loaded, older, recorded)


def test_lanes_that_followed_each_other_do_so_again(loaded: Loaded) -> None:
    header, recorded = traced(loaded, "ngram", ASKED[3])
    lanes = [entry.lane for entry in again(loaded, {**header, "isolated": True}, recorded)]
    assert lanes == sorted(lanes, key=[PLAIN, SPECULATIVE].index)


def test_a_tree_is_drafted_again_by_the_k_that_was_asked_for_and_not_by_its_size(loaded: Loaded) -> None:
    def drafts(race: list[Entry]) -> list[list[tuple[int | None, int | None]]]:
        rounds = [entry.event for entry in race if entry.lane == SPECULATIVE and isinstance(entry.event, Round)]
        return [[(token.id, token.parent) for token in event.drafted] for event in rounds]

    header, recorded = traced(loaded, "lookahead", replace(ASKED[3], k=9, tree=True))
    assert any(0 < len(draft) < 8 for draft in drafts(recorded))  # a column begins as a collected phrase does
    assert drafts(list(again(loaded, header, recorded))) == drafts(recorded)


def test_a_trace_of_other_weights_is_refused_and_another_environment_is_told(loaded: Loaded) -> None:
    header, recorded = traced(loaded, "ngram", ASKED[3])
    with refuses(BadInput, "weights preset"):
        list(again(loaded, {**header, "weights": {"target": {"source": "elsewhere"}}}, recorded))
    assert other_environment(loaded, header) == []
    header["environment"]["dtype"] = "posit8"
    assert other_environment(loaded, header) == ["dtype posit8"]
    assert other_environment(loaded, {"environment": 3}) == []
