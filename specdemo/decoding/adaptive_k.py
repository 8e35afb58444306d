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

import numpy as np

from ..types import DraftOutcome
from .costs import CostModel, DraftStats
from .drafter import Drafter
from .events import Round

PROBING = 0.0125  # share of the time that tries may lose: drafts of a kind that does not pay, to see if that changed


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
    stop_below: float  # see `Drafter.stop_below`


def best_length(costs: CostModel, stats: DraftStats, kind: Kind, longest: int) -> BestLength:
    """The K from 1 to `longest` of the highest rate; 1 until it is known what a draft costs.

        rate(k) = E[tokens](k) / (T(n + 1) + D(n))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k
        n = m_1 + m_2 + ... + m_k

    a_i is the chance that guess i is made and passes if those before it did, m_i the share of drafts that reach guess
    i, T(n) the cost of a pass over n tokens and D(n) = a + b n that of drafting n, both in passes over one token.

    In a tree guess i is the token of rank i, and a_i the chance that it is on the path, so E[tokens](k) is
    1 + a_1 + a_2 + ... + a_k.
    """
    longest = longest if stats.cost_known else 1
    chances, made = stats.chances()[:longest], np.cumsum(stats.shares_made()[:longest])
    tokens = 1 + np.cumsum(chances if kind.tree else np.cumprod(chances))
    round_costs = costs.pass_over(made + 1) + stats.cost(kind.source.steps(made))
    rates = tokens / round_costs
    k = 1 + int(np.argmax(rates))
    # A guess that is less likely to pass than this costs more than it brings.
    rise = costs.passes[k + 1] - costs.passes[1] + stats.cost(float(k)) - stats.cost(0.0)
    stop_below = 0.0 if kind.source.parallel_drafting and not kind.tree else rates[k - 1] * rise / k
    return BestLength(k, float(rates[k - 1]), float(round_costs[k - 1]), float(stop_below))


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
        self._options: dict[str, list[tuple[BestLength, Kind]]] = {}  # by the drafter's name, until its next draft
        self._up_to_date: dict[str, bool] = {}  # those that drafted in this run, and if they did when last asked
        self._drafts: dict[str, DraftStats] = {}  # of this run: one beside it writes at another place of the text

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
        options = self._options.get(source.name)
        if options is None:
            longest = min(most, costs.most_k)
            found = ((best_length(costs, self._known(costs, kind), kind, longest), kind) for kind in kinds)
            options = self._options[source.name] = sorted(found, key=lambda option: option[0].rate)
        alone = 1 / float(costs.passes[1:].min())  # the rate without drafts; the cost at one token may be old
        highest = options[-1][0].rate
        begun = source.name in self._up_to_date
        reading = 0.0 if begun else self.prompt_tokens * max(self._known(costs, kind).reading for kind in kinds)
        pays = most * (1 / alone - 1 / highest) > reading  # if the rest of the text goes like this
        for best, kind in options:
            stats = self._known(costs, kind)
            stats.idle += 1
            if pays and best.rate == highest:
                rest = 0.0
            else:
                loss = best.cost * ((highest if pays else alone) - best.rate) + reading * alone  # of a try, in tokens
                rest = loss * len(kinds) / PROBING
            if stats.idle > rest:
                self.kind, source.stop_below = kind, best.stop_below
                return min(best.k, most)
        if begun:
            self._up_to_date[source.name] = False
        return 0

    def _known(self, costs: CostModel, kind: Kind) -> DraftStats:
        """What this run knows of a kind of draft; it begins with what the run before it knew."""
        if kind.name not in self._drafts:
            self._drafts[kind.name] = costs.drafts[kind.name] = costs.drafts[kind.name].for_another_text()
        return self._drafts[kind.name]

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the last round cost, and what became of its draft."""
        outcomes, kind = [token.outcome for token in last.drafted], self.kind
        source = kind.source
        if not (last.k and source.uses_early_exit):
            costs.learn_pass(len(outcomes) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        stats, steps = self._known(costs, kind), source.steps(len(outcomes))
        cost, usual = last.draft_seconds / costs.baseline_seconds, stats.cost(steps)
        if self._up_to_date.get(source.name) or cost < usual:
            stats.learn_cost(steps, cost)
        elif source.name not in self._up_to_date:  # it also read the prompt
            more = (cost - usual) / self.prompt_tokens
            stats.reading = min(more, (more + stats.reading) / 2) if stats.reading else more
        self._up_to_date[source.name] = True
        self._options.pop(source.name, None)
        stats.idle = 0.0
        stats.learn(outcomes, last.k, kind.tree)
        if outcomes:
            costs.first_guesses[source.name, outcomes[0] is DraftOutcome.ACCEPTED] += 1
