"""Two lanes on one device: whose turn it is, what is freed, and what comes of comparing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdemo.decoding import batch, loop, measuring
from specdemo.decoding.events import Finished, Prefilled, Round, emitted_tokens
from specdemo.engines.runner import ANY_ROWS
from specdemo.errors import BadInput
from specdemo.racing import race as racing
from specdemo.racing.race import check_drafter, drafters_of, race, rule_for, start
from specdemo.racing.request import DraftedLane
from specdemo.racing.summary import report
from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, read_trace, write_trace
from specdemo.settings import AUTO, MATCH, MAX_K, REJECTION, Settings
from specdemo.system import device
from specdemo.system.progress import Stopped, attended
from specdemo.tokens import FinishReason, TokenKind
from tests.harness.classes import CostModel
from tests.harness.doubles import PROMPT, TableRunner, counting_table, ids_of, letters_tokenizer
from tests.harness.toys import DRAFTER_NAMES, TableToy, alike_toy

from ..sentences import gist, refuses

SETTINGS = Settings(temperature=1, k=3, max_new_tokens=24, seed=3)


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    return alike_toy(tmp_path)


def test_auto_tries_a_drafter_out_before_its_first_run_and_frees_what_that_took(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "TRYING_SECONDS", 60)  # the trials end with their text
    settings = replace(SETTINGS, k=AUTO)
    first = start(toy, "draft-model", PROMPT, settings)
    (costs,) = toy.costs.values()
    assert costs.drafts["draft-model", False].timed > 1
    assert costs.drafts["draft-model", False].tested[0] > 1
    assert all(runner.released for runner in toy.runners[:-1] + toy.draft_runners[:-1])
    assert ids_of(list(first))
    seen = len(toy.runners), len(toy.draft_runners)
    start(toy, "draft-model", PROMPT, settings)
    assert (len(toy.runners), len(toy.draft_runners)) == (seen[0] + 1, seen[1] + 1)
    start(toy, "none", PROMPT, settings)
    start(toy, "layer-skip", PROMPT, replace(settings, k=3))
    assert costs.tried == {("draft-model", False)}


def test_auto_keeps_the_seed_and_writes_the_text_of_the_target_alone(toy: Any) -> None:
    alone = ids_of(list(start(toy, "none", PROMPT, SETTINGS)))
    for _ in range(3):
        first, *rest = start(toy, "draft-model", PROMPT, replace(SETTINGS, k=AUTO))
        assert isinstance(first, Prefilled)
        assert first.seed == SETTINGS.seed
        assert ids_of([first, *rest]) == alone


@pytest.mark.parametrize("tree", [False, True])
def test_auto_with_rejection_sampling_is_refused_above_temperature_0(toy: Any, tree: bool) -> None:
    settings = replace(SETTINGS, k=AUTO, rule=REJECTION, tree=tree)
    with refuses(BadInput, "auto match"):
        start(toy, "draft-model", PROMPT, settings)
    assert toy.runners == []
    assert rule_for(replace(settings, temperature=0.0)).name == MATCH
    for fine in (replace(settings, temperature=0.0), replace(settings, k=3)):
        assert len(ids_of(list(start(toy, "draft-model", PROMPT, fine)))) == SETTINGS.max_new_tokens


@pytest.mark.parametrize(("exact_rows", "most_k"), [(0, MAX_K), (9, 8), (MAX_K + 1, MAX_K), (ANY_ROWS, MAX_K)])
def test_auto_goes_no_further_than_its_engine_is_exact(
    toy: Any, monkeypatch: pytest.MonkeyPatch, exact_rows: int, most_k: int
) -> None:
    monkeypatch.setattr(TableRunner, "exact_rows", exact_rows)
    start(toy, "none", PROMPT, replace(SETTINGS, k=AUTO))  # which is not auto's
    assert toy.costs == {}
    start(toy, "draft-model", PROMPT, replace(SETTINGS, k=AUTO))
    (costs,) = toy.costs.values()
    assert costs.most_k() == most_k


@pytest.mark.parametrize(("seconds", "tried"), [(0.05, True), (0.11, False)])
def test_nothing_is_tried_out_where_passes_are_slow(toy: Any, seconds: float, tried: bool) -> None:
    toy.costs[True, False, False, 1] = CostModel({1: seconds, MAX_K + 1: seconds})
    list(start(toy, "draft-model", PROMPT, replace(SETTINGS, k=AUTO)))
    assert len(toy.draft_runners) == (3 if tried else 1)  # two trials and the run


def test_what_takes_a_while_before_a_run_is_told_the_first_time(toy: Any) -> None:
    messages: list[str] = []
    for _ in range(2):
        with attended(lambda: False, messages.append):
            start(toy, "draft-model", PROMPT, replace(SETTINGS, k=AUTO))
    assert [*map(gist, messages)] == ["measuring", "measuring draft-model"]


@pytest.mark.parametrize("passes", [0, 3, 30])
def test_a_calibration_that_is_stopped_is_made_by_the_next_run(
    toy: Any, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    monkeypatch.setattr(measuring, "CALIBRATION_SECONDS", 0)
    monkeypatch.setattr(measuring, "TRYING_SECONDS", 60)
    settings, stopped = replace(SETTINGS, k=AUTO), lambda: sum(len(runner.passes) for runner in toy.runners) > passes
    with attended(stopped), pytest.raises(Stopped):
        start(toy, "draft-model", PROMPT, settings)
    assert sum(len(runner.passes) for runner in toy.runners) <= passes + 1
    assert all(runner.length == 0 for runner in (*toy.runners, *toy.draft_runners))
    assert len(ids_of(list(start(toy, "draft-model", PROMPT, settings)))) == settings.max_new_tokens
    (costs,) = toy.costs.values()
    assert costs.tried == {("draft-model", False)}


# Whose turn it is ------------------------------------------------------------------------------------------


def of(entries: list[Entry], lane: str) -> list:
    return [entry.event for entry in entries if entry.lane == lane]


def clocked(toy: Any, monkeypatch: pytest.MonkeyPatch, target_pass: Callable[[int], float]) -> None:
    """A clock that only the target's passes move: by what `target_pass` says of the tokens read at once."""
    now = 0.0

    class Timed(TableRunner):
        def read(self, ids: Any) -> torch.Tensor:
            nonlocal now
            now += target_pass(len(ids))
            return super().read(ids)

    for module in (batch, loop, device):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(TableToy, "target_runner", lambda self, capacity: Timed(self.target, capacity, self.early))


