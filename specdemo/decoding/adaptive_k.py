"""How many tokens to draft next: a fixed K, or K = auto, which chooses the form and length of the highest rate.

Under the match rule the text does not depend on K, so K may depend on everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
auto needs the match rule above temperature 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import repeat
from math import inf

from ..types import DraftOutcome
from .costs import CostModel, DraftPlan, DraftStats
from .drafter import Drafter
from .events import Round

PROBING = 0.0125  # share of the time that may be lost by trying kinds of drafts that did not pay before
FEW_MISSED = 8  # to read so few tokens that were written since its last draft is part of a draft's own cost
Form = tuple[int, bool]  # of a draft: K, and whether it is a tree


def best_length(costs: CostModel, stats: DraftStats, source: Drafter, tree: bool, readers: int = 1) -> DraftPlan:
    """The K of the highest rate, in tokens in the time of a pass over one token:

        rate(k) = E[tokens](k) / (T(k + 1) + D(k))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k of a chain
                       1 + a_1 + a_2 + ... + a_k of a tree

    T(m) is what a pass over m tokens costs this reader (`CostModel.shares`), D(k) = a + b k what drafting k does, and
    a_i is as in `DraftStats.chances`.
    Until the cost of a draft is known, K is as small as possible: 1, or 2 for a tree.
    """
    (constant, each), passes = stats.line(), costs.shares(readers)
    tokens, passing, found = 1.0, 1.0, list[tuple[float, float, int]]()
    for k, (chance, checking) in enumerate(zip(stats.chances(), passes[2:], strict=False), start=1):
        passing = chance if tree else passing * chance
        tokens += passing
        cost = checking + constant + each * source.steps(k)
        found.append((tokens / cost, cost, k))
    rate, cost, k = max(found[tree : None if stats.timed > 1 else 1 + tree])
    # A guess that is less likely to pass than this costs more than it brings. A parallel draft has paid for it already.
    least = 0.0 if source.parallel_drafting and not tree else rate * (cost - constant - passes[1]) / k
    return DraftPlan(rate, cost, k, tree, stop_below=least, readers=readers)


@dataclass
class Readers:
    """The prompts that are decoded at once, and share their passes. Each has a controller of its own.

    Where no draft pays, it is known how many rounds go by before the next try. Until then all readers rest: none of
    them looks which source would draft and whether that is due, which takes them longer than anything else but passes.
    """

    count: int = 1
    rest: float = 0.0  # rounds that are left
    _waits: list[float] = field(default_factory=list)

    def wait(self, rounds: float) -> None:
        """One of them drafts nothing for so many rounds of them all. When each has said so, they rest."""
        if self.rest >= 1:  # it has come while the others rest
            self.rest = min(self.rest, rounds)
            return
        self._waits.append(rounds)
        if len(self._waits) == self.count:
            self.rest, self._waits = min(self._waits), []

    def wake(self) -> None:
        self.rest, self._waits = 0.0, []


class DraftLengthController:
    """Chooses the K of every round of one run, and whether its draft is a tree, from what each source has shown."""

    source: Drafter  # for which K was chosen last
    branches = False  # whether its draft is a tree

    def __init__(
        self,
        k: int | str | Iterable[Form],
        costs: CostModel | None,
        prompt_tokens: int = 1,
        tree: bool = False,
        readers: Readers | None = None,
    ) -> None:
        """`k` is AUTO, a fixed K, or the form of each round's draft. AUTO needs `costs`, which learn from every round.
        With `tree` a fixed K drafts trees, and AUTO may. Several `readers` learn together.
        """
        self.costs, self.tokens, self.tree, self.readers = costs, prompt_tokens, tree, readers or Readers()
        self._given = None if isinstance(k, str) else repeat((k, tree)) if isinstance(k, int) else iter(k)
        self._known = dict[str, int]()  # by drafter that drafted in this run, the tokens that the text had then
        self._missed = 0  # tokens before the last round's that the source had not read when it drafted
        known = costs.drafts if costs else defaultdict[tuple[str, bool], DraftStats](DraftStats)
        self._drafts = known if self.readers.count > 1 else deepcopy(known)  # lanes side by side learn apart
        self._asked = list[DraftStats]()  # those of the source for which K was chosen last

    def choose(self, most: int, last: Round | None, drafter: Drafter, context: Sequence[int] = ()) -> int:
        """How many tokens follow `context` in the next draft, after the `last` round of this run; `branches` says in
        which form. A path has room for `most` tokens.
        """
        if self.costs and last:
            self._learn(self.costs, last)
        read, self.tokens = self.tokens, self.tokens + (len(last.emitted) if last else 0)
        if self._given is None and self._asked and self.readers.rest >= 1:
            self.readers.rest -= 1
            for stats in self._asked:
                stats.idle += 1
            return 0
        self.source = source = drafter.draft_source(context)
        self._missed = self._missed_by(source, read)
        if self._given is not None:
            k, self.branches = next(self._given)
            k = k if self.branches and most else min(k, most)
        else:
            assert self.costs is not None, "K = auto needs costs"
            k = self._choose(self.costs, most, drafter, read) if most else 0
        if k:
            self._known[source.name] = self.tokens
        return k

    def _missed_by(self, source: Drafter, read: int) -> int:
        """How many of the `read` tokens a draft of this source would read besides its usual work."""
        missed, first = read - self._known.get(source.name, 0), source.name not in self._known
        return missed if first or missed > FEW_MISSED else 0

    def _choose(self, costs: CostModel, most: int, drafter: Drafter, read: int) -> int:
        """The K of the highest rate; 0 if drafting does not pay, except for a try now and then."""
        source = self.source
        self._asked = [self._drafts[source.name, tree] for tree in self._forms(costs, most)]
        for tree, stats in enumerate(self._asked):
            costs.drafts[source.name, bool(tree)] = stats
            stats.idle += 1
        for plan, wait in self._waits(costs, most, source, read):
            if wait < 0:
                stats = self._asked[plan.tree]
                if stats.idle == inf:  # what none has tried yet is tried by one
                    stats.idle = 0.0
                self.branches, source.stop_below = plan.tree, plan.stop_below
                return min(plan.k, most)
        waits = [self._waits(costs, most, each, read) for each in drafter.sources]
        self.readers.wait(min(wait for each in waits for _, wait in each))
        return 0

    def _waits(self, costs: CostModel, most: int, source: Drafter, read: int) -> list[tuple[DraftPlan, float]]:
        """The best draft of each form, the worst first, and how many rounds go by before it is due; below 0 it is now.

        It is due if it pays best, and else when what a try loses is a small share of all rounds since the last one. All
        readers try it in the same round, where a draft costs each of them what it would if all went on with it.
        """
        readers, plans = self.readers.count, list[DraftPlan]()
        for tree in self._forms(costs, most):
            stats = self._drafts[source.name, tree]
            if stats.plan is None or stats.plan.readers != readers:
                stats.plan = best_length(costs, stats, source, tree, readers)
            plans.append(stats.plan)
        alone = costs.passes[readers] / readers
        rate = max(1 / alone, max(plans).rate)
        reading = costs.reading[source.name] * self._missed_by(source, read)
        saved = most * (alone - 1 / rate)  # if the rest of the text goes on at this rate
        extra = max(reading - saved, 0.0) / alone  # of the loss, in tokens; it grows with the text
        losses = [(plan, plan.cost * (rate - plan.rate) + extra) for plan in sorted(plans)]
        due = len(plans) * readers / PROBING
        return [(plan, loss * due - self._drafts[source.name, plan.tree].idle) for plan, loss in losses]

    def _forms(self, costs: CostModel, most: int) -> Sequence[bool]:
        """Whether a draft of up to `most` tokens is a tree: what it may be."""
        return (False, True) if self.tree and min(most, costs.most_k(self.readers.count)) > 1 else (False,)

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the draft of the last round cost, and what became of it."""
        outcomes, source = [token.outcome for token in last.drafted], self.source
        if not last.k:
            return
        self.readers.wake()
        stats = costs.drafts[source.name, self.branches] = self._drafts[source.name, self.branches]
        steps, (constant, each) = source.steps(len(outcomes)), stats.line()
        cost, usual = last.draft_seconds / costs.baseline_seconds, constant + each * steps
        if not self._missed or cost <= usual:
            stats.learn_cost(steps, cost)
        else:  # it also read the prompt, or what was written since its last draft
            costs.reading[source.name] = (cost - usual) / self._missed
        stats.learn(outcomes, last.k, self.branches)
        if outcomes:
            costs.first_guesses[source.name, outcomes[0] is DraftOutcome.ACCEPTED] += 1
