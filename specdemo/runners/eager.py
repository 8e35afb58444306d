"""The transformers model as it is, on any device: the reference every faster runner is checked against."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from ..hardware import sent
from . import check_fits, check_part
from .ahead import Ahead
from .cache import PreallocatedCache

# Families whose layers take nothing but the layer before and the cache; only there can a pass begin in the middle.
RESUMABLE = {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3"}


class EagerRunner:
    """Runs `model` through its own forward, with a cache of `capacity` tokens.

    The cache is taken from memory at the first pass and is meant to live for one run.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.context = capacity
        self.device = model.device
        self.vocab_size = model.config.get_text_config().vocab_size
        self.length = 0
        self.states: Tensor | None = None
        self._kept: tuple[int, ...] = ()
        self._ahead = Ahead()
        self._split: Split | None = None
        self._cache: PreallocatedCache | None = None

    def keep_states(self, layers: Sequence[int]) -> None:
        self._kept = tuple(layers)

    def prefill(self, ids: Sequence[int]) -> Tensor:
        self.release()
        self._cache = PreallocatedCache(self.model.config.get_text_config().num_hidden_layers, self.context)
        return self._read(ids, logits_to_keep=1)

    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        return self._read(ids, logits_to_keep=0)  # 0 keeps them all

    @torch.inference_mode()
    def read_ahead(self, ids: Sequence[int], layers: int) -> Tensor:
        check_fits(self, len(self._ahead) + len(ids))
        if self._split is None or layers != self._ahead.layers:
            self._ahead, self._split = Ahead(layers), Split.of(self.model, layers)
        logits: Tensor = self._read_ahead(self._split.first, ids).logits[0]
        return logits

    def rollback(self, length: int) -> None:
        self._ahead.clear()
        self.length = min(self.length, length)

    def release(self) -> None:
        self._ahead.clear()
        self._cache = self.states = None
        self.length = 0

    @torch.inference_mode()
    def _read(self, ids: Sequence[int] | Tensor, logits_to_keep: int) -> Tensor:
        check_fits(self, len(ids))
        model = self.model
        resumable = model.config.model_type in RESUMABLE and not self._kept
        self._ahead.keep_beginning_of(ids if resumable else ())
        if self._split and self._ahead:
            if len(unread := ids[len(self._ahead) :]):
                self._read_ahead(self._split.first.base_model, unread)
            model = self._split.rest_from(self._ahead.states())
            self._ahead.clear()
        layers = layers_at(self.model, self._kept)
        with outputs_of(layers) as outputs:
            logits: Tensor = self._pass(model, ids, self.length, logits_to_keep=logits_to_keep).logits[0]
        self.length += len(ids)
        self.device = logits.device  # differs from the input's where the layers are spread over devices
        if layers:
            self.states = torch.cat([outputs[layer][0].to(self.device) for layer in layers], -1)
        return logits

    def _read_ahead(self, model: PreTrainedModel, ids: Sequence[int] | Tensor) -> Any:
        """The answer of the first layers to T tokens behind those already read ahead."""
        assert self._split is not None
        with outputs_of([self._split.last]) as outputs:
            answer = self._pass(model, ids, self.length + len(self._ahead))
        self._ahead.add(ids, outputs[self._split.last][0])
        return answer

    def _pass(self, model: PreTrainedModel, ids: Sequence[int] | Tensor, start: int, **options: Any) -> Any:
        assert self._cache is not None, "prefill comes first"
        self._cache.seek(start)
        input_ids = sent(ids, self.model.device)[None]  # [1, T]
        return model(input_ids, past_key_values=self._cache, use_cache=True, **options)


class Given(Module):
    """Stands where layers would whose outcome is known already."""

    states: Tensor  # [1, T, hidden]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.states


@dataclass(frozen=True, slots=True)
class Split:
    """A model cut in two behind its layer `last`; both parts share its weights and leave it as it is.

    `first` goes from there to the norm and the head. `rest` begins there, at the states that are `given`.
    """

    first: PreTrainedModel
    last: Module
    given: Given
    rest: PreTrainedModel

    @classmethod
    def of(cls, model: PreTrainedModel, layers: int) -> Split:
        """Cut a model behind its first `layers` layers."""
        _, stack = decoder_layers(model)
        check_part(layers, len(stack))
        given = Given()
        first = with_layers(model, stack[:layers])
        return cls(first, stack[layers - 1], given, with_layers(model, [*[given] * layers, *stack[layers:]]))

    def rest_from(self, states: Tensor) -> PreTrainedModel:
        """The second part, to be asked about the tokens with these states, [T, hidden]."""
        self.given.states = states[None]
        return self.rest


def with_layers(model: PreTrainedModel, layers: Iterable[Module]) -> PreTrainedModel:
    """A model that shares everything with `model` but has other decoder layers."""
    name, _ = decoder_layers(model)
    base = copy.copy(model.base_model)
    base._modules = {**base._modules, name: ModuleList(layers)}
    other = copy.copy(model)
    other._modules = {**other._modules, model.base_model_prefix: base}
    return other


def decoder_layers(model: PreTrainedModel) -> tuple[str, ModuleList]:
    """The list of a model's decoder layers, and what the model calls it."""
    count = model.config.get_text_config().num_hidden_layers
    return next(
        (name, child)
        for name, child in model.base_model.named_children()
        if isinstance(child, ModuleList) and len(child) == count
    )


def layers_at(model: PreTrainedModel, places: Iterable[int]) -> list[Module]:
    """The decoder layers that stand at these places, the first of all at 0."""
    _, stack = decoder_layers(model)
    return [stack[place] for place in places]


@contextmanager
def outputs_of(layers: Sequence[Module]) -> Iterator[dict[Module, Tensor]]:
    """Collects what some layers put out (the residual stream behind each) in a pass made inside, [B, T, hidden]."""
    outputs: dict[Module, Tensor] = {}

    def keep(layer: Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
