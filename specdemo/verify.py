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
    k, vocab = len(draft.token_ids), target_probs.shape[-1]
    x = sent(draft.token_ids, target_probs.device)  # [k]
    drawn_from = one_hot(x, vocab, target_probs.dtype) if draft.probs is None else draft.probs
    draft_probs = drawn_from.to(target_probs)  # [k, V]

    p = target_probs[:k].gather(1, x[:, None]).squeeze(1)  # [k]
    q = draft_probs.gather(1, x[:, None]).squeeze(1)  # [k]
    passed = draws[:k] < acceptance_probability(p, q)
    accepted = passed.long().cumprod(0).sum(0, keepdim=True)  # [1], how many passed before the first failure

    # The bonus is drawn from the residual against a draft that proposes nothing: with q = 0 it is p itself.
    nothing = draft_probs.new_zeros(1, vocab)
    p_next = target_probs.index_select(0, accepted)  # [1, V]
    q_next = torch.cat([draft_probs, nothing]).index_select(0, accepted)
    token = sample(residual(p_next, q_next), draws[k:])  # [1]

    # One transfer, and on a GPU the only wait, brings everything to the host.
    answer = torch.cat([accepted, token, p_next.gather(1, token[:, None])[0], p, q, draws[:k], x]).tolist()
    n, token_id, token_p, tests = int(answer[0]), int(answer[1]), answer[2], answer[3:]
    after_draft = TokenKind.BONUS if n == k else TokenKind.RESAMPLED
    kind = after_draft if k else TokenKind.TARGET
    p_x, q_x, drawn, ids = (tests[i * k : (i + 1) * k] for i in range(4))
    return Verdict(n, token_id, kind, token_p, p_x, q_x, drawn, [int(id) for id in ids])


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q), elementwise. A drafted token has q > 0, or it could not have been drawn."""
    return (p / q).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected place is drawn from: max(0, p - q), unnormalised, [..., V].

    Where p = q nothing can be rejected, except by rounding; then there is no residual and p stands in.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
