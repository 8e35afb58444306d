"""How many tokens to draft next: a fixed K, or K = auto, which takes the K of the highest expected speed.

Under the match rule the text does not depend on K, so auto may go by everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
above temperature 0 auto needs the match rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from ..types import DraftOutcome
from .costs import CostModel, DraftStats, Plan
from .drafter import Drafter
from .events import Round

PROBING = 0.0125  # share of the time that tries may lose: drafts that do not pay, made to see if that changed


def best_length(costs: CostModel, stats: DraftStats, source: Drafter, tree: bool, longest: int) -> Plan:
    """The K up to `longest` of the highest rate, in tokens in the time of a pass over one token.

        rate(k) = E[tokens](k) / (T(k + 1) + D(k))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k for a chain, 1 + a_1 + a_2 + ... + a_k for a tree

    T(n) is the cost of a pass over n tokens, D(k) = a + b k that of drafting k, and a_i as `DraftStats.chances` has it.
    """
    shortest = 1 + tree  # a tree of one token is a chain that costs more
    longest = longest if stats.cost_known else shortest
    constant, each = stats.line()
    tokens, passing, found = 1.0, 1.0, list[tuple[float, float, int]]()
    for k, chance in enumerate(stats.chances()[:longest], start=1):
        passing = chance if tree else passing * chance
        tokens += passing
        cost = costs.passes[k + 1] + constant + each * source.steps(k)
        found.append((tokens / cost, cost, k))
    rate, cost, k = max(found[tree:])
    # A guess that is less likely to pass than this costs more than it brings.
    stop_below = 0.0 if source.parallel_drafting and not tree else rate * (cost - found[0][1]) / max(k - 1, 1)
    return Plan(rate, cost, k, tree, stop_below)


class DraftLengthController:
    """Chooses the K of every round of one run, and whether its draft is a tree.

    Each drafter that others hand over to (`Drafter.draft_source`) is judged by itself: a copied phrase is worth a long
    draft, a head's guess a short one or none.

    Attributes:
        source, branches: the drafter that K was chosen for last, and whether its draft is a tree.
    """

    source: Drafter
    branches = False

    def __init__(
        self,
        k: int | str | Iterable[tuple[int, bool]],
        costs: CostModel | None,
        prompt_tokens: int = 1,
        tree: bool = False,
    ) -> None:
        """`k` is AUTO, which needs `costs`, a fixed K, or the K of each round and whether its draft is a tree.

        `costs` learns from all of them. With `tree` auto may draft trees, and a fixed K does.
        """
        self.costs, self.prompt_tokens, self.tree = costs, prompt_tokens, tree
        self._given = None if isinstance(k, str) else repeat((k, tree)) if isinstance(k, int) else iter(k)
        self._drafts: dict[tuple[str, bool], DraftStats] = {}  # a run beside this one is at another place of its text
        self._begun: set[str] = set()  # the drafters that have read the prompt

    def choose(self, most: int, last: Round | None, source: Drafter) -> int:
        """How many tokens `source` drafts next, after the `last` round of this run; `branches` says in which form.

        There is room for `most` tokens one behind the other.
        """
        if self.costs and last:
            self._learn(self.costs, last)
        self.source = source
        if self._given is not None:
            k, self.branches = next(self._given)
            return k if self.branches and most else min(k, most)
        assert self.costs is not None, "K = auto needs costs"
        return self._choose(self.costs, most) if most else 0

    def _choose(self, costs: CostModel, most: int) -> int:
        """The K of the highest rate; 0 where drafting does not pay, but for a try now and then."""
        source, longest = self.source, min(most, costs.most_k)
        plans, idle, reading = list[Plan](), list[float](), 0.0
        for tree in (False, True)[: 1 + (self.tree and longest > 1)]:
            stats = self._known(costs, tree)
            stats.plan = stats.plan or best_length(costs, stats, source, tree, longest)
            stats.idle += 1
            plans.append(stats.plan)
            reading = max(reading, stats.reading)
        reading *= self.prompt_tokens * (source.name not in self._begun)
        rate, alone = max(plans).rate, 1 / min(costs.passes[1:])  # the cost at one token may be old
        if most * (1 / alone - 1 / rate) > reading:  # it pays, if the rest of the text goes like this
            reading = 0.0
        else:
            rate = alone
        for plan in sorted(plans):
            loss = plan.cost * (rate - plan.rate) + reading * alone  # of a draft, in tokens
            if self._known(costs, plan.tree).idle * PROBING > loss * len(plans):
                self.branches, source.stop_below = plan.tree, plan.stop_below
                return min(plan.k, most)
        return 0

    def _known(self, costs: CostModel, tree: bool) -> DraftStats:
        """What this run knows of chains or trees by the source; it begins with what the run before it knew."""
        kind = self.source.name, tree
        if kind not in self._drafts:
            self._drafts[kind] = costs.drafts[kind] = costs.drafts[kind].for_another_text()
        return self._drafts[kind]

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the last round cost, and what became of its draft."""
        outcomes, source = [token.outcome for token in last.drafted], self.source
        if not (last.k and source.uses_early_exit):
            costs.learn_pass(len(outcomes) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        stats, steps = self._known(costs, self.branches), source.steps(len(outcomes))
        constant, each = stats.line()
        cost, usual = last.draft_seconds / costs.baseline_seconds, constant + each * steps
        if source.name in self._begun or cost < usual:
            stats.learn_cost(steps, cost)
        else:  # it also read the prompt
            stats.reading = (cost - usual) / self.prompt_tokens
        self._begun.add(source.name)
        stats.plan = None
        stats.idle = 0.0
        stats.learn(outcomes, last.k, self.branches)
        if outcomes:
            costs.first_guesses[source.name, outcomes[0] is DraftOutcome.ACCEPTED] += 1
