"""A suffix automaton with counts: what followed every earlier stretch of a text, and how often.

It is the smallest automaton that accepts the suffixes of a text (Blumer et al. 1985), built token by token. It has at
most two states for each token. A state stands for stretches of the text that all end at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 64  # tokens of a stretch whose occurrences are counted
ROOT = 0  # the state of the empty stretch


class SuffixAutomaton:
    """The stretches of a growing text.

    `following[state]` gives the state after each token that followed, `lengths[state]` the length of the longest
    stretch of a state, `links[state]` the state of its longest suffix that ends at more places, and `counts[state]`
    how often its stretches occurred, which is exact up to `LONGEST` tokens.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.lengths = [0]
        self.links = [-1]
        self.counts = [0]
        self._whole = ROOT  # the state of the whole text
        self._end = ROOT  # the state of its last `LONGEST` tokens
        self.extend(token_ids)

    def __len__(self) -> int:
        """How many tokens the text has."""
        return self.lengths[self._whole]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the end of the text."""
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

        Args:
            state, matched: the same of the text before that token; at first `ROOT` and 0.
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
