"""K = auto: exact whatever the clock says, never much slower than the target alone, never far from the best fixed K."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdemo.decoding import costs as costs_module
from specdemo.decoding import loop
from specdemo.decoding.adaptive_k import PROBING, DraftLengthController, Kind, best_length
from specdemo.decoding.costs import (
    FOLLOW,
    LENGTHS,
    OUTLIER,
    AcceptanceStats,
    CostModel,
    DraftCost,
    measure_passes,
)
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Event, Round
from specdemo.drafters.none import NoDrafter
from specdemo.system import hardware
from specdemo.system.progress import Stopped, attended
from specdemo.types import AUTO, MAX_K, DraftedToken, DraftOutcome, Settings
from tests.unit.toys import (
    DRAFTER_NAMES,
    PROMPT,
    TableRunner,
    TableToy,
    certain_toy,
    decode,
    ids_of,
    random_table,
    texts_read,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = {1: 1.0, MAX_K + 1: 1.0}
STEEP = {1: 1.0, MAX_K + 1: MAX_K + 1.0}
NAME = "one by one"


class OneByOne(Drafter):
    """Whose draft costs more for every token."""

    name = NAME


ONE_BY_ONE = OneByOne()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TableToy:
    return certain_toy(tmp_path_factory.mktemp("control"))


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


def auto_run(toy: TableToy, name: str, settings: Settings, clock: Clock) -> list[Event]:
    """A run with K = auto where a clock that says anything has its say in every K."""
    runner = toy.target_runner(65)
    drafter = toy.drafter(name, runner, settings)
    with pytest.MonkeyPatch.context() as patch:
        for module in (loop, hardware):
            patch.setattr(module, "time", clock)
        return list(decode(runner, drafter, PROMPT, settings, costs=costs_known(drafter, 0.02)))


def costs_known(drafter: Drafter, seconds: float) -> CostModel:
    """With those of a drafted token, whether the text repeats itself or not."""
    costs = CostModel(FLAT)
    for draft_source in {drafter.draft_source(context) for context in (PROMPT, PROMPT[:1])}:
        learn(costs, draft_source.name, seconds)
    return costs


def learn(costs: CostModel, drafter: str, seconds: float) -> None:
    """What a draft of one token costs."""
    for _ in range(2):
        costs.drafts[drafter].add(1, seconds / costs.baseline_seconds)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_auto_writes_the_text_of_the_target_alone_whatever_the_clock_says(
    toy: TableToy, name: str, temperature: float
) -> None:
    chosen: set[int | None] = {0}
    for seed in range(2):
        settings = Settings(k=AUTO, temperature=temperature, max_new_tokens=60, seed=seed)
        plain = list(decode(toy.target_runner(65), NoDrafter(), PROMPT, replace(settings, k=0)))
        events = auto_run(toy, name, settings, Clock(8 + seed))
        assert ids_of(events) == ids_of(plain)
        chosen |= {event.k for event in events if isinstance(event, Round)}
        drafts = [toy.draft_runners[-1]] if name == "draft-model" else []
        for model in [toy.runners[-1], *drafts]:
            assert set(Counter(texts_read(model.passes)).values()) == {1}  # and reads nothing twice
    assert len(chosen) > 2 or name == "none"


# Costs -----------------------------------------------------------------------------------------------------


def measured(runner: TableRunner, settings: Settings | None = None, most_k: int = MAX_K) -> CostModel:
    return CostModel(measure_passes(runner, loop.rule_for(settings or Settings()), most_k), most_k)


def test_costs_between_the_measured_lengths_lie_on_a_line() -> None:
    costs = CostModel({1: 0.02, 3: 0.03, 17: 0.1})
    assert costs.passes[1:4] == pytest.approx([1.0, 1.25, 1.5])
    assert costs.passes[10] == pytest.approx(3.25)
    assert costs.baseline_seconds == 0.02


def test_no_pass_is_taken_to_cost_more_than_a_longer_one() -> None:
    costs = CostModel({1: 0.03, 2: 0.02, 4: 0.05, 9: 0.04}, most_k=8)
    assert costs.baseline_seconds == 0.02
    assert costs.passes[1:] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])


def test_a_pass_longer_than_auto_takes_leaves_the_baseline_alone() -> None:
    costs = CostModel({1: 1.0, 9: 1.2}, most_k=8)
    for _ in range(20):
        costs.learn_pass(MAX_K + 1, 1.7)
    assert costs.baseline_seconds == 1.0


def test_a_calibration_leaves_out_what_auto_never_takes() -> None:
    runner = TableRunner(random_table(1), capacity=MAX_K + 2)
    measured(runner, most_k=8)
    assert {len(ids) for _, ids in runner.passes} == {1, 2, 3, 4, 6, 9}


def test_a_calibration_measures_every_length_without_its_first_pass_and_frees_the_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, read = 0.0, Counter[int]()

    class Timed(TableRunner):
        def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
            nonlocal now
            now += (1 + len(ids)) * (0.001 if read[len(ids)] else 0.002)
            read[len(ids)] += 1
            return super().forward(ids, parents)

    monkeypatch.setattr(costs_module, "time", SimpleNamespace(perf_counter=lambda: now))
    runner = Timed(random_table(1), capacity=MAX_K + 2)
    costs = measured(runner, Settings(temperature=1, top_p=0.9))
    assert costs.baseline_seconds == pytest.approx(0.002)
    assert costs.passes[1:] == pytest.approx([(1 + tokens) / 2 for tokens in range(1, MAX_K + 2)])
    assert set(read) == set(LENGTHS)
    assert runner.released


@pytest.mark.parametrize("most_k", [1, 4, 6, 7, MAX_K])
def test_a_calibration_reaches_as_far_as_auto_does(most_k: int) -> None:
    costs = measured(TableRunner(random_table(1), capacity=MAX_K + 2), most_k=most_k)
    assert len(costs.passes) == most_k + 2  # or the K of most tokens would be looked up behind the end
    learn(costs, ONE_BY_ONE.name, 1e-9)
    assert 0 <= DraftLengthController(AUTO, costs).choose(1000, None, ONE_BY_ONE) <= most_k


def test_costs_that_do_not_reach_as_far_as_auto_does_are_refused() -> None:
    for seconds in ({1: 1.0, 6: 1.2}, {2: 1.0, 8: 1.2}):
        with pytest.raises(ValueError, match="to at least 8 are needed"):
            CostModel(seconds, most_k=7)


def test_a_calibration_can_be_stopped_between_two_passes() -> None:
    passes = 0

    class Counted(TableRunner):
        def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
            nonlocal passes
            passes += 1
            return super().forward(ids, parents)

    runner = Counted(random_table(1), capacity=MAX_K + 2)
    with attended(lambda: passes == 3), pytest.raises(Stopped):
        measured(runner)
    assert passes == 3
    assert runner.released


def test_a_calibration_that_fails_frees_the_runner_too() -> None:
    class Broken(TableRunner):
        def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
            raise RuntimeError("out of memory")

    runner = Broken(random_table(1), capacity=MAX_K + 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        measured(runner)
    assert runner.released


def test_a_slower_machine_moves_the_baseline_and_not_the_costs() -> None:
    costs = CostModel(STEEP)
    before = list(costs.passes)
    for step in range(300):
        seconds = 1 + step / 100  # up to four times slower
        costs.learn_pass(1, seconds)
        costs.learn_pass(5, 5 * seconds)
    assert costs.passes == pytest.approx(before, rel=0.1)
    assert costs.baseline_seconds == pytest.approx(4, rel=0.1)


def test_an_outlier_counts_for_little() -> None:
    costs = CostModel(FLAT)
    costs.learn_pass(4, 60.0)
    assert costs.passes[4] == pytest.approx(OUTLIER**FOLLOW)
    assert costs.baseline_seconds < OUTLIER


def test_a_calibration_that_was_far_off_is_unlearnt_even_late() -> None:
    costs = CostModel(FLAT)
    for _ in range(10 * 100):
        costs.learn_pass(1, 1.0)
        costs.learn_pass(5, 1.0)
    for _ in range(4 * 100):
        costs.learn_pass(1, 1.0)
        costs.learn_pass(5, 1.4)
    assert costs.passes[5] / costs.passes[1] == pytest.approx(1.4, rel=0.03)


def test_a_draft_costs_a_constant_and_something_for_each_token() -> None:
    costs = CostModel(FLAT)
    assert costs.drafts[NAME].of(1) is None
    for _ in range(9):
        for tokens in (1, 4):
            costs.drafts[NAME].add(tokens, 0.3 + 0.1 * tokens)
    assert [costs.drafts[NAME].of(tokens) for tokens in (1, 4, 8)] == pytest.approx([0.4, 0.7, 1.1], rel=0.1)


@pytest.mark.parametrize("change", [0.33, 3.0])
def test_what_drafts_of_other_lengths_once_cost_is_forgotten(change: float) -> None:
    costs = CostModel(FLAT)
    for tokens in list(range(1, 9)) * 9:
        costs.drafts[NAME].add(tokens, 0.2 * tokens)
    for _ in range(100):
        costs.drafts[NAME].add(1, 0.2 * change)
    assert costs.drafts[NAME].of(1) == pytest.approx(0.2 * change, rel=0.1)


def test_what_drafts_of_one_length_cost_is_put_down_to_their_tokens() -> None:
    costs = CostModel(FLAT)
    for _ in range(5):
        costs.drafts[NAME].add(2, 0.5)
    assert [costs.drafts[NAME].of(tokens) for tokens in (1, 2, 8)] == pytest.approx([0.25, 0.5, 2.0])


def test_a_draft_made_at_once_costs_the_same_however_long_it_is() -> None:
    costs = CostModel(FLAT)
    for tokens in (1, 8, 3):
        costs.drafts[NAME].add(AtOnce().steps(tokens), 0.2)
    assert [costs.drafts[NAME].of(AtOnce().steps(tokens)) for tokens in (1, 16)] == pytest.approx([0.2, 0.2])


# The chances -----------------------------------------------------------------------------------------------

PASSED, FAILED = [DraftOutcome.ACCEPTED] * 3, [DraftOutcome.REJECTED, DraftOutcome.UNTESTED, DraftOutcome.UNTESTED]


def chances(*drafts: Sequence[DraftOutcome]) -> list[float]:
    """What is believed after these drafts."""
    stats = AcceptanceStats()
    for outcomes in drafts:
        stats.add(outcomes, len(outcomes))
    return stats.chances()


def test_the_chance_of_a_guess_is_even_until_tests_say_more() -> None:
    assert chances() == [0.5] * MAX_K
    assert chances(PASSED)[:4] == pytest.approx([2 / 3, 7 / 9, 23 / 27, 23 / 27])


def test_a_draft_that_stopped_failed_where_it_did() -> None:
    stats = AcceptanceStats()
    for _ in range(100):
        stats.add(PASSED, 6)
    assert stats.chances()[2] > 0.8 > 0.2 > stats.chances()[3]
    assert stats.shares_made()[2] == 1.0
    assert stats.shares_made()[3] < 0.2
    stats.add([], 6)  # it had nothing to say, which says nothing of its guesses
    assert stats.chances()[0] > 0.8


def test_older_drafts_weigh_less() -> None:
    assert chances(*[FAILED] * 50)[0] < 0.2
    assert chances(*[FAILED] * 50, *[PASSED] * 50)[0] > 0.8
    assert all(0 <= chance <= 1 for chance in chances(*[FAILED] * 50, *[PASSED] * 5))


def test_what_the_first_draft_of_a_run_reads_is_put_down_to_the_tokens_of_its_prompt() -> None:
    costs = CostModel(FLAT)
    learn(costs, NAME, 0.1)
    for first in (15.1, 3.1):  # the first one set something up
        choosing = DraftLengthController([(1, False), (0, False)], costs, prompt_tokens=1500)
        k = choosing.choose(100, None, ONE_BY_ONE)
        drafted = (DraftedToken(0, DraftOutcome.ACCEPTED, 1, 1, 0),) * k
        choosing.choose(100, Round(0, drafted, (), first, 1.0, first + 1, k), ONE_BY_ONE)
        assert costs.drafts[NAME].reading * 1500 == pytest.approx(first - 0.1)
    assert costs.drafts[NAME].of(1) == pytest.approx(0.1)


def test_longer_drafts_are_never_taken_to_cost_less() -> None:
    cost = DraftCost()
    for tokens, seconds in ((1, 1.0), (4, 0.9)) * 20:
        cost.add(tokens, seconds)
    assert cost.of(1) == pytest.approx(0.9, rel=0.2)
    assert 0 <= float(cost.of(4) or 0) - float(cost.of(1) or 0) < 0.2


# The choice ------------------------------------------------------------------------------------------------

Chance = Callable[[int], float]  # how likely a guess passes, by the tokens written so far


class AtOnce(Drafter):
    """Whose draft costs the same however long it is."""

    name, parallel_drafting = "at once", True


# Seconds of passes by their tokens, of a drafted token (of a draft, if the drafter drafts at once), and the chance.
World = tuple[dict[int, float], float, Chance]
RIGHT, WRONG, UNREAD = (
    (DraftedToken(0, outcome, 0.5, 0.5, 0.5),)
    for outcome in (DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED)
)


def speed(
    k: int | str,
    world: World,
    seed: int = 1,
    tokens: int = 1000,
    drafter: Drafter = ONE_BY_ONE,
    unread: float = 0.0,
    stops: bool = False,
) -> float:
    """Tokens per second of a run in a world where guesses pass by chance.

    A draft takes `unread` seconds more for every token that was written since the last one. One that `stops` knows the
    chances, and ends at `Drafter.stop_below`.
    """
    passes, draft, chance = world
    costs, true_passes = CostModel(passes), np.interp(range(MAX_K + 2), list(passes), list(passes.values())).tolist()
    learn(costs, drafter.name, draft)
    choosing, luck = DraftLengthController(k, costs), random.Random(seed)
    written, seconds, last, read = 0, 0.0, None, 0
    while written < tokens:
        most = asked = choosing.choose(tokens - written - 1, last, drafter)
        if stops and asked:
            passing = list(accumulate((chance(written + i) for i in range(asked)), mul))
            asked = next((i + 1 for i in range(asked) if passing[i] < drafter.stop_below), asked)
        passed = next((i for i in range(asked) if luck.random() >= chance(written + i)), asked)
        drafted = RIGHT * passed + WRONG * (passed < asked) + UNREAD * (asked - passed - 1)
        drafting, checking = (
            draft * drafter.steps(asked),
            true_passes[asked + 1] * luck.gauss(1, 0.02),
        )
        if asked:
            drafting, read = drafting + unread * (written - read), written
        last = Round(0, drafted, (), drafting, checking, drafting + checking, most)
        written, seconds = written + passed + 1, seconds + drafting + checking
    return written / seconds


def always(chance: float) -> Chance:
    return lambda written: chance


CPU = {1: 1.0, 2: 1.08, 3: 0.98, 6: 1.04, 9: 1.24, 17: 1.66}
RISING = {1: 1.0, 5: 1.27, 9: 1.54, 17: 2.7}
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


FIXED = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)  # no other K is faster by as much as one percent in any of these worlds


@pytest.mark.parametrize("drafter", [ONE_BY_ONE, AtOnce()], ids=["one by one", "at once"])
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_auto_is_never_slower_than_the_target_alone_and_close_to_the_best_fixed_k(
    world: World, drafter: Drafter
) -> None:
    auto, *fixed = (fmean(speed(k, world, seed, drafter=drafter) for seed in range(3)) for k in (AUTO, *FIXED))
    assert auto >= 0.97 * fixed[0]
    assert auto >= 0.95 * max(fixed)


def test_a_drafter_that_knows_how_good_its_guesses_are_beats_every_fixed_k() -> None:
    world: World = (RISING, 0.12, lambda written: 0.95 if random.Random(written).random() < 0.6 else 0.15)
    auto, *fixed = (speed(k, world, drafter=OneByOne(), stops=True) for k in (AUTO, *FIXED))
    assert auto > 1.05 * max(fixed)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("draft", [0.05, 0.15, 0.72])
def test_a_drafter_that_stops_meets_both_goals(draft: float, chance: float) -> None:
    world: World = (RISING, draft, always(chance))
    auto, *fixed = (speed(k, world, drafter=OneByOne(), stops=True) for k in (AUTO, *FIXED))
    assert auto >= 0.97 * fixed[0]
    assert auto >= 0.95 * max(fixed)


def test_auto_notices_when_guesses_begin_to_pass() -> None:
    alone = speed(0, (CPU, 0.1, always(0.0)))
    late: World = (CPU, 0.1, lambda written: 0.9 if written > 500 else 0.0)
    assert speed(AUTO, late) > 1.25 * alone
    assert speed(AUTO, late, unread=0.02) > 1.2 * alone  # what was written at rest is read once, and that is no habit


def test_auto_rests_the_longer_the_more_a_draft_loses() -> None:
    def longest_rest(draft: float, passing: int) -> int:
        costs, rest, longest, last = CostModel(CPU), 0, 0, None
        learn(costs, NAME, draft)
        choosing, drafts = DraftLengthController(AUTO, costs), 0
        for _ in range(400):
            k = choosing.choose(1000, last, ONE_BY_ONE)
            rest = 0 if k else rest + 1
            longest, drafts = max(longest, rest), drafts + (k > 0)
            outcome = DraftOutcome.ACCEPTED if passing and drafts % passing == 0 else DraftOutcome.REJECTED
            drafted = (DraftedToken(0, outcome, 0.5, 0.5, 0.5),) * k
            last = Round(0, drafted, (), draft * k, 1.0, 1.0 + draft * k, k)
        return longest

    assert longest_rest(0.72, passing=0) > 40
    assert 0 < longest_rest(0.35, passing=3) < 20  # a third of the guesses pass: that all but pays


def test_auto_learns_of_each_drafter_apart() -> None:
    costs = CostModel(CPU)
    sources = ONE_BY_ONE, AtOnce()
    for source in sources:
        learn(costs, source.name, 0.2)
    choosing, last, chosen = DraftLengthController(AUTO, costs), None, []
    for turn in range(40):
        source, outcome = sources[turn % 2], DraftOutcome.ACCEPTED if turn % 2 else DraftOutcome.REJECTED
        k = choosing.choose(100, last, source)
        drafted = (DraftedToken(0, outcome, 0.5, 0.5, 0.5),) * k
        drafting = 0.2 * source.steps(k)
        last = Round(0, drafted, (), drafting, 1.0, 1.0 + drafting, k)
        chosen.append(k)
    assert chosen[-20::2].count(0) >= 8  # but for a try now and then
    assert min(chosen[-9::2]) > 8


def test_a_drafter_that_nothing_is_known_of_is_asked_for_one_token() -> None:
    assert chosen_by(CostModel(FLAT), [5.0, 0.0, 0.0, 0.0]) == [1, 1, 1, MAX_K]  # the first may have read the prompt


def test_a_draft_that_was_held_up_is_forgotten() -> None:
    assert chosen_by(CostModel(FLAT), [0.1, 5.0, 0.1, 0.1, 0.1])[-1] > 1
    costs = CostModel(FLAT)
    for seconds in (0.1, 0.1, 5.0):
        costs.drafts[NAME].add(1, seconds)
    assert costs.drafts[NAME].of(1) == pytest.approx(0.1, rel=0.25)


def test_a_drafter_that_once_seemed_too_dear_is_tried_again_however_short_the_runs() -> None:
    costs = CostModel(FLAT)
    learn(costs, NAME, 4.0)
    costs.idle[NAME] = 0
    chosen = [chosen_by(costs, [0.1] * 19) for _ in range(50)]
    assert chosen[0] == [0] * 19
    assert chosen[-1][1:] == [MAX_K] * 18


def test_a_drafter_whose_first_draft_is_dear_is_seldom_tried_in_short_runs() -> None:
    costs = CostModel(FLAT)
    learn(costs, NAME, 0.7)
    tried = [chosen_by(costs, [5.0, 0.7, 0.7], most=3) for _ in range(500)]
    assert (
        1 < sum(map(any, tried)) <= 1 + PROBING * 3 * 500 / 2
    )  # once since nothing is known; a try loses over 2 tokens


def test_a_drafter_that_nothing_was_tested_of_is_tried_once_and_goes_on_if_it_pays() -> None:
    for seconds, tries in ((0.2, 5), (2.0, 1)):
        costs = CostModel(FLAT)
        learn(costs, NAME, seconds)
        assert sum(map(bool, chosen_by(costs, [seconds] * 5))) == tries


def test_a_drafter_that_was_good_begins_at_once_unless_the_text_is_too_short_to_pay_for_it() -> None:
    costs = CostModel(FLAT)
    for _ in range(20):
        chosen_by(costs, [5.0] + [0.1] * 9)
    assert chosen_by(costs, [5.0])[0] > 4
    assert chosen_by(costs, [5.0], most=3) == [0]


def chosen_by(costs: CostModel, drafting: Sequence[float], most: int = 100) -> list[int]:
    """The K of as many rounds, with `most` tokens left, whose drafts take these seconds in turn and pass whole."""
    choosing, passed = DraftLengthController(AUTO, costs), DraftedToken(0, DraftOutcome.ACCEPTED, 1, 1, 0)
    last, chosen, left = None, [], iter(drafting)
    for _ in drafting:
        chosen.append(choosing.choose(most, last, ONE_BY_ONE))
        seconds = next(left) if chosen[-1] else 0.0
        last = Round(0, (passed,) * chosen[-1], (), seconds, 1.0, seconds + 1, chosen[-1])
    return chosen


@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_a_fixed_k_is_what_was_asked_for_and_needs_no_costs(k: int) -> None:
    assert [DraftLengthController(k, None).choose(most, None, ONE_BY_ONE) for most in (20, 3, 0)] == [k, min(k, 3), 0]


def test_auto_stays_below_its_limit() -> None:
    costs = CostModel(FLAT, most_k=8)
    learn(costs, NAME, 0.0)
    assert max(chosen_by(costs, [0.0] * 20)) == 8


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=MAX_K, max_size=MAX_K),
    st.lists(st.floats(0, 1), min_size=MAX_K, max_size=MAX_K),
    st.floats(0, 0.3),
)
def test_no_other_length_than_the_chosen_one_has_a_higher_rate(
    steps: list[float], chances: list[float], drafting: float
) -> None:
    costs = CostModel({tokens: 1 + sum(steps[: tokens - 1]) for tokens in range(1, MAX_K + 2)})
    for tokens in (1, 2, 1, 2):
        costs.drafts[NAME].add(tokens, drafting * tokens)
    stats = costs.acceptance[NAME]
    stats.tested, stats.passed = np.full(MAX_K, 1e6), 1e6 * np.array(chances)
    passing = list(accumulate(stats.chances(), mul))
    rates = [
        (1 + sum(passing[:k])) / (costs.passes[k + 1] + float(costs.drafts[NAME].of(k) or 0))
        for k in range(1, MAX_K + 1)
    ]
    best = best_length(costs, Kind(ONE_BY_ONE), MAX_K)
    assert best is not None
    assert best.rate == pytest.approx(max(rates))
    assert rates[best.k - 1] == pytest.approx(best.rate)
