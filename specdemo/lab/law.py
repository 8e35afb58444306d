"""The law that the rule emits, how far a sample lies from a law, and two rules made wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import chdtrc
from torch import Tensor

from ..decode import Rule
from ..sampling import sample
from ..types import Draft, TokenKind, Verdict
from ..verify import acceptance_probability, residual, verify

LEAST_EXPECTED = 5  # counts that a cell of the chi-square test must be expected to hold (Cochran 1954)
ALMOST_ONE = 1 - 2**-53  # the largest draw there is: it passes no test below certainty


Part = Callable[[Tensor, Tensor], Tensor]  # p and q, both [V] -> [V]


def emitted_law(p: Tensor, q: Tensor, accept: Part = acceptance_probability, left: Part = residual) -> Tensor:
    """The law of the token emitted where the target says p and the draft was drawn from q, [V] float64.

    Drafted and accepted, or rejected and then drawn from the residual, by the very functions that `verify` uses:
    q(x) min(1, p(x) / q(x)) + P(rejected) residual(x). Leviathan et al., arXiv 2211.17192, appendix A.1, show that
    this is p. Both laws are normalised in double precision first, since float32 rows sum to 1 only roughly.

    Another `accept` or `left` in place of those functions gives the law of a broken rule.
    """
    p, q = (row.double() / row.double().sum() for row in (p, q))
    drafted = q > 0
    accepted = torch.zeros_like(p)
    accepted[drafted] = q[drafted] * accept(p[drafted], q[drafted])
    resampled = left(p, q)
    return accepted + (1 - accepted.sum()) * resampled / resampled.sum()


def harm(p: Tensor, q: Tensor) -> float:
    """How far from p, in total variation, the law of either broken rule below lies where p and q are these."""
    laws = emitted_law(p, q, accept=lambda p, q: (p > q).double()), emitted_law(p, q, left=lambda p, q: p)
    return min(float((law - p.double() / p.double().sum()).abs().sum() / 2) for law in laws)


@dataclass(frozen=True, slots=True)
class Distances:
    """How far the frequencies of a sample lie from a law; divergences in nats."""

    total_variation: float
    kl: float | None
    jensen_shannon: float

    @classmethod
    def between(cls, counts: np.ndarray, probs: np.ndarray) -> Distances:
        """Of counts [cells] and the probabilities of the cells; KL is None where the sample holds the impossible."""
        found = counts / counts.sum()
        middle = (found + probs) / 2
        js = (_kl(found, middle) + _kl(probs, middle)) / 2
        kl = None if found[probs == 0].any() else _kl(found, probs)
        return cls(float(np.abs(found - probs).sum() / 2), kl, js)


def _kl(found: np.ndarray, law: np.ndarray) -> float:
    there = found > 0
    return float((found[there] * np.log(found[there] / law[there])).sum())


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float | None:
    """Pearson's p-value: how often a fair sample would lie at least as far from the law as this one.

    Cells expected to hold fewer than `LEAST_EXPECTED` are pooled. A count where the probability is 0 makes it 0.
    None if there is only one cell left, and so nothing to test.
    """
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    order = expected.argsort()
    small = max(int((expected < LEAST_EXPECTED).sum()), 1)
    while small < len(order) and expected[order[:small]].sum() < LEAST_EXPECTED:
        small += 1
    pooled_expected = np.append(expected[order[small:]], expected[order[:small]].sum())
    pooled_counts = np.append(counts[order[small:]], counts[order[:small]].sum())
    if len(pooled_counts) == 1:
        return None
    statistic = ((pooled_counts - pooled_expected) ** 2 / pooled_expected).sum()
    return float(chdtrc(len(pooled_counts) - 1, statistic))


def accept_if_p_exceeds_q(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
    """Wrong on purpose: a drafted token passes iff p > q, whatever was drawn."""
    honest = verify(target_probs, draft, draws)
    rigged = [0.0 if p > q else ALMOST_ONE for p, q in zip(honest.p, honest.q, strict=True)]
    return verify(target_probs, draft, torch.cat([draws.new_tensor(rigged), draws[len(rigged) :]]))


def resample_from_p(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
    """Wrong on purpose: after a rejection the token is drawn from p again, not from the residual."""
    verdict = verify(target_probs, draft, draws)
    if verdict.kind is not TokenKind.RESAMPLED:
        return verdict
    p = target_probs[verdict.accepted]
    token = int(sample(p, draws[-1]))
    return replace(verdict, token_id=token, token_p=float(p[token]))


EXACT = "exact"
RULES: dict[str, Rule] = {
    EXACT: verify,
    "accept-if-p-exceeds-q": accept_if_p_exceeds_q,
    "resample-from-p": resample_from_p,
}
