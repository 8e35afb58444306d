"""Which runner a model gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import psutil
import torch
from transformers import PreTrainedModel

from . import Runner
from .eager import EagerRunner
from .fused import FusedRunner
from .graph import CudaCapture, GraphRunner, Graphs
from .layout import FusedModel, knows

MakeRunner = Callable[[int], Runner]  # capacity in tokens -> a runner for one run
OLDEST = (8, 0)  # compute capability that Triton's kernels are made for


def runner_maker(model: PreTrainedModel, slots: int = 1, eager: bool = False) -> tuple[str, MakeRunner]:
    """The fastest way to run a model here: its name, `graph`, `fused` or `eager`, and what makes its runners.

    The models it knows run fused, on a CPU if there is memory for its own copy of the weights. On a GPU their passes
    are captured now, for `slots` runs at a time.

    Args:
        eager: take the transformers model as it is.
    """
    if not eager and knows(model):
        if model.device.type == "cuda":
            fused = FusedModel.of(model)
            graphs = Graphs(fused, ops_for(fused), CudaCapture(model.device), slots)
            return "graph", partial(GraphRunner, graphs)
        if _weight_bytes(model) < psutil.virtual_memory().available * 0.8:
            return "fused", partial(FusedRunner, FusedModel.of(model))
    return "eager", partial(EagerRunner, model)


def ops_for(model: FusedModel) -> ModuleType:
    """What runs between the products of a captured pass: Triton's kernels where they can be had."""
    device = model.embedding.device
    if device.type == "cuda" and find_spec("triton") and torch.cuda.get_device_capability(device) >= OLDEST:
        from . import kernels

        if kernels.usable(model.width):
            return kernels
    from . import ops

    return ops


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
