"""Accept, resample, bonus: the rule that makes speculation lossless.

Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.
Pure functions on tensors; all randomness comes in as uniform draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .hardware import sent
from .sampling import one_hot, sample
from .types import Draft, TokenKind, Verdict


def verify(target_probs: Tensor, draft: Draft, draws: Tensor) -> Verdict:
    """Test a draft of k tokens against the target, left to right, and draw the token that follows.

    Drafted token x_i passes iff draws[i] < min(1, p_i(x_i) / q_i(x_i)). The token after the accepted
    ones is drawn with draws[k]: from the residual max(0, p - q) if a test failed (*resampled*), from
    the target's own next distribution if none did (*bonus*, or *target* when the draft was empty).

    A draft without probabilities is one-hot: q = 1, so x passes with probability p(x), and the residual
    is p with x struck out. At temperature 0 p is one-hot as well, and the rule reads: accept iff x is
    the target's argmax, else emit the argmax.

    Args:
        target_probs: [k + 1, V], the target's distribution at each drafted place and after the last.
        draws: [k + 1], uniform in [0, 1).
    """
    k = len(draft.token_ids)
    x = sent(draft.token_ids, target_probs.device)  # [k]
    draft_probs = None if draft.probs is None else draft.probs.to(target_probs)  # [k, V]

    p = target_probs[:k].gather(1, x[:, None]).squeeze(1)  # [k]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, x[:, None]).squeeze(1)  # [k]
    passed = draws[:k] < acceptance_probability(p, q)
    accepted = passed.long().cumprod(0).sum(0, keepdim=True)  # [1], how many passed before the first failure

    p_next = target_probs.index_select(0, accepted)  # [1, V]
    left = residual(p_next, _law_at(accepted, x, draft_probs, p_next)) if k else p_next  # nothing was proposed
    token = sample(left, draws[k:])  # [1]

    # One transfer, and on a GPU the only wait, brings everything to the host.
    answer = torch.cat([accepted, token, p_next.gather(1, token[:, None])[0], p, q, draws[:k], x]).tolist()
    n, token_id, token_p, tests = int(answer[0]), int(answer[1]), answer[2], answer[3:]
    after_draft = TokenKind.BONUS if n == k else TokenKind.RESAMPLED
    kind = after_draft if k else TokenKind.TARGET
    p_x, q_x, drawn, ids = (tests[i * k : (i + 1) * k] for i in range(4))
    return Verdict(n, token_id, kind, token_p, p_x, q_x, drawn, [int(id) for id in ids])


def _law_at(place: Tensor, x: Tensor, draft_probs: Tensor | None, like: Tensor) -> Tensor:
    """What the drafted token at a place [1] was drawn from, [1, V]. Zeros behind the draft: the bonus is drawn from the
    residual against a draft that proposes nothing, which is p itself."""
    inside = place.clamp(max=len(x) - 1)
    if draft_probs is None:
        law = one_hot(x.index_select(0, inside), like.shape[-1], like.dtype)
    else:
        law = draft_probs.index_select(0, inside)
    return law * (place < len(x))


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q), elementwise. A drafted token has q > 0, or it could not have been drawn."""
    return (p / q).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected place is drawn from: max(0, p - q), unnormalised, [..., V].

    Where p = q nothing can be rejected, except by rounding; then there is no residual and p stands in.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
