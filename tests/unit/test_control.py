"""K = auto: never much slower than the target alone, never far from the best fixed K.

That it is exact whatever the clock says is tested in `test_texts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from statistics import fmean

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdemo.decoding.adaptive_k import PROBING, Readers, best_length
from specdemo.decoding.costs import DraftStats
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Round
from specdemo.types import AUTO, MAX_K, DraftedToken, DraftOutcome, Token, TokenKind
from tests.harness.classes import CostModel, DraftLengthController

FLAT = {1: 1.0, MAX_K + 1: 1.0}
STEEP = {1: 1.0, MAX_K + 1: MAX_K + 1.0}
NAME = "one by one"


class OneByOne(Drafter):
    """Whose draft costs more for every token."""

    name = NAME


ONE_BY_ONE = OneByOne()


def learn(costs: CostModel, drafter: str, seconds: float) -> None:
    """What a draft of one token costs."""
    for _ in range(2):
        costs.drafts[drafter, False].learn_cost(1, seconds / costs.baseline_seconds)


def cost_of(stats: DraftStats, steps: int) -> float:
    """Of a draft of this many steps."""
    constant, each = stats.line()
    return constant + each * steps


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
        drafting, checking = (draft * drafter.steps(asked), true_passes[asked + 1] * luck.gauss(1, 0.02))
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "drafter", [pytest.param(ONE_BY_ONE, id="one by one"), pytest.param(AtOnce(), id="at once", marks=pytest.mark.slow)]
)
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("draft", [0.05, 0.15, 0.72])
def test_a_drafter_that_stops_meets_both_goals(draft: float, chance: float) -> None:
    world: World = (RISING, draft, always(chance))
    auto, *fixed = (speed(k, world, drafter=OneByOne(), stops=True) for k in (AUTO, *FIXED))
    assert auto >= 0.97 * fixed[0]
    assert auto >= 0.95 * max(fixed)


def speed_of_all(
    k: int | str, readers: int, draft: float, prompt: float, chance: float, passes: dict[int, float], rounds: int = 1000
) -> float:
    """Tokens per second of readers that share passes and drafts, which nothing is known of at first.

    A draft of one token takes `draft` seconds for one reader, and a fifth of that for each more. A reader's first draft
    takes `prompt` seconds more.
    """
    together = {1: passes[1]} | {readers * tokens: float(all_passes(passes, readers * tokens)) for tokens in (1, 2, 3)}
    costs, luck = CostModel(together), random.Random(readers)
    shared = Readers(readers)
    choosing = [DraftLengthController(k, costs, prompt_tokens=50, readers=shared) for _ in range(readers)]
    last, fresh = list[Round | None]([None] * readers), set(range(readers))
    written, seconds = 0, 0.0
    for _ in range(rounds):
        asked = [each.choose(100, before, ONE_BY_ONE) for each, before in zip(choosing, last, strict=True)]
        drafting = [0.0] * readers
        for place in range(max(asked)):
            those = [reader for reader in range(readers) if asked[reader] > place]
            for reader in those:
                drafting[reader] += draft * (1 + 0.2 * (len(those) - 1)) / len(those)
        for reader in {reader for reader in fresh if asked[reader]}:
            drafting[reader] += prompt
            fresh.remove(reader)
        rows = [1 + count for count in asked]
        one_row = float(all_passes(passes, sum(rows))) / sum(rows)
        for reader, count in enumerate(asked):
            passed = next((i for i in range(count) if luck.random() >= chance), count)
            drafted = RIGHT * passed + WRONG * (passed < count) + UNREAD * (count - passed - 1)
            checking = one_row * rows[reader]
            last[reader] = Round(0, drafted, (), drafting[reader], checking, drafting[reader] + checking, count)
            written, seconds = written + passed + 1, seconds + drafting[reader] + checking
    return written / seconds


def all_passes(passes: dict[int, float], tokens: int) -> float:
    """The seconds of a pass; of a longer one than those known, as if it went on in proportion."""
    longest = max(passes)
    return float(np.interp(min(tokens, longest), list(passes), list(passes.values()))) * max(1.0, tokens / longest)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("passes", [RISING, FLAT], ids=["rising", "flat"])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("draft", "prompt"), [(0.0, 0.0), (0.1, 1.0)])
@pytest.mark.parametrize("readers", [2, 4, 8, 16])
def test_auto_is_never_slower_than_all_readers_with_a_drafter_or_without(
    readers: int, draft: float, prompt: float, chance: float, passes: dict[int, float]
) -> None:
    auto, *fixed = (speed_of_all(k, readers, draft, prompt, chance, passes) for k in (AUTO, 0, 1, 2))
    assert auto >= 0.97 * max(fixed)


def test_what_no_reader_has_tried_is_tried_by_one() -> None:
    """Where drafts do not pay; all of them begin where they do."""
    for passes, drafting in ((STEEP, 1), (FLAT, 16)):
        costs = CostModel({1: 1.0, 16: passes[MAX_K + 1], 32: 2 * passes[MAX_K + 1] if passes is STEEP else 1.0})
        readers = Readers(16)
        choosing = [DraftLengthController(AUTO, costs, readers=readers) for _ in range(16)]
        assert sum(bool(each.choose(9, None, ONE_BY_ONE)) for each in choosing) == drafting


class Looked(OneByOne):
    """Counts how often it is asked which drafter drafts."""

    looked = 0

    def draft_source(self, context: Sequence[int]) -> Drafter:
        self.looked += 1
        return self


class Restless(Readers):
    """Who are asked in each round."""

    def wait(self, rounds: float) -> None:
        pass


def not_due(readers: Readers) -> tuple[CostModel, Looked, list[DraftLengthController]]:
    """Readers who have been asked once, and whose next try is not due: a drafted token costs as much as a pass."""
    costs, drafter = CostModel({1: 1.0, 4: 1.0, 8: 2.0}), Looked()
    learn(costs, NAME, 1.0)
    costs.drafts[NAME, False].idle = 0.0
    choosing = [DraftLengthController(AUTO, costs, readers=readers) for _ in range(readers.count)]
    assert [each.choose(500, None, drafter) for each in choosing] == [0] * readers.count
    return costs, drafter, choosing


@pytest.mark.parametrize("count", [1, 4])
def test_readers_look_for_no_draft_until_one_is_due(count: int) -> None:
    """They try it in the very round in which they would if all were asked in each."""
    tried, looked = [], []
    for readers in (Readers(count), Restless(count)):
        _, drafter, choosing = not_due(readers)
        last, rounds = Round(0, (), (), 0.0, 1.0, 1.0, 0), 0
        while not choosing[rounds % count].choose(500, last, drafter):
            rounds += 1
        tried.append(rounds)
        looked.append(drafter.looked)
    assert tried[0] == tried[1] > 20 * count
    assert looked == [count + 1, count + tried[1] + 1]


def test_a_reader_who_comes_is_asked_while_the_others_rest() -> None:
    readers = Readers(4)
    costs, drafter, _ = not_due(readers)
    before, looked = readers.rest, drafter.looked
    assert DraftLengthController(AUTO, costs, readers=readers).choose(500, None, drafter) == 0
    assert drafter.looked == looked + 1
    assert 1 <= readers.rest <= before


def test_no_reader_rests_when_a_draft_has_shown_something_or_another_source_pays() -> None:
    readers = Readers(2)
    costs, drafter, choosing = not_due(readers)
    assert readers.rest >= 1
    tried = Round(0, (DraftedToken(0, DraftOutcome.ACCEPTED, 1, 1, 0),), (), 0.0, 1.0, 1.0, 1)
    choosing[1].choose(500, tried, drafter)
    assert readers.rest == 0
    both, free = InTurn((drafter, AtOnce())), costs.drafts[AtOnce.name, False]
    for _ in range(9):
        free.learn_cost(1, 0.0)
        free.learn([DraftOutcome.ACCEPTED], 1)
    for each in choosing:
        each.choose(500, None, both)
    assert readers.rest < 1


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


class InTurn(Drafter):
    """One drafter after the other drafts."""

    def __init__(self, sources: Sequence[Drafter]) -> None:
        self.all = sources

    @property
    def sources(self) -> Sequence[Drafter]:
        return self.all

    def draft_source(self, context: Sequence[int]) -> Drafter:
        return self.all[len(context) % len(self.all)]


def test_auto_learns_of_each_drafter_apart() -> None:
    costs, sources = CostModel(CPU), (ONE_BY_ONE, AtOnce())
    drafter = InTurn(sources)
    for source in sources:
        learn(costs, source.name, 0.2)
    choosing, last, chosen = DraftLengthController(AUTO, costs), None, []
    for turn in range(40):
        source, outcome = sources[turn % 2], DraftOutcome.ACCEPTED if turn % 2 else DraftOutcome.REJECTED
        k = choosing.choose(100, last, drafter, range(turn))
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
        costs.drafts[NAME, False].learn_cost(1, seconds)
    assert cost_of(costs.drafts[NAME, False], 1) == pytest.approx(0.1, rel=0.25)


def test_the_rounds_since_the_last_draft_are_counted() -> None:
    costs, rejected = CostModel(FLAT), (DraftedToken(0, DraftOutcome.REJECTED, 0, 1, 1),)
    learn(costs, NAME, 4.0)
    choosing, last = DraftLengthController(AUTO, costs), None
    assert choosing.choose(100, last, ONE_BY_ONE) == 1
    last = Round(0, rejected, (), 4.0, 1.0, 5.0, 1)
    for rounds in (1, 2, 3):
        assert choosing.choose(100, last, ONE_BY_ONE) == 0
        assert costs.drafts[NAME, False].idle == rounds
        last = Round(0, (), (), 0.0, 1.0, 1.0, 0)


def test_a_drafter_that_once_seemed_too_dear_is_tried_again_however_short_the_runs() -> None:
    costs = CostModel(FLAT)
    learn(costs, NAME, 4.0)
    costs.drafts[NAME, False].idle = 0
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


def test_what_a_try_has_to_read_first_counts_as_lost() -> None:
    """A head or a draft model reads the tokens that were written since its last draft, at 0.05 of a pass each."""
    costs, failed = CostModel(FLAT), DraftedToken(0, DraftOutcome.REJECTED, 0, 1, 1)
    choosing, token = DraftLengthController(AUTO, costs), (Token(0, TokenKind.RESAMPLED, 1),)
    last, rounds, read, lost = None, 3000, 0, 0.0
    for index in range(rounds):
        k = choosing.choose(100, last, ONE_BY_ONE)
        seconds = 0.1 + 0.05 * (index - read) if k else 0.0
        read, lost = index if k else read, lost + seconds
        last = Round(0, (failed,) * k, token, seconds, 1.0, seconds + 1, k)
    assert 0 < lost <= 2 * PROBING * rounds


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
    costs = CostModel({1: 1.0, 9: 1.0})
    learn(costs, NAME, 0.0)
    assert max(chosen_by(costs, [0.0] * 20)) == 8


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=MAX_K, max_size=MAX_K),
    st.lists(st.floats(0, 1), min_size=MAX_K, max_size=MAX_K),
    st.floats(0, 0.3),
    st.booleans(),
)
@example([1.0] * MAX_K, [0.0] * MAX_K, 0.1, True)  # the smallest is the best, and of a single token it is a chain
def test_no_other_draft_than_the_chosen_one_has_a_higher_rate(
    steps: list[float], chances: list[float], drafting: float, tree: bool
) -> None:
    """A token of a chain passes after all before it; one of a tree has a chance of its own."""
    costs = CostModel({tokens: 1 + sum(steps[: tokens - 1]) for tokens in range(1, MAX_K + 2)})
    for tokens in (1, 2, 1, 2):
        costs.drafts[NAME, tree].learn_cost(tokens, drafting * tokens)
    stats = costs.drafts[NAME, tree]
    stats.tested, stats.passed = [1e6] * MAX_K, [1e6 * chance for chance in chances]
    passing = stats.chances() if tree else list(accumulate(stats.chances(), mul))
    rates = {k: (1 + sum(passing[:k])) / (costs.passes[k + 1] + cost_of(stats, k)) for k in range(1 + tree, MAX_K + 1)}
    best = best_length(costs, stats, ONE_BY_ONE, tree)
    assert best.rate == pytest.approx(max(rates.values()))
    assert rates[best.k] == pytest.approx(best.rate)
