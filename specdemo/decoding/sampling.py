"""Logits to probabilities to a token. Target and drafter go through the same functions."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..settings import Settings
from ..system.compiled import compiled

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


class Largest(NamedTuple):
    """The largest logit of each row, [...]."""

    values: Tensor  # in the type of the logits
    places: Tensor  # int64
    margins: Tensor  # how far the next largest lies below it, in the type of the logits


def largest(logits: Tensor) -> Largest:
    """The largest logits, [..., V] -> [...].

    Of equal logits the first counts. NaN counts as the largest, so a row with NaN gives NaN.
    """
    functions = _library_for(logits)
    if functions is None:  # `argmax` takes five times as long for bfloat16 on a CPU
        values, places = logits.max(-1)
        seconds = logits.scatter(-1, places[..., None], -torch.inf).amax(-1)
        return Largest(values, places, values - seconds)
    places = torch.empty(logits.shape[:-1], dtype=torch.long)
    values, seconds = logits.new_empty(2, *logits.shape[:-1])
    outputs = places.data_ptr(), values.data_ptr(), seconds.data_ptr()
    functions.largest(logits.data_ptr(), places.numel(), logits.shape[-1], *outputs, torch.get_num_threads())
    return Largest(values, places, values - seconds)


def certainty(values: Tensor) -> Tensor:
    """1 where a chosen logit is finite, NaN where it is not, [...] -> [...], without waiting for a GPU."""
    return values - values + 1


def sample(probs: Tensor, draw: Tensor) -> Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability exceeds `draw`.

    `probs` may be unnormalised. A token of probability 0 is never returned. One uniform draw for each token
    is all the randomness, so that runs can be reproduced and tests can enumerate them.

    Args:
        probs: [..., V], non-negative, not all zero.
        draw: [...], uniform in [0, 1).
    Returns:
        [...], int64; V, which is no token, where all are zero or not numbers.
    """
    functions = _library_for(probs)
    if functions is not None:
        places = torch.empty(probs.shape[:-1], dtype=torch.long)
        draw = draw.to(probs.device, torch.float64).expand(places.shape).contiguous()
        functions.sample(probs.data_ptr(), places.numel(), probs.shape[-1], draw.data_ptr(), places.data_ptr())
        return places
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Rounding may carry the product up to the total itself, which no cumulative value exceeds.
    threshold = torch.minimum(draw[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def one_hot(ids: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """A distribution with all mass on each id, [...] int64 -> [..., V]. Torch's own waits for a GPU."""
    return torch.zeros(*ids.shape, vocab, dtype=dtype, device=ids.device).scatter_(-1, ids[..., None], 1)


@cache
def library() -> CDLL | None:
    """The functions of `sampling.c`, None where they cannot be built. The first call may have to compile them."""
    functions = compiled(Path(__file__).with_suffix(".c"))
    if functions is not None:
        functions.largest.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_int]
        functions.sample.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p]
    return functions


def _library_for(rows: Tensor) -> CDLL | None:
    """The library, if it reads rows like these."""
    known = rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.is_contiguous()
    return library() if known else None


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
