"""A key-value cache that is allocated once and rolled back by moving an integer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values in fixed buffers of `capacity` positions.

    `DynamicLayer` concatenates for every token, which copies the whole cache each time. Here new keys and values are
    written after the first `length`, and a rollback only lowers `length`: the positions after it are overwritten
    before they are read again.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, width)
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, T, width]. Returns views of all of them, [B, heads, length, width]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class PreallocatedCache(Cache):
    """A transformers cache of `PreallocatedLayer`s, for models in which every layer is attention.

    The first pass makes its layers, since some models have more than one for a decoder layer.
    """

    layers: list[PreallocatedLayer]

    def __init__(self, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=partial(PreallocatedLayer, capacity))

    def seek(self, length: int) -> None:
        """Set the length in every layer: the next pass sees these positions and writes after them."""
        for layer in self.layers:
            layer.length = length

    def move(self, start: int, path: Sequence[int]) -> None:
        """Move the rows of a path, counted from `start`, to the positions from `start` on, in every layer."""
        rows, end = torch.tensor(path) + start, start + len(path)
        for layer in self.layers:
            for part in (layer.keys, layer.values):
                part[:, :, start:end] = part[:, :, rows.to(part.device)]
