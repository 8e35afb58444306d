"""K = auto: exact whatever the clock says, never much slower than the target alone, never far from the best fixed K."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from operator import mul
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from specdemo import costs as costs_module
from specdemo import decode as loop
from specdemo import hardware
from specdemo.control import EARLIER_TESTS, PROBING, Control, History
from specdemo.costs import CALIBRATED, FORGET, HICCUP, LENGTHS, RECENT, STEADY, Costs, Tally
from specdemo.drafters import Drafter
from specdemo.drafters.draft_model import DraftModel
from specdemo.drafters.none import NoDrafter
from specdemo.events import Event, Round
from specdemo.types import AUTO, MAX_K, MAX_SEED, Draft, DraftedToken, Fate, Settings
from tests.unit.enumerate_decode import distance, emitted_law
from tests.unit.toys import (
    DRAFTER_NAMES,
    PROMPT,
    VOCAB,
    TableRunner,
    TableToy,
    ids_of,
    ngram_file,
    random_table,
    texts_read,
    true_law,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = {1: 1.0, MAX_K + 1: 1.0}
STEEP = {1: 1.0, MAX_K + 1: MAX_K + 1.0}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TableToy:
    table = random_table(1, support=3)
    table[PROMPT[-2], PROMPT[-1]] = torch.tensor(
        [0, 0, 1.0, 0]
    )  # as in test_exactness: it keeps the tree of runs small
    folder: Path = tmp_path_factory.mktemp("control")
    return TableToy(
        target=table,
        draft_model=0.5 * table + 0.5 * random_table(2, support=2),
        early=random_table(3, support=2),
        ngram_table=ngram_file(folder, VOCAB),
    )


# Exactness -------------------------------------------------------------------------------------------------


class Clock:
    """Says that passes and drafts took these seconds, one after another; `restarted` begins anew."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.restart()

    def restart(self) -> None:
        self._random, self._now = random.Random(self.seed), 0.0

    def perf_counter(self) -> float:
        self._now += self._random.choice((0.01, 0.5, 1.0, 3.0))
        return self._now


def auto_law(toy: TableToy, name: str, settings: Settings, seed: int, seen: Callable = lambda events: None) -> dict:
    """What K = auto emits when a clock that says anything has its say in every K."""
    clock = Clock(seed)

    def start_run() -> tuple[TableRunner, Any]:
        runner = toy.target_runner(32)
        return runner, toy.drafter(name, runner, settings)

    def costs() -> Costs:
        clock.restart()
        return costs_known(toy.drafter(name, toy.target_runner(32), settings), (0.02, 0.1, 0.3)[seed % 3])

    with pytest.MonkeyPatch.context() as patch:
        for module in (loop, hardware):
            patch.setattr(module, "time", clock)
        return emitted_law(start_run, PROMPT, settings, seen=seen, costs=costs)


def costs_known(drafter: Drafter, seconds: float) -> Costs:
    """With those of a drafted token, whether the text repeats itself or not."""
    costs = Costs(FLAT)
    for author in {drafter.author(context) for context in (PROMPT, PROMPT[:1])}:
        learn(costs, author, seconds)
    return costs


def learn(costs: Costs, drafter: type[Drafter], seconds: float) -> None:
    """What a draft of one token costs."""
    for _ in range(2):
        costs.learn_draft(drafter, 1, seconds)


AUTO_LAWS = [
    Settings(temperature=0, k=AUTO, max_new_tokens=6),
    Settings(temperature=1, k=AUTO, max_new_tokens=5, top_k=2),
    Settings(temperature=0.7, k=AUTO, max_new_tokens=4, top_p=0.8),
]


@pytest.mark.parametrize("settings", AUTO_LAWS, ids=lambda s: f"T{s.temperature:g}")
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_auto_emits_the_targets_law_whatever_the_clock_says(toy: TableToy, name: str, settings: Settings) -> None:
    truth = true_law(toy.target, PROMPT, settings.max_new_tokens, settings)
    for seed in range(3):
        assert distance(auto_law(toy, name, settings, seed), truth) < 1e-6