def test_isolated_lanes_run_one_after_the_other(toy: Any) -> None:
    order = [entry.lane for entry in race(toy, "draft-model", PROMPT, SETTINGS, isolated=True)]
    assert order == [PLAIN] * order.count(PLAIN) + [SPECULATIVE] * order.count(SPECULATIVE)
    assert len(set(order)) == 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_a_race_says_the_same_interleaved_isolated_and_alone(toy: Any, name: str, temperature: float) -> None:
    settings = replace(SETTINGS, temperature=temperature)
    alone = ids_of(list(start(toy, name, PROMPT, settings)))
    for isolated in (False, True):
        entries = list(race(toy, name, PROMPT, settings, isolated))
        assert ids_of(of(entries, PLAIN)) == ids_of(of(entries, SPECULATIVE)) == alone


def test_the_plain_lane_is_the_same_loop_with_an_empty_draft(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS))
    plain, drafting = of(entries, PLAIN), of(entries, SPECULATIVE)
    assert all(not event.drafted for event in plain if isinstance(event, Round))
    assert any(event.drafted for event in drafting if isinstance(event, Round))
    assert {token.kind for event in plain for token in emitted_tokens(event)} == {TokenKind.TARGET}
    slow, fast = toy.runners  # the same runner for both, reading the same prompt
    assert type(slow) is type(fast)
    assert slow.passes[0] == fast.passes[0] == (0, PROMPT)
    assert [len(ids) for _, ids in slow.passes[1:]] == [1] * (SETTINGS.max_new_tokens - 1)
    assert len(fast.passes) < len(slow.passes)


def test_every_token_has_its_text_and_the_texts_join(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS))
    for lane in (PLAIN, SPECULATIVE):
        for entry in (entry for entry in entries if entry.lane == lane):
            assert [ord(token.text) - ord("a") for token in emitted_tokens(entry.event)] == [
                token.id for token in emitted_tokens(entry.event)
            ]
            if isinstance(entry.event, Round):
                assert [ord(token.text) - ord("a") for token in entry.event.drafted] == [
                    token.id for token in entry.event.drafted
                ]


