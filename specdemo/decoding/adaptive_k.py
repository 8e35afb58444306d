"""K = auto: before each round it chooses how many tokens are drafted, and whether as a tree.

**The estimate.** A draft of one drafter has two forms, a chain and a tree. For each form `best_length` finds the K of
the highest rate, in tokens per second, and the rate of no draft is known as well. This takes the cost of a pass by its
rows, the cost of a draft by its length, and the chance that a guess passes by its position.

**A form that does not pay is tried again** after a rest of (tokens that its last draft lost) / `PROBING` rounds. The
loss is that against the best choice and, if no guess was accepted, the cost of reading what the drafter had missed. So
tries take that share of the time, whatever they cost. The best form and untried forms do not rest. Readers who share
passes share the rest: they try together, and the rounds of each count.

**What is learnt.** From each draft: what it cost, and which guesses passed. From each pass: what it cost. `CostModel`
keeps this for later runs. What must be known before the first run is measured by `measuring`: passes of a few lengths,
and short runs with a fixed K.

Under the match rule the text does not depend on K, so K may depend on everything: earlier rounds and runs, the clock,
and the draft itself. Under rejection sampling a choice that depends on drawn tokens would change the distribution, so
auto needs the match rule above temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tokens import DraftOutcome
from .costs import CostModel, DraftPlan, DraftStats
from .drafter import Drafter
from .either import source_of, sources_of
from .events import Round
from .loop import Form

PROBING = 0.0125  # share of the time that may be lost by trying forms that did not pay before
FEW_MISSED = 8  # to read so few tokens that were written since its last draft is part of a draft's own cost


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
        cost = checking + constant + each * costs.steps(source.name, k)
        found.append((tokens / cost, cost, k))
    rate, cost, k = max(found[tree : None if stats.timed > 1 else 1 + tree])
    # A guess that is less likely to pass than this costs more than it brings. A parallel draft has paid for it already.
    least = 0.0 if source.name in costs.parallel and not tree else rate * (cost - constant - passes[1]) / k
    return DraftPlan(rate, cost, k, tree, least)


class DraftLengthController:
    """Chooses the form of every draft of one run, from what the drafts of this run and earlier ones have shown."""

    def __init__(self, costs: CostModel, tree: bool = False) -> None:
        """With `tree` drafts may be trees. Readers who share passes share `costs`."""
        self.costs, self.tree, self.readers = costs, tree, 0
        self._forms = dict[str, list[DraftStats]]()  # by drafter, what is known of its chains, and of its trees
        self._read = dict[str, int]()  # by drafter that drafted in this run, the tokens that the text had then
        self._drafted: tuple[Drafter, bool, bool]  # the last one, whether a tree, and whether it had missed text

    def choose(self, most: int, last: Round | None, drafter: Drafter, ids: Sequence[int], readers: int = 1) -> Form:
        if last and last.k:
            self._learn(last)
        if readers != self.readers:
            self._begin(sources_of(drafter), readers)
        source, form = self._pick(most, drafter, ids)
        if form.k:
            self._drafted = source, form.tree, len(ids) - self._read.get(source.name, 0) > FEW_MISSED
            self._read[source.name] = len(ids)
        return form

    def _begin(self, sources: Sequence[Drafter], readers: int) -> None:
        """From now on share passes with so many readers in all."""
        self.readers, drafts = readers, self.costs.drafts
        trees = (False, True) if self.tree and self.costs.most_k(readers) > 1 else (False,)
        for source in sources:
            forms = self._forms[source.name] = [drafts[source.name, tree] for tree in trees]
            for tree, stats in zip(trees, forms, strict=True):
                stats.plan = best_length(self.costs, stats, source, tree, readers)
            self._let_rest(forms)

    def _pick(self, most: int, drafter: Drafter, ids: Sequence[int]) -> tuple[Drafter, Form]:
        """The drafter and the form of the next draft: of those that do not rest the worst, so that the best goes on
        when the others have been tried.
        """
        resting = True
        for forms in self._forms.values():
            for stats in forms:
                stats.rest -= 1
                resting = resting and stats.rest > 0
        if resting or not most:  # to look which of them would draft takes longer than all this
            return drafter, Form(0)
        source = source_of(drafter, ids)
        due = [stats for stats in self._forms[source.name] if stats.rest <= 0]
        if not due:
            return source, Form(0)
        stats = min(due, key=lambda stats: stats.plan)
        if not stats.timed:  # unless it promises to pay, one of the readers tries it first
            stats.rest = self.readers
        return source, Form(min(stats.plan.k, most), stats.plan.tree, stats.plan.stop_below)

    def _let_rest(self, forms: Sequence[DraftStats], tried: DraftStats | None = None, reading: float = 0.0) -> None:
        """Let the form that was tried rest for what it lost, of which `reading` is the cost of what its drafter had
        missed. The best form of this drafter does not rest, if it pays.
        """
        alone = self.costs.passes[self.readers] / self.readers
        rate = max(1 / alone, *(stats.plan.rate for stats in forms))
        rounds = len(forms) * self.readers / PROBING  # for each token lost, since all readers try all forms
        for stats in forms:
            lost = stats.plan.cost * (rate - stats.plan.rate)
            if not lost:
                stats.rest = min(stats.rest, 0.0)
            elif stats is tried:
                stats.rest = (lost + reading * rate) * rounds

    def _learn(self, last: Round) -> None:
        """Learn what the draft of the last round cost, and what became of it."""
        (source, tree, missed), costs = self._drafted, self.costs
        stats, outcomes = costs.drafts[source.name, tree], [token.outcome for token in last.drafted]
        steps, (constant, each) = costs.steps(source.name, len(outcomes)), stats.line()
        cost = last.draft_seconds / costs.baseline_seconds
        reading = max(cost - constant - each * steps, 0.0) if missed else 0.0
        if not reading:
            stats.learn_cost(steps, cost)
        stats.learn(outcomes, last.k or 0, tree)
        stats.plan = best_length(costs, stats, source, tree, self.readers)
        # If a guess passed, the drafter may go on, and what it read was not in vain.
        self._let_rest(self._forms[source.name], stats, reading if len(last.emitted) == 1 else 0.0)
        if outcomes:
            costs.first_guesses[source.name, outcomes[0] is DraftOutcome.ACCEPTED] += 1
