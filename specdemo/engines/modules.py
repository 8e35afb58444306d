"""Finds parts of a transformers model, and replaces them in a copy that shares all weights with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import BadInput
from ..system.progress import check_stopped


def cache_argument(kind: type[PreTrainedModel]) -> str:
    """What models of this class call their cache: `past_key_values`, from transformers 5.24 on `cache`.

    Empty where they take none.
    """
    arguments = signature(kind.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in arguments), "")


def decoder_layers(model: PreTrainedModel) -> tuple[str, ModuleList]:
    """The path of a model's list of decoder layers, and that list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = {path: module for path, module in model.named_modules() if isinstance(module, ModuleList)}
    found = {
        path: stack
        for path, stack in lists.items()
        if len(stack) == count and not any(path.startswith(f"{other}.") for other in lists)  # no list inside a layer
    }
    decoder = set(model.get_decoder().modules())
    narrower: list[Callable[[ModuleList], bool]] = [
        lambda stack: all(isinstance(layer, GradientCheckpointingLayer) for layer in stack),
        lambda stack: stack in decoder,  # an encoder of images may have as many layers
    ]
    for test in narrower:
        if len(found) > 1:
            found = {path: stack for path, stack in found.items() if test(stack)}
    if len(found) != 1:
        raise BadInput(
            f"The decoder layers of a model of the type {model.config.model_type} are not found, so neither heads nor "
            "layer-skip can be used with it."
        )
    return next(iter(found.items()))


def layers_at(model: PreTrainedModel, indices: Iterable[int]) -> list[Module]:
    """Some decoder layers of a model. See `decoder_layers` for errors; without `indices` there are none."""
    indices = list(indices)
    stack = decoder_layers(model)[1] if indices else ()
    return [stack[index] for index in indices]


def with_module(module: Any, path: str, part: Module) -> Any:
    """A copy of a module with another part at `path`. It shares everything else with the module."""
    name, _, rest = path.partition(".")
    return with_parts(module, {name: with_module(module.get_submodule(name), rest, part) if rest else part})


def with_parts(module: Any, parts: Mapping[str, Module]) -> Any:
    """A shallow copy of a module with some other children.

    If a model is spread over devices, accelerate replaces a module's `forward` by one that calls a hook and then the
    original. A plain copy would still run the original module, so the copy gets a hook of its own.
    """
    other = copy.copy(module)
    other._modules = {**other._modules, **parts}
    if hook := other.__dict__.pop("_hf_hook", None):
        from accelerate.hooks import add_hook_to_module

        del other.forward, other._old_forward
        add_hook_to_module(other, hook)
    return other


def make_stoppable(model: PreTrainedModel) -> None:
    """From now on a pass that should stop ends before its next layer."""
    for parts in model.modules():
        for part in parts if isinstance(parts, ModuleList) else ():
            if _check not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(_check)


def _check(*_: object) -> None:
    check_stopped()


@contextmanager
def outputs_of(layers: Sequence[Module]) -> Iterator[dict[Module, Tensor]]:
    """Collect the outputs of some layers (the residual stream, [B, T, hidden]) in the passes within this context."""
    outputs: dict[Module, Tensor] = {}

    def keep(layer: Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
