"""What rules make of several drafted tokens for the same place, as the children of a token in a tree are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.rejection import acceptance_probability, residual

SIZES = (1, 2, 4, 8)  # children
OWN_DRAW, IN_TURN, BY_RATIO = "draw from p", "test by p, in turn", "test by p / q, in turn"


@dataclass(frozen=True, slots=True)
class Tested:
    """A rule with so many children: the chance that it accepts one, and how far from p what it emits is.

    `off` is the total variation.
    """

    rule: str
    children: int
    accepted: float
    off: float


def each_rule(p: Tensor, q: Tensor) -> Iterator[Tested]:
    """Every rule with the drafter's likeliest tokens as children, from p and q [V].

    "Draw from p" is the rule here, for match and for rejection sampling: where the target's own draw is a child, the
    walk goes on. In EAGLE's code the children are tested one after the other by p, and one that fails is struck out of
    p; the emitted distribution is the same. A test by p / q is right for children that were drawn from q. These were
    chosen, so the text no longer follows p.
    """
    p, q = (row.double() / row.double().sum() for row in (p, q))
    likeliest = q.topk(min(max(SIZES), int((q > 0).sum()))).indices.tolist()
    for size in SIZES:
        for rule in (OWN_DRAW, IN_TURN, BY_RATIO):
            accepted, emitted = emitted_with(p, q, likeliest[:size], rule)
            yield Tested(rule, size, accepted, float((emitted - p).abs().sum() / 2))


def emitted_with(p: Tensor, q: Tensor, children: Sequence[int], rule: str) -> tuple[float, Tensor]:
    """The chance that a child is accepted, and the distribution of the emitted token [V], from p and q [V].

    Both are normalised, and q is above 0 for all children.
    """
    if rule == OWN_DRAW:
        return float(p[list(children)].sum()), p
    emitted, reached = torch.zeros_like(p), 1.0
    for child in children:
        by_ratio = rule == BY_RATIO
        passes = float(acceptance_probability(p[child], q[child]) if by_ratio else p[child])
        emitted[child] += reached * passes
        reached *= 1 - passes
        if reached <= 0:
            return 1.0, emitted
        p = residual(p, q) if by_ratio else _without(p, child)
        p, q = p / p.sum(), _without(q, child)
    return 1 - reached, emitted + reached * p


def _without(probs: Tensor, token: int) -> Tensor:
    """A distribution with a token struck out; zeros if there is no other."""
    left = probs.clone()
    left[token] = 0
    return left / left.sum().clamp(min=torch.finfo(left.dtype).tiny)
