"""From a checkpoint to a model in memory.

Importing transformers' models takes longer than the rest of a start, and such a model would keep a second copy of the
weights in memory. So `read_weights` reads the files of the families that the fused runners know. `open_model` opens
other families by transformers, and any model that is needed in transformers' own class.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engines.choose import MakeRunner, has_room_for, runner_maker, runner_of_weights
from ..engines.exactness import SelfTest
from ..engines.families import knows
from ..engines.named_weights import Weights, embeddings, final_norm, stored_as
from ..engines.quantized import Weight, widened
from ..engines.self_test import WrongLogits, self_test
from ..formats import reason
from ..system.hardware import QUANTIZED, compute_dtype, unquantized
from ..system.progress import tell
from .checkpoint import Checkpoint, fetch_weights
from .configuration import described
from .errors import wrap_load_errors
from .on_hub import download_bar
from .store import LoadError, Progress, ignore
from .trial import do_without, has_kernels, try_engine
from .weights import StoredWeights, have_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMED = 3  # weights that a sentence names, at most
REPORTS = logging.getLogger("transformers.modeling_utils")  # of what is missing; a sentence replaces them


def read_weights(checkpoint: Checkpoint, files: list[Path], device: torch.device) -> StoredWeights | None:
    """A model's weights, read without transformers' model; None if that is needed to read or run them."""
    if not knows(checkpoint.config):
        return None
    return StoredWeights.of(files, checkpoint.config, checkpoint.dtype, device, checkpoint.of_ours)


def open_model(
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress,
    max_memory: Mapping[int | str, int] | None = None,
) -> PreTrainedModel:
    """Open a model by transformers.

    Args:
        max_memory: the most bytes of weights for each of several devices, in this order. Weights that are quantized in
            the files stay in main memory.
    Raises:
        LoadError: it failed, or its files lack weights. The message says why and what to do.
    """
    dtype, computed = checkpoint.dtype, compute_dtype(checkpoint.dtype, device)
    with wrap_load_errors(checkpoint.source):
        files = fetch_weights(checkpoint, progress) if dtype in QUANTIZED.values() and checkpoint.of_ours else []
        if have_quantized(files) and (weights := read_weights(checkpoint, files, device)):
            return _opened_widened(checkpoint, weights, computed)
        model = open_whole(
            str(checkpoint.source),
            checkpoint.name_or_path,
            dtype=computed,
            variant=checkpoint.variant,
            use_safetensors=True,
            tqdm_class=download_bar(checkpoint.source, progress),
            **device_map(device, max_memory),
            **checkpoint.options,
            **described(checkpoint.name_or_path, checkpoint.options),  # `checkpoint.config` may lack its family's class
        )
        if dtype != computed and knows(checkpoint.config):  # a fused runner stores a smaller type than it computes in
            _round(model, dtype)
        return model.eval()


def _opened_widened(checkpoint: Checkpoint, weights: StoredWeights, dtype: torch.dtype) -> PreTrainedModel:
    """A model by transformers, some of whose weights are quantized in its files."""
    from transformers import AutoModelForCausalLM

    config = described(checkpoint.name_or_path, checkpoint.options)["config"]
    shapes = weights.shapes  # those of experts have an axis more than when they are quantized
    numbers = {name: widened(weight).to(dtype).view(shapes[name]) for name, weight in weights.items()}
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    model: PreTrainedModel = model_class.from_pretrained(None, config=config, state_dict=numbers, dtype=dtype)
    return model.eval()


def open_whole(name: str, place: str, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(place, **options)`, if the files hold every weight of the model.

    What transformers ties or computes need not be there, and what it does not use may be.

    Args:
        name: of the model, for the message.
    Raises:
        LoadError: naming the weights that are missing or have another shape.
    """
    from transformers import AutoModelForCausalLM

    REPORTS.addFilter(_is_no_report)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    finally:
        REPORTS.removeFilter(_is_no_report)
    check_whole(name, found["missing_keys"], found["mismatched_keys"])
    opened: PreTrainedModel = model
    return opened


