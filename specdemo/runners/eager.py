"""The transformers model as it is, on any device: the reference every faster runner is checked against."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedModel

from . import check_fits
from .cache import PreallocatedCache


class EagerRunner:
    """Runs `model` through its own forward, with a cache of `capacity` tokens.

    The cache is taken from memory at the first pass and is meant to live for one run.
    """

    def __init__(self, model: PreTrainedModel, capacity: int, cache: PreallocatedCache | None = None) -> None:
        self.model = model
        self.context = capacity
        self.device = model.device
        self.vocab_size = model.config.get_text_config().vocab_size
        self._cache = cache

    @property
    def length(self) -> int:
        return self._cache.get_seq_length() if self._cache is not None else 0

    def prefill(self, ids: Sequence[int]) -> Tensor:
        self.release()
        self._cache = PreallocatedCache(self.model.config.get_text_config().num_hidden_layers, self.context)
        return self._read(ids, logits_to_keep=1)

    def forward(self, ids: Sequence[int]) -> Tensor:
        return self._read(ids, logits_to_keep=0)  # 0 keeps them all

    def rollback(self, length: int) -> None:
        if self._cache is not None:
            self._cache.rollback(length)

    def first_layers(self, count: int) -> EagerRunner:
        return EagerRunner(first_layers(self.model, count), self.context, self._cache)

    def release(self) -> None:
        self._cache = None

    @torch.inference_mode()
    def _read(self, ids: Sequence[int], logits_to_keep: int) -> Tensor:
        check_fits(self, len(ids))
        input_ids = torch.tensor([ids], device=self.device)  # [1, T]
        output = self.model(input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=logits_to_keep)
        logits: Tensor = output.logits[0]
        self.device = logits.device  # differs from the input's where the layers are spread over devices
        return logits


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model that shares every weight with `model` but ends after `count` layers, then norm and head."""
    total = model.config.get_text_config().num_hidden_layers
    if not 1 <= count < total:
        raise ValueError(f"The model has {total} layers; the first {count} of them are not a proper part.")
    base = copy.copy(model.base_model)
    name, layers = next(
        (name, child) for name, child in base.named_children() if isinstance(child, ModuleList) and len(child) == total
    )
    base._modules = {**base._modules, name: ModuleList(list(layers)[:count])}
    short = copy.copy(model)
    short._modules = {**short._modules, model.base_model_prefix: base}
    return short
