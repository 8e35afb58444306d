"""Which runner a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hardware import free_memory
from . import Runner, ops
from .fused import FusedRunner
from .graph import Capture, CudaCapture, GraphRunner, Graphs
from .layout import FusedModel, Rope, Weights, knows
from .native import NativeRunner, native_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
MakeRunner = Callable[[int], Runner]  # capacity in tokens -> a runner for one run
READ = 32  # tokens of a first prompt that nobody asked for
OLDEST = (8, 0)  # compute capability that Triton's kernels are made for


def runner_maker(
    model: PreTrainedModel, slots: int = 1, eager: bool = False, dtype: torch.dtype | None = None
) -> tuple[str, MakeRunner]:
    """The fastest way to run a model here: its name, `graph`, `native`, `fused` or `eager`, and what makes its runners.

    The models it knows run fused, on a CPU if there is memory for its own copy of the weights. On a GPU their passes
    are captured now, for `slots` runs at a time.

    Args:
        eager: take the transformers model as it is.
        dtype: what the weights are stored in, if the model has them in another type.
    """
    weights = list(model.parameters())
    if not eager and knows(model.config) and len({weight.device for weight in weights}) == 1:
        if model.device.type == "cuda":
            make = partial(GraphRunner, captured(FusedModel.of(model), CudaCapture(model.device), slots))
            reader = make(READ)
            reader.prefill([0] * READ)  # sets up what is not captured, or the first run of all would pay for that
            reader.release()
            return "graph", make
        if has_room_for(sum(weight.numel() for weight in weights) * (dtype or model.dtype).itemsize):
            return _on_cpu(FusedModel.of(model, dtype))
    from .eager import EagerRunner  # late: it brings in transformers' models

    return "eager", partial(EagerRunner, model)


def captured(model: FusedModel, capture: Capture, slots: int) -> Graphs:
    """The captured passes, of the fastest operations that run here."""
    fastest = ops_for(model)
    try:
        return Graphs(model, fastest, capture, slots)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if fastest is ops:
            raise
        log.warning("Triton's kernels cannot be run: torch's own operations run instead.", exc_info=True)
    return Graphs(model, ops, capture, slots)


def runner_of_weights(config: PreTrainedConfig, weights: Weights) -> tuple[str, MakeRunner]:
    """The same for weights in main memory, of a model that is plain (`layout.is_plain`)."""
    return _on_cpu(FusedModel.of_weights(config, weights, Rope.plain(config)))


def _on_cpu(model: FusedModel) -> tuple[str, MakeRunner]:
    """By one call for each pass where `native.c` can be compiled, else by torch's operations."""
    native = native_model(model)
    return ("native", partial(NativeRunner, native)) if native else ("fused", partial(FusedRunner, model))


def ops_for(model: FusedModel) -> ModuleType:
    """What runs between the products of a captured pass: Triton's kernels where they can be had."""
    device = model.embedding.device
    if device.type == "cuda" and find_spec("triton") and torch.cuda.get_device_capability(device) >= OLDEST:
        from . import kernels

        if kernels.usable(model.width) and can_build(kernels.swiglu, device):
            return kernels
    return ops


def can_build(kernel: Callable[[Tensor], Tensor], device: torch.device) -> bool:
    """Whether Triton can build a kernel: it needs a C compiler and Python's headers, which small containers lack."""
    try:
        kernel(torch.zeros(1, 2, device=device))
    except Exception:  # whatever it was, torch's own operations do without
        log.warning("Triton cannot build its kernels: torch's own operations run instead.", exc_info=True)
        return False
    return True


def has_room_for(size: int) -> bool:
    """Whether main memory has so many bytes for a copy of weights, and some to spare."""
    return size < free_memory() * 0.8
