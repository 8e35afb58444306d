"""Keys and values of many rows that step together, in pages, and the attention over them.

A row reads one token a step, so attention is a product of a few query rows with everything that came before. On a CPU
products with whole pages, each in one piece of memory, take less time than one with a growing slice of a buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from ..runners.fused import round_up

PAGE = 128  # positions
ATTENTION = "specdemo_paged"  # its name in transformers


class PagedLayer(DynamicLayer):
    """One layer's pages of keys and of values, each [B * heads, PAGE, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.key_pages: list[Tensor] = []
        self.value_pages: list[Tensor] = []
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append one position, [B, heads, 1, width] twice; return the pages."""
        keys, values = key_states.flatten(0, 1), value_states.flatten(0, 1)
        page, place = divmod(self.length, PAGE)
        if page == len(self.key_pages):  # zeros, since what is masked must still be a number
            self.key_pages.append(keys.new_zeros(len(keys), PAGE, keys.shape[-1]))
            self.value_pages.append(values.new_zeros(len(values), PAGE, values.shape[-1]))
        self.key_pages[page][:, place] = keys[:, 0]
        self.value_pages[page][:, place] = values[:, 0]
        self.length += 1
        return self.key_pages, self.value_pages

    def get_seq_length(self) -> int:
        return self.length


class PagedCache(Cache):
    """A transformers cache for one token a row at a time, for models whose every layer is attention."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[PagedLayer() for _ in range(layers)])


def page_mask(first: Tensor, length: int) -> Tensor:
    """What is added to the scores of rows that see the positions from `first` [B, 1] up to `length`: 0 or -inf.

    float32 [B, 1, 1, positions of all pages].
    """
    position = torch.arange(round_up(length, PAGE), device=first.device)
    seen = (position >= first) & (position < length)
    return torch.zeros(seen.shape, device=first.device).masked_fill_(~seen, -torch.inf)[:, None, None]


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    mask: Tensor,
    scaling: float,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of one query token a row, [B, heads, 1, width] -> [B, 1, heads, width], over pages.

    The query heads that share a key head are the rows of one product, so keys and values are never copied.
    """
    batch, heads, _one, width = query.shape
    grouped = query.reshape(len(key[0]), -1, width)  # [B * key heads, heads of a group, width]
    scores = torch.cat([grouped @ page.mT for page in key], -1).float().mul_(scaling)
    weights = scores.view(batch, heads, -1).add_(mask[:, 0]).softmax(-1).to(query.dtype).view(scores.shape)
    parts = [part @ page for part, page in zip(weights.split(PAGE, -1), value, strict=True)]
    out = torch.stack(parts).sum(0, dtype=torch.float32).to(query.dtype)
    return out.view(batch, 1, heads, width), None


AttentionInterface.register(ATTENTION, paged_attention)
