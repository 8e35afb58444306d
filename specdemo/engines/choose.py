"""Which runner a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..system.hardware import compute_dtype, free_memory, unquantized
from ..system.progress import tell
from . import ops
from .cpu.library import library_for
from .families import Scales, fits_float16, head_width, is_hybrid, knows, mixtures
from .fused import FusedRunner, SharedPasses
from .gpu.capture import Capture, CudaCapture
from .gpu.graph import GraphRunner, Graphs
from .layout import FusedModel
from .linear import can_pack
from .named_weights import Weights
from .native import NativeRunner, native_model
from .runner import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
MakeRunner = Callable[[int], Runner]  # capacity in tokens -> a runner for one run
WARM_UP_TOKENS = 32  # of the prompt that is read once when a model is loaded
SHARE = 0.8  # the most of the free main memory that weights may take
OLDEST = (8, 0)  # the lowest compute capability that Triton's kernels run on


def runner_maker(
    model: PreTrainedModel, slots: int = 1, eager: bool = False, dtype: torch.dtype | None = None
) -> tuple[str, MakeRunner]:
    """The name of the fastest engine for a model here, and a function that makes a runner.

    ========  =========================================================================================
    eager     the model is not one that `families.knows`, lies on several devices, or `eager` asks for it;
              on a CPU also if memory has no room for a second copy of the weights
    graph     on a GPU: the passes are captured now, for `slots` runs at a time
    native    on a CPU where `native.c` can be compiled for these weights
    fused     on any other CPU
    ========  =========================================================================================

    Args:
        eager: run transformers' own forward.
        dtype: the type to store the weights in, if the model has another.
    """
    weights = list(model.parameters())
    on_one_device = {weight.device for weight in weights} == {model.device} and model.device.type != "meta"
    if not eager and knows(model.config) and on_one_device:
        if model.device.type == "cuda":
            return _on_gpu(FusedModel.of(model), slots)
        if has_room_for(sum(weight.numel() for weight in weights) * (dtype or model.dtype).itemsize):
            return _on_cpu(FusedModel.of(model, dtype))
    from .eager import EagerRunner  # late: these bring in transformers' models
    from .hybrid import HybridRunner

    return "eager", partial(HybridRunner if is_hybrid(model.config) else EagerRunner, model)


def dtype_in_range(dtype: torch.dtype, configs: Iterable[PreTrainedConfig]) -> torch.dtype:
    """A type for models that run together: float32 instead of float16 if one of them has numbers beyond its range."""
    return dtype if dtype != torch.float16 or all(map(fits_float16, configs)) else torch.float32


def expected_engine(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> tuple[str, bool]:
    """The engine that a model will get, by its configuration alone, and whether its rows are exact to the bit.

    This assumes that there is memory for it, and on a GPU a compiler for Triton's kernels.
    """
    if not knows(config) or device.type == "mps":
        return "eager", False
    width = head_width(config.get_text_config())
    if device.type == "cuda":
        from .gpu import kernels

        capable = find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= OLDEST
        return "graph", capable and kernels.usable(width)
    library = library_for(unquantized(dtype))
    inner = [config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size]
    inner += [of_layer.inner for of_layer in mixtures(config)]
    if library and width % (2 * library.step) == 0 and all(size % library.step == 0 for size in inner):
        return "native", True
    packed = compute_dtype(dtype, device) == torch.bfloat16 and can_pack(torch.bfloat16)
    return "fused", packed and not Scales.of(config).score_cap


def captured(model: FusedModel, capture: Capture, slots: int) -> Graphs:
    """The captured passes of a model, with the fastest operations that run here."""
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


def runner_of_weights(
    config: PreTrainedConfig, weights: Weights, device: torch.device, slots: int = 1
) -> tuple[str, MakeRunner]:
    """`runner_maker` for weights without a transformers model, of a configuration that `knows` accepts."""
    model = FusedModel.of_weights(config, weights)
    return _on_gpu(model, slots) if device.type == "cuda" else _on_cpu(model)


def _on_gpu(model: FusedModel, slots: int) -> tuple[str, MakeRunner]:
    tell("compiling the kernels for this GPU and capturing the passes")
    device = model.embedding.device
    graphs = captured(model, CudaCapture(device), slots)
    if graphs.ops is not ops:
        tell("compiling the kernels that draw tokens and grow trees")
        from .gpu import noise, trees

        try:
            noise.prepare(model.vocab_size, device)
            trees.prepare(device)
        except Exception:  # chains at T = 0 need neither
            log.warning("A kernel cannot be compiled ahead: the first round that needs it compiles it.", exc_info=True)
    make = partial(GraphRunner, graphs)
    warm_up = make(WARM_UP_TOKENS)  # the set-up of what is not captured would slow down the first run
    warm_up.prefill([0] * WARM_UP_TOKENS)
    warm_up.release()
    return "graph", make


def _on_cpu(model: FusedModel) -> tuple[str, MakeRunner]:
    """`native` where `native.c` can be compiled for these weights, else `fused`."""
    native = native_model(model)
    if native:
        return "native", partial(NativeRunner, native)
    return "fused", partial(FusedRunner, model, together=SharedPasses(model))


def ops_for(model: FusedModel) -> ModuleType:
    """The module with the operations of a captured pass: `kernels` (Triton), or `ops` (torch) if Triton cannot run."""
    device = model.embedding.device
    if device.type == "cuda" and find_spec("triton") and torch.cuda.get_device_capability(device) >= OLDEST:
        from .gpu import kernels

        if kernels.usable(model.width) and can_build(kernels.probe, device):
            return kernels
    return ops


def can_build(kernel: Callable[[Tensor], Tensor], device: torch.device) -> bool:
    """Whether Triton can build a kernel. It needs a C compiler and Python's headers, which small containers lack."""
    try:
        with torch.cuda.device(device):  # Triton launches on the current one
            kernel(torch.zeros(1, 16, device=device))
    except Exception:  # any error, since torch's operations can replace the kernels
        log.warning("Triton cannot build its kernels: torch's own operations run instead.", exc_info=True)
        return False
    return True


def has_room_for(size: int) -> bool:
    """Whether main memory has room to spare for a copy of weights of `size` bytes."""
    return size < free_memory() * SHARE