def check_whole(name: str, missing: Iterable[str], unlike: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse files that do not hold every weight of a model.

    Args:
        unlike: weights of another shape than the model's: their names, their shapes, and those of the model.
    Raises:
        LoadError: naming them.
    """
    if missing := sorted(missing):
        raise LoadError(f"{name} lacks weights that its configuration asks for: {_named(missing)}.")
    if unlike := sorted(unlike):
        described = (f"{weight} is {list(there)}, not {list(wanted)}" for weight, there, wanted in unlike)
        raise LoadError(f"{name} has weights of another shape than its configuration says: {_named(described)}.")


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _named(weights: Iterable[str]) -> str:
    names = list(weights)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def device_map(device: torch.device, max_memory: Mapping[int | str, int] | None) -> dict[str, Any]:
    """Options of `from_pretrained`: all weights on one device, or on several, each filled before the next."""
    if max_memory is not None:
        return {"device_map": "sequential", "max_memory": dict(max_memory)}
    return {} if device.type == "cpu" else {"device_map": {"": str(device)}}


def embeddings_of(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """The input and the output embeddings, [V, hidden] each; one tensor if they are tied, None if one is offloaded."""
    first, last = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return None if first.is_meta or last.is_meta else (first, last)


@torch.no_grad()
def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(widened(stored_as(name, weight, dtype)).view(weight.shape))


def placement(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of weights on each device. "disk" stands for weights that every pass reads from the disk."""
    sizes: dict[str, int] = {}
    for name, weight in model.named_parameters():
        device = _waiting_at(model, name) if weight.is_meta else str(weight.device)
        sizes[device] = sizes.get(device, 0) + weight.nbytes
    return sizes


def _waiting_at(model: PreTrainedModel, name: str) -> str:
    """Where accelerate keeps a weight between passes: "cpu" or "disk"."""
    places = getattr(model, "hf_device_map", {})  # by the names of modules; "" is the whole model
    return next((str(place) for part, place in places.items() if not part or name.startswith(f"{part}.")), "cpu")


# In memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)  # a repr would print every weight
class _ModelInMemory:
    """Makes the runners of one model, and holds what of it is in memory; see `Loaded`."""

    engine: str
    make_runner: MakeRunner
    open_model: Callable[[], PreTrainedModel]
    embeddings: tuple[Weight, Weight] | None
    placement: dict[str, int]
    device: torch.device
    self_test: SelfTest | None  # None if there was none
    final_norm: tuple[Tensor, float] | None = None
    sizes: Mapping[str, int] | None = None  # bytes of each weight, where they are read without transformers' model


def open_checkpoint(
    checkpoint: Checkpoint,
    files: list[Path],
    device: torch.device,
    slots: int,
    with_embeddings: bool = False,
    *,
    target: bool = True,
    progress: Progress,
    eager: bool,
    max_memory: Mapping[int | str, int] | None = None,
) -> _ModelInMemory:
    """Bring a model into memory, ready to make its runners.

    Args:
        files: its weights, see `fetch_weights`.
        slots: how many runs go on at the same time.
        with_embeddings: whether heads will draft for it.
        target: whether its text counts. Then the engine is tested.
        max_memory: see `open_model`.
    Raises:
        LoadError: it failed. The message says why and what to do.
    """
    progress(None, f"loading {checkpoint.source}")
    again = _as_long_as_held(partial(open_model, checkpoint, device, ignore, max_memory))
    laying_out = "capturing the passes" if device.type == "cuda" else "laying out the weights"
    with wrap_load_errors(checkpoint.source):
        ours = not eager and not max_memory and device.type != "mps"
        if ours and knows(checkpoint.config):
            try_engine(checkpoint.config, checkpoint.dtype, device)
        weights = read_weights(checkpoint, files, device) if ours else None
        if weights is not None and (device.type != "cpu" or has_room_for(weights.nbytes)):
            progress(None, laying_out)
            engine, make_runner, found = _proven(
                lambda: runner_of_weights(checkpoint.config, weights, device, slots), checkpoint, weights, target
            )
            both = embeddings(checkpoint.config, weights) if with_embeddings else None
            norm = final_norm(checkpoint.config, weights)
            weights.let_go()
            return _ModelInMemory(
                engine, make_runner, again, both, weights.placement, device, found, norm, weights.sizes
            )
        model = open_model(checkpoint, device, progress, max_memory)
        progress(None, laying_out)
        engine, make_runner, found = _proven(
            lambda: runner_maker(model, slots, eager, checkpoint.dtype),
            checkpoint,
            dict(model.named_parameters(remove_duplicate=False)),
            target,
        )
        both = embeddings_of(model) if with_embeddings else None
        if both is not None and device.type == "mps":  # heads draft on the device of the states, see `EagerRunner`
            both = _as_type(both, "cpu", torch.float32)
        if engine == "eager":
            again = lambda: model  # noqa: E731
        elif both is not None:
            both = _as_type(both, unquantized(checkpoint.dtype))
        norm = final_norm(checkpoint.config, dict(model.named_parameters()))
        return _ModelInMemory(engine, make_runner, again, both, placement(model), model.device, found, norm)


Made = tuple[str, MakeRunner, SelfTest | None]  # an engine, and its test if there was one


def _proven(make: Callable[[], tuple[str, MakeRunner]], checkpoint: Checkpoint, weights: Weights, target: bool) -> Made:
    """The engine that `make` gives. If it fails, or its test where it is the target's, another takes its place.

    Raises:
        LoadError: there is none for these weights.
    """
    config, device = checkpoint.config, checkpoint.device
    while True:
        try:
            return _tested(make, checkpoint, weights, target)
        except WrongLogits as error:
            wrong = str(error)
        except Exception as error:
            short = isinstance(error, torch.OutOfMemoryError)
            if short or device.type != "cuda" or not knows(config) or not has_kernels(config, device):
                raise
            wrong = f"fails ({reason(error)})"
        do_without(wrong, config, checkpoint.dtype, device)


def _tested(make: Callable[[], tuple[str, MakeRunner]], checkpoint: Checkpoint, weights: Weights, target: bool) -> Made:
    engine, make_runner = make()
    if not target or engine == "eager":
        return engine, make_runner, None
    tell("testing the engine")
    try:
        return engine, make_runner, self_test(make_runner, checkpoint.config, weights)
    except (MemoryError, torch.OutOfMemoryError):  # a test takes more of it than a short run
        return engine, make_runner, None


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
