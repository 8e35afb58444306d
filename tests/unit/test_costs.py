"""What K = auto knows: the costs of passes and drafts, and how likely a guess passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torch import Tensor

from specdemo.decoding import measuring
from specdemo.decoding.costs import FOLLOW, FORGET, OUTLIER, DraftStats
from specdemo.decoding.events import Round
from specdemo.decoding.loop import Form
from specdemo.decoding.measuring import LENGTHS, Trial, measure_passes
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_K, Settings
from specdemo.system.progress import Stopped, attended
from specdemo.tokens import DraftedToken, DraftOutcome
from tests.harness.classes import CostModel, DraftLengthController
from tests.harness.doubles import TableRunner, random_table
from tests.unit.test_control import FLAT, NAME, ONE_BY_ONE, STEEP, AtOnce, cost_of, learn


def measured(runner: TableRunner, settings: Settings | None = None) -> CostModel:
    return CostModel(measure_passes(runner, rule_for(settings or Settings())))


def test_costs_between_the_measured_lengths_lie_on_a_line() -> None:
    costs = CostModel({1: 0.02, 3: 0.03, 17: 0.1})
    assert costs.passes[1:4] == pytest.approx([1.0, 1.25, 1.5])
    assert costs.passes[10] == pytest.approx(3.25)
    assert costs.baseline_seconds == 0.02


def test_no_pass_is_taken_to_cost_more_than_a_longer_one() -> None:
    costs = CostModel({1: 0.03, 2: 0.02, 4: 0.05, 9: 0.04})
    assert costs.baseline_seconds == 0.02
    assert costs.passes[1:] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])


def test_a_pass_longer_than_auto_takes_leaves_the_baseline_alone() -> None:
    costs = CostModel({1: 1.0, 9: 1.2})
    for _ in range(20):
        costs.learn_pass([MAX_K + 1], 1.7)
    assert costs.baseline_seconds == 1.0


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

    monkeypatch.setattr(measuring, "CALIBRATION_SECONDS", 0.5)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now))
    runner = Timed(random_table(1), capacity=MAX_K + 2)
    costs = measured(runner, Settings(temperature=1, top_p=0.9))
    assert costs.baseline_seconds == pytest.approx(0.002)
    assert costs.passes[1:] == pytest.approx([(1 + tokens) / 2 for tokens in range(1, MAX_K + 2)])
    assert set(read) == set(LENGTHS)
    assert runner.released


@pytest.mark.parametrize("most_k", [1, 4, 6, 7, 8, MAX_K])
def test_a_calibration_reaches_as_far_as_auto_does_and_no_further(most_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableRunner, "exact_rows", most_k + 1)
    runner = TableRunner(random_table(1), capacity=MAX_K + 2)
    costs = measured(runner)
    assert {len(ids) for _, ids in runner.passes} == {*(n for n in LENGTHS if n <= most_k), most_k + 1}
    assert len(costs.passes) == most_k + 2  # or the cost of the largest K would be looked up past the end
    learn(costs, ONE_BY_ONE.name, 1e-9)
    assert 0 <= DraftLengthController(costs).choose(1000, None, ONE_BY_ONE, ())[0] <= most_k


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
        costs.learn_pass([1], seconds)
        costs.learn_pass([5], 5 * seconds)
    assert costs.passes == pytest.approx(before, rel=0.1)
    assert costs.baseline_seconds == pytest.approx(4, rel=0.1)


def test_an_outlier_counts_for_little() -> None:
    costs = CostModel(FLAT)
    costs.learn_pass([4], 60.0)
    assert costs.passes[4] == pytest.approx(OUTLIER**FOLLOW)
    assert costs.baseline_seconds < OUTLIER


def test_a_calibration_that_was_far_off_is_unlearnt_even_late() -> None:
    costs = CostModel(FLAT)
    for _ in range(10 * 100):
        costs.learn_pass([1], 1.0)
        costs.learn_pass([5], 1.0)
    for _ in range(4 * 100):
        costs.learn_pass([1], 1.0)
        costs.learn_pass([5], 1.4)
    assert costs.passes[5] / costs.passes[1] == pytest.approx(1.4, rel=0.03)


def test_a_draft_costs_a_constant_and_something_for_each_token() -> None:
    costs = CostModel(FLAT)
    assert cost_of(costs.drafts[NAME, False], 1) == 0
    for _ in range(9):
        for tokens in (1, 4):
            costs.drafts[NAME, False].learn_cost(tokens, 0.3 + 0.1 * tokens)
    stats = costs.drafts[NAME, False]
    assert [cost_of(stats, tokens) for tokens in (1, 4, 8)] == pytest.approx([0.4, 0.7, 1.1], rel=0.1)


@pytest.mark.parametrize("change", [0.33, 3.0])
def test_what_drafts_of_other_lengths_once_cost_is_forgotten(change: float) -> None:
    costs = CostModel(FLAT)
    for tokens in list(range(1, 9)) * 9:
        costs.drafts[NAME, False].learn_cost(tokens, 0.2 * tokens)
    for _ in range(100):
        costs.drafts[NAME, False].learn_cost(1, 0.2 * change)
    assert cost_of(costs.drafts[NAME, False], 1) == pytest.approx(0.2 * change, rel=0.1)


def test_what_drafts_of_one_length_cost_is_put_down_to_their_tokens() -> None:
    costs = CostModel(FLAT)
    for _ in range(5):
        costs.drafts[NAME, False].learn_cost(2, 0.5)
    assert [cost_of(costs.drafts[NAME, False], tokens) for tokens in (1, 2, 8)] == pytest.approx([0.25, 0.5, 2.0])


def test_a_draft_made_at_once_costs_the_same_however_long_it_is() -> None:
    costs = CostModel(FLAT, [AtOnce.name])
    for tokens in (1, 8, 3):
        costs.drafts[NAME, False].learn_cost(costs.steps(AtOnce.name, tokens), 0.2)
    stats = costs.drafts[NAME, False]
    assert [cost_of(stats, costs.steps(AtOnce.name, tokens)) for tokens in (1, 16)] == pytest.approx([0.2, 0.2])


# The chances -----------------------------------------------------------------------------------------------

PASSED, FAILED = [DraftOutcome.ACCEPTED] * 3, [DraftOutcome.REJECTED, DraftOutcome.UNTESTED, DraftOutcome.UNTESTED]


def chances(*drafts: Sequence[DraftOutcome]) -> list[float]:
    """What is believed after these drafts."""
    stats = DraftStats()
    for outcomes in drafts:
        stats.learn(outcomes, len(outcomes))
    return stats.chances()


def test_the_chance_of_a_guess_is_even_until_tests_say_more() -> None:
    assert chances() == [0.5] * MAX_K
    assert chances(PASSED)[:4] == pytest.approx([2 / 3, 7 / 9, 23 / 27, 23 / 27])


def test_a_draft_that_stopped_says_nothing_of_the_guesses_that_it_did_not_make() -> None:
    stats = DraftStats()
    for outcomes in [PASSED] * 50 + [FAILED] * 50 + [[]] * 50:
        stats.learn(outcomes, 6)
    assert stats.chances()[0] < 0.2
    assert stats.tested[:4] == pytest.approx([20, 20 * FORGET**50, 20 * FORGET**50, 0], rel=0.1)


def test_older_drafts_weigh_less() -> None:
    assert chances(*[FAILED] * 50)[0] < 0.2
    assert chances(*[FAILED] * 50, *[PASSED] * 50)[0] > 0.8
    assert all(0 <= chance <= 1 for chance in chances(*[FAILED] * 50, *[PASSED] * 5))


def test_what_the_first_draft_of_a_run_reads_is_no_part_of_what_drafts_cost() -> None:
    costs, prompt = CostModel(FLAT), range(1500)
    learn(costs, NAME, 0.1)
    for _ in range(2):
        choosing = Trial(costs, Form(1))
        last = None
        for seconds in (15.1, 0.1):
            k, *_ = choosing.choose(100, last, ONE_BY_ONE, prompt)
            last = Round(0, (DraftedToken(0, DraftOutcome.ACCEPTED, 1, 1, 0),) * k, (), seconds, 1.0, seconds + 1, k)
    assert cost_of(costs.drafts[NAME, False], 1) == pytest.approx(0.1)


def test_longer_drafts_are_never_taken_to_cost_less() -> None:
    cost = DraftStats()
    for tokens, seconds in ((1, 1.0), (4, 0.9)) * 20:
        cost.learn_cost(tokens, seconds)
    assert cost_of(cost, 1) == pytest.approx(0.9, rel=0.2)
    assert 0 <= cost_of(cost, 4) - cost_of(cost, 1) < 0.2


def test_those_readers_who_draft_share_what_their_drafts_add_to_a_pass() -> None:
    """The fifth row of a pass costs as much as six tenths of the first four, and those after it less."""
    costs = CostModel({1: 1.0, 4: 1.0, 5: 1.6, 6: 1.6, 8: 2.0})
    assert costs.shares(4)[1:3] == pytest.approx([0.25, 0.25 + 1.0 / 4])  # all four draft a token
    for _ in range(40):
        costs.learn_pass([1, 2, 1, 1], 1.6)
    assert costs.shares(4)[1:3] == pytest.approx([0.25, 0.25 + 0.6])
    for _ in range(40):
        costs.learn_pass([2, 2, 2, 2], 2.0)
    assert costs.shares(4)[1:3] == pytest.approx([0.25, 0.25 + 1.0 / 4])
