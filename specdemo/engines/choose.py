"""Which runner a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..system.hardware import compute_dtype, cpu_attends_alike, free_memory, unquantized
from ..system.progress import tell
from ..system.replaced import DRAWS, KERNELS, REPLACED, TREES
from . import ops
from .cpu.library import library_for
from .families import Scales, fits_float16, head_width, inner_sizes, is_hybrid, knows
from .fused import FusedRunner, SharedPasses
from .gpu.capture import CudaCapture
from .gpu.graph import GraphRunner, Graphs
from .layout import FusedModel
from .linear import can_pack
from .named_weights import Weights
from .native import NativeModel, NativeRunner
from .runner import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
MakeRunner = Callable[[int], Runner]  # capacity in tokens -> a runner for one run
WARM_UP_TOKENS = 32  # of the prompt that is read once when a model is loaded
SHARE = 0.8  # the most of the free main memory that weights may take
OLDEST = (8, 0)  # the lowest compute capability that Triton's kernels run on


def engine_of(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The engine of a model whose weights are stored as `dtype` on a device. This stands before there are weights.

    ========  =========================================================================================
    eager     the model is not one that `families.knows`, or lies on another device than those below
    graph     on a GPU: its passes are captured when it is loaded
    native    on a CPU where `native.c` can be compiled for these weights, if their sizes are whole blocks
    fused     on any other CPU
    ========  =========================================================================================
    """
    if not knows(config) or device.type not in ("cpu", "cuda"):
        return "eager"
    if device.type == "cuda":
        return "graph"
    library = library_for(unquantized(dtype))
    whole = library and library.has_blocks_for(head_width(config), inner_sizes(config))
    return "native" if whole else "fused"


def is_exact(engine: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows will be exact (`Runner.exact_rows`). This stands before there are weights, too."""
    if engine == "graph":
        return ops_for(head_width(config), device).EXACT
    packed = compute_dtype(dtype, device) == torch.bfloat16 and can_pack(torch.bfloat16)
    sums_alike = packed and not Scales.of(config).score_cap and cpu_attends_alike()
    return engine == "native" or (engine == "fused" and sums_alike)


def runner_maker(
    model: PreTrainedModel, slots: int = 1, eager: bool = False, dtype: torch.dtype | None = None
) -> tuple[str, MakeRunner]:
    """The name of the engine for a model in memory, and a function that makes a runner.

    A model that lies on several devices is eager, and on a CPU one that memory has no room for a second time.

    Args:
        slots: on a GPU, for how many runs at a time passes are captured now.
        eager: run transformers' own forward.
        dtype: the type to store the weights in, if the model has another.
    """
    stored, weights = dtype or model.dtype, list(model.parameters())
    engine = "eager" if eager else engine_of(model.config, stored, model.device)
    on_one_device = {weight.device for weight in weights} == {model.device}
    size = sum(weight.numel() for weight in weights) * stored.itemsize
    if engine != "eager" and on_one_device and (engine == "graph" or has_room_for(size)):
        return engine, _runners(engine, FusedModel.of(model, dtype), slots)
    from .eager import EagerRunner  # late: these bring in transformers' models
    from .hybrid import HybridRunner
    from .modules import make_stoppable

    make_stoppable(model)
    return "eager", partial(HybridRunner if is_hybrid(model.config) else EagerRunner, model)


def runner_of_weights(
    config: PreTrainedConfig, weights: Weights, device: torch.device, slots: int = 1
) -> tuple[str, MakeRunner]:
    """`runner_maker` for weights without a transformers model, of a configuration that `knows` accepts."""
    model = FusedModel.of_weights(config, weights)
    engine = engine_of(config, model.embedding.dtype, device)
    return engine, _runners(engine, model, slots)


def _runners(engine: str, model: FusedModel, slots: int) -> MakeRunner:
    """What makes the runners of an engine other than eager."""
    if engine == "graph":
        return _on_gpu(model, slots)
    if engine == "native":
        return partial(NativeRunner, NativeModel(model))
    return partial(FusedRunner, model, together=SharedPasses(model))


def dtype_in_range(dtype: torch.dtype, configs: Iterable[PreTrainedConfig]) -> torch.dtype:
    """A type for models that run together: float32 instead of float16 if one of them has numbers beyond its range."""
    return dtype if dtype != torch.float16 or all(map(fits_float16, configs)) else torch.float32


def _on_gpu(model: FusedModel, slots: int) -> MakeRunner:
    tell("compiling the kernels for this GPU and capturing the passes")
    device = model.embedding.device
    graphs = Graphs(model, ops_for(model.width, device), CudaCapture(device), slots)
    if graphs.ops is not ops:
        tell("compiling the kernels that draw tokens and grow trees")
        from .gpu import noise, trees

        try:
            if DRAWS not in REPLACED:
                noise.prepare(model.vocab_size, device)
            if TREES not in REPLACED:
                trees.prepare(device)
        except Exception:  # chains at T = 0 need neither
            log.warning("A kernel cannot be compiled ahead: the first round that needs it compiles it.", exc_info=True)
    make = partial(GraphRunner, graphs)
    warm_up = make(WARM_UP_TOKENS)  # the set-up of what is not captured would slow down the first run
    warm_up.prefill([0] * WARM_UP_TOKENS)
    warm_up.release()
    return make


def ops_for(width: int, device: torch.device) -> ModuleType:
    """The module with the operations of a captured pass of a model with attention heads of this width: `kernels`
    (Triton), `ops` (torch) where those cannot run, or some of each."""
    if KERNELS in REPLACED:
        return ops
    if device.type == "cuda" and find_spec("triton") and torch.cuda.get_device_capability(device) >= OLDEST:
        from .gpu import kernels

        if kernels.usable(width):
            return ops.partly(kernels, [part for part in ops.PARTS if part in REPLACED])
    return ops


def has_room_for(size: int) -> bool:
    """Whether main memory has room to spare for a copy of weights of `size` bytes."""
    return size < free_memory() * SHARE
