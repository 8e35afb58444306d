"""The loop: its invariants, where it stops, what it counts, and what it leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from specdemo.decoding import loop
from specdemo.decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from specdemo.decoding.loop import check_room
from specdemo.drafters.draft_model import DraftModel
from specdemo.drafters.mtp import Mtp
from specdemo.drafters.names import behind, drafter_class
from specdemo.errors import BadInput
from specdemo.settings import REJECTION, Settings
from specdemo.tokens import DraftOutcome, FinishReason, TokenKind
from tests.harness.classes import HeadDrafter
from tests.harness.doubles import (
    PROMPT,
    Scripted,
    TableRunner,
    counting_table,
    ids_of,
    oracle,
    random_table,
    rounds_of,
    texts_read,
)
from tests.harness.texts import decode
from tests.harness.toys import DRAFTER_NAMES, TableToy, alike_toy

from ..sentences import refuses

SAMPLED = Settings(temperature=1, k=3, max_new_tokens=40, seed=7)
COUNT = 30  # vocabulary of the model that counts: after [.., 1] it says 2, 3, 4, ...


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TableToy:
    return alike_toy(tmp_path_factory.mktemp("ngram"))


def run(toy: TableToy, name: str, settings: Settings) -> tuple[TableRunner, list[Event]]:
    runner = toy.target_runner(len(PROMPT) + settings.max_new_tokens)
    return runner, list(decode(runner, toy.drafter(name, runner, settings), PROMPT, settings))


def counting(
    k: int = 4,
    limit: int = 12,
    draft_to: int = COUNT,
    eos: int = -1,
    stop: Callable[[Sequence[int]], bool] | None = None,
) -> list[Event]:
    """A greedy run of the model that counts, with a drafter that counts along up to `draft_to` and is wrong then."""
    truth = [*range(draft_to), *[0] * COUNT]
    runner = TableRunner(counting_table(COUNT), capacity=limit + 2)
    settings = Settings(k=k, max_new_tokens=limit)
    stops: dict[str, Any] = {"stop": stop} if stop else {}
    return list(decode(runner, oracle(truth, vocab=COUNT), [0, 1], settings, frozenset({eos}), **stops))


# Invariants ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_the_newest_token_is_pending_and_no_token_of_the_text_is_read_twice(toy: TableToy, name: str) -> None:
    runner = toy.target_runner(len(PROMPT) + SAMPLED.max_new_tokens)
    drafter = toy.drafter(name, runner, SAMPLED)
    ids, read = list(PROMPT), len(PROMPT)
    for event in decode(runner, drafter, PROMPT, SAMPLED):
        ids += [token.id for token in emitted_tokens(event)]
        assert runner.length == len(ids) - 1
        assert runner.tokens == ids[:-1]
        read += 1 + len(event.drafted) if isinstance(event, Round) else 0
    assert sum(len(ids) for _, ids in runner.passes) == read
    models: list[Any] = [runner, *([drafter.runner] if isinstance(drafter, DraftModel) else [])]
    for model in models:
        assert model.passes
        assert set(Counter(texts_read(model.passes)).values()) == {1}


@pytest.mark.parametrize("name", ["draft-model", "layer-skip"])
def test_the_draft_model_catches_up_with_one_token_or_two(toy: TableToy, name: str) -> None:
    runner = toy.target_runner(64)
    drafter = toy.drafter(name, runner, SAMPLED)
    assert isinstance(drafter, DraftModel)
    draft_runner: Any = drafter.runner
    ids, unread, caught_up = list(PROMPT), len(PROMPT) + 1, set()
    seen = 0
    for event in decode(runner, drafter, PROMPT, SAMPLED):
        if isinstance(event, Round) and event.drafted:
            passes = draft_runner.passes[seen:]
            assert [len(ids) for _, ids in passes] == [unread, *[1] * (len(event.drafted) - 1)]
            seen = len(draft_runner.passes)
            fully_accepted = all(token.outcome is DraftOutcome.ACCEPTED for token in event.drafted)
            unread = 2 if fully_accepted else 1
            caught_up.add(unread)
        ids += [token.id for token in emitted_tokens(event)]
        if isinstance(event, Round) and event.drafted:  # the cache holds the text up to what is unread
            assert draft_runner.tokens == ids[: len(ids) - unread]
    assert caught_up == {1, 2}


def test_k_0_never_asks_the_drafter() -> None:
    def refuse(context: Sequence[int], k: int) -> list[int]:
        raise AssertionError("proposed at K = 0")

    events = list(decode(TableRunner(random_table(1)), Scripted(refuse), PROMPT, Settings(k=0, max_new_tokens=9)))
    assert [token.kind for event in events for token in emitted_tokens(event)] == [TokenKind.TARGET] * 9


def test_the_drafter_is_asked_for_no_more_than_can_be_emitted() -> None:
    asked: list[int] = []

    def note(context: Sequence[int], k: int) -> list[int]:
        asked.append(k)
        return []

    list(decode(TableRunner(random_table(1)), Scripted(note), PROMPT, Settings(k=5, max_new_tokens=9)))
    assert asked == [5, 5, 5, 4, 3, 2, 1]  # a round emits up to K + 1, and no draft is made for the very last token


def test_every_answer_reaches_the_drafter() -> None:
    drafter = oracle(range(COUNT), vocab=COUNT)
    list(decode(TableRunner(counting_table(COUNT)), drafter, [0, 1], Settings(k=3, max_new_tokens=9)))
    assert [answer.accepted for answer in drafter.answers] == [0, 3, 3]


# What a round says -----------------------------------------------------------------------------------------


def test_kinds_and_outcomes_of_a_run_written_out() -> None:
    prefilled, *middle, finished = counting(k=3, limit=9, draft_to=7)
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.prompt_tokens, prefilled.token.id, prefilled.token.kind) == (2, 2, TokenKind.TARGET)
    right, wrong, never = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED
    taken, resampled = TokenKind.ACCEPTED, TokenKind.RESAMPLED
    assert [
        ([(token.id, token.outcome) for token in r.drafted], [(token.id, token.kind) for token in r.emitted])
        for r in rounds_of(middle)
    ] == [
        ([(3, right), (4, right), (5, right)], [(3, taken), (4, taken), (5, taken), (6, TokenKind.BONUS)]),
        ([(0, wrong), (0, never), (0, never)], [(7, resampled)]),
        ([(0, wrong), (0, never)], [(8, resampled)]),
        ([(0, wrong)], [(9, resampled)]),
        ([], [(10, TokenKind.TARGET)]),
    ]
    assert [r.index for r in rounds_of(middle)] == [0, 1, 2, 3, 4]
    assert finished == Finished(FinishReason.LENGTH)


@pytest.mark.parametrize("name", [name for name in DRAFTER_NAMES if name != "none"])
def test_a_guess_passed_iff_its_draw_is_below_min_1_p_over_q(toy: TableToy, name: str) -> None:
    _, events = run(toy, name, replace(SAMPLED, rule=REJECTION))
    outcomes: Counter[DraftOutcome] = Counter()
    ids = list(PROMPT)
    for event in events:
        if isinstance(event, Round):
            tested = [token for token in event.drafted if token.outcome is not DraftOutcome.UNTESTED]
            for guess in tested:
                assert guess.p is not None
                assert guess.q is not None
                assert guess.draw is not None
                assert (guess.draw < min(1, guess.p / guess.q)) == (guess.outcome is DraftOutcome.ACCEPTED)
                outcomes[guess.outcome] += 1
            accepted = [token.id for token in tested if token.outcome is DraftOutcome.ACCEPTED]
            assert [t.id for t in event.emitted if t.kind is TokenKind.ACCEPTED] == accepted
        for token in emitted_tokens(event):
            probs = toy.target[ids[-2], ids[-1]]
            assert token.p == pytest.approx(float(probs[token.id]), abs=1e-12)
            ids.append(token.id)
    assert outcomes[DraftOutcome.ACCEPTED] > 3
    assert outcomes[DraftOutcome.REJECTED] > 3


def test_a_draft_is_timed_on_the_clock_of_the_device_it_is_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake of `timestamp`, as this needs two GPUs: the target's clock does not move while the other one drafts."""
    here, there = torch.device("cpu"), torch.device("cuda", 1)
    clocks = {here: 0.0, there: 0.0}
    asked: list[torch.device] = []

    def timestamp(device: torch.device) -> float:
        asked.append(device)
        return clocks[device]

    def propose(context: list[int], k: int) -> list[int]:
        clocks[there] += 3
        return [0] * k

    monkeypatch.setattr(loop, "timestamp", timestamp)
    runner = TableRunner(random_table(1))
    events = rounds_of(
        list(decode(runner, Scripted(propose), PROMPT, Settings(k=2, max_new_tokens=9), drafts_on=there))
    )
    assert {event.draft_seconds for event in events if event.k} == {3}
    assert {*asked} == {there}
    asked.clear()
    list(decode(TableRunner(random_table(1)), Scripted(propose), PROMPT, Settings(k=2, max_new_tokens=9)))
    assert {*asked} == {here}


