"""The theory against known tables, against brute force and by hand; and the gap to a measured race."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.decoding.events import Event, Prefilled, Round
from specdemo.errors import BadInput
from specdemo.racing.figures import expected_tokens
from specdemo.settings import MAX_K
from specdemo.studies import theory
from specdemo.studies.explain import _shapley, explain
from specdemo.studies.theory import Costs, best_k, break_even, speed_up
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind

from ..sentences import gist, refuses, tells

A, R, U = DraftOutcome.ACCEPTED, DraftOutcome.REJECTED, DraftOutcome.UNTESTED
SLOW_PAIR = Costs(22.09 / 29.92)  # a published pair of Qwen3 0.6B and 4B
KS = (1, 2, 3, 4, 5, 6, 8, 10)

probability = st.floats(0, 1)
cost = st.floats(0, 2)


# The formulas ----------------------------------------------------------------------------------------------


def test_the_ideal_and_the_break_even_of_a_published_pair() -> None:
    rows = theory.table(SLOW_PAIR, ks=KS)
    ideal = [1.151, 1.211, 1.244, 1.265, 1.279, 1.289, 1.303, 1.312]
    even = [0.738, 0.814, 0.856, 0.882, 0.901, 0.914, 0.932, 0.944]
    assert [row["k"] for row in rows] == list(KS)
    assert [row["ideal_speedup"] for row in rows] == pytest.approx(ideal, abs=5e-4)
    assert [row["break_even_alpha"] for row in rows] == pytest.approx(even, abs=5e-4)


def brute_force(alpha: float, k: int) -> float:
    """Tokens of a round, over every way K tests can end, each with its probability."""
    total = 0.0
    for tests in product([True, False], repeat=k):
        chance = 1.0
        for passed in tests:
            chance *= alpha if passed else 1 - alpha
        accepted = tests.index(False) if False in tests else k
        total += chance * (accepted + 1)
    return total


@given(probability, st.integers(0, 8))
def test_expected_tokens_are_those_of_every_way_the_tests_can_end(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx(brute_force(alpha, k))


@given(st.floats(0, 0.999), st.integers(0, MAX_K))
def test_expected_tokens_are_the_papers_quotient(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_the_speed_up_of_simulated_rounds() -> None:
    alpha, k, costs = 0.7, 4, Costs(0.05, [1, 1.1, 1.15, 1.2, 1.3])
    passed = torch.rand(200_000, k, generator=torch.Generator().manual_seed(0)) < alpha
    tokens = (passed.long().cumprod(1).sum(1) + 1).double().mean()
    seconds = k * 0.05 + 1.3
    assert speed_up(alpha, k, costs) == pytest.approx(float(tokens) / seconds, rel=0.01)


def test_speed_ups_by_hand() -> None:
    assert speed_up(0.5, 2, Costs(0.25)) == pytest.approx(1.75 / 1.5)
    assert speed_up(0.5, 2, Costs(0.25, [1, 1, 1.5])) == pytest.approx(1.75 / 2)
    assert speed_up(1.0, 3, Costs(0)) == 4
    assert speed_up(0.9, 0, Costs(5.0)) == 1


@given(st.integers(1, MAX_K), cost, st.floats(1, 3))
def test_break_even_is_where_the_speed_up_crosses_one(k: int, c: float, v: float) -> None:
    costs = Costs(c, [1.0, *[v] * MAX_K])
    even = break_even(k, costs)
    if even is None:
        assert speed_up(1.0, k, costs) < 1
    elif even == 0:
        assert speed_up(0.0, k, costs) >= 1 - 1e-12
    else:
        assert speed_up(even, k, costs) == pytest.approx(1)
        assert speed_up(min(1.0, even + 0.01), k, costs) > 1 or even == 1


def test_a_drafter_that_drafts_all_at_once_pays_once() -> None:
    costs = Costs(0.25, [1, 1, 1.5], parallel=True)
    assert (costs.round(0), costs.round(1), costs.round(2)) == (1, 1.25, 1.75)
    assert speed_up(0.5, 2, costs) == pytest.approx(1.75 / 1.75)
    assert best_k(1.0, Costs(0.5, parallel=True)) == MAX_K
    assert theory.table(costs)[1]["ideal_speedup"] == pytest.approx(3 / 1.25)
    assert tells(theory.in_words(costs)[0], "A 25.0% however")


@given(probability, cost)
def test_no_k_is_better_than_the_best(alpha: float, c: float) -> None:
    best = best_k(alpha, Costs(c))
    assert all(speed_up(alpha, best, Costs(c)) >= speed_up(alpha, k, Costs(c)) for k in range(MAX_K + 1))


def test_the_best_k_by_hand() -> None:
    assert best_k(0.5, SLOW_PAIR) == 0
    assert best_k(1.0, Costs(0.0)) == MAX_K
    assert best_k(0.8, Costs(0.0, [1, 1, 1.05, 2])) == 2  # a pass over four tokens costs two
    assert best_k(0.0, Costs(0.0)) == 0  # a tie goes to not speculating


def test_in_words() -> None:
    assert [*map(gist, theory.in_words(SLOW_PAIR, 0.5)[1:])] == ["To 74% K 1", "If 50% no K"]
    assert tells(theory.in_words(Costs(0.001))[1], "faster hardly")
    assert tells(theory.in_words(Costs(1.2))[1], "With faster accepted")
    assert gist(theory.in_words(Costs(0.73), 0.9)[2]) == "If 90% K 2 1.10×"


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_costs_and_chances_that_are_none_are_refused(wrong: float) -> None:
    with refuses(BadInput, "0"):
        Costs(wrong)
    with refuses(BadInput, "probability"):
        theory.table(SLOW_PAIR, wrong)


# The gap to a measured race --------------------------------------------------------------------------------


def round_(
    outcomes: list[DraftOutcome], draft: float, verify: float, seconds: float, emitted: int | None = None
) -> Round:
    drafted = tuple(DraftedToken(0, outcome, 0.5, 0.5, 0.5) for outcome in outcomes)
    tokens = (Token(0, TokenKind.ACCEPTED, 0.5),) * (outcomes.count(A) + 1 if emitted is None else emitted)
    return Round(0, drafted, tokens, draft, verify, seconds)


def prefilled(seconds: float) -> Prefilled:
    return Prefilled(5, Token(1, TokenKind.TARGET, 0.5), seconds)


PLAIN: list[Event] = [prefilled(0.3), *[round_([], 0.0, 0.10, 0.11)] * 12]
SPECULATIVE: list[Event] = [
    prefilled(0.3),
    round_([A, A, R, U], 0.02, 0.13, 0.17),
    round_([A, A, A, A], 0.02, 0.13, 0.16),
    round_([], 0.01, 0.10, 0.12),
    round_([R, U], 0.01, 0.11, 0.13),
    round_([A, A], 0.01, 0.11, 0.13, emitted=2),  # the text ended after the second
]


def test_the_parts_by_hand_add_up_to_the_gap() -> None:
    found = explain(PLAIN, SPECULATIVE)
    measured = (12 / 0.705) / (12 / 1.32)  # after the prompt, of which the first draft read 0.005 s
    assert found.measured == pytest.approx(measured)
    assert found.parts[-1].speedup == pytest.approx(found.measured)
    assert found.predicted + sum(part.change for part in found.parts) == pytest.approx(measured)
    alpha = 8 / 10  # of ten tested eight passed; 0.065 s of drafts over twelve tokens, in passes of 0.1 s
    assert (found.k, found.alpha) == (4, pytest.approx(alpha))
    assert found.draft_cost == pytest.approx(0.65 / 12)
    assert found.verify_cost == pytest.approx(1.16)
    assert found.by_position == (3 / 4, 1, 1 / 2, 1)  # of what was tested
    assert found.predicted == pytest.approx(expected_tokens(alpha, 4) / (1 + 4 * 0.65 / 12))
    assert [part.name for part in found.parts] == ["drafts", "positions", "rounds", "checking", "overhead"]


def test_what_a_part_is_worth_does_not_depend_on_an_order() -> None:
    values = {"": 1.0, "a": 2.0, "b": 4.0, "ab": 9.0}
    found = _shapley(lambda there: values["".join(sorted(there))], ["a", "b"])
    assert found == pytest.approx({"a": ((2 - 1) + (9 - 4)) / 2, "b": ((4 - 1) + (9 - 2)) / 2})


def test_drafts_made_at_once_are_explained_by_what_a_draft_costs() -> None:
    plain: list[Event] = [prefilled(0.0), *[round_([], 0.0, 0.1, 0.1)] * 15]
    rounds = [round_([A, A, A, A], 0.02, 0.1, 0.12), round_([A, A], 0.02, 0.1, 0.12), round_([], 0.0, 0.1, 0.1)] * 3
    found = explain(plain, [prefilled(0.0), *rounds], parallel=True)
    assert (found.parallel, found.draft_cost) == (True, pytest.approx(0.2))
    assert found.predicted == pytest.approx(5 / 1.2)
    assert found.parts[-1].speedup == pytest.approx(found.measured)
    assert tells(found.in_words()[0], "100% 20%")


@pytest.mark.parametrize("reading", [0, 0.5])
def test_a_race_that_follows_the_theory_leaves_no_gap(reading: float) -> None:
    """The first draft takes longer by the seconds in which it reads the prompt: they are no part of the rounds."""
    plain: list[Event] = [prefilled(0.3), *[round_([], 0.0, 0.1, 0.1)] * 15]
    first = round_([A, A], 0.02 + reading, 0.1, 0.12 + reading)
    found = explain(plain, [prefilled(0.2), first, *[round_([A, A], 0.02, 0.1, 0.12)] * 4])
    assert found.predicted == pytest.approx(3 / 1.2) == found.measured
    assert [part.change for part in found.parts] == pytest.approx([0] * 5)


def test_a_position_that_was_never_tested_has_no_acceptance() -> None:
    never_tested = round_([A, R, U], 0.02, 0.13, 0.17)
    assert explain(PLAIN, [prefilled(0.3), never_tested]).by_position == (1, 0, None)


@pytest.mark.parametrize("lanes", [([], []), (PLAIN, PLAIN), (PLAIN[:1], SPECULATIVE)])
def test_a_race_without_tests_is_refused(lanes: tuple[list[Event], list[Event]]) -> None:
    with refuses(BadInput, "explain"):
        explain(*lanes)
