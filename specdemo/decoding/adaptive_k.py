"""How many tokens to draft next: a fixed K, or K = auto, which follows what rounds cost and how many guesses pass.

Under the match rule the text does not depend on K, so K may depend on everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
auto needs the match rule above temperature 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from ..types import DraftOutcome
from .costs import CostModel
from .drafter import Drafter
from .events import Round

EARLIER_TESTS = 4.0  # the most that the tests of earlier runs weigh at the beginning of a run
ENOUGH_TESTS = 3.0  # with fewer, a drafter gets the benefit of the doubt
REST = 7  # rounds without a draft before it is asked again: asking costs a part of a small model's pass
PROBING = 0.0125  # share of the time that probes may lose: drafts where none pays, to see whether that has changed


class BestLength(NamedTuple):
    """The draft length of the highest rate, and what a round with it is expected to do."""

    k: int
    rate: float  # tokens in the time of a pass over one token
    cost: float  # of the round


def best_length(costs: CostModel, source: Drafter, longest: int, optimistic: bool = False) -> BestLength | None:
    """The K from 1 to `longest` of the highest rate; None while it is not known what a draft costs.

        rate(k) = E[tokens](k) / (T(n + 1) + D(n))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k
        n = m_1 + m_2 + ... + m_k

    a_i is the chance that guess i is made and passes if those before it did, m_i the share of drafts that reach guess i
    (both 1 if `optimistic`), T(n) the cost of a pass over n tokens and D(n) = a + b n that of drafting n tokens, both
    in passes over one token.
    """
    best: BestLength | None = None
    stats = costs.acceptance[source.name]
    expected, all_pass, made = 1.0, 1.0, 0.0
    for k, (chance, share_made) in enumerate(zip(stats.chances()[:longest], stats.shares_made(), strict=False), 1):
        all_pass *= 1.0 if optimistic else chance
        expected += all_pass
        made += 1.0 if optimistic else share_made
        cost = _cost(costs, source, made)
        if cost is None:
            return None
        if best is None or expected / cost > best.rate:
            best = BestLength(k, expected / cost, cost)
    return best


def _cost(costs: CostModel, source: Drafter, tokens: float) -> float | None:
    """Of a round with a draft of so many tokens; None while it is not known what a draft costs."""
    drafting = costs.drafts[source.name].of(source.steps(tokens))
    return None if drafting is None else costs.pass_over(tokens + 1) + drafting


def least_chance(costs: CostModel, source: Drafter, best: BestLength) -> float:
    """The chance that all guesses so far pass below which one more costs more than it brings at the best rate."""
    longer = min(best.k + 1, costs.most_k)
    first, last = _cost(costs, source, 1), _cost(costs, source, longer)
    if source.parallel_drafting or longer == 1 or first is None or last is None:
        return 0.0
    return best.rate * (last - first) / (longer - 1)


class Attempts:
    """What a drafter did in a run."""

    began = False  # it drafted in this run
    in_a_row = 0  # drafts since the run began or since it rested
    resting = 0  # rounds to go until it is asked again whether drafting pays
    passed = False  # the first guess of the last draft did


class DraftLengthController:
    """Chooses the K of every round of one run.

    Where a drafter hands over to others (`Drafter.draft_source`), each of them is judged by itself, because a copied
    phrase is worth a long draft, and a head's guess a short one or none.
    """

    def __init__(self, k: int | str | Iterable[int], costs: CostModel | None, prompt_tokens: int = 1) -> None:
        """`k` is AUTO, which needs `costs`, a fixed K, or the K of each round; `costs` learns from all of them."""
        self.costs, self.prompt_tokens = costs, prompt_tokens
        self._given = None if isinstance(k, str) else repeat(k) if isinstance(k, int) else iter(k)
        self._attempts: dict[str, Attempts] = {}  # by the drafter's name
        self._source: Drafter  # of the last round that K was chosen for

    def choose(self, most: int, last: Round | None, source: Drafter) -> int:
        """How many tokens `source` drafts next, at most `most`, after the `last` round of this run."""
        if self.costs and last:
            self._learn(self.costs, last)
        self._source = source
        if self._given is not None:
            return min(next(self._given), most)
        assert self.costs is not None, "K = auto needs costs"
        return self._choose(self.costs, source, most) if most else 0

    def _choose(self, costs: CostModel, source: Drafter, most: int) -> int:
        """The K of most tokens per second; 0 where drafting does not pay, but for a try now and then."""
        attempts = self._of(source.name, costs)
        if attempts.resting:
            attempts.resting -= 1
            costs.idle[source.name] += 1
            return 0
        longest = min(most, costs.most_k)
        best = best_length(costs, source, longest)
        if best is None:
            return 1  # a draft shows what one costs
        untested = costs.acceptance[source.name].tested[0] < ENOUGH_TESTS
        hoped = best_length(costs, source, longest, optimistic=True) if untested else best
        assert hoped is not None
        alone = min(costs.passes[1:])  # of a round without a draft; the figure of one token may be old
        beginning = 0.0 if attempts.began else costs.drafts[source.name].reading * self.prompt_tokens
        pays = most * (alone - 1 / hoped.rate) > beginning  # if the rest of the text goes like this
        second = attempts.in_a_row == 1 and attempts.passed  # only that is timed without the reading of what it missed
        loss = best.cost * (1 / alone - best.rate) + beginning / alone  # of a try, in tokens
        if pays or second or costs.idle[source.name] >= loss / PROBING:
            costs.idle[source.name] = 0
            source.stop_below = least_chance(costs, source, best)
            return best.k
        costs.idle[source.name] += 1
        attempts.in_a_row, attempts.resting = 0, REST
        return 0

    def _of(self, name: str, costs: CostModel) -> Attempts:
        if name not in self._attempts:
            self._attempts[name] = Attempts()
            acceptance = costs.acceptance[name]
            acceptance.weigh(min(EARLIER_TESTS / max(acceptance.tested[0], EARLIER_TESTS), 1.0))
        return self._attempts[name]

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the last round cost, and what became of its draft."""
        outcomes, source = [token.outcome for token in last.drafted], self._source
        if not (last.k and source.uses_early_exit):
            costs.learn_pass(len(outcomes) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        attempts, steps = self._of(source.name, costs), source.steps(len(outcomes))
        attempts.in_a_row += 1
        if attempts.in_a_row > 1:  # the first in a row also reads the prompt, or what was written while it rested
            costs.learn_draft(source.name, steps, last.draft_seconds)
        elif not attempts.began:
            costs.learn_first(source.name, steps, last.draft_seconds, self.prompt_tokens)
        attempts.began = True
        attempts.passed = outcomes[:1] == [DraftOutcome.ACCEPTED]
        costs.acceptance[source.name].add(outcomes, last.k)
