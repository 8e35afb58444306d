"""Transformers' own forward, on any device: the reference that every faster engine is checked against."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from ..system.hardware import to_device
from ..system.progress import check_stopped
from .preallocated_cache import PreallocatedCache
from .rows import mask_of, places
from .runner import CachedRunner, Runner, check_branches, check_fits

# Families whose layers read only the layer before and the cache.
SIMPLE = {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3"}
MASKED = {"eager", "sdpa"}  # attention that takes a mask of any shape


class EagerRunner(CachedRunner):
    """Runs `model` through its own forward, with a cache of `capacity` tokens.

    The cache is allocated at the prefill and lives for one run.
    """

    exact_tree_rows = exact_rows = 0  # the order of sums in a product may depend on the number of rows

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        super().__init__(capacity)
        self.model = model
        self._reads_on = torch.device("cpu") if model.device.type == "meta" else model.device  # meta: it is on the disk
        self.device = torch.device("cpu") if model.device.type == "mps" else self._reads_on
        self.vocab_size = model.config.get_text_config().vocab_size
        self.length = 0

    @property
    def cannot_branch(self) -> str | None:
        """Known are families whose attention goes by one mask. In others a row may see what is not in its branch."""
        config = self.model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or {"full_attention"})
        if config.model_type not in SIMPLE:
            return f"it is not known how a tree is masked in a model of the type {config.model_type}"
        if layers != {"full_attention"} or getattr(config, "sliding_window", None):
            return "some layers of this model see a window only"
        if config._attn_implementation not in MASKED:
            return f"its attention ({config._attn_implementation}) takes no mask of that kind"
        return None

    def prefill(self, ids: Sequence[int]) -> Tensor:
        self.release()
        self._cache = self._new_cache()
        with stoppable(self.model):
            return self._read(ids, None, logits_to_keep=1)

    def _new_cache(self) -> Any:
        return PreallocatedCache(self.model.config.get_text_config().num_hidden_layers, self.context)

    def forward(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None = None) -> Tensor:
        if parents is not None:
            check_branches(self)
        return self._read(ids, parents, logits_to_keep=0)  # 0 means all of them

    def first_layers(self, count: int, capacity: int) -> Runner:
        _, layers = decoder_layers(self.model)
        return type(self)(with_layers(self.model, layers[:count]), capacity)

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)

    def release(self) -> None:
        self._cache = self.hidden_states = None
        self.length = 0

    @torch.inference_mode()
    def _read(self, ids: Sequence[int] | Tensor, parents: Sequence[int] | None, logits_to_keep: int) -> Tensor:
        check_fits(self, len(ids))
        self._start = self.length
        layers = layers_at(self.model, self._captured_layers) if self._captured_layers else []
        with outputs_of(layers) as outputs:
            how: dict[str, Any] = {} if parents is None else self._branching(parents)
            logits = for_sampling(self._pass(ids, self.length, logits_to_keep=logits_to_keep, **how).logits[0])
        self.length += len(ids)
        self.device = logits.device  # differs from the input's where the layers are spread over devices
        if layers:
            states = [for_sampling(outputs[layer][0, -len(ids) :]).to(self.device) for layer in layers]
            self.hidden_states = torch.cat(states, -1)
        return logits

    def _branching(self, parents: Sequence[int]) -> dict[str, Tensor]:
        """What tells transformers where the rows of a tree stand, and what they see."""
        model, start = self.model, self.length
        positions = torch.tensor(places(start, len(parents), parents), device=model.device)
        mask = mask_of(parents, start, model.dtype, model.device)
        return {"position_ids": positions[None], "attention_mask": mask[None, None]}

    def _pass(self, ids: Sequence[int] | Tensor, start: int, **options: Any) -> Any:
        assert self._cache is not None, "prefill comes first"
        self._cache.seek(start)
        input_ids = to_device(ids, self._reads_on)[None]  # [1, T]
        return self.model(input_ids, past_key_values=self._cache, use_cache=True, **options)


def for_sampling(rows: Tensor) -> Tensor:
    """Logits or states where they are sampled from and drafted with: an Apple GPU has no float64, so they leave it."""
    return rows.to("cpu", torch.float32) if rows.device.type == "mps" else rows


def with_layers(model: PreTrainedModel, layers: Iterable[Module]) -> PreTrainedModel:
    """A model that shares everything with `model` but has other decoder layers."""
    name, _ = decoder_layers(model)
    base = with_parts(model.base_model, {name: ModuleList(layers)})
    return with_parts(model, {model.base_model_prefix: base})


def with_parts(module: Any, parts: Mapping[str, Module]) -> Any:
    """A shallow copy of a module with some other children.

    On a model that is spread over devices, accelerate replaces a module's `forward` by one that calls a hook and then
    the original. A plain copy would still run the original module, so the copy gets a hook of its own.
    """
    other = copy.copy(module)
    other._modules = {**other._modules, **parts}
    if hook := other.__dict__.pop("_hf_hook", None):
        from accelerate.hooks import add_hook_to_module

        del other.forward, other._old_forward
        add_hook_to_module(other, hook)
    return other


@contextmanager
def stoppable(model: PreTrainedModel) -> Iterator[None]:
    """Within this context a stopped pass ends before its next layer."""
    parts = [module for parts in model.modules() if isinstance(parts, ModuleList) for module in parts]
    hooks = [part.register_forward_pre_hook(lambda *_: check_stopped()) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def decoder_layers(model: PreTrainedModel) -> tuple[str, ModuleList]:
    """The name of a model's list of decoder layers, and that list."""
    count = model.config.get_text_config().num_hidden_layers
    return next(
        (name, child)
        for name, child in model.base_model.named_children()
        if isinstance(child, ModuleList) and len(child) == count
    )


def layers_at(model: PreTrainedModel, indices: Iterable[int]) -> list[Module]:
    _, stack = decoder_layers(model)
    return [stack[index] for index in indices]


@contextmanager
def outputs_of(layers: Sequence[Module]) -> Iterator[dict[Module, Tensor]]:
    """Collect the outputs of some layers (the residual stream, [B, T, hidden]) of a pass within this context."""
    outputs: dict[Module, Tensor] = {}

    def keep(layer: Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
