"""Runs models some of whose layers keep a running state: linear attention, state-space layers, short convolutions.

Every pass overwrites such a state. transformers' own rollback (`Cache.activate_past_recording` and `crop`) restores
the states of convolutions but not recurrent ones (5.23: `LinearAttentionCacheLayerMixin.is_croppable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ..system.device import to_device
from .eager import EagerRunner, PreallocatedLayer

AGAIN = 8  # the most tokens that a pass reads again before its new ones; more get a pass of their own


class PreallocatedBoth(LinearAttentionAndFullAttentionLayer, PreallocatedLayer):
    """A layer with states as well as keys and values, as Falcon-H1 has them."""

    def __init__(self, capacity: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self)
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        kind = PreallocatedLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


PREALLOCATED = {DynamicLayer: PreallocatedLayer, LinearAttentionAndFullAttentionLayer: PreallocatedBoth}


class HybridCache(DynamicCache):
    """A cache of keys, values and running states, with one copy of the states to go back to."""

    layers: list[Any]

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        super().__init__(config=config)
        kinds = [PREALLOCATED.get(type(layer)) for layer in self.layers]
        self.layers = [kind(capacity) if kind else layer for kind, layer in zip(kinds, self.layers, strict=True)]
        self.keep()

    def keep(self) -> None:
        """Copy the present states."""
        self._kept = [_copied(layer.__dict__) for layer in self.layers]

    def go_back(self) -> None:
        """Restore the copied states."""
        for layer, kept in zip(self.layers, self._kept, strict=True):
            layer.__dict__.update(_copied(kept))


def _copied(held: dict[str, Any]) -> dict[str, Any]:
    """What a layer holds. Its states, which are in dicts, are copied. Keys and values are not: they only grow."""
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in held.items()}


def _copy(states: dict[int, Any]) -> dict[int, Any]:
    return {index: state.clone() if isinstance(state, Tensor) else state for index, state in states.items()}


class HybridRunner(EagerRunner):
    """An `EagerRunner` for a model that `families.is_hybrid` names.

    The states are copied where the text is settled: after the prompt, and after the tokens that a rollback keeps. If
    tokens were forgotten since then, the next pass begins at the copy and reads again the kept tokens after it.
    """

    cannot_branch = "some layers of this model keep a running state, which only a chain can write"

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        super().__init__(model, capacity)
        self._text = torch.empty(capacity, dtype=torch.int64, device=self._reads_on)
        self._reached = 0  # tokens that the states have read, forgotten ones included
        self._kept_at = 0  # tokens that the copied states have read
        self._settled = False

    def _new_cache(self) -> Any:
        return HybridCache(self.model.config.get_text_config(), self.context)

    def prefill(self, ids: Sequence[int]) -> Tensor:
        self._reached = self._kept_at = 0
        logits = super().prefill(ids)
        self._settled = True
        return logits

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self._settled = True

    def _pass(self, ids: Sequence[int] | Tensor, **options: Any) -> Any:
        start, begin, end = self._start, self._start, self._start + len(ids)
        self._text[start:end] = to_device(ids, self._reads_on)
        if start < self._reached:
            begin = self._go_back(start)
        elif self._settled:
            self._keep(start)
        self._settled, self._reached = False, end
        if options["logits_to_keep"] == 0:
            options["logits_to_keep"] = end - start
        return self._run(begin, end, **options)

    def _go_back(self, length: int) -> int:
        """Bring back states from before token `length`. Returns how many tokens they have read."""
        if length < self._kept_at:  # a drafter with another tokenizer may forget settled tokens
            self._cache, self._kept_at = self._new_cache(), 0
        else:
            self._cache.go_back()
        if length - self._kept_at > AGAIN:
            self._run(self._kept_at, length, logits_to_keep=1)
            self._keep(length)
        return self._kept_at

    def _keep(self, length: int) -> None:
        self._cache.keep()
        self._kept_at = length

    def _run(self, begin: int, end: int, **options: Any) -> Any:
        options[self._cache_as] = self._cache
        return self.model(self._text[None, begin:end], use_cache=True, **options)
