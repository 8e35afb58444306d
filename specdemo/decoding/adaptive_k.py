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
from .costs import CostModel
from .drafter import Drafter
from .events import Round

EARLIER_TESTS = 4.0  # the most that the tests of earlier runs weigh at the beginning of a run
ENOUGH_TESTS = 3.0  # with fewer, a kind of draft gets the benefit of the doubt
REST = 7  # rounds without a draft before it is asked again: asking costs a part of a small model's pass
PROBING = 0.0125  # share of the time that probes may lose: drafts of a kind that does not pay, to see if that changed


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


def best_length(costs: CostModel, kind: Kind, longest: int, optimistic: bool = False) -> BestLength | None:
    """The K from 1 to `longest` of the highest rate; None while it is not known what a draft costs.

        rate(k) = E[tokens](k) / (T(n + 1) + D(n))
        E[tokens](k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_k
        n = m_1 + m_2 + ... + m_k

    a_i is the chance that guess i is made and passes if those before it did, m_i the share of drafts that reach guess i
    (both 1 if `optimistic`), T(n) the cost of a pass over n tokens and D(n) = a + b n that of drafting n tokens, both
    in passes over one token.

    In a tree guess i is the token of rank i, and a_i the chance that it is on the path, so E[tokens](k) is
    1 + a_1 + a_2 + ... + a_k.
    """
    best: BestLength | None = None
    stats = costs.acceptance[kind.name]
    expected, all_pass, made = 1.0, 1.0, 0.0
    for k, (chance, share_made) in enumerate(zip(stats.chances()[:longest], stats.shares_made(), strict=False), 1):
        passing = 1.0 if optimistic else chance
        all_pass *= passing
        expected += passing if kind.tree else all_pass
        made += 1.0 if optimistic else share_made
        cost = _cost(costs, kind, made)
        if cost is None:
            return None
        if best is None or expected / cost > best.rate:
            best = BestLength(k, expected / cost, cost)
    return best


def _cost(costs: CostModel, kind: Kind, tokens: float) -> float | None:
    """Of a round with a draft of so many tokens; None while it is not known what a draft costs."""
    drafting = costs.drafts[kind.name].of(kind.source.steps(tokens))
    return None if drafting is None else costs.pass_over(tokens + 1) + drafting


def least_chance(costs: CostModel, kind: Kind, best: BestLength) -> float:
    """The chance that all guesses up to one pass below which that one costs more than it brings at the best rate."""
    longer = min(best.k + 1, costs.most_k)
    first, last = _cost(costs, kind, 1), _cost(costs, kind, longer)
    if (kind.source.parallel_drafting and not kind.tree) or longer == 1 or first is None or last is None:
        return 0.0
    return best.rate * (last - first) / (longer - 1)


class Attempts:
    """What a drafter did in a run."""

    began = False  # it drafted in this run
    in_a_row = 0  # drafts since the run began or since it rested
    resting = 0  # rounds to go until it is asked again whether drafting pays
    passed = False  # a guess of the last draft did
    kind: Kind | None = None  # of the last draft


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
        self._attempts: dict[str, Attempts] = {}  # by the drafter's name

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
        attempts, kinds = self._of(source, costs), self._kinds(source)
        if attempts.resting:
            attempts.resting -= 1
            costs.idle.update(kind.name for kind in kinds)
            return 0
        longest = min(most, costs.most_k)
        judged: list[tuple[float, BestLength, Kind]] = []
        for kind in kinds:
            best = best_length(costs, kind, longest)
            if best is None:
                self.kind = kind
                return 1  # a draft shows what one costs
            untested = costs.acceptance[kind.name].tested[0] < ENOUGH_TESTS
            hoped = best_length(costs, kind, longest, optimistic=True) if untested else best
            assert hoped is not None
            judged.append((hoped.rate, best, kind))
        judged.sort(key=lambda one: one[0])
        highest, of_highest, promising = judged[-1]
        alone = min(costs.passes[1:])  # of a round without a draft; the figure of one token may be old
        beginning = 0.0
        if not attempts.began:
            beginning = max(costs.drafts[kind.name].reading for kind in kinds) * self.prompt_tokens
        pays = most * (alone - 1 / highest) > beginning  # if the rest of the text goes like this
        second = attempts.in_a_row == 1 and attempts.passed  # only that is timed without the reading of what it missed
        for _, best, kind in judged:  # the most promising comes last, where no try of the other is due
            usual = 1 / alone if kind == promising else of_highest.rate
            loss = best.cost * (usual - best.rate) + beginning / alone  # of a try, in tokens
            wanted = (kind == promising and pays) or (second and kind == attempts.kind)
            due = costs.idle[kind.name] >= loss / PROBING and (kind == promising or usual > 1 / alone)
            if wanted or due:
                source.stop_below = least_chance(costs, kind, best)
                costs.idle.update(other.name for other in kinds)
                self.kind, costs.idle[kind.name] = kind, 0
                return best.k
        attempts.in_a_row, attempts.resting = 0, REST
        costs.idle.update(kind.name for kind in kinds)
        return 0

    def _kinds(self, source: Drafter) -> list[Kind]:
        return [Kind(source), Kind(source, tree=True)] if self.tree else [Kind(source)]

    def _of(self, source: Drafter, costs: CostModel) -> Attempts:
        if source.name not in self._attempts:
            self._attempts[source.name] = Attempts()
            for kind in self._kinds(source):
                acceptance = costs.acceptance[kind.name]
                acceptance.weigh(min(EARLIER_TESTS / max(acceptance.tested[0], EARLIER_TESTS), 1.0))
        return self._attempts[source.name]

    def _learn(self, costs: CostModel, last: Round) -> None:
        """Learn what the last round cost, and what became of its draft."""
        outcomes, kind = [token.outcome for token in last.drafted], self.kind
        source = kind.source
        if not (last.k and source.uses_early_exit):
            costs.learn_pass(len(outcomes) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        attempts, steps = self._of(source, costs), source.steps(len(outcomes))
        attempts.in_a_row += 1
        if attempts.in_a_row > 1:  # the first in a row also reads the prompt, or what was written while it rested
            costs.learn_draft(kind.name, steps, last.draft_seconds)
        elif not attempts.began:
            costs.learn_first(kind.name, steps, last.draft_seconds, self.prompt_tokens)
        attempts.began, attempts.kind = True, kind
        attempts.passed = DraftOutcome.ACCEPTED in outcomes
        costs.acceptance[kind.name].add(outcomes, last.k, kind.tree)
