"""K = auto: never much slower than the target alone, never far from the best fixed K.

That it is exact whatever the clock says is tested in `test_texts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul
from statistics import fmean

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdemo.decoding.adaptive_k import PROBING, best_length
from specdemo.decoding.costs import DraftStats
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.either import Either
from specdemo.decoding.events import Round
from specdemo.decoding.loop import Chooser, Form, Given, fixed
from specdemo.settings import AUTO, MAX_K, Settings
from specdemo.tokens import DraftedToken, DraftOutcome, Token, TokenKind
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


def chooser_of(k: int | str, costs: CostModel) -> Chooser:
    return DraftLengthController(costs) if k == AUTO else Given(repeat(Form(int(k))))


def cost_of(stats: DraftStats, steps: int) -> float:
    """Of a draft of this many steps."""
    constant, each = stats.line()
    return constant + each * steps


# The choice ------------------------------------------------------------------------------------------------

Chance = Callable[[int], float]  # how likely a guess passes, by the tokens written so far


class AtOnce(Drafter):
    """Whose draft costs the same however long it is."""

    name = "at once"


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
    chances, and ends at `DraftOptions.stop_below`.
    """
    passes, draft, chance = world
    costs, true_passes = (
        CostModel(passes, [AtOnce.name]),
        np.interp(range(MAX_K + 2), list(passes), list(passes.values())).tolist(),
    )
    learn(costs, drafter.name, draft)
    choosing, luck = chooser_of(k, costs), random.Random(seed)
    written, seconds, last, read = 0, 0.0, None, 0
    while written < tokens:
        asked, _, stop_below = choosing.choose(tokens - written - 1, last, drafter, range(written), 1)
        most = asked
        if stops and asked:
            passing = list(accumulate((chance(written + i) for i in range(asked)), mul))
            asked = next((i + 1 for i in range(asked) if passing[i] < stop_below), asked)
        passed = next((i for i in range(asked) if luck.random() >= chance(written + i)), asked)
        drafted = RIGHT * passed + WRONG * (passed < asked) + UNREAD * (asked - passed - 1)
        drafting, checking = (draft * costs.steps(drafter.name, asked), true_passes[asked + 1] * luck.gauss(1, 0.02))
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
    choosing, text = [chooser_of(k, costs) for _ in range(readers)], range(50)
    last, fresh = list[Round | None]([None] * readers), set(range(readers))
    written, seconds = 0, 0.0
    for _ in range(rounds):
        asked = [one.choose(100, last[i], ONE_BY_ONE, text, readers)[0] for i, one in enumerate(choosing)]
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
    for longer, drafting in ((2.0, 1), (1.0, 16)):
        costs = CostModel({1: 1.0, 16: 1.0, 32: 1.0 + 16 * (longer - 1)})
        choosing = [DraftLengthController(costs) for _ in range(16)]
        assert sum(each.choose(9, None, ONE_BY_ONE, (), 16)[0] for each in choosing) == drafting


class Looked(Either):
    """Counts how often it is asked which drafter drafts."""

    looked = 0

    def choice(self, context: Sequence[int]) -> Drafter:
        self.looked += 1
        return self.first


@pytest.mark.parametrize("count", [1, 4])
def test_readers_look_for_no_draft_until_one_is_due_and_then_all_of_them_try(count: int) -> None:
    """A drafted token costs as much as a pass."""
    costs, drafter = CostModel({1: 1.0, 4: 1.0, 8: 2.0}), Looked(ONE_BY_ONE, ONE_BY_ONE)
    learn(costs, NAME, 1.0 / count)
    choosing = [DraftLengthController(costs) for _ in range(count)]
    last, tried = list[Round | None]([None] * count), list[list[int]]()
    while len(tried) < 300:
        tried.append([one.choose(500, last[i], drafter, (), count)[0] for i, one in enumerate(choosing)])
        last = [Round(0, WRONG * k, (), k / count, 1.0, 1.0, k) for k in tried[-1]]
    assert tried[0] == [1] * count
    assert count < drafter.looked == sum(map(sum, tried)) <= 6 * count


