"""Rules made wrong on purpose, the distribution that a rule emits, and what rules accept of the same drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..decoding.rejection import Rejection, Term, acceptance_probability, residual
from ..decoding.rule import Match, Rule
from ..errors import BadInput
from ..racing.race import rule_for
from ..settings import REJECTION, Settings


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
    """The rule of the settings, or one of `BROKEN` in its place."""
    if broken and broken not in BROKEN:
        raise BadInput(f"There is no broken rule called {broken!r}. Choose one of: {', '.join(BROKEN)}.")
    return BROKEN[broken](settings) if broken else rule_for(settings)


def emitted_distribution(p: Tensor, q: Tensor, rule: str = REJECTION, broken: str = "") -> Tensor:
    """The distribution of the token emitted where the target says p and the draft was drawn from q, [V] float64.

    Under rejection sampling the token was drafted and accepted, or the draft was rejected and the token drawn from what
    is left: q(x) passes(x) + P(rejected) left(x), computed by the very functions that the rule runs. For the exact rule
    this is p (Leviathan et al., arXiv 2211.17192, appendix A.1). "likeliest-by-ratio" drafts the likeliest token of q
    with probability 1 and tests it by p / q. Under the match rule the token is the target's own draw, whatever was
    drafted: p itself. That holds with noise used twice as well, which shows in pairs of tokens only.
    Both p and q are normalised in double precision first, since float32 rows sum to 1 only roughly.
    """
    p, q = (row.double() / row.double().sum() for row in (p, q))
    if broken == "noise-used-twice" or (not broken and rule != REJECTION):
        return p
    passes, left_of = _PARTS.get(broken, (acceptance_probability, residual))
    draft = one_hot(q.argmax(), len(q)).to(q.dtype) if broken == "likeliest-by-ratio" else q
    drafted = draft > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = draft[drafted] * passes(p[drafted], q[drafted])
    left = left_of(p, q)
    return accepted + (1 - accepted.sum()) * left / left.sum()


def harm(p: Tensor, q: Tensor) -> float:
    """How far from p, in total variation, all of `_PARTS` emit at least where p and q are these."""
    fair = p.double() / p.double().sum()
    return min(float((emitted_distribution(p, q, broken=name) - fair).abs().sum() / 2) for name in _PARTS)


# What rules accept ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many tokens of one draft rejection sampling and the match rule accept on average."""

    drafted: int
    rejection: float
    match: float


def accepted_of(p: Tensor, q: Tensor, token_ids: Sequence[int]) -> Acceptance:
    """For one draft of k tokens that were drawn from q (or chosen: one-hot q).

    Args:
        p, q: [k, V], the distributions of the target and of the drafter at each drafted position.
    """
    p, q = (rows.double() / rows.double().sum(-1, keepdim=True) for rows in (p, q))
    x = torch.tensor(token_ids)[:, None]
    ratio = (p.gather(1, x) / q.gather(1, x))[:, 0].tolist()
    match = [match_chance(p[i], q[i], token) for i, token in enumerate(token_ids)]
    return Acceptance(len(token_ids), _in_order([min(1.0, r) for r in ratio]), _in_order(match))


def _in_order(chances: Sequence[float]) -> float:
    """The mean number of tests passed before the first that fails."""
    passed, total = 1.0, 0.0
    for chance in chances:
        passed *= chance
        total += passed
    return total


def match_chance(p: Tensor, q: Tensor, token: int) -> float:
    """The chance that the target draws the token that the drafter drew with the same noise, from p and q [V].

    P(both draw x) = 1 / sum_j max(p_j / p_x, q_j / q_x) (Daliri, Musco and Suresh, arXiv 2408.07978), over q_x.
    """
    p_x, q_x = float(p[token]), float(q[token])
    if p_x == 0:
        return 0.0
    return 1 / float(torch.maximum(p / p_x, q / q_x).sum()) / q_x