def test_a_race_is_read_back_from_its_trace(toy: Any) -> None:
    entries = list(race(toy, "draft-model", PROMPT, SETTINGS))
    header = {"lanes": [{"name": PLAIN}, {"name": SPECULATIVE}], "seed": 3}
    assert read_trace(write_trace(header, entries)) == (header, entries)


def test_stop_strings_and_eos_end_each_lane_by_itself(toy: Any) -> None:
    toy.target, toy.tokenizer = counting_table(20), letters_tokenizer(20)
    toy.draft_model = toy.early = counting_table(20)
    settings = Settings(k=4, max_new_tokens=15, stop=("gh",))
    entries = list(race(toy, "draft-model", [0, 1], settings))
    for lane in (PLAIN, SPECULATIVE):
        assert ids_of(of(entries, lane)) == [2, 3, 4, 5, 6, 7]
        assert of(entries, lane)[-1] == Finished(FinishReason.STOP)
    toy.eos_ids = frozenset({5})
    for lane in (PLAIN, SPECULATIVE):
        events = of(list(race(toy, "draft-model", [0, 1], settings)), lane)
        assert ids_of(events) == [2, 3, 4, 5]
        assert events[-1] == Finished(FinishReason.EOS)
        assert report(toy, [0, 1], events)["text"] == "cde"  # the end-of-sequence token is no text


# What is freed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("events", [1, 2, 9])
@pytest.mark.parametrize("more", [(), (DraftedLane("draft-model", 2), DraftedLane("ngram", 2))], ids=["two", "four"])
def test_closing_a_race_closes_every_lane(
    toy: Any, monkeypatch: pytest.MonkeyPatch, more: tuple[DraftedLane, ...], events: int, isolated: bool
) -> None:
    lanes = []

    def kept(*args: Any, **more: Any) -> Any:  # a reference keeps the lanes from being closed by being forgotten
        lanes.append(start(*args, **more))
        return lanes[-1]

    monkeypatch.setattr(racing, "start", kept)
    stream: Any = race(toy, "draft-model", PROMPT, SETTINGS, isolated, more)
    for _ in range(events):
        next(stream)
    stream.close()
    assert not any(runner.length for runner in (*toy.runners, *toy.draft_runners))
    started = [runner for runner in toy.runners if runner.passes]
    assert started
    assert all(runner.released for runner in started)


def test_an_error_in_one_lane_closes_the_other(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = race(toy, "draft-model", PROMPT, SETTINGS)
    for _ in range(6):
        next(stream)

    def fail(*ids: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(toy.draft_runners[0], "forward", fail)
    with pytest.raises(MemoryError):
        list(stream)
    assert [runner.length for runner in (*toy.runners, *toy.draft_runners)] == [0, 0, 0]


# What is refused -------------------------------------------------------------------------------------------


def test_a_drafter_that_there_is_not_is_refused_with_the_reason(toy: Any) -> None:
    with refuses(BadInput, "'magic'") as refusal:
        list(race(toy, "magic", PROMPT, SETTINGS))
    assert all(name in str(refusal.value) for name in DRAFTER_NAMES)
    toy.draft_model = None
    with refuses(BadInput, "draft-model preset"):
        check_drafter(toy, "draft-model")


def test_drafters_are_those_named_or_all_that_can_be_used(toy: Any) -> None:
    assert drafters_of(toy, "ngram, none,ngram") == ["ngram", "none", "ngram"]
    assert {"ngram", "draft-model"} <= {*drafters_of(toy, "")} <= {*DRAFTER_NAMES} - {"none"}
    toy.draft_model = None
    assert "draft-model" not in drafters_of(toy, "")
    for names, reason in (("ngram,draft-model", "draft-model"), ("ngram,", "''")):
        with refuses(BadInput, reason):
            drafters_of(toy, names)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_allocated(toy: Any) -> None:
    toy.context = 20
    with refuses(BadInput, "5 24 20"):
        start(toy, "none", PROMPT, SETTINGS)
    assert toy.runners == []