def test_the_form_that_pays_best_never_rests_and_the_others_are_tried() -> None:
    costs = CostModel(FLAT)
    for tree, seconds in ((False, 0.3), (True, 0.0)):
        for tokens in (2, 4, 2, 4):
            costs.drafts[NAME, tree].learn_cost(tokens, seconds * tokens)
    choosing, last, forms = DraftLengthController(costs, tree=True), None, list[tuple[int, bool]]()
    for _ in range(200):
        k, tree, _ = choosing.choose(100, last, ONE_BY_ONE, ())
        seconds = 0.0 if tree else 0.3 * k
        last = Round(0, RIGHT + WRONG * (k - 1), (), seconds, 1.0, 1.0 + seconds, k)
        forms.append((k, tree))
    assert all(k for k, _ in forms)
    assert 1 <= sum(not tree for _, tree in forms) < 20


def test_auto_notices_when_guesses_begin_to_pass() -> None:
    alone = speed(0, (CPU, 0.1, always(0.0)))
    late: World = (CPU, 0.1, lambda written: 0.9 if written > 500 else 0.0)
    assert speed(AUTO, late) > 1.25 * alone
    assert speed(AUTO, late, unread=0.02) > 1.2 * alone  # what was written at rest is read once, and that is no habit


def test_auto_rests_the_longer_the_more_a_draft_loses() -> None:
    def longest_rest(draft: float, passing: int) -> int:
        costs, rest, longest, last = CostModel(CPU), 0, 0, None
        learn(costs, NAME, draft)
        choosing, drafts = DraftLengthController(costs), 0
        for _ in range(400):
            k, *_ = choosing.choose(1000, last, ONE_BY_ONE, ())
            rest = 0 if k else rest + 1
            longest, drafts = max(longest, rest), drafts + (k > 0)
            outcome = DraftOutcome.ACCEPTED if passing and drafts % passing == 0 else DraftOutcome.REJECTED
            drafted = (DraftedToken(0, outcome, 0.5, 0.5, 0.5),) * k
            last = Round(0, drafted, (), draft * k, 1.0, 1.0 + draft * k, k)
        return longest

    assert longest_rest(0.72, passing=0) > 40
    assert 0 < longest_rest(0.35, passing=3) < 20  # a third of the guesses pass: that all but pays


class InTurn(Either):
    """One drafter after the other drafts."""

    def choice(self, context: Sequence[int]) -> Drafter:
        return self.other if len(context) % 2 else self.first


def test_auto_learns_of_each_drafter_apart() -> None:
    costs, sources = CostModel(CPU, [AtOnce.name]), (ONE_BY_ONE, AtOnce())
    drafter = InTurn(*sources)
    for source in sources:
        learn(costs, source.name, 0.2)
    choosing, last, chosen = DraftLengthController(costs), None, []
    for turn in range(40):
        source, outcome = sources[turn % 2], DraftOutcome.ACCEPTED if turn % 2 else DraftOutcome.REJECTED
        k, *_ = choosing.choose(100, last, drafter, range(turn))
        drafted = (DraftedToken(0, outcome, 0.5, 0.5, 0.5),) * k
        drafting = 0.2 * costs.steps(source.name, k)
        last = Round(0, drafted, (), drafting, 1.0, 1.0 + drafting, k)
        chosen.append(k)
    assert chosen[-20::2].count(0) >= 7  # but for a try now and then
    assert min(chosen[-9::2]) > 8


def test_a_drafter_that_nothing_is_known_of_is_asked_for_one_token() -> None:
    assert chosen_by(CostModel(FLAT), [5.0, 0.0, 0.0, 0.0]) == [1, 1, 1, MAX_K]  # the first may have read the prompt


