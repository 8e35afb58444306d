"""Drafting ahead changes when tokens are drafted, and nothing else.

That the distribution stays the target's is tested in `test_distribution`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdemo.decoding.acceptance import Answer
from specdemo.decoding.drafter import CHAIN, DraftOptions
from specdemo.decoding.events import Event, Prefilled, Round
from specdemo.decoding.loop import Form, Given
from specdemo.drafters import ahead
from specdemo.drafters.ahead import DraftingAhead, fan_out
from specdemo.drafters.draft_model import DraftModel
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.errors import BadInput, NotFinite
from specdemo.racing.race import check_rule, race, rule_for, start
from specdemo.racing.request import read_lanes
from specdemo.racing.trace import read_trace, write_trace
from specdemo.settings import AUTO, MATCH, MAX_AHEAD, MAX_K, REJECTION, Settings
from specdemo.tokens import Draft
from tests.harness.doubles import PROMPT, TableRunner, costs_with, draft_in_turn, ids_of
from tests.harness.engines import EngineToy, mixed, tiny_model
from tests.harness.mistakes import ByArgmax
from tests.harness.texts import decode, p_value, true_texts
from tests.harness.toys import TableToy, alike_toy

from ..sentences import refuses

ABLE = [name for name, entry in DRAFTERS.items() if entry.drafts_ahead]
TEXT = list(range(9)) * 3
SAMPLED = Settings(k=1, temperature=1.0, rule=REJECTION, max_new_tokens=4, ahead=1)


def run(toy: Any, name: str, settings: Settings, in_turn: bool = False, **more: Any) -> list[Event]:
    """A text with drafts ahead, or without where the settings ask for none."""
    return list(started(toy, name, settings, in_turn, **more))


def started(
    toy: Any,
    name: str,
    settings: Settings,
    in_turn: bool = False,
    kind: type[DraftingAhead] = DraftingAhead,
    prompt: Sequence[int] = PROMPT,
    **more: Any,
) -> Any:
    runner, rule = toy.target_runner(len(prompt) + settings.max_new_tokens), rule_for(settings)
    drafter = toy.drafter(name, runner, settings, rule)
    if settings.ahead:
        drafter = kind(drafter, runner, rule)
        drafter.in_turn = in_turn
    return decode(runner, drafter, prompt, settings, rule=rule, **more)


def hits(events: Sequence[Event]) -> int:
    return sum(event.ahead.hit for event in events if isinstance(event, Round) and event.ahead)


@pytest.fixture
def toy(tmp_path: Path) -> TableToy:
    return alike_toy(tmp_path)


@pytest.fixture(scope="module")
def native() -> EngineToy:
    """The draft model is right now and then."""
    model = tiny_model("llama")
    return EngineToy(model=model, draft_model=mixed(model, tiny_model("llama", seed=1), 0.1), skip_layers=2)


def test_a_drafter_says_whether_it_can() -> None:
    """Those that `DraftingAhead` can be over."""
    able = [name for name in DRAFTERS if issubclass(drafter_class(name), DraftModel)]
    assert ABLE == able == ["draft-model", "layer-skip"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("each", [1, 3, MAX_AHEAD])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", [MATCH, REJECTION])
@pytest.mark.parametrize("name", ABLE)
def test_the_text_is_the_one_without(
    native: EngineToy, name: str, rule: str, temperature: float, each: int, in_turn: bool
) -> None:
    """Also under rejection: a draft that was prepared is the one that would have been drafted."""
    settings = Settings(k=3, temperature=temperature, rule=rule, max_new_tokens=60, seed=each)
    without = run(native, name, settings, prompt=TEXT)
    with_it = run(native, name, replace(settings, ahead=each), in_turn, prompt=TEXT)
    assert ids_of(with_it) == ids_of(without)
    if rule == MATCH:
        assert ids_of(without) == ids_of(run(native, "none", replace(settings, k=0), prompt=TEXT))
    if in_turn and each > 1:
        drafts = [[token.id for token in event.drafted] for event in with_it if isinstance(event, Round)]
        assert drafts == [[token.id for token in event.drafted] for event in without if isinstance(event, Round)]
        assert 0 < hits(with_it) < len(drafts)


@pytest.mark.parametrize("k", [1, 3])
def test_a_perfect_draft_model_hits_whenever_it_can(k: int) -> None:
    toy = TableToy()
    toy.draft_model = toy.target
    events = run(toy, "draft-model", Settings(k=k, max_new_tokens=60, ahead=1), in_turn=True)
    reports = [event.ahead for event in events if isinstance(event, Round) and event.ahead]
    assert len(reports) > 60 // (k + 1) - 2
    assert [each.hit for each in reports] == [False] + [True] * (len(reports) - 1)


@pytest.mark.parametrize("name", ABLE)
def test_texts_that_end_in_mid_round_are_those_without(toy: TableToy, name: str) -> None:
    for eos, tokens in product(range(4), range(1, 9)):
        settings = Settings(k=3, max_new_tokens=tokens, seed=tokens, temperature=1.0)
        with_it = run(toy, name, replace(settings, ahead=2), eos_ids=frozenset([eos]))
        assert ids_of(with_it) == ids_of(run(toy, name, settings, eos_ids=frozenset([eos])))
    assert not [thread for thread in threading.enumerate() if thread.name == "ahead"]


# What the published code does ---------------------------------------------------------------------------------


class Filling(DraftingAhead):
    """On a miss it drafts any token, at once."""

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Any:
        draft = yield from super().propose(context, k, options)
        if draft.ahead and not draft.ahead.hit and draft.ahead.prepared:
            filler = (context[-1] + len(context)) % self.drafter.vocab_size
            return Draft([filler] * len(draft.token_ids), ahead=draft.ahead)
        return draft


@pytest.mark.slow
def test_fillers_are_harmless_where_the_rule_tests_them_and_not_where_argmax_does(toy: TableToy) -> None:
    assert sampled(toy, rule_for) > 1e-3
    assert sampled(toy, ByArgmax, 2000) < 1e-6


def sampled(toy: TableToy, make_rule: Callable[[Settings], Any], texts: int = 400) -> float:
    """The p-value of texts of four tokens, written by several rounds with fillers, against the target alone."""
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(texts):
        seeded = replace(SAMPLED, seed=seed)
        runner, rule = toy.target_runner(16), make_rule(seeded)
        drafter = Filling(toy.drafter("draft-model", runner, seeded, rule), runner, rule)
        drafter.in_turn = True
        found[tuple(ids_of(list(decode(runner, drafter, PROMPT, seeded, rule=rule))))] += 1
    return p_value(found, true_texts(toy.target, PROMPT, 4, SAMPLED))


# Trouble ----------------------------------------------------------------------------------------------------


class Troubled(TableRunner):
    """Fails, or waits, where it prepares."""

    trouble: Callable[[], None]

    def forward(self, ids: Any, parents: Sequence[int] | None = None) -> Tensor:
        if threading.current_thread().name == "ahead":
            self.trouble()
        return super().forward(ids, parents)


def troubled(toy: TableToy, trouble: Callable[[], None]) -> TableToy:
    def draft_runner(capacity: int) -> Troubled:
        runner = Troubled(toy.draft_model, capacity)
        runner.trouble = trouble
        toy.draft_runners.append(runner)
        return runner

    toy.draft_runner = draft_runner  # type: ignore[method-assign]
    return toy


SETTINGS = Settings(k=3, max_new_tokens=24, ahead=2)


def test_a_drafter_that_dies_drafts_as_before(toy: TableToy) -> None:
    def die() -> None:
        raise RuntimeError("out of memory")

    without = run(toy, "draft-model", replace(SETTINGS, ahead=0))
    events = run(troubled(toy, die), "draft-model", SETTINGS)
    assert ids_of(events) == ids_of(without)
    assert hits(events) == 0
    assert len(events) == len(without)


def test_the_target_goes_on_alone_while_a_drafter_stalls(toy: TableToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    goes_on, stalls = threading.Event(), [True]

    def stall() -> None:
        if stalls:
            stalls.clear()
            goes_on.wait(20)

    without = ids_of(run(toy, "draft-model", replace(SETTINGS, ahead=0)))
    text, rounds = [], 0
    for event in started(troubled(toy, stall), "draft-model", SETTINGS):
        if isinstance(event, Round):
            rounds += 1
            assert bool(event.drafted) == (not 1 <= event.index < 4)
        if rounds == 4 and not goes_on.is_set():
            goes_on.set()
            for thread in threading.enumerate():
                if thread.daemon and thread.name.startswith("ahead"):
                    thread.join(5)
        text += ids_of([event])
    assert text == without


class Late(DraftingAhead):
    """Its first preparation ends while the target verifies the round after the one that it is for."""

    rounds = -1  # the prompt is none

    def observe(self, answer: Answer) -> None:
        self.rounds += 1
        runner: Any = self.drafter.runner
        if self.rounds == 1:
            runner.drafted.wait(20)
        elif self.rounds == 2 and self._thread:
            runner.goes_on.set()
            self._thread.join(20)
        super().observe(answer)


def test_what_was_prepared_too_late_is_no_hit_of_the_next_round(toy: TableToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)

    def stall() -> None:
        runner: Any = toy.draft_runners[-1]
        runner.prepared = getattr(runner, "prepared", 0) + 1
        if runner.prepared == 3:  # something is drafted by now
            runner.drafted.set()
            runner.goes_on.wait(20)

    for seed in range(10):
        monkeypatch.setattr(Troubled, "drafted", threading.Event(), raising=False)
        monkeypatch.setattr(Troubled, "goes_on", threading.Event(), raising=False)
        settings = replace(SETTINGS, temperature=1.0, ahead=MAX_AHEAD, seed=seed)
        events = started(troubled(toy, stall), "draft-model", settings, kind=Late)
        first, second, third = [event for event in events if isinstance(event, Round)][:3]
        assert first.drafted
        assert not second.drafted
        assert third.ahead is not None
        assert not third.ahead.hit


def test_what_was_prepared_before_a_round_without_a_draft_is_no_hit_after_it(toy: TableToy) -> None:
    for seed in range(6):
        settings = replace(SETTINGS, k=3, temperature=0.8, ahead=4, seed=seed, max_new_tokens=60)
        drafts = []
        for each in (settings, replace(settings, ahead=0)):
            chooser = Given(Form(k) for k in cycle([3, 0]))
            events = run(toy, "draft-model", each, in_turn=True, chooser=chooser)
            drafts.append([[guess.id for guess in event.drafted] for event in events if isinstance(event, Round)])
        assert drafts[0] == drafts[1]


@pytest.mark.parametrize("after", range(1, 6))
def test_one_that_is_stopped_leaves_no_thread_and_no_cache(toy: TableToy, after: int) -> None:
    events = started(toy, "draft-model", SETTINGS)
    for _ in range(after):
        next(events)
    events.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ahead"]
    assert toy.draft_runners[-1].released == toy.runners[-1].released == 1
    assert torch.get_num_threads() >= 1


def test_logits_that_are_no_numbers_end_the_run_as_without(toy: TableToy) -> None:
    toy.draft_model = torch.full_like(toy.draft_model, torch.nan)
    for each in (0, 2):
        with refuses(NotFinite, "drafter"):
            run(toy, "draft-model", replace(SETTINGS, ahead=each))


# What can be asked for --------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 16), st.floats(0.01, 0.99))
def test_the_fan_out_adds_up_and_follows_the_chance_of_each_place(total: int, k: int, acceptance: float) -> None:
    counts = fan_out(total, k, acceptance)
    assert sum(counts) == total
    assert len(counts) == k + 1
    assert counts[:k] == sorted(counts[:k], reverse=True)


def test_what_cannot_be_drafted_ahead_is_refused(toy: TableToy) -> None:
    with refuses(BadInput, "eagle ahead. draft-model"):
        check_rule("eagle", Settings(ahead=1))
    with refuses(BadInput, "chains ahead: tree."):
        check_rule("draft-model", Settings(ahead=1, tree=True))
    with refuses(BadInput, f"ahead 0 {MAX_AHEAD}, 99"):
        Settings(ahead=99)
    check_rule("none", Settings(ahead=1))


def test_auto_prepares_nothing_where_drafter_and_target_share_a_device(toy: TableToy) -> None:
    costs = costs_with({1: 1.0, MAX_K + 1: 1.0})
    events = run(toy, "draft-model", replace(SETTINGS, k=AUTO), costs=costs)
    reports = [event.ahead for event in events if isinstance(event, Round) and event.ahead]
    assert reports
    assert not any(each.prepared for each in reports)


def test_auto_learns_what_a_draft_costs_that_was_not_prepared(toy: TableToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftingAhead, "_prepare_next", None)  # which the trials would call
    start(toy, "draft-model", PROMPT, replace(SETTINGS, k=AUTO))  # type: ignore[arg-type]
    (costs,) = toy.costs.values()
    assert costs.tried == {("draft-model", False)}


def test_a_lane_drafts_ahead_and_its_trace_says_so(toy: TableToy, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_in_turn(monkeypatch)
    first, second = read_lanes(["draft-model:3:ahead", "layer-skip:2"])
    assert (first.name, first.ahead, second.ahead) == ("draft-model:3:ahead", 3, 0)
    settings = first.settings_in(replace(SETTINGS, seed=5))
    entries = list(race(toy, first.drafter, PROMPT, settings, more=[second]))  # type: ignore[arg-type]
    lines = list(write_trace({"lanes": [{"name": name} for name in ("plain", first.name, second.name)]}, entries))
    assert read_trace(lines)[1] == entries
    by_lane = {name: [e.event for e in entries if e.lane == name] for name in (first.name, second.name, "plain")}
    assert [0 < hits(events) < len(events) for events in by_lane.values()] == [True, False, False]
    assert len({tuple(ids_of(events)) for events in by_lane.values()}) == 1
    assert all(isinstance(events[0], Prefilled) for events in by_lane.values())
