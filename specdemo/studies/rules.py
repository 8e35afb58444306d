"""Rules made wrong on purpose, and the distribution that a rule emits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..decoding.loop import rule_for
from ..decoding.match import Match
from ..decoding.rejection import Rejection, Term, acceptance_probability, residual
from ..decoding.rule import Rule
from ..types import REJECTION, BadInput, Settings
from .acceptance import BY_RATIO, emitted_with


class NoiseUsedTwice(Match):
    """The match rule with the noise of a position used again at the next: tokens depend on those before them twice."""

    def key(self, position: int) -> int:
        return super().key(position - position % 2)


class LikeliestByRatio(Rejection):
    """Rejection sampling of tokens that were chosen: the drafter's likeliest is tested as if it was drawn from q."""

    def _draw(self, probs: Tensor, number: Tensor, token_ids: Tensor | None) -> Tensor:
        return probs.argmax(-1)


_PARTS: dict[str, tuple[Term, Term]] = {  # of rejection sampling, by the name of the broken rule
    "accept-if-p-exceeds-q": (lambda p, q: (p > q).to(p.dtype), residual),
    "resample-from-p": (acceptance_probability, lambda p, q: p),
}
BROKEN: dict[str, Callable[[Settings], Rule]] = {
    **{name: partial(Rejection, passes=passes, left=left) for name, (passes, left) in _PARTS.items()},
    "likeliest-by-ratio": LikeliestByRatio,
    "noise-used-twice": NoiseUsedTwice,
}


def make_rule(settings: Settings, broken: str = "") -> Rule:
    """The rule of the settings, or one of `BROKEN` in its place.

    Raises:
        BadInput: there is no such broken rule.
    """
    if broken and broken not in BROKEN:
        raise BadInput(f"There is no broken rule called {broken!r}. Choose one of: {', '.join(BROKEN)}.")
    return BROKEN[broken](settings) if broken else rule_for(settings)


def emitted_distribution(p: Tensor, q: Tensor, rule: str = REJECTION, broken: str = "") -> Tensor:
    """The distribution of the token emitted where the target says p and the draft was drawn from q, [V] float64.

    Under rejection sampling the token was drafted and accepted, or the draft was rejected and the token drawn from what
    is left: q(x) passes(x) + P(rejected) left(x), computed by the very functions that the rule runs. For the exact rule
    this is p (Leviathan et al., arXiv 2211.17192, appendix A.1). Under the match rule the token is the target's own
    draw, whatever was drafted: p itself. That holds with noise used twice as well, which shows in pairs of tokens only.
    Both p and q are normalised in double precision first, since float32 rows sum to 1 only roughly.
    """
    p, q = (row.double() / row.double().sum() for row in (p, q))
    if broken == "likeliest-by-ratio":
        return emitted_with(p, q, [int(q.argmax())], BY_RATIO)[1]
    if broken not in _PARTS and (broken or rule != REJECTION):
        return p
    passes, left_of = _PARTS.get(broken, (acceptance_probability, residual))
    drafted = q > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = q[drafted] * passes(p[drafted], q[drafted])
    left = left_of(p, q)
    return accepted + (1 - accepted.sum()) * left / left.sum()


def harm(p: Tensor, q: Tensor) -> float:
    """How far from p, in total variation, all of `_PARTS` emit at least where p and q are these."""
    fair = p.double() / p.double().sum()
    return min(float((emitted_distribution(p, q, broken=name) - fair).abs().sum() / 2) for name in _PARTS)
