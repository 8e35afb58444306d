"""Suffix decoding: what mostly followed the same words, in this text or in earlier answers.

SuffixDecoding (Oliaro et al., arXiv 2411.04975) keeps suffix trees of the text and of earlier answers. It looks up the
longest end of the text that occurred before, and drafts what followed it there, the more of it the longer that end is.
Here suffix automata take the place of the trees: they hold the same counts in less memory.

A suffix automaton is the smallest that accepts the suffixes of a text (Blumer et al. 1985). It is built token by token,
and has at most two states for each token. A state stands for stretches of the text that all end at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..decoding.parts import DrafterParts
from ..decoding.rule import Rule
from ..engines.rows import WIDTH
from ..engines.runner import Runner
from ..tokens import Draft
from .tree import Child, grow

LONGEST = 64  # tokens of a stretch whose occurrences are counted
ROOT = 0  # the state of the empty stretch
AFTER = -1  # stands after every remembered text, and is no token
FACTOR = 4  # a path has at most so many tokens for each token that matches
LEAST = 0.5  # a draft ends before a token that makes it less likely than this, by counts, to pass as a whole


class SuffixAutomaton:
    """What followed every earlier stretch of a growing text, and how often."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        # By state:
        self.following: list[dict[int, int]] = [{}]  # the state after each token that followed
        self.lengths = [0]  # of its longest stretch
        self.links = [-1]  # the state of the longest suffix of that stretch that ends at more places
        self.counts = [0]  # how often its stretches occurred, which is exact up to `LONGEST` tokens
        self._whole = ROOT  # the state of the whole text
        self._end = ROOT  # the state of its last `LONGEST` tokens
        self.extend(token_ids)

    def __len__(self) -> int:
        """How many tokens the text has."""
        return self.lengths[self._whole]

    def extend(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self._add(token)
            self._count(token)

    def _add(self, token: int) -> None:
        following, lengths, links = self.following, self.lengths, self.links
        new = self._state({}, lengths[self._whole] + 1, ROOT, 0)
        state, self._whole = self._whole, new
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state < 0:
            return
        next_state = following[state][token]
        if lengths[next_state] > lengths[state] + 1:  # only its shorter stretches end here as well: they get a state
            longer = next_state
            shape = dict(following[longer]), lengths[state] + 1, links[longer], self.counts[longer]
            next_state = links[longer] = self._state(*shape)
            while state >= 0 and following[state].get(token) == longer:
                following[state][token] = next_state
                state = links[state]
        links[new] = next_state

    def _state(self, following: dict[int, int], length: int, link: int, count: int) -> int:
        self.following.append(following)
        self.lengths.append(length)
        self.links.append(link)
        self.counts.append(count)
        return len(self.counts) - 1

    def _count(self, token: int) -> None:
        """Count the stretches that end here. Without `LONGEST` a text that repeats itself would take ever longer."""
        most = min(len(self), LONGEST)
        self._end = self.following[self.shortened(self._end, most - 1)][token]
        self._end = state = self.shortened(self._end, most)
        while state > ROOT:
            self.counts[state] += 1
            state = self.links[state]

    def repeated(self) -> tuple[int, int]:
        """The state and the length of the longest end of the text that occurred before; `ROOT` and 0 if none did."""
        state = self._end if self.counts[self._end] > 1 else max(self.links[self._end], ROOT)
        return state, min(self.lengths[state], LONGEST)

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Read a token of another text: the state and the length of the longest end of it that occurs in this one.

        `state` and `matched` are the same of the text before that token, at first `ROOT` and 0.
        """
        while token not in self.following[state]:
            if state == ROOT:
                return ROOT, 0
            state = self.links[state]
            matched = self.lengths[state]
        state, matched = self.following[state][token], matched + 1
        return (state, matched) if matched <= LONGEST else (self.shortened(state, LONGEST), LONGEST)

    def shortened(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of the longest stretch of a state."""
        while state > ROOT and self.lengths[self.links[state]] >= length:
            state = self.links[state]
        return state


class SuffixMatch(NamedTuple):
    """An end of the text and where it occurs: a state of an automaton and the length of its stretch."""

    automaton: SuffixAutomaton
    state: int
    length: int

    def following(self, most: int) -> Iterator[Child[SuffixMatch]]:
        """The tokens that followed most often, with their shares. Where nothing did, a shorter end may know more."""
        automaton, state, length = self
        if length >= LONGEST:
            length = LONGEST - 1
            state = automaton.shortened(state, length)  # so that what follows is counted too
        while state != ROOT:
            found = automaton.following[state]
            counts = automaton.counts
            total = sum(counts[after] for after in found.values())  # without the end of the text itself
            ranked = sorted(found, key=lambda token: -counts[found[token]])[:most] if len(found) > 1 else found
            if tokens := [token for token in ranked if token != AFTER and counts[found[token]]]:
                for token in tokens:
                    after = found[token]
                    yield token, counts[after] / total, SuffixMatch(automaton, after, length + 1)
                return
            state = automaton.links[state]
            length = automaton.lengths[state]


class Suffix(Drafter):
    """Drafts what followed the longest end of the text that occurred before, in the text or in a `remembered` answer.

    >>> Suffix().propose([1, 2, 3, 4, 9, 1, 2, 3], k=3).token_ids
    [4, 9, 1]
    >>> Suffix([[5, 6, 7, 8]]).propose([1, 2, 5, 6], k=3).token_ids
    [7, 8]

    A tree holds the tokens with the largest values first, see `tree`:

    >>> draft = Suffix().propose([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 1, 2], 4, DraftOptions(depth=2))
    >>> draft.token_ids, draft.parents
    ([3, 4, 9, 8], [-1, -1, 0, 0])
    """

    name = "suffix"

    def __init__(self, remembered: Sequence[Sequence[int]] = ()) -> None:
        self._earlier = SuffixAutomaton()
        for token_ids in remembered:
            self._earlier.extend([*token_ids, AFTER])
        self._text = SuffixAutomaton()
        self._matched = ROOT, 0  # the end of the text that occurs in the remembered ones

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Suffix:
        return cls(parts.remembered)

    def match(self, context: Sequence[int]) -> SuffixMatch:
        """The longest end of the text that occurred before; of equal ones that in the text itself."""
        new = context[len(self._text) :]
        self._text.extend(new)
        for token in new:
            self._matched = self._earlier.step(*self._matched, token)
        here, earlier = self._text.repeated(), self._matched
        return SuffixMatch(self._text, *here) if here[1] >= earlier[1] else SuffixMatch(self._earlier, *earlier)

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        at = self.match(context)
        if options.depth is not None:
            depth = min(options.depth, FACTOR * at.length)
            return grow(at, lambda match: match.following(WIDTH), k, depth, options.stop_below) if depth else Draft()
        most, all_pass = min(k, FACTOR * at.length), 1.0
        token_ids: list[int] = []
        while len(token_ids) < most and (child := next(at.following(1), None)):
            token, share, at = child
            all_pass *= share
            if all_pass < (max(LEAST, options.stop_below) if token_ids else 0):
                break
            token_ids.append(token)
        return Draft(token_ids)
