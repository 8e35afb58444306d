"""Transformers' own forward, on any device: the reference that every faster engine is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..errors import BadInput
from ..system.device import to_device
from .families import DEPENDS_ON_LENGTH, family_of
from .modules import cache_argument, decoder_layers, layers_at, outputs_of, with_module
from .rows import mask_of, places
from .runner import Runner
from .settled import settled

MASKED = {"eager", "sdpa"}  # attention that takes a mask of any shape


class EagerRunner(Runner):
    """Runs `model` through its own forward, with a cache of `capacity` tokens.

    The cache is allocated at the prefill and lives for one run. `capacity` is also the longest text of the run, which
    some models depend on, see `settled`. No row is exact: the order of sums in a product may depend on their number.
    """

    length = 0

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        super().__init__(capacity)
        self._unsettled, self.model = model, settled(model, capacity)
        self._reads_on = torch.device("cpu") if model.device.type == "meta" else model.device  # meta: on the disk
        self.device = torch.device("cpu") if model.device.type == "mps" else self._reads_on
        self.vocab_size = model.config.get_text_config().vocab_size
        self._layers: list[Module] = []
        self._cache_as = cache_argument(type(model))
        self._takes_positions = "position_ids" in signature(model.forward).parameters

    @property
    def cannot_branch(self) -> str | None:
        """None for families whose attention uses one mask. In others a row might see rows outside its branch."""
        config = self.model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or {"full_attention"})
        if not family_of(config).branches:
            return f"it is not known how a tree is masked in a model of the type {config.model_type}"
        if layers != {"full_attention"} or getattr(config, "sliding_window", None):
            return "some layers of this model see a window only"
        if self.model is not self._unsettled:  # a tree may have more rows than the run has positions
            return DEPENDS_ON_LENGTH
        if config._attn_implementation not in MASKED:
            return f"its attention ({config._attn_implementation}) takes no mask of that kind"
        return None

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        self._layers = layers_at(self.model, layers)  # an error must come before the run begins
        super().capture_hidden_states(layers)

    def prefill(self, ids: Sequence[int]) -> Tensor:
        self.release()
        self._cache = self._new_cache()
        return self._read(ids, None, logits_to_keep=1)

    def _new_cache(self) -> Any:
        return PreallocatedCache(self.context)

    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        if parents is not None:
            self.check_branches()
        return self._read(ids, parents, logits_to_keep=0)  # 0 means all of them

    def first_layers(self, count: int, capacity: int) -> Runner:
        path, layers = decoder_layers(self._unsettled)
        return type(self)(with_module(self._unsettled, path, layers[:count]), capacity)

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)

    def release(self) -> None:
        self._cache = self.hidden_states = None
        self.length = 0

    @torch.inference_mode()
    def _read(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None, logits_to_keep: int) -> Tensor:
        self.check_fits(len(ids))
        self._start = self.length
        listening: Any = outputs_of(self._layers) if self._layers else nullcontext()
        with listening as outputs:
            how: dict[str, Any] = {} if parents is None else self._branching(parents)
            logits = self._pass(ids, logits_to_keep=logits_to_keep, **how).logits[0]
        logits = for_sampling(logits[-logits_to_keep:])  # some models return those of all rows
        if len(logits) != (logits_to_keep or len(ids)):
            raise BadInput(
                f"A model of the type {self.model.config.model_type} gives {len(logits)} rows of logits for a pass "
                f"over {len(ids)} tokens, so no draft can be checked with it."
            )
        self.length += len(ids)
        self.device = logits.device  # differs from the input's where the layers are spread over devices
        if self._layers:
            states = [for_sampling(outputs[layer][0, -len(ids) :]).to(self.device) for layer in self._layers]
            self.hidden_states = torch.cat(states, -1)
        return logits

    def _branching(self, parents: Sequence[int]) -> dict[str, Tensor]:
        """The arguments that tell transformers the positions of a tree's rows and what they see."""
        model, start = self.model, self.length
        positions = torch.tensor(places(start, len(parents), parents), device=model.device)
        mask = mask_of(parents, start, model.dtype, model.device)
        return {"position_ids": positions[None], "attention_mask": mask[None, None]}

    def _pass(self, ids: Sequence[int] | Tensor, **options: Any) -> Any:
        start = self._start
        assert self._cache is not None, "prefill comes first"
        self._cache.seek(start)
        input_ids = to_device(ids, self._reads_on)[None]  # [1, T]
        if self._takes_positions:  # as `generate` does: some models would count differently
            positions = torch.arange(start, start + len(ids), device=self._reads_on)
            options = {"position_ids": positions[None], **options}
        return self.model(input_ids, use_cache=True, **{self._cache_as: self._cache}, **options)


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


def for_sampling(rows: Tensor) -> Tensor:
    """Move logits or states to where they are used: off an Apple GPU, which has no float64."""
    return rows.to("cpu", torch.float32) if rows.device.type == "mps" else rows
