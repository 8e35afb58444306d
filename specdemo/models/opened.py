"""A model in memory, once: as weights of a fused runner, or else as a transformers model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engines.choose import MakeRunner, has_room_for, runner_maker, runner_of_weights
from ..engines.layout import embeddings, final_norm
from .checkpoint import Checkpoint, embeddings_of, open_model, placement, read_weights
from .errors import wrap_load_errors
from .store import Progress, ignore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)  # a repr would print every weight
class OpenedModel:
    """Makes the runners of one model, and holds what of it is in memory; see `Loaded`."""

    engine: str
    make_runner: MakeRunner
    open_model: Callable[[], PreTrainedModel]
    embeddings: tuple[Tensor, Tensor] | None
    placement: dict[str, int]
    device: torch.device
    final_norm: tuple[Tensor, float] | None = None


def open_checkpoint(
    checkpoint: Checkpoint,
    files: list[Path],
    device: torch.device,
    slots: int,
    with_embeddings: bool = False,
    *,
    dtype: torch.dtype,
    progress: Progress,
    eager: bool,
    max_memory: Mapping[int | str, int] | None = None,
) -> OpenedModel:
    """Bring a model into memory, ready to make its runners.

    Args:
        files: its weights, see `fetch_weights`.
        slots: how many runs go on at the same time.
        with_embeddings: whether heads will draft for it.
        max_memory: see `open_model`.
    Raises:
        LoadError: it failed. The message says why and what to do.
    """
    progress(None, f"loading {checkpoint.source}")
    again = _as_long_as_held(partial(open_model, checkpoint, dtype, device, ignore, max_memory))
    laying_out = "capturing the passes" if device.type == "cuda" else "laying out the weights"
    with wrap_load_errors(checkpoint.source):
        weights = None if eager or max_memory else read_weights(checkpoint, files, dtype, device)
        if weights is not None and (device.type != "cpu" or has_room_for(weights.nbytes)):
            progress(None, laying_out)
            engine, make_runner = runner_of_weights(checkpoint.config, weights, device, slots)
            both = embeddings(weights) if with_embeddings else None
            norm = final_norm(checkpoint.config, weights)
            return OpenedModel(engine, make_runner, again, both, weights.placement, device, norm)
        model = open_model(checkpoint, dtype, device, progress, max_memory)
        progress(None, laying_out)
        engine, make_runner = runner_maker(model, slots, eager, dtype)
        both = embeddings_of(model) if with_embeddings else None
        if both is not None and device.type == "mps":  # heads draft on the device of the states, see `EagerRunner`
            both = _as_type(both, "cpu", torch.float32)
        if engine == "eager":
            again = lambda: model  # noqa: E731
        elif both is not None:
            both = _as_type(both, dtype)
        norm = final_norm(checkpoint.config, dict(model.named_parameters()))
        return OpenedModel(engine, make_runner, again, both, placement(model), model.device, norm)


def _as_type(both: tuple[Tensor, Tensor], *to: Any) -> tuple[Tensor, Tensor]:
    """Two embeddings on another device or of another type. If they are one tensor, they stay one."""
    first, last = (part.to(*to) for part in both)
    return first, first if both[1] is both[0] else last


def _as_long_as_held(opened: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    """`opened`, but the same model as long as anybody holds it."""
    held: Callable[[], PreTrainedModel | None] = lambda: None  # noqa: E731

    def model() -> PreTrainedModel:
        nonlocal held
        found = held() or opened()
        held = weakref.ref(found)
        return found

    return model