def test_a_draft_that_was_held_up_is_forgotten() -> None:
    assert chosen_by(CostModel(FLAT), [0.1, 5.0, 0.1, 0.1, 0.1])[-1] > 1
    costs = CostModel(FLAT)
    for seconds in (0.1, 0.1, 5.0):
        costs.drafts[NAME, False].learn_cost(1, seconds)
    assert cost_of(costs.drafts[NAME, False], 1) == pytest.approx(0.1, rel=0.25)


def test_a_drafter_that_once_seemed_too_dear_is_tried_again_however_short_the_runs() -> None:
    costs = CostModel(FLAT)
    learn(costs, NAME, 4.0)
    costs.drafts[NAME, False].rest = 300
    chosen = [chosen_by(costs, [0.1] * 19) for _ in range(50)]
    assert chosen[0] == [0] * 19
    assert chosen[-1][1:] == [MAX_K] * 18


def test_a_drafter_whose_first_draft_is_dear_is_seldom_tried_in_short_runs() -> None:
    costs = CostModel(FLAT)
    learn(costs, NAME, 0.7)
    tried = [chosen_by(costs, [5.0, 0.7, 0.7], most=3, passing=False) for _ in range(500)]
    assert 1 < sum(map(any, tried)) <= 2 + PROBING * 3 * 500 / 4  # a try loses over 4 tokens


def test_what_a_try_has_to_read_first_counts_as_lost() -> None:
    """A head or a draft model reads the tokens that were written since its last draft, at 0.05 of a pass each."""
    costs, failed = CostModel(FLAT), DraftedToken(0, DraftOutcome.REJECTED, 0, 1, 1)
    choosing, token = DraftLengthController(costs), (Token(0, TokenKind.RESAMPLED, 1),)
    last, rounds, read, lost = None, 3000, 0, 0.0
    for index in range(rounds):
        k, *_ = choosing.choose(100, last, ONE_BY_ONE, range(index))
        seconds = 0.1 + 0.05 * (index - read) if k else 0.0
        read, lost = index if k else read, lost + seconds
        last = Round(0, (failed,) * k, token, seconds, 1.0, seconds + 1, k)
    assert 0 < lost <= 4 * PROBING * rounds


def test_a_drafter_that_nothing_was_tested_of_is_tried_once_and_goes_on_if_it_pays() -> None:
    for seconds, tries in ((0.2, 5), (2.0, 1)):
        costs = CostModel(FLAT)
        learn(costs, NAME, seconds)
        assert sum(map(bool, chosen_by(costs, [seconds] * 5))) == tries


def test_a_drafter_that_was_good_begins_at_once() -> None:
    costs = CostModel(FLAT)
    for _ in range(20):
        chosen_by(costs, [5.0] + [0.1] * 9)
    assert chosen_by(costs, [5.0])[0] > 4


def chosen_by(costs: CostModel, drafting: Sequence[float], most: int = 100, passing: bool = True) -> list[int]:
    """The K of as many rounds, with `most` tokens left after a prompt of 50, whose drafts take these seconds in turn
    and pass whole or fail.
    """
    choosing, last, chosen, left = DraftLengthController(costs), None, list[int](), iter(drafting)
    for _ in drafting:
        chosen.append(choosing.choose(most, last, ONE_BY_ONE, range(50))[0])
        seconds = next(left) if chosen[-1] else 0.0
        drafted = (RIGHT if passing else WRONG) * chosen[-1]
        emitted = (Token(0, TokenKind.ACCEPTED, 1),) * (1 + passing * chosen[-1])
        last = Round(0, drafted, emitted, seconds, 1.0, seconds + 1, chosen[-1])
    return chosen


@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_a_fixed_k_is_what_was_asked_for_and_needs_no_costs(k: int) -> None:
    given = fixed(Settings(k=k))
    assert [given.choose(most, None, ONE_BY_ONE, (), 1)[0] for most in (20, 3, 0)] == [k, min(k, 3), 0]


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
