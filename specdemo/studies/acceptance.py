"""What rejection sampling, the match rule and block verification accept of the same drafts, from p and q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Accepted:
    """How many tokens of one draft each rule accepts on average, over its own random numbers."""

    drafted: int
    rejection: float
    match: float
    block: float


def accepted_of(p: Tensor, q: Tensor, token_ids: Sequence[int]) -> Accepted:
    """For one draft of k tokens that were drawn from q (or chosen: one-hot q).

    Args:
        p, q: [k, V], the distributions of the target and of the drafter at each drafted position.
    """
    p, q = (rows.double() / rows.double().sum(-1, keepdim=True) for rows in (p, q))
    x = torch.tensor(token_ids)[:, None]
    ratio = (p.gather(1, x) / q.gather(1, x))[:, 0].tolist()
    match = [match_chance(p[i], q[i], token) for i, token in enumerate(token_ids)]
    return Accepted(len(token_ids), _in_order([min(1.0, r) for r in ratio]), _in_order(match), _block(p, q, ratio))


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


def _block(p: Tensor, q: Tensor, ratio: Sequence[float]) -> float:
    """Of block verification (Sun et al., arXiv 2403.10444).

    P_i = min(1, P_(i-1) p_i(x_i) / q_i(x_i)), S_i = sum_y max(0, P_i p_(i+1)(y) - q_(i+1)(y)),
    h_i = S_i / (S_i + 1 - P_i) for i < k and h_k = P_k; the largest i whose own test of chance h_i passes is accepted.
    """
    k, joint, tests = len(ratio), 1.0, []
    for i, r in enumerate(ratio, start=1):
        joint = min(1.0, joint * r)
        if i == k:
            tests.append(joint)
        else:
            left = float((joint * p[i] - q[i]).clamp(min=0).sum())
            tests.append(left / (left + 1 - joint) if left + 1 - joint > 0 else 1.0)
    failed, total = 1.0, 0.0
    for i in range(k, 0, -1):
        total += failed * tests[i - 1] * i
        failed *= 1 - tests[i - 1]
    return total
