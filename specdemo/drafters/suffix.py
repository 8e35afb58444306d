"""Suffix decoding: what mostly followed the same words, in this text or in earlier answers.

SuffixDecoding (Oliaro et al., arXiv 2411.04975) keeps suffix trees of the text and of earlier answers. It looks up the
longest end of the text that occurred before, and drafts what followed it there, the more of it the longer that end is.
Here suffix automata take the place of the trees: they hold the same counts in less memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..decoding.drafter import CHAIN, Drafter, DraftOptions
from ..decoding.parts import DrafterParts
from ..decoding.rule import Rule
from ..engines.rows import WIDTH
from ..engines.runner import Runner
from ..types import Draft
from .suffix_automaton import LONGEST, ROOT, SuffixAutomaton
from .tree import Child, grow

AFTER = -1  # stands after every remembered text, and is no token
FACTOR = 4  # a path has at most so many tokens for each token that matches
LEAST = 0.5  # a draft ends before a token that makes it less likely than this, by counts, to pass as a whole


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
    """Drafts what followed the longest end of the text that occurred before, in the text or in a remembered one.

    >>> Suffix().propose([1, 2, 3, 4, 9, 1, 2, 3], k=3).token_ids
    [4, 9, 1]
    >>> Suffix([[5, 6, 7, 8]]).propose([1, 2, 5, 6], k=3).token_ids
    [7, 8]
    """

    name = "suffix"

    def __init__(self, remembered: Sequence[Sequence[int]] = ()) -> None:
        """
        Args:
            remembered: the tokens of earlier answers.
        """
        self._earlier = SuffixAutomaton()
        for token_ids in remembered:
            self._earlier.extend([*token_ids, AFTER])
        self._text = SuffixAutomaton()
        self._matched = ROOT, 0  # the end of the text that occurs in the remembered ones

    @classmethod
    def build(cls, parts: DrafterParts, runner: Runner, rule: Rule) -> Suffix:
        return cls(parts.remembered)

    def _read(self, context: Sequence[int]) -> None:
        new = context[len(self._text) :]
        self._text.extend(new)
        for token in new:
            self._matched = self._earlier.step(*self._matched, token)

    def match(self, context: Sequence[int]) -> SuffixMatch:
        """The longest end of the text that occurred before; of equal ones that in the text itself."""
        self._read(context)
        here, earlier = self._text.repeated(), self._matched
        return SuffixMatch(self._text, *here) if here[1] >= earlier[1] else SuffixMatch(self._earlier, *earlier)

    def propose(self, context: Sequence[int], k: int, options: DraftOptions = CHAIN) -> Draft:
        if options.depth is not None:
            return self._tree(context, k, options.depth, options.stop_below)
        at = self.match(context)
        most, all_pass = min(k, FACTOR * at.length), 1.0
        token_ids: list[int] = []
        while len(token_ids) < most and (child := next(at.following(1), None)):
            token, share, at = child
            all_pass *= share
            if all_pass < (max(LEAST, options.stop_below) if token_ids else 0):
                break
            token_ids.append(token)
        return Draft(token_ids)

    def _tree(self, context: Sequence[int], nodes: int, depth: int, stop_below: float) -> Draft:
        """What followed, the tokens with the largest values first, see `tree`.

        >>> draft = Suffix().propose([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 1, 2], 4, DraftOptions(depth=2))
        >>> draft.token_ids, draft.parents
        ([3, 4, 9, 8], [-1, -1, 0, 0])
        """
        at = self.match(context)
        depth = min(depth, FACTOR * at.length)
        return grow(at, lambda match: match.following(WIDTH), nodes, depth, stop_below) if depth else Draft()
