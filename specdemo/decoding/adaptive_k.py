"""How many tokens to draft next: a fixed K, or K = auto, which follows what rounds cost and how many guesses pass.

Under the match rule the text does not depend on K, so K may depend on everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
auto needs the match rule above temperature 0.

Where drafts may branch, auto chooses the form as well: the tree of the best n tokens, the chain of k, or no draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from math import inf
from typing import NamedTuple

from .costs import CostModel
from .drafter import Drafter
from .events import Round

PROBING = 0.0125  # share of the time that tries may lose: drafts of a kind that does not pay, to see if that changed
LEAST_REST = 7.0  # rounds without a draft of a kind that does not pay


class Kind(NamedTuple):
    """A kind of draft, which is judged by itself."""

    source: Drafter
    tree: bool = False

    @property
    def name(self) -> str:
        """What a `CostModel` knows it by."""
        return f"{self.source.name} tree" if self.tree else self.source.name


class BestLength(NamedTuple):
    """The draft length of the highest rate, and what a round with it is expected to do."""

    k: int
    rate: float  # tokens in the time of a pass over one token
    cost: float  # of the round


class Plan(NamedTuple):
    """What a drafter does until more is known of it."""

    kind: Kind
    k: int
    stop_below: float  # see `Drafter.stop_below`
    rest: float  # rounds without a draft of this kind before the next one; 0 where it pays


def best_length(costs: CostModel, kind: Kind, longest: int) -> BestLength | None:
    """The K from 1 to `longest` of the highest rate; None while it is not known what a draft costs.

        rate(k) = E[tokens](k) / (T(n + 1) + D(n))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k
        n = m_1 + m_2 + ... + m_k

    a_i is the chance that guess i is made and passes if those before it did, m_i the share of drafts that reach guess
    i, T(n) the cost of a pass over n tokens and D(n) = a + b n that of drafting n, both in passes over one token.

    In a tree guess i is the token of rank i, and a_i the chance that it is on the path, so E[tokens](k) is
    1 + a_1 + a_2 + ... + a_k.
    """
    best = BestLength(0, 0.0, 0.0)
    stats = costs.acceptance[kind.name]
    expected, all_pass, made = 1.0, 1.0, 0.0
    for k, (chance, share_made) in enumerate(zip(stats.chances()[:longest], stats.shares_made(), strict=False), 1):
        all_pass *= chance
        expected += chance if kind.tree else all_pass
        made += share_made
        drafting = costs.drafts[kind.name].of(kind.source.steps(made))
        if drafting is None:
            return None
        cost = costs.pass_over(made + 1) + drafting
        best = max(best, BestLength(k, expected / cost, cost), key=lambda length: length.rate)
    return best


def least_chance(costs: CostModel, kind: Kind, best: BestLength) -> float:
    """The chance that all guesses up to one pass below which that one costs more than it brings at the best rate."""
    draft, k = costs.drafts[kind.name], best.k
    rise = costs.pass_over(k + 1) - costs.pass_over(1) + (draft.of(k) or 0.0) - (draft.of(0) or 0.0)
    return 0.0 if kind.source.parallel_drafting and not kind.tree else best.rate * rise / k


class DraftLengthController:
    """Chooses the K of every round of one run, and whether its draft is a tree.

    Where a drafter hands over to others (`Drafter.draft_source`), each of them is judged by itself, because a copied
    phrase is worth a long draft, and a head's guess a short one or none.

    Attributes:
        kind: of the draft that K was chosen for last.
    """

    kind: Kind

    def __init__(
        self,
        k: int | str | Iterable[tuple[int, bool]],
        costs: CostModel | None,
        prompt_tokens: int = 1,
        tree: bool = False,
    ) -> None:
        """`k` is AUTO, which needs `costs`, a fixed K, or the K of each round and whether its draft is a tree.

        `costs` learns from all of them. With `tree` drafts may branch, and those of a fixed K do.
        """
        self.costs, self.prompt_tokens, self.tree = costs, prompt_tokens, tree
        self._given = None if isinstance(k, str) else repeat((k, tree)) if isinstance(k, int) else iter(k)
        self._plans: dict[str, list[Plan]] = {}  # by the drafter's name, until its next draft
        self._begun: set[str] = set()  # kinds that K was chosen for in this run
        self._drafted: set[str] = set()  # drafters that drafted in this run
        self._reads_on: set[str] = set()  # and those that have read what was written while they did not draft

    def choose(self, most: int, last: Round | None, source: Drafter) -> int:
        """How many tokens `source` drafts next, after the `last` round of this run, and in which form: `kind`.

        There is room for `most` tokens one behind the other.
        """
        if self.costs and last:
            self._learn(self.costs, last)
        if self._given is not None:
            k, tree = next(self._given)
            self.kind = Kind(source, tree)
            return k if tree and most else min(k, most)
        assert self.costs is not None, "K = auto needs costs"
        self.kind = Kind(source)
        return self._choose(self.costs, source, most) if most else 0

    def _choose(self, costs: CostModel, source: Drafter, most: int) -> int:
        """The K of most tokens per second; 0 where drafting does not pay, but for a try now and then."""
        kinds = [Kind(source), Kind(source, tree=True)] if self.tree else [Kind(source)]
        for kind in kinds:
            costs.idle[kind.name] += 1
        for plan in self._plans.get(source.name) or self._plan(costs, kinds, most):
            if costs.idle[plan.kind.name] > plan.rest:
                self.kind, source.stop_below = plan.kind, plan.stop_below
                return min(plan.k, most)
        self._reads_on.discard(source.name)
        return 0

    def _plan(self, costs: CostModel, kinds: Sequence[Kind], most: int) -> list[Plan]:
        """What is best until the next draft of the drafter, the kind of the highest rate last."""
        found: list[tuple[BestLength, Kind]] = []
        for kind in kinds:
            if kind.name not in self._begun:
                self._begun.add(kind.name)
                costs.acceptance[kind.name].begin()
            best = best_length(costs, kind, min(most, costs.most_k))
            if best is None:
                return [Plan(kind, 1, 0.0, 0.0)]  # a draft shows what one costs
            found.append((best, kind))
        found.sort(key=lambda one: one[0].rate)
        highest, name = found[-1][0].rate, kinds[0].source.name
        alone = min(costs.passes[1:])  # of a round without a draft; the figure of one token may be old
        reading = 0.0 if name in self._drafted else max(costs.drafts[kind.name].reading for kind in kinds)
        beginning = reading * self.prompt_tokens
        pays = most * (alone - 1 / highest) > beginning  # if the rest of the text goes like this
        plans = []
        for place, (best, kind) in enumerate(found, 1):
            leads = place == len(found)
            otherwise = 1 / alone if leads else highest  # the rate without a try
            loss = best.cost * (otherwise - best.rate) + beginning / alone  # of a try, in tokens
            rest = 0.0 if leads and pays else max(loss / PROBING, LEAST_REST) if leads or pays else inf
            plans.append(Plan(kind, best.k, least_chance(costs, kind, best), rest))
        self._plans[name] = plans
        return plans

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the last round cost, and what became of its draft."""
        outcomes, kind = [token.outcome for token in last.drafted], self.kind
        source = kind.source
        if not (last.k and source.uses_early_exit):
            costs.learn_pass(len(outcomes) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        draft, steps = costs.drafts[kind.name], source.steps(len(outcomes))
        cost, usual = last.draft_seconds / costs.baseline_seconds, draft.of(steps)
        if source.name in self._reads_on or (usual is not None and cost < usual):
            draft.add(steps, cost)
        elif source.name not in self._drafted:  # it also read the prompt
            more = max(cost - (usual or 0.0), 0.0) / self.prompt_tokens
            draft.reading = min(more, (more + draft.reading) / 2) if draft.reading else more
        self._drafted.add(source.name)
        self._reads_on.add(source.name)
        self._plans.pop(source.name, None)
        costs.idle[kind.name] = 0.0
        costs.acceptance[kind.name].add(outcomes, last.k, kind.tree)