def test_a_drafter_says_where_it_drafts(toy: TableToy) -> None:
    """A draft model may be on another device than the target; a head is with the target's embeddings."""
    elsewhere = torch.device("meta")
    parts = replace(toy.parts, draft_device=elsewhere, embeddings=(torch.empty(0), torch.empty(0)))
    for name in DRAFTER_NAMES:
        cls = drafter_class(behind(name))
        heads = torch.device("cpu") if issubclass(cls, (HeadDrafter, Mtp)) else None
        assert drafter_class(name).needs(parts).device == (elsewhere if cls is DraftModel else heads)


# Where it stops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 12])
def test_the_limit_is_met_exactly(k: int, limit: int) -> None:
    events = counting(k=k, limit=limit)
    assert ids_of(events) == list(range(2, 2 + limit))
    assert events[-1] == Finished(FinishReason.LENGTH)


@pytest.mark.parametrize("eos", range(2, 12))
def test_eos_inside_a_round_ends_the_text_there(eos: int) -> None:
    events = counting(k=4, limit=20, eos=eos)
    assert ids_of(events) == list(range(2, eos + 1))
    assert events[-1] == Finished(FinishReason.EOS)
    accepted = [token.id for r in rounds_of(events) for token in r.drafted if token.outcome is DraftOutcome.ACCEPTED]
    assert max(accepted, default=0) <= eos
    assert not any(token.outcome is DraftOutcome.REJECTED for r in rounds_of(events) for token in r.drafted)
    drafted = [token.id for r in rounds_of(events) for token in r.drafted if token.outcome is DraftOutcome.UNTESTED]
    assert all(token > eos for token in drafted)


