"""Logits to probabilities: temperature, top-k, top-p. Target and drafter go through the same functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..settings import Settings
from .sampling import certainty, largest

TINY = 1e-30  # a temperature below this would underflow in float32; this one gives the same distribution
FEW, MANY_MORE = 256, 16  # how many tokens top-p sorts first, and the factor for each further try


def probabilities(logits: Tensor, settings: Settings) -> Tensor:
    """The distribution that is sampled: temperature, then top-k, then top-p, renormalised.

    Temperature 0 is the one-hot distribution of the largest logit (the first one on a tie), so that
    greedy decoding is ordinary sampling from it and nothing is ever divided by zero.

    Args:
        logits: [..., V], any float type.
    Returns:
        [..., V], float32 (float64 if the logits are), rows summing to 1. A row is NaN if its logits hold NaN or plus
        infinity, or are all minus infinity; `sample` finds no token in it.
    """
    if settings.temperature == 0:
        values, places, _ = largest(logits)
        rows = torch.zeros(logits.shape, dtype=_wide(logits), device=logits.device)
        return rows.scatter_(-1, places[..., None], certainty(values).to(rows)[..., None])
    logits = logits.to(_wide(logits)) / max(settings.temperature, TINY)
    if 0 < settings.top_k < logits.shape[-1]:
        logits = _keep_top_k(logits, settings.top_k)
    probs = logits.softmax(-1)
    if settings.top_p < 1:
        probs = _keep_top_p(probs, settings.top_p, settings.top_k)
    return probs


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep exactly the k largest logits and set the others to minus infinity. Of equal ones the lowest ids are kept.

    Which of several equal logits `topk` finds depends on the other rows.
    """
    last = logits.topk(k, dim=-1).values[..., -1:]
    ties = logits == last
    room = k - (logits > last).sum(-1, keepdim=True)
    return logits.masked_fill((logits < last) | (ties & (ties.cumsum(-1) > room)), -torch.inf)


def _keep_top_p(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches top_p (Holtzman et al., 1904.09751).

    On a CPU sorting a whole vocabulary takes as long as a pass of a small model, so only a few tokens are sorted if
    these reach top_p. On a GPU all are sorted, because looking at the sum would wait for the GPU.
    """
    vocab = probs.shape[-1]
    most = min(top_k or vocab, vocab)  # the others have no probability
    count = min(FEW, most) if probs.device.type == "cpu" else most
    while True:
        values, index = _likeliest(probs, count)
        reached = values.cumsum(-1)
        last = (reached < top_p).sum(-1, keepdim=True).clamp(max=count - 1)  # [..., 1], the place of the set's last
        if count == most or bool((values.gather(-1, last) > values[..., -1:]).all()):  # none as likely was left out
            break
        count = min(MANY_MORE * count, most)
    inside = torch.arange(count, device=probs.device) <= last
    kept = torch.where(inside, values / reached.gather(-1, last), 0)
    return torch.zeros_like(probs).scatter(-1, index, kept)


def _likeliest(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest probabilities in falling order and their tokens, [..., count] each; equal ones by token id."""
    if count == probs.shape[-1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    index = probs.topk(count).indices.sort().values
    values, order = probs.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return values, index.gather(-1, order)