def test_the_enumeration_of_auto_visits_different_k_after_the_same_text(toy: TableToy) -> None:
    chosen: dict[tuple[int, ...], set[int | None]] = {}

    def note(events: list[Event]) -> None:
        for place, event in enumerate(events):
            if isinstance(event, Round):
                chosen.setdefault(tuple(ids_of(events[:place])), set()).add(event.k)

    for seed in range(6):
        auto_law(toy, "draft-model", AUTO_LAWS[1], seed, note)
    assert set(chain.from_iterable(chosen.values())) == {0, 1, 2, 3}
    assert max(map(len, chosen.values())) > 1


def test_a_draft_cut_by_its_own_tokens_would_be_caught(toy: TableToy) -> None:
    settings = Settings(temperature=1, k=2, max_new_tokens=4)

    def start_run() -> tuple[TableRunner, Any]:
        runner = toy.target_runner(32)
        drafter = toy.drafter("draft-model", runner, settings)
        propose = drafter.propose

        def without_zeros(context: Sequence[int], k: int) -> Draft:
            draft = propose(context, k)
            ids = list(map(int, draft.token_ids))
            kept = ids.index(0) if 0 in ids else k
            return Draft(draft.token_ids[:kept], draft.probs[:kept] if kept and draft.probs is not None else None)

        setattr(drafter, "propose", without_zeros)  # noqa: B010
        return runner, drafter

    law = emitted_law(start_run, PROMPT, settings)
    assert distance(law, true_law(toy.target, PROMPT, 4, settings)) > 1e-3


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_auto_writes_the_targets_own_greedy_text_and_reads_nothing_twice(toy: TableToy, name: str) -> None:
    settings = Settings(k=AUTO, max_new_tokens=60)
    plain = list(loop.decode(toy.target_runner(65), NoDrafter(), PROMPT, replace(settings, k=0)))
    runner = toy.target_runner(65)
    drafter = toy.drafter(name, runner, settings)
    costs, clock = costs_known(drafter, 0.02), Clock(8)
    with pytest.MonkeyPatch.context() as patch:
        for module in (loop, hardware):
            patch.setattr(module, "time", clock)
        events = list(loop.decode(runner, drafter, PROMPT, settings, costs=costs))
    assert ids_of(events) == ids_of(plain)
    assert len({event.k for event in events if isinstance(event, Round)} | {0}) > 2
    for model in [runner, *(toy.draft_runners[-1:] if isinstance(drafter, DraftModel) else [])]:
        assert set(Counter(texts_read(model.passes)).values()) == {1}


# Costs -----------------------------------------------------------------------------------------------------


def test_costs_between_the_measured_lengths_lie_on_a_line() -> None:
    costs = Costs({1: 0.02, 3: 0.03, 17: 0.1})
    assert costs.passes[1:4] == pytest.approx([1.0, 1.25, 1.5])
    assert costs.passes[10] == pytest.approx(3.25)
    assert costs.pace == 0.02


def test_no_pass_is_taken_to_cost_more_than_a_longer_one() -> None:
    costs = Costs({1: 0.03, 2: 0.02, 4: 0.05, 9: 0.04}, most_k=8)
    assert costs.pace == 0.02
    assert costs.passes[1:] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])


def test_a_pass_longer_than_auto_takes_says_nothing_of_the_weather() -> None:
    costs = Costs({1: 1.0, 9: 1.2}, most_k=8)
    for _ in range(20):
        costs.learn_pass(MAX_K + 1, 1.7)
    assert costs.pace == 1.0


def test_a_run_rests_by_its_own_rounds_and_not_by_those_of_one_beside_it() -> None:
    costs = Costs(CPU)
    learn(costs, Drafter, 0.3)
    fates = (Fate.REJECTED, Fate.ACCEPTED)
    last: list[Round | None] = [None, None]
    chosen: tuple[list[int], list[int]] = ([], [])
    runs = [Control(AUTO, costs) for _ in fates]
    for _ in range(200):
        for run, (control, fate) in enumerate(zip(runs, fates, strict=True)):
            k = control.choose(1000, last[run], Drafter)
            drafted = (DraftedToken(0, fate, 0.5, 0.5, 0.5),) * k
            last[run] = Round(0, drafted, (), 0.3 * k, 1.0, 1.0 + 0.3 * k, k)
            chosen[run].append(k)
    assert min(chosen[1]) > 0
    assert chosen[0][40:].count(0) > 120
    assert max(chosen[0][40:]) > 0