def test_an_eos_that_is_drafted_but_rejected_does_not_end_the_text() -> None:
    drafter = Scripted(lambda context, k: [9] * k)
    events = list(
        decode(TableRunner(counting_table(COUNT)), drafter, [0, 1], Settings(max_new_tokens=5), frozenset({9}))
    )
    assert ids_of(events) == [2, 3, 4, 5, 6]
    assert events[-1] == Finished(FinishReason.LENGTH)


def test_token_0_can_be_the_eos() -> None:
    runner = TableRunner(counting_table(6))  # 0, 1, ... 5, 0
    events = list(decode(runner, oracle([0, 1, 2, 3, 4, 5, 0, 1], vocab=6), [0, 1], Settings(), frozenset({0})))
    assert ids_of(events) == [2, 3, 4, 5, 0]
    assert events[-1] == Finished(FinishReason.EOS)


@pytest.mark.parametrize("last", range(2, 12))
def test_a_stop_inside_a_round_ends_the_text_there(last: int) -> None:
    texts: list[list[int]] = []

    def stop(ids: Sequence[int]) -> bool:
        texts.append(list(ids))
        return ids[-1] == last

    events = counting(k=4, limit=20, stop=stop)
    assert ids_of(events) == list(range(2, last + 1))
    assert events[-1] == Finished(FinishReason.STOP)
    assert texts == [list(range(2, end + 1)) for end in range(2, last + 1)]  # one token more each time, none past it


