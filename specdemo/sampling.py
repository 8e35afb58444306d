"""Logits to probabilities to a token. Target and drafter go through the same functions."""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Settings

TINY = 1e-30  # a temperature or top-p below this would underflow in float32; the law is the same as at this value


def probabilities(logits: Tensor, settings: Settings) -> Tensor:
    """The distribution that is sampled: temperature, then top-k, then top-p, renormalised.

    Temperature 0 is the one-hot distribution of the largest logit (the first one on a tie), so that
    greedy decoding is ordinary sampling from it and nothing is ever divided by zero.

    Args:
        logits: [..., V], any float type.
    Returns:
        [..., V], float32 (float64 if the logits are), rows summing to 1.
    """
    if settings.temperature == 0:
        return one_hot(largest(logits), logits.shape[-1], _wide(logits))
    logits = logits.to(_wide(logits)) / max(settings.temperature, TINY)
    if 0 < settings.top_k < logits.shape[-1]:
        logits = _keep_top_k(logits, settings.top_k)
    probs = logits.softmax(-1)
    if settings.top_p < 1:
        probs = _keep_top_p(probs, settings.top_p)
    return probs


def largest(logits: Tensor) -> Tensor:
    """The place of the largest logit, the first one on a tie, [..., V] -> [...] int64.

    What `argmax` answers, which takes five times as long for bfloat16 on a CPU: half a millisecond for five tokens.
    """
    return logits.max(-1).indices


def sample(probs: Tensor, draw: Tensor) -> Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability exceeds `draw`.

    `probs` may be unnormalised. A token of probability 0 is never returned. One uniform draw a token
    is all the randomness there is, which keeps runs reproducible and tests able to enumerate them.

    Args:
        probs: [..., V], non-negative, not all zero.
        draw: [...], uniform in [0, 1).
    Returns:
        [...], int64.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Rounding may carry the product up to the total itself, which no cumulative value exceeds.
    threshold = torch.minimum(draw[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def one_hot(ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """The law that is certain of each id, [...] int64 -> [..., V]; torch's own looks at the ids, which waits."""
    return torch.zeros(*ids.shape, vocab, dtype=dtype, device=ids.device).scatter_(-1, ids[..., None], 1)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Exactly the k largest logits (ties broken by `topk`), the others at minus infinity."""
    values, index = logits.topk(k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, index, values)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches top_p (Holtzman et al., 1904.09751)."""
    values, index = probs.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1) - values  # the most likely token always stays: nothing comes before it
    kept = values.masked_fill(before >= max(top_p, TINY), 0)
    return torch.zeros_like(probs).scatter(-1, index, kept / kept.sum(-1, keepdim=True))
