"""Verification rules as they are got wrong: what public implementations do, and a little beside the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdemo.decoding.acceptance import Answer
from specdemo.decoding.rejection import TESTING, residual, sample, verify
from specdemo.decoding.warping import probabilities
from specdemo.settings import Settings
from specdemo.tokens import Draft, Token, TokenKind
from tests.harness.classes import Rejection

from .doubles import VOCAB, answering
from .enumeration import VerifyFn


def rule(
    accept: Callable[[float, float], float] = lambda p, q: min(1.0, p / q),
    left: Callable[[float, float], float] = lambda p, q: max(0.0, p - q),
    unwarp: Callable[[list[float]], list[float]] = lambda row: row,
    bonus: Callable[[list[float]], list[float]] = lambda row: row,
    bonus_row: int = 0,
) -> VerifyFn:
    """The rule of `verify` in plain Python, with its parts replaceable by wrong ones."""

    def verified(target_probs: Tensor, draft: Draft, draws: Tensor) -> Answer:
        ids, p_rows, k = [int(token) for token in draft.token_ids], target_probs.tolist(), len(draft.token_ids)
        one_hot = [[float(x == token) for x in range(VOCAB)] for token in ids]
        q_rows = draft.probs.tolist() if draft.probs is not None else one_hot
        n, weights, kind = k, bonus(p_rows[k - bonus_row if k else 0]), TokenKind.BONUS
        for place, token in enumerate(ids):
            if not float(draws[place]) < accept(p_rows[place][token], q_rows[place][token]):
                n, kind = place, TokenKind.RESAMPLED
                weights = [left(p, q) for p, q in zip(unwarp(p_rows[place]), q_rows[place], strict=True)]
                break
        sums = np.cumsum(weights)
        token = int(np.searchsorted(sums, float(draws[k]) * sums[-1], side="right"))
        return answering(draft, n, Token(min(token, VOCAB - 1), kind))

    return verified


def argmax_of(row: list[float]) -> list[float]:
    return [float(p == max(row)) for p in row]


def unwarped(temperature: float) -> Callable[[list[float]], list[float]]:
    """Undoes the temperature: what the target said before it."""

    def undo(row: list[float]) -> list[float]:
        raised = [p**temperature for p in row]
        return [p / sum(raised) for p in raised]

    return undo


HOT = 1.5  # the temperature at which they are caught
MISTAKES = {
    "accepted if p exceeds q": rule(accept=lambda p, q: float(p > q)),
    "accepted by p alone": rule(accept=lambda p, q: p),
    "p and q swapped in the test": rule(accept=lambda p, q: min(1.0, q / p) if p else 1.0),
    "p and q swapped in the residual": rule(left=lambda p, q: max(0.0, q - p)),
    "resampled from p": rule(left=lambda p, q: p),
    "residual of un-warped p": rule(unwarp=unwarped(HOT)),
    "residual keeps its size": rule(left=lambda p, q: abs(p - q)),
    "bonus by argmax": rule(bonus=argmax_of),
    "bonus from the place before": rule(bonus_row=1),
}
SLIGHT = {
    "a test slightly off": rule(accept=lambda p, q: min(1.0, p / q) * 0.999),
    "a residual slightly off": rule(left=lambda p, q: max(0.0, p - q) ** 1.001),
    "a bonus slightly off": rule(bonus=lambda row: [p**0.999 for p in row]),
}


def masked_afterwards(target_probs: Tensor, draft: Draft, draws: Tensor) -> Answer:
    """q is masked and renormalised after the guesses were drawn from it."""
    if draft.probs is not None:
        left = draft.probs * (target_probs[:-1] > 0)
        draft = replace(draft, probs=left / left.sum(-1, keepdim=True).clamp(min=1e-9) + 1e-12)
    return verify(target_probs, draft, draws)


def forbidden_dropped(target_probs: Tensor, draft: Draft, draws: Tensor) -> Answer:
    """The draft is cut off before its first forbidden guess, and the next token is a bonus."""
    token_ids = [int(token) for token in draft.token_ids]
    good = next((place for place, token in enumerate(token_ids) if not target_probs[place, token]), len(token_ids))
    probs, q = (None if each is None else each[:good] for each in (draft.probs, draft.q))
    draws = torch.cat([draws[:good], draws[-1:]])
    return verify(target_probs[: good + 1], Draft(token_ids[:good], probs, q), draws)


def children_by_ratio(target_probs: Tensor, draft: Draft, draws: Tensor) -> Answer:
    """The likeliest children of a tree, tokens 0 and 1, tested as if drawn from q: min(1, p / q), one after the other.

    `draws` are those of the target's own token after each row, of which only the first is used.
    """
    if not draft.tree:
        return verify(target_probs, draft, draws)
    p, q, number = target_probs[0].tolist(), [0.4, 0.3, 0.2, 0.1], float(draws[0])
    for token in draft.token_ids:
        chance = min(1.0, p[int(token)] / q[int(token)])
        if number < chance:
            return answering(draft, 0, Token(int(token), TokenKind.ACCEPTED))
        number = (number - chance) / (1 - chance)  # uniform again
        left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        p, q[int(token)] = [a / sum(left) for a in left], 0.0
        q = [b / sum(q) for b in q]
    token = int(np.searchsorted(np.cumsum(p), number, side="right"))
    return answering(draft, 0, Token(token, TokenKind.RESAMPLED))


# With random numbers of their own ----------------------------------------------------------------------------------


class Wrong(Rejection):
    """Rejection sampling with another test."""

    def __init__(self, settings: Settings, test: VerifyFn) -> None:
        super().__init__(settings)
        self.test = test

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Any = None) -> Answer:
        draws = self._uniforms(TESTING, range(len(logits)))
        self._round += 1
        return self.test(probabilities(logits, self.settings), draft, draws)


class Reseeded(Rejection):
    """Its random numbers are the same in every round."""

    def _uniforms(self, purpose: int, indices: Iterable[int]) -> Tensor:
        self._round = 0
        return super()._uniforms(purpose, indices if purpose == TESTING else [0 for _ in indices])


class Shared(Rejection):
    """Proposes and accepts with the same numbers."""

    def _draft_numbers(self, positions: Iterable[int]) -> Tensor:
        return super()._draft_numbers(range(len([*positions])))  # the places in the draft

    def _uniforms(self, purpose: int, indices: Iterable[int]) -> Tensor:
        return super()._uniforms(TESTING, indices)


class Unmasked(Rejection):
    """The naive combination with a grammar: unmasked p is tested against q, and only what is left is masked."""

    def masked(self, logits: Tensor, draft: Draft) -> Tensor:
        self.unmasked = logits
        return super().masked(logits, draft)

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Any = None) -> Answer:
        draws, k = self._uniforms(TESTING, range(len(logits))), len(draft.token_ids)
        self._round += 1
        p, allowed = probabilities(self.unmasked, self.settings), logits > -torch.inf
        x = [int(token) for token in draft.token_ids]
        q = torch.eye(VOCAB, dtype=p.dtype)[x] if draft.probs is None else draft.probs
        n = 0
        while n < k and allowed[n, x[n]] and draws[n] < p[n, x[n]] / q[n, x[n]]:
            n += 1
        left = residual(p[n], q[n]) if n < k else p[n]
        left = left * allowed[n]
        token = int(sample(left if left.sum() else p[n] * allowed[n], draws[k]))
        kind = TokenKind.RESAMPLED if n < k else TokenKind.BONUS
        return answering(draft, n, Token(token, kind))


class ByArgmax(Rejection):
    """Accepts a filler where it is the likeliest token, as the published code of drafting ahead does on a miss."""

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Any = None) -> Answer:
        if not (draft.ahead and not draft.ahead.hit and draft.ahead.prepared):
            return super().verify(logits, draft, position)
        accepted = probabilities(logits, replace(self.settings, temperature=0))
        return super().verify(torch.cat([accepted[: len(draft.token_ids)].log(), logits[-1:]]), draft, position)
