"""Which runner a model gets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psutil
from transformers import PreTrainedModel

from . import Runner
from .eager import EagerRunner
from .fused import FusedRunner
from .layout import FusedModel, knows

MakeRunner = Callable[[int], Runner]  # capacity in tokens -> a runner for one run


def runner_maker(model: PreTrainedModel) -> tuple[str, MakeRunner]:
    """The fastest way to run a model here: its name, `fused` or `eager`, and what makes its runners.

    The fused path is taken on a CPU, where it is measured to be faster, for the models it knows and if there
    is memory for its own copy of the weights.
    """
    if model.device.type == "cpu" and knows(model) and _weight_bytes(model) < psutil.virtual_memory().available * 0.8:
        return "fused", partial(FusedRunner, FusedModel.of(model))
    return "eager", partial(EagerRunner, model)


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