def test_a_calibration_leaves_out_what_auto_never_takes() -> None:
    runner = TableRunner(random_table(1), capacity=MAX_K + 2)
    Costs.measured(runner, Settings(), most_k=8)
    assert {len(ids) for _, ids in runner.passes} == {1, 2, 3, 4, 6, 9}


def test_a_calibration_measures_every_length_without_its_first_pass_and_frees_the_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, read = 0.0, Counter[int]()

    class Timed(TableRunner):
        def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
            nonlocal now
            now += (1 + len(ids)) * (0.001 if read[len(ids)] else 0.002)
            read[len(ids)] += 1
            return super().forward(ids)

    monkeypatch.setattr(costs_module, "time", SimpleNamespace(perf_counter=lambda: now))
    runner = Timed(random_table(1), capacity=MAX_K + 2)
    costs = Costs.measured(runner, Settings(temperature=1, top_p=0.9))
    assert costs.pace == pytest.approx(0.002)
    assert costs.passes[1:] == pytest.approx([(1 + tokens) / 2 for tokens in range(1, MAX_K + 2)])
    assert set(read) == set(LENGTHS)
    assert runner.released


def test_a_calibration_that_fails_frees_the_runner_too() -> None:
    class Broken(TableRunner):
        def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    runner = Broken(random_table(1), capacity=MAX_K + 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        Costs.measured(runner, Settings())
    assert runner.released


def test_the_weather_moves_the_pace_and_not_the_costs() -> None:
    costs = Costs(STEEP)
    before = list(costs.passes)
    for step in range(300):
        seconds = 1 + step / 100  # up to four times slower
        costs.learn_pass(1, seconds)
        costs.learn_pass(5, 5 * seconds)
    assert costs.passes == pytest.approx(before, rel=0.1)
    assert costs.pace == pytest.approx(4, rel=0.1)


def test_a_hiccup_counts_for_little() -> None:
    costs = Costs(FLAT)
    costs.learn_pass(4, 60.0)
    assert costs.passes[4] == pytest.approx(HICCUP ** (1 / (CALIBRATED + 1)))
    assert costs.pace < HICCUP


def test_a_calibration_that_was_far_off_is_unlearnt_even_late() -> None:
    costs = Costs(FLAT)
    for _ in range(10 * STEADY):
        costs.learn_pass(1, 1.0)
        costs.learn_pass(5, 1.0)
    for _ in range(4 * STEADY):
        costs.learn_pass(1, 1.0)
        costs.learn_pass(5, 1.4)
    assert costs.passes[5] / costs.passes[1] == pytest.approx(1.4, rel=0.03)


def test_a_draft_costs_a_constant_and_something_for_each_token() -> None:
    costs = Costs(FLAT)
    assert costs.of_draft(Drafter, 1) is None
    for _ in range(RECENT):
        for tokens in (1, 4):
            costs.learn_draft(Drafter, tokens, 0.3 + 0.1 * tokens)
    assert [costs.of_draft(Drafter, tokens) for tokens in (1, 4, 8)] == pytest.approx([0.4, 0.7, 1.1], rel=0.1)


def test_longer_drafts_are_never_taken_to_cost_less() -> None:
    costs = Costs(FLAT)
    for tokens, seconds in ((1, 1.0), (4, 0.5)) * 5:
        costs.learn_draft(Drafter, tokens, seconds)
    assert costs.of_draft(Drafter, 1) == costs.of_draft(Drafter, 4) == pytest.approx(0.75, rel=0.05)


def test_drafts_that_became_cheap_are_believed_whatever_other_lengths_cost() -> None:
    costs = Costs(FLAT)
    for tokens in (1, 4) * RECENT:
        costs.learn_draft(Drafter, tokens, 4.0 * tokens)
    costs.learn_draft(Drafter, 1, 0.1)
    assert costs.of_draft(Drafter, 4) == pytest.approx(0.4)


@pytest.mark.parametrize("change", [0.33, 3.0])
def test_what_drafts_of_other_lengths_once_cost_is_forgotten(change: float) -> None:
    costs = Costs(FLAT)
    for tokens in list(range(1, 9)) * RECENT:
        costs.learn_draft(Drafter, tokens, 0.2 * tokens)
    for _ in range(100):
        costs.learn_draft(Drafter, 1, 0.2 * change)
    assert costs.of_draft(Drafter, 1) == pytest.approx(0.2 * change, rel=0.1)


def test_what_drafts_of_one_length_cost_is_put_down_to_their_tokens() -> None:
    costs = Costs(FLAT)
    for _ in range(5):
        costs.learn_draft(Drafter, 2, 0.5)
    assert [costs.of_draft(Drafter, tokens) for tokens in (1, 2, 8)] == pytest.approx([0.25, 0.5, 2.0])


def test_drafts_that_came_to_nothing_are_paid_by_the_others() -> None:
    costs = Costs(FLAT)
    for _ in range(50):
        costs.learn_draft(Drafter, 1, 1.0)
        costs.learn_draft(Drafter, 0, 1.0)
    assert costs.of_draft(Drafter, 1) == pytest.approx(2.0, rel=0.1)
    for _ in range(50):
        costs.learn_draft(Drafter, 0, 1.0)
    assert costs.of_draft(Drafter, 1) == pytest.approx(
        1 / (1 - FORGET), rel=0.1
    )  # it does not run away: they may be found again


def test_a_draft_made_at_once_costs_the_same_however_long_it_is() -> None:
    costs = Costs(FLAT)
    for tokens in (1, 8, 3):
        costs.learn_draft(AtOnce, tokens, 0.2)
    assert costs.of_draft(AtOnce, 1) == costs.of_draft(AtOnce, 16) == pytest.approx(0.2)


# The chances -----------------------------------------------------------------------------------------------

PASSED, FAILED = [Fate.ACCEPTED] * 3, [Fate.REJECTED, Fate.UNTESTED, Fate.UNTESTED]


def chances(now: Sequence[Sequence[Fate]] = (), earlier: Sequence[Sequence[Fate]] = ()) -> list[float]:
    """What a run believes after these drafts, and earlier ones after those."""
    known = Tally(1.0)
    for fates in earlier:
        known.add(fates)
    history = History(known)
    for fates in now:
        history.tests.add(fates)
    return list(history.chances())


def test_the_chance_of_a_guess_is_even_until_tests_say_more() -> None:
    assert chances() == [0.5] * MAX_K
    assert chances([PASSED])[:4] == pytest.approx([2 / 3, 7 / 9, 23 / 27, 23 / 27])


def test_a_run_begins_with_what_earlier_ones_found_and_then_believes_itself() -> None:
    """Every other draft fails at its first guess, and those that do not pass whole."""
    earlier = [PASSED, FAILED] * 100
    first, second, third, *_ = chances(earlier=earlier)
    assert first == pytest.approx(0.5)
    assert second > 0.97
    assert third > 0.97
    assert 0.5 * EARLIER_TESTS / (EARLIER_TESTS + 1) <= chances([FAILED], earlier)[0] < 0.45
    assert chances([FAILED] * 50, earlier)[0] < 0.2
    assert chances([PASSED] * 50, earlier)[0] > 0.8


def test_chances_stay_chances() -> None:
    earlier = [FAILED] * 50 + [PASSED] * 5  # the second place is far better than the first
    assert all(0 <= chance <= 1 for chance in chances([PASSED] * 50, earlier))


def test_what_a_trial_shows_of_guesses_is_not_kept() -> None:
    costs = Costs(FLAT)
    trial = costs.on_trial()
    chosen_by(trial, [0.1] * 9)
    assert costs.of_draft(Drafter, 1) == trial.of_draft(Drafter, 1) is not None
    assert (list(trial.fared), list(costs.fared)) == ([Drafter], [])
    assert costs.of_beginning(Drafter, 1) == 0


def test_a_long_prompt_does_not_make_the_beginning_of_a_short_one_dear() -> None:
    costs = Costs(FLAT)
    for seconds in (20.0, 30.0):
        costs.learn_first(Drafter, 1, seconds, prompt_tokens=1500)
    assert costs.of_beginning(Drafter, 75) == pytest.approx(1.0)
    assert costs.of_beginning(Drafter, 1500) == costs.of_beginning(Drafter, 3000) == 20
    for _ in range(3):
        costs.learn_first(Drafter, 1, 2.0, prompt_tokens=75)
    assert costs.of_beginning(Drafter, 1500) == 20  # what short ones cost has no say in that
    assert costs.of_beginning(Drafter, 75) == 2


def test_a_drafter_that_finds_nothing_at_no_cost_does_not_make_its_drafts_free() -> None:
    costs = Costs(FLAT)
    for tokens in (1, 4) * RECENT:
        costs.learn_draft(Drafter, tokens, 0.2 * tokens)
    for _ in range(3):
        costs.learn_draft(Drafter, 0, 0.0)
    cost = costs.of_draft(Drafter, 4)
    assert cost is not None
    assert cost > 0.75


def test_no_two_runs_have_the_same_random_numbers() -> None:
    costs = Costs(FLAT)
    assert len({costs.fresh_seed(seed) for seed in (0, 1, 0, 1, 0)}) == 5
    assert Settings(seed=costs.fresh_seed(MAX_SEED)).seed <= MAX_SEED


# The choice ------------------------------------------------------------------------------------------------

Chance = Callable[[int], float]  # how likely a guess passes, by the tokens written so far


class AtOnce(Drafter):
    """Whose draft costs the same however long it is."""

    description, at_once = "For tests.", True


# Seconds of passes by their tokens, of a drafted token (of a draft, if the drafter drafts at once), and the chance.
World = tuple[dict[int, float], float, Chance]


def speed(
    k: int | str,
    world: World,
    seed: int = 1,
    tokens: int = 1000,
    drafter: type[Drafter] = Drafter,
    unread: float = 0.0,
) -> float:
    """Tokens per second of a run in a world where guesses pass by chance.

    A draft takes `unread` seconds more for every token that was written since the last one.
    """
    passes, draft, chance = world
    costs, true_passes = Costs(passes), np.interp(range(MAX_K + 2), list(passes), list(passes.values()))
    learn(costs, drafter, draft)
    choosing, luck = Control(k, costs), random.Random(seed)
    written, seconds, last, read = 0, 0.0, None, 0
    while written < tokens:
        asked = choosing.choose(tokens - written - 1, last, drafter)
        passed = next((i for i in range(asked) if luck.random() >= chance(written)), asked)
        fates = [Fate.ACCEPTED] * passed + [Fate.REJECTED] * (passed < asked) + [Fate.UNTESTED] * (asked - passed - 1)
        drafting, checking = (
            draft * (asked > 0 if drafter.at_once else asked),
            true_passes[asked + 1] * luck.gauss(1, 0.02),
        )
        if asked:
            drafting, read = drafting + unread * (written - read), written
        drafted = tuple(DraftedToken(0, fate, 0.5, 0.5, 0.5) for fate in fates[:asked])
        last = Round(0, drafted, (), drafting, checking, drafting + checking, asked)
        written, seconds = written + passed + 1, seconds + drafting + checking
    return written / seconds


def always(chance: float) -> Chance:
    return lambda written: chance


CPU = {1: 1.0, 2: 1.08, 3: 0.98, 6: 1.04, 9: 1.24, 17: 1.66}
WORLDS: dict[str, World] = {
    "free guesses that never pass": (CPU, 0.0, always(0.0)),
    "dear guesses that never pass": (CPU, 0.72, always(0.0)),
    "very dear guesses": (CPU, 3.0, always(0.5)),
    "dear guesses that always pass": (CPU, 0.5, always(1.0)),
    "free guesses, some pass": (CPU, 0.0, always(0.3)),
    "free guesses, all pass": (CPU, 0.0, always(1.0)),
    "a small draft model": (CPU, 0.15, always(0.7)),
    "checking is free": (FLAT, 0.05, always(0.8)),
    "checking costs as much as writing": (STEEP, 0.0, always(0.6)),
    "checking costs half": ({1: 1.0, 17: 9.0}, 0.01, always(0.8)),
    "a text that becomes predictable": (CPU, 0.1, lambda written: 0.95 if written > 500 else 0.1),
    "a text that stops being so": (CPU, 0.1, lambda written: 0.1 if written > 500 else 0.95),
    "a text that changes often": (CPU, 0.1, lambda written: 0.9 if written // 60 % 2 else 0.1),
}


@pytest.mark.parametrize("drafter", [Drafter, AtOnce], ids=["one by one", "at once"])
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_auto_is_never_slower_than_the_target_alone_and_close_to_the_best_fixed_k(
    world: World, drafter: type[Drafter]
) -> None:
    auto, *fixed = (
        fmean(speed(k, world, seed, drafter=drafter) for seed in range(3)) for k in (AUTO, *range(MAX_K + 1))
    )
    assert auto >= 0.97 * fixed[0]
    assert auto >= 0.95 * max(fixed)


def test_auto_notices_when_guesses_begin_to_pass() -> None:
    alone = speed(0, (CPU, 0.1, always(0.0)))
    late: World = (CPU, 0.1, lambda written: 0.9 if written > 500 else 0.0)
    assert speed(AUTO, late) > 1.25 * alone
    assert speed(AUTO, late, unread=0.02) > 1.2 * alone  # what was written at rest is read once, and that is no habit


def test_auto_rests_the_longer_the_more_a_draft_loses() -> None:
    def longest_rest(draft: float, passing: int) -> int:
        costs, rest, longest, last = Costs(CPU), 0, 0, None
        learn(costs, Drafter, draft)
        choosing, drafts = Control(AUTO, costs), 0
        for _ in range(400):
            k = choosing.choose(1000, last, Drafter)
            rest = 0 if k else rest + 1
            longest, drafts = max(longest, rest), drafts + (k > 0)
            fate = Fate.ACCEPTED if passing and drafts % passing == 0 else Fate.REJECTED
            drafted = (DraftedToken(0, fate, 0.5, 0.5, 0.5),) * k
            last = Round(0, drafted, (), draft * k, 1.0, 1.0 + draft * k, k)
        return longest

    assert longest_rest(0.72, passing=0) > 40
    assert 0 < longest_rest(0.35, passing=3) < 20  # a third of the guesses pass: that all but pays


def test_auto_learns_of_each_author_apart() -> None:
    costs = Costs(CPU)
    for author in (Drafter, AtOnce):
        learn(costs, author, 0.2)
    choosing, last, chosen = Control(AUTO, costs), None, []
    for turn in range(40):
        author, fate = (AtOnce, Fate.ACCEPTED) if turn % 2 else (Drafter, Fate.REJECTED)
        k = choosing.choose(100, last, author)
        drafted = (DraftedToken(0, fate, 0.5, 0.5, 0.5),) * k
        drafting = 0.2 * min(k, 1 if author.at_once else k)
        last = Round(0, drafted, (), drafting, 1.0, 1.0 + drafting, k)
        chosen.append(k)
    assert max(chosen[-10::2]) == 0
    assert min(chosen[-9::2]) > 8


def test_a_drafter_that_nothing_is_known_of_is_asked_for_one_token() -> None:
    assert chosen_by(Costs(FLAT), [5.0, 0.0, 0.0, 0.0]) == [1, 1, 1, MAX_K]  # the first may have read the prompt


def test_a_draft_that_was_held_up_is_forgotten() -> None:
    assert chosen_by(Costs(FLAT), [0.1, 5.0, 0.1, 0.1, 0.1])[-1] > 1
    costs = Costs(FLAT)
    for seconds in (0.1, 0.1, 5.0):
        costs.learn_draft(Drafter, 1, seconds)
    assert costs.of_draft(Drafter, 1) == pytest.approx(0.1)


def test_a_drafter_that_once_seemed_too_dear_is_tried_again_however_short_the_runs() -> None:
    costs = Costs(FLAT)
    learn(costs, Drafter, 4.0)
    chosen = [chosen_by(costs, [0.1] * 19) for _ in range(50)]
    assert chosen[0] == [0] * 19
    assert chosen[-1][1:] == [MAX_K] * 18


def test_a_drafter_whose_first_draft_is_dear_is_seldom_tried_in_short_runs() -> None:
    costs = Costs(FLAT)
    learn(costs, Drafter, 0.7)
    tried = [chosen_by(costs, [5.0, 0.7, 0.7], most=3) for _ in range(500)]
    assert 1 < sum(map(any, tried)) <= 1 + PROBING * 3 * 500 / (5 - 0.7)  # once since nothing is known of it


def test_a_drafter_that_nothing_was_tested_of_is_tried_if_it_may_pay() -> None:
    for seconds, tried in ((0.9, True), (2.0, False)):
        costs = Costs(FLAT)
        learn(costs, Drafter, seconds)
        assert any(chosen_by(costs, [seconds] * 5)) is tried


def test_a_drafter_that_was_good_begins_at_once_unless_the_text_is_too_short_to_pay_for_it() -> None:
    costs = Costs(FLAT)
    for _ in range(20):
        chosen_by(costs, [5.0] + [0.1] * 9)
    assert chosen_by(costs, [5.0])[0] > 4
    assert chosen_by(costs, [5.0], most=3) == [0]


def chosen_by(costs: Costs, drafting: Sequence[float], most: int = 100) -> list[int]:
    """The K of as many rounds, with so many tokens left, whose drafts take these seconds in turn and pass whole."""
    choosing, passed = Control(AUTO, costs), DraftedToken(0, Fate.ACCEPTED, 1, 1, 0)
    last, chosen, left = None, [], iter(drafting)
    for _ in drafting:
        chosen.append(choosing.choose(most, last, Drafter))
        seconds = next(left) if chosen[-1] else 0.0
        last = Round(0, (passed,) * chosen[-1], (), seconds, 1.0, seconds + 1, chosen[-1])
    return chosen


@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_a_fixed_k_is_what_was_asked_for_and_needs_no_costs(k: int) -> None:
    assert [Control(k, None).choose(most, None, Drafter) for most in (20, 3, 0)] == [k, min(k, 3), 0]


def test_auto_stays_below_its_limit() -> None:
    costs = Costs(FLAT, most_k=8)
    learn(costs, Drafter, 0.0)
    assert max(chosen_by(costs, [0.0] * 20)) == 8


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=MAX_K, max_size=MAX_K),
    st.lists(st.floats(0, 1), min_size=MAX_K, max_size=MAX_K),
    st.floats(0, 0.3),
)
def test_no_longer_draft_than_the_chosen_one_would_have_yielded_more(
    steps: list[float], chances: list[float], drafting: float
) -> None:
    """Not all are looked at."""
    costs = Costs({tokens: 1 + sum(steps[: tokens - 1]) for tokens in range(1, MAX_K + 2)})
    for tokens in (1, 2, 1, 2):
        costs.learn_draft(Drafter, tokens, costs.pace * drafting * tokens)
    control = Control(AUTO, costs)
    tests = control._history(Drafter, costs).tests
    tests.tested, tests.passed = [1e6] * MAX_K, [1e6 * chance for chance in chances]
    passing = list(accumulate(control._history(Drafter, costs).chances(), mul))
    rates = [
        (1 + sum(passing[:k])) / (costs.passes[k + 1] + float(costs.of_draft(Drafter, k) or 0))
        for k in range(1, MAX_K + 1)
    ]
    assume(max(rates) * min(costs.passes[1:]) > 1.001)  # else it may pay not to draft
    assert rates[control.choose(100, None, Drafter) - 1] == pytest.approx(max(rates))
