"""How many tokens to draft next: a fixed K, or K = auto, which follows what rounds cost and how many guesses pass.

Under the match rule the text does not depend on K, so K may depend on everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
auto needs the match rule above temperature 0.

Where drafts may branch, auto chooses the form as well: the tree of the best n tokens, the chain of k, or no draft.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from ..types import DraftOutcome
from .costs import CostModel, DraftStats, Kind
from .drafter import Drafter
from .events import Round

PROBING = 0.0125  # share of the time that tries may lose: drafts of a kind that does not pay, to see if that changed


class Plan(NamedTuple):
    """A draft of one kind at its best length, and what a round with it is expected to do."""

    rate: float  # tokens in the time of a pass over one token
    cost: float  # of the round
    k: int
    tree: bool
    stop_below: float  # see `Drafter.stop_below`


def best_length(costs: CostModel, stats: DraftStats, source: Drafter, tree: bool, longest: int) -> Plan:
    """The K up to `longest` of the highest rate, the least one until it is known what a draft costs. That is 1, and 2
    in a tree: one of a single token is a chain that costs more.

        rate(k) = E[tokens](k) / (T(k + 1) + D(k))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k

    a_i is the chance that guess i passes if those before it did, T(n) the cost of a pass over n tokens and
    D(k) = a + b k that of drafting k, both in passes over one token.

    In a tree guess i is the token of rank i, and a_i the chance that it is on the path, so E[tokens](k) is
    1 + a_1 + a_2 + ... + a_k.
    """
    longest = longest if stats.cost_known else 1 + tree
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

    Where a drafter hands over to others (`Drafter.draft_source`), each of them is judged by itself, because a copied
    phrase is worth a long draft, and a head's guess a short one or none.

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

        `costs` learns from all of them. With `tree` drafts may branch, and those of a fixed K do.
        """
        self.costs, self.prompt_tokens, self.tree = costs, prompt_tokens, tree
        self._given = None if isinstance(k, str) else repeat((k, tree)) if isinstance(k, int) else iter(k)
        self._plans: dict[Kind, Plan] = {}  # until the next draft of the kind
        self._up_to_date: dict[str, bool] = {}  # those that drafted in this run, and if they did when last asked
        self._drafts: dict[Kind, DraftStats] = {}  # of this run: one beside it writes at another place of the text

    def choose(self, most: int, last: Round | None, source: Drafter) -> int:
        """How many tokens `source` drafts next, after the `last` round of this run; in which form, say `branches`.

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
        """The K of most tokens per second; 0 where drafting does not pay, but for a try now and then."""
        source = self.source
        longest = min(most, costs.most_k)
        kinds = [(source.name, tree) for tree in (False, True)[: 1 + (self.tree and longest > 1)]]
        for kind in kinds:
            if kind not in self._plans:
                self._plans[kind] = best_length(costs, self._known(costs, kind[1]), source, kind[1], longest)
        plans = sorted(self._plans[kind] for kind in kinds)
        alone = 1 / min(costs.passes[1:])  # the rate without drafts; the cost at one token may be old
        highest = plans[-1].rate
        begun = source.name in self._up_to_date
        reading = 0.0 if begun else self.prompt_tokens * max(self._known(costs, plan.tree).reading for plan in plans)
        pays = most * (1 / alone - 1 / highest) > reading  # if the rest of the text goes like this
        for plan in plans:
            stats = self._known(costs, plan.tree)
            stats.idle += 1
            loss = plan.cost * ((highest if pays else alone) - plan.rate) + reading * alone  # of a try, in tokens
            if (pays and plan.rate == highest) or stats.idle > loss * len(plans) / PROBING:
                self.branches, source.stop_below = plan.tree, plan.stop_below
                return min(plan.k, most)
        if begun:
            self._up_to_date[source.name] = False
        return 0

    def _known(self, costs: CostModel, tree: bool) -> DraftStats:
        """What this run knows of a kind of draft by the source; it begins with what the run before it knew."""
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
        if self._up_to_date.get(source.name) or cost < usual:
            stats.learn_cost(steps, cost)
        elif source.name not in self._up_to_date:  # it also read the prompt
            stats.reading = (cost - usual) / self.prompt_tokens
        self._up_to_date[source.name] = True
        self._plans.pop((source.name, self.branches), None)
        stats.idle = 0.0
        stats.learn(outcomes, last.k, self.branches)
        if outcomes:
            costs.first_guesses[source.name, outcomes[0] is DraftOutcome.ACCEPTED] += 1
