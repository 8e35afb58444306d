"""How near a pass comes to the speed of the memory.

A pass over a few tokens does little arithmetic on many weights, so memory limits its speed. The least time of a pass is
the bytes that it has to read, divided by the bandwidth of this machine. The least time divided by the measured time is
what the runner achieves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from transformers import PreTrainedModel

from specdemo.engines.choose import MakeRunner, runner_maker
from specdemo.engines.eager import EagerRunner
from specdemo.engines.memory_rate import Stream
from specdemo.engines.runner import Runner
from specdemo.models.loaded import Loaded
from specdemo.system.hardware import free_memory

from .models import SHAPES, bytes_read, random_model
from .rows import Row
from .tables import text_table
from .turns import in_turns

BUFFER = 2**30  # bytes that are streamed
REPEATS = 25
SHARE = 0.2  # of the free memory that random weights may take; the runner may need as much again for its layout
COLUMNS = {"weights": "", "engine": "", "layers": "", "tokens": "d", "bytes": ",d"}  # of the table, and their formats
COLUMNS |= {"floor_ms": ".2f", "ms": ".2f", "achieved": ".0%"}


def against_memory(seconds: float, size: int | None, rate: float) -> Row:
    """A time, and the least time in which memory of this `rate` delivers `size` bytes, if they can be counted."""
    floor = {} if size is None else {"floor_ms": 1000 * size / rate, "achieved": size / rate / seconds}
    return {"ms": 1000 * seconds, **floor}


def engines(loaded: Loaded) -> dict[str, MakeRunner]:
    """The preset's engine and transformers' own forward."""
    return {loaded.engine: loaded.target_runner, "eager": partial(EagerRunner, loaded.model)}


def passes(
    name: str,
    model: PreTrainedModel,
    makers: Mapping[str, MakeRunner],
    lengths: Sequence[int],
    context: int,
    stream: Stream,
    all_layers: int | None = None,
    kept: int | None = None,
) -> Iterator[Row]:
    """Time a pass of each length after `context` tokens by each engine, and the `stream`, all of them in turn.

    Each is timed after a pass of its own kind, as in a text, so that the caches hold what such a pass leaves there.
    If a shape is too large for the memory, only some `layers` of `all_layers` are built and timed.

    Args:
        kept: the bytes that a pass must read by engines other than `eager`, if their weights are not the model's.
    """
    layers = model.config.get_text_config().num_hidden_layers
    runners = {engine: make(context + max(lengths)) for engine, make in makers.items()}
    works: dict[tuple[int, str], Callable[[], float]] = {}
    for length in lengths:
        works[length, ""] = stream.rate
        works |= {(length, engine): partial(_read, runner, length) for engine, runner in runners.items()}
    try:
        for runner in runners.values():
            runner.prefill([1] * context)
        found = in_turns(works, REPEATS)
    finally:
        for runner in runners.values():
            runner.release()
    for length, engine in works:
        if engine:
            size = bytes_read(model, context, length) if kept is None or engine == "eager" else kept
            yield {
                **{"weights": name, "engine": engine, "layers": layers, "all_layers": all_layers or layers},
                **{"context": context, "tokens": length, "bytes": size},
                **against_memory(median(found[length, engine]), size, median(found[length, ""])),
            }


def _read(runner: Runner, length: int) -> float:
    """The seconds of the second of two passes: the first only warms up."""
    took, context = 0.0, runner.length
    for _ in range(2):
        began = time.perf_counter()
        float(runner.forward([1] * length)[-1, -1])  # a GPU is done when a number can be read
        took = time.perf_counter() - began
        runner.rollback(context)
    return took


def random_passes(
    shape: str, dtype: torch.dtype, device: torch.device, lengths: Sequence[int], context: int, stream: Stream
) -> Iterator[Row]:
    """`passes` of random weights of a shape, with as many layers as the memory allows."""
    config = SHAPES[shape]
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    model, every = random_model(config, dtype, device, SHARE * free), config.num_hidden_layers
    yield from passes(f"{shape}, random", model, dict([runner_maker(model)]), lengths, context, stream, every)


def table(bandwidth: Mapping[str, float], rows: Sequence[Row]) -> str:
    least, middle, best = (bandwidth[name] / 1e9 for name in ("least", "median", "best"))
    lines = [
        f"This machine streamed {middle:.1f} GB/s ({least:.1f} to {best:.1f} while this ran; least times follow it).",
        "",
        text_table([{**row, "layers": f"{row['layers']}/{row['all_layers']}"} for row in rows], COLUMNS),
    ]
    if any(row["layers"] < row["all_layers"] for row in rows):
        lines += ["", "Of shapes too large for the memory only some of the layers were built and timed."]
    return "\n".join(lines)