def test_the_end_goes_by_what_comes_first() -> None:
    assert counting(limit=3, eos=4)[-1] == Finished(FinishReason.EOS)
    assert counting(limit=2, eos=4)[-1] == Finished(FinishReason.LENGTH)
    assert counting(limit=3, stop=lambda ids: len(ids) == 3)[-1] == Finished(FinishReason.STOP)


def test_a_run_that_fills_the_context_to_the_last_place_is_taken_and_one_more_is_not() -> None:
    settings = Settings(k=16, max_new_tokens=10)
    fits = TableRunner(counting_table(COUNT), capacity=12)
    assert len(ids_of(list(decode(fits, oracle(range(COUNT), vocab=COUNT), [0, 1], settings)))) == 10
    with refuses(BadInput, "2 10 11."):
        list(decode(TableRunner(counting_table(COUNT), capacity=11), Scripted(lambda *_: []), [0, 1], settings))
    check_room(2, settings, 12)


def test_an_empty_prompt_is_refused() -> None:
    with refuses(BadInput, "empty"):
        list(decode(TableRunner(random_table(1)), Scripted(lambda *_: []), [], Settings()))


# What it leaves behind -------------------------------------------------------------------------------------


class Trouble(Exception):
    pass


def trouble(*_: Any) -> Any:
    raise Trouble


@pytest.mark.parametrize("events", [1, 2, 5, None])
def test_caches_are_released_when_the_run_is_closed_and_at_the_end(toy: TableToy, events: int | None) -> None:
    runner = toy.target_runner(64)
    stream: Any = decode(runner, toy.drafter("draft-model", runner, SAMPLED), PROMPT, SAMPLED)
    list(islice(stream, events))
    assert (runner.length > 0) == (events is not None)
    stream.close()
    draft_runner: Any = toy.draft_runners[-1]
    assert runner.released
    assert draft_runner.released
    assert runner.length == draft_runner.length == 0
    assert next(stream, None) is None


@pytest.mark.parametrize("where", ["prefill", "forward", "keep", "propose", "observe", None])
def test_caches_are_released_when_something_breaks_or_the_input_is_refused(where: str | None) -> None:
    runner, drafter = TableRunner(random_table(1), 256 if where else 3), Scripted(lambda context, k: [0] * k)
    if where:
        setattr(runner if hasattr(runner, where) else drafter, where, trouble)
    with pytest.raises(Trouble if where else BadInput):
        list(decode(runner, drafter, PROMPT, Settings()))
    assert runner.released
    assert drafter.released


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_every_step_may_run_in_another_thread(toy: TableToy, name: str) -> None:
    runner = toy.target_runner(64)
    stream = decode(runner, toy.drafter(name, runner, SAMPLED), PROMPT, SAMPLED)
    events: list[Event] = []
    while True:
        with ThreadPoolExecutor(1) as thread:  # a new one for every step
            event = thread.submit(next, stream, None).result()
            assert not thread.submit(torch.is_inference_mode_enabled).result()
        if event is None:
            break
        events.append(event)
    assert ids_of(events) == ids_of(run(toy, name, SAMPLED)[1])


def test_inference_mode_stays_inside(toy: TableToy) -> None:
    inside: list[bool] = []

    def propose(context: list[int], k: int) -> list[int]:
        inside.append(torch.is_inference_mode_enabled())
        return [0]

    stream: Any = decode(toy.target_runner(64), Scripted(propose), PROMPT, SAMPLED)
    for _ in range(4):
        next(stream)
        assert not torch.is_inference_mode_enabled()
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad
    stream.close()
    assert not torch.is_inference_mode_enabled()
    assert set(inside) == {True}
