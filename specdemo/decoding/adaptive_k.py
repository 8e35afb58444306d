"""How many tokens to draft next: a fixed K, or K = auto, which follows what rounds cost and how many guesses pass.

Under the match rule the text does not depend on K, so K may depend on everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
auto needs the match rule above temperature 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from .costs import CostModel
from .drafter import Drafter
from .events import Round

PROBING = 0.0125  # share of the time that tries may lose: drafts where none pays, to see whether that has changed


class BestLength(NamedTuple):
    """The draft length of the highest rate, and what a round with it is expected to do."""

    k: int
    rate: float  # tokens in the time of a pass over one token
    cost: float  # of the round


class Plan(NamedTuple):
    """What a drafter does until more is known of it."""

    k: int
    stop_below: float  # see `Drafter.stop_below`
    rest: float  # rounds without a draft before the next one; 0 where drafting pays


def best_length(costs: CostModel, source: Drafter, longest: int) -> BestLength | None:
    """The K from 1 to `longest` of the highest rate; None while it is not known what a draft costs.

        rate(k) = E[tokens](k) / (T(n + 1) + D(n))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k
        n = m_1 + m_2 + ... + m_k

    a_i is the chance that guess i is made and passes if those before it did, m_i the share of drafts that reach guess
    i, T(n) the cost of a pass over n tokens and D(n) = a + b n that of drafting n, both in passes over one token.
    """
    best = BestLength(0, 0.0, 0.0)
    stats = costs.acceptance[source.name]
    expected, all_pass, made = 1.0, 1.0, 0.0
    for k, (chance, share_made) in enumerate(zip(stats.chances()[:longest], stats.shares_made(), strict=False), 1):
        all_pass *= chance
        expected += all_pass
        made += share_made
        drafting = costs.drafts[source.name].of(source.steps(made))
        if drafting is None:
            return None
        cost = costs.pass_over(made + 1) + drafting
        best = max(best, BestLength(k, expected / cost, cost), key=lambda length: length.rate)
    return best


def least_chance(costs: CostModel, source: Drafter, best: BestLength) -> float:
    """The chance that all guesses so far pass below which one more costs more than it brings at the best rate."""
    draft, k = costs.drafts[source.name], best.k
    rise = costs.pass_over(k + 1) - costs.pass_over(1) + (draft.of(k) or 0.0) - (draft.of(0) or 0.0)
    return 0.0 if source.parallel_drafting else best.rate * rise / k


class DraftLengthController:
    """Chooses the K of every round of one run.

    Where a drafter hands over to others (`Drafter.draft_source`), each of them is judged by itself, because a copied
    phrase is worth a long draft, and a head's guess a short one or none.
    """

    def __init__(self, k: int | str | Iterable[int], costs: CostModel | None, prompt_tokens: int = 1) -> None:
        """`k` is AUTO, which needs `costs`, a fixed K, or the K of each round; `costs` learns from all of them."""
        self.costs, self.prompt_tokens = costs, prompt_tokens
        self._given = None if isinstance(k, str) else repeat(k) if isinstance(k, int) else iter(k)
        self._planned: set[str] = set()  # drafters that K was chosen for in this run
        self._began: set[str] = set()  # those that drafted in it
        self._reads_on: set[str] = set()  # and those that have read what was written while they did not draft
        self._plans: dict[str, Plan] = {}  # by the drafter's name, until its next draft
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
        plan = self._plans.get(source.name) or self._plan(costs, source, most)
        if plan is None:
            return 1  # a draft shows what one costs
        if costs.idle[source.name] < plan.rest:
            costs.idle[source.name] += 1
            self._reads_on.discard(source.name)
            return 0
        source.stop_below = plan.stop_below
        return min(plan.k, most)

    def _plan(self, costs: CostModel, source: Drafter, most: int) -> Plan | None:
        """What is best until the next draft of `source`; None while it is not known what a draft costs."""
        if source.name not in self._planned:
            self._planned.add(source.name)
            costs.acceptance[source.name].begin()
        best = best_length(costs, source, min(most, costs.most_k))
        if best is None:
            return None
        alone = min(costs.passes)  # of a round without a draft; the figure of one token may be old
        beginning = 0.0 if source.name in self._began else costs.drafts[source.name].reading * self.prompt_tokens
        pays = most * (alone - 1 / best.rate) > beginning  # if the rest of the text goes like this
        loss = best.cost * (1 / alone - best.rate) + beginning / alone  # of a try, in tokens
        plan = Plan(best.k, least_chance(costs, source, best), 0.0 if pays else loss / PROBING)
        self._plans[source.name] = plan
        return plan

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the last round cost, and what became of its draft."""
        outcomes, source = [token.outcome for token in last.drafted], self._source
        if not (last.k and source.uses_early_exit):
            costs.learn_pass(len(outcomes) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        draft, steps = costs.drafts[source.name], source.steps(len(outcomes))
        cost, usual = last.draft_seconds / costs.baseline_seconds, draft.of(steps)
        if source.name in self._reads_on or (usual is not None and cost < usual):
            draft.add(steps, cost)
        elif source.name not in self._began:  # it also read the prompt
            more = max(cost - (usual or 0.0), 0.0) / self.prompt_tokens
            draft.reading = min(more, (more + draft.reading) / 2) if draft.reading else more
        self._began.add(source.name)
        self._reads_on.add(source.name)
        self._plans.pop(source.name, None)
        costs.idle[source.name] = 0.0
        costs.acceptance[source.name].add(outcomes, last.k)
