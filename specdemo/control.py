"""How many tokens to draft next: a fixed K, or K = auto, which follows what rounds cost and how many guesses pass.

The text stays exact with auto because K is chosen before the draft is made, from what has no part in the draws to
come: earlier rounds, the clock, and runs with other random numbers. Given the text so far, a round emits the target's
law for a draft of any length, so also for a length chosen like that. To drop guesses for what they are would not be
safe: those that are kept would be a biased choice. Nor would it be to learn from a run with the same random numbers:
so each run with auto has its own, and above temperature 0 a seed can give another text each time, of the same law.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from .costs import FORGET, LIKELY_TESTS, Costs, Tally
from .events import Round
from .types import AUTO, Fate

if TYPE_CHECKING:
    from .drafters import Drafter

EARLIER_TESTS = 4.0  # a run begins with those of earlier ones, as if so many at most had been its own
ENOUGH_TESTS = 3.0  # with fewer, a drafter gets the benefit of the doubt
PROBING = 0.0125  # share of the time that may be lost by drafting where it does not pay, to see whether it does by now


class History:
    """What one drafter did in this run, and what it did in earlier ones."""

    def __init__(self, earlier: Tally, rested: int = 0) -> None:
        self._usual = earlier.chances()
        self.tests = Tally(FORGET)
        self.tests.tested = [min(tested, EARLIER_TESTS) for tested in earlier.tested]
        self.tests.passed = [usual * tested for usual, tested in zip(self._usual, self.tests.tested, strict=True)]
        self.drafts = 0  # in a row: since the run began or since it rested
        self.passed = False  # the first guess of the last draft
        self.began = self.resting = False  # at rest it drafts nothing until it is time to try again,
        self.rest = 0.0  # so many rounds after its last draft
        self.rested = rested  # rounds since that, in whatever run

    def chances(self) -> Iterator[float]:
        """How likely the guess at each place passes if those before it did.

        Where tests say little, as much likelier or less than at the place before as it was in earlier runs.
        """
        passing = before = 1.0
        for usual, passed, tested in zip(self._usual, self.tests.passed, self.tests.tested, strict=True):
            expected = min(passing * usual / before, 1.0)
            passing, before = (passed + LIKELY_TESTS * expected) / (tested + LIKELY_TESTS), usual
            yield passing


class Control:
    """Chooses the K of every round of one run.

    Where a drafter hands over to others (`Drafter.author`), each of them has a history of its own: a copied phrase
    is worth a long draft, a guess beside it a short one or none.
    """

    def __init__(self, k: int | str, costs: Costs | None, prompt_tokens: int = 1) -> None:
        """`k` may be AUTO and needs `costs` then. A fixed K adds what its rounds cost to them."""
        self.k, self.costs, self.prompt_tokens = k, costs, prompt_tokens
        self._histories: dict[type[Drafter], History] = {}
        self._author: type[Drafter]  # of the last round that K was chosen for

    def choose(self, most: int, last: Round | None, author: type[Drafter]) -> int:
        """How many tokens `author` is to draft next, at most `most`, having seen the `last` round of this run."""
        costs = self.costs
        if costs and last:
            self._learn(costs, last)
        self._author = author
        if self.k != AUTO:
            return min(int(self.k), most)
        assert costs is not None, "K = auto goes by costs"
        history = self._history(author, costs)
        history.rested += 1
        k = self._choose(author, history, most, costs) if most else 0
        history.rested = costs.rested[author] = 0 if k else history.rested
        return k

    def _choose(self, author: type[Drafter], history: History, most: int, costs: Costs) -> int:
        """The K of most tokens per second, as far as one can tell; 0 while drafting does not pay."""
        if history.resting and history.rested < history.rest:
            return 0
        passes = costs.passes
        k, rate, cost, hope = 0, 0.0, 0.0, 0.0
        tokens = chance = 1.0
        untested = history.tests.tested[0] < ENOUGH_TESTS
        longest = min(most, costs.most_k)
        for place, passing in enumerate(islice(history.chances(), longest)):
            chance *= passing
            tokens += chance
            draft = costs.of_draft(author, place + 1)
            if draft is None:
                return 1  # to see what one costs
            length = passes[place + 2] + draft
            if tokens / length > rate:
                k, rate, cost = place + 1, tokens / length, length
            hope = max(hope, (place + 2) / length)  # the rate if all pass
            if not untested and (tokens + (longest - place - 1) * chance) / length < rate:
                break  # nor would longer ones yield as much if each of their guesses were as likely as this one
        beginning = 0.0 if history.began else costs.of_beginning(author, self.prompt_tokens)
        alone = min(passes[1:])  # a pass over one token costs no more than others, and its own figure may be old
        pays = most * (alone - 1 / (hope if untested else rate)) > beginning  # if the rest of the text goes like this
        history.rest = (cost * (1 / alone - rate) + beginning / alone) / PROBING  # what the draft is likely to lose
        again = history.drafts == 1 and history.passed  # worth knowing what it costs: only a second draft is timed
        due = again or history.rested >= history.rest
        history.resting = not due and (history.resting or not pays)
        if history.resting:
            history.drafts = 0
            return 0
        return k

    def _history(self, author: type[Drafter], costs: Costs) -> History:
        if author not in self._histories:
            self._histories[author] = History(costs.fared[author], costs.rested[author])
        return self._histories[author]

    def _learn(self, costs: Costs, last: Round) -> None:
        fates = [token.fate for token in last.drafted]
        if not (last.k and self._author.reads_ahead):
            costs.learn_pass(len(fates) + 1, last.seconds - last.draft_seconds)
        if not last.k:
            return
        history = self._history(self._author, costs)
        history.drafts += 1
        if history.drafts > 1:  # the first of a row reads the prompt, or what was written while it rested
            costs.learn_draft(self._author, len(fates), last.draft_seconds)
        elif not history.began:
            costs.learn_first(self._author, len(fates), last.draft_seconds, self.prompt_tokens)
        history.began = True
        history.passed = fates[:1] == [Fate.ACCEPTED]
        if fates:
            history.tests.add(fates)
            costs.fared[self._author].add(fates)
