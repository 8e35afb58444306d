"""How near a pass comes to the speed of the memory.

A pass over a few tokens does little arithmetic on many weights, so memory limits its speed. The least time of a pass is
the bytes that it has to read, divided by the bandwidth of this machine. The least time divided by the measured time is
what the runner achieves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.initialization import no_init_weights

from ..engines.choose import MakeRunner, runner_maker
from ..engines.eager import EagerRunner
from ..engines.fused import FusedRunner
from ..engines.layout import head_width
from ..engines.memory_rate import Stream
from ..models.loaded import Loaded
from ..studies.tables import text_table
from ..system.hardware import compute_dtype, free_memory

BUFFER = 2**30  # bytes that are streamed
REPEATS = 25
COLUMNS = {"weights": "", "engine": "", "layers": "", "tokens": "d", "bytes": ",d"}  # of the table, and their formats
COLUMNS |= {"floor_ms": ".2f", "ms": ".2f", "achieved": ".0%"}
SHARE = 0.2  # of the free memory that random weights may take; the runner may need as much again for its layout

SHAPES: dict[str, PreTrainedConfig] = {
    "SmolLM2-1.7B": LlamaConfig(
        **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"intermediate_size": 8192, "vocab_size": 49152, "tie_word_embeddings": True},
    ),
    "Qwen3-0.6B": Qwen3Config(
        **{"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"intermediate_size": 3072, "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "Qwen3-4B": Qwen3Config(
        **{"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 9728, "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "Llama-8B": LlamaConfig(
        **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
    ),
}


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over `tokens` tokens after `context` others: its median time, the bytes that it must read, the least time.

    If a shape is too large for the memory, only `layers` of `all_layers` are built and timed.
    """

    weights: str
    engine: str
    layers: int
    all_layers: int
    context: int
    tokens: int
    bytes: int
    ms: float
    floor_ms: float


def bytes_read(model: PreTrainedModel, context: int, tokens: int, stored: torch.dtype | None = None) -> int:
    """The bytes that a pass must read: every weight once, the embeddings of its tokens, and the keys and values.

    An embedding that is tied to the head is read as a whole, as the head.

    Args:
        stored: the type that the weights are stored in, if it is not the model's.
    """
    stored = stored or model.dtype
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = sum(weight.numel() for weight in model.parameters()) - (0 if tied else embedding.numel())
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    entry = 2 * config.num_hidden_layers * heads * head_width(config) * compute_dtype(stored, model.device).itemsize
    return (weights + tokens * embedding.shape[1]) * stored.itemsize + context * entry


def engines(loaded: Loaded) -> dict[str, MakeRunner]:
    """The preset's engine and transformers' own forward; with `fused` also a variant that is not bit-exact."""
    makers = {loaded.engine: loaded.target_runner}
    if loaded.engine == "fused":
        runner: Any = loaded.target_runner(1)
        makers["not bit-exact"] = partial(FusedRunner, replace(runner.model, bit_exact=False))
    return {**makers, "eager": partial(EagerRunner, loaded.model)}


def passes(
    name: str,
    model: PreTrainedModel,
    makers: Mapping[str, MakeRunner],
    lengths: Sequence[int],
    context: int,
    stream: Stream,
    all_layers: int | None = None,
    stored: torch.dtype | None = None,
) -> Iterator[Pass]:
    """Time a pass of each length after `context` tokens by each engine, and the `stream`, all of them in turn.

    Each is timed after a pass of its own kind, as in a text, so that the caches hold what such a pass leaves there.

    Args:
        stored: the type that engines other than `eager` store the weights in, if it is not the model's.
    """
    layers = model.config.get_text_config().num_hidden_layers
    runners = {engine: make(context + max(lengths)) for engine, make in makers.items()}
    seconds: dict[tuple[int, str], list[float]] = {}
    rates: dict[int, list[float]] = {}  # of each length
    try:
        for runner in runners.values():
            runner.prefill([1] * context)
        for _ in range(REPEATS):
            for length in lengths:
                rates.setdefault(length, []).append(stream.rate())
                for engine, runner in runners.items():
                    for _ in range(2):  # the first only warms up
                        began = time.perf_counter()
                        float(runner.forward([1] * length)[-1, -1])  # a GPU is done when a number can be read
                        took = time.perf_counter() - began
                        runner.rollback(context)
                    seconds.setdefault((length, engine), []).append(took)
    finally:
        for runner in runners.values():
            runner.release()
    for (length, engine), times in seconds.items():
        size = bytes_read(model, context, length, None if engine == "eager" else stored)
        ms, floor_ms = 1000 * median(times), 1000 * size / median(rates[length])
        yield Pass(name, engine, layers, all_layers or layers, context, length, size, ms, floor_ms)


def random_passes(
    shape: str, dtype: torch.dtype, device: torch.device, lengths: Sequence[int], context: int, stream: Stream
) -> Iterator[Pass]:
    """`passes` of random weights of a shape, with as many layers as the memory allows."""
    config = SHAPES[shape]
    every = config.num_hidden_layers
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    model = random_model(config, dtype, device, SHARE * free)
    yield from passes(f"{shape}, random", model, dict([runner_maker(model)]), lengths, context, stream, every)


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, room: float) -> PreTrainedModel:
    """A model of this shape with at least one layer, and as many more as fit into `room` bytes."""
    with torch.device("meta"):
        one, two = (AutoModelForCausalLM.from_config(_cut(config, layers), dtype=dtype) for layers in (1, 2))
    first, second = (sum(weight.nbytes for weight in model.parameters()) for model in (one, two))
    layers = 1 + int(max(0.0, room - first) // (second - first))
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(_cut(config, min(layers, config.num_hidden_layers)), dtype=dtype)
    noise = torch.empty(2**22, dtype=dtype, device=device).uniform_(-0.02, 0.02)
    with torch.no_grad():
        for weight in model.parameters():  # repeats a few random numbers: to draw billions would take minutes
            for part in weight.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])
    return model.eval()


def _cut(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    fields = {**config.to_dict(), "num_hidden_layers": layers}
    fields.pop("layer_types", None)
    return type(config)(**fields)


def table(bandwidth: dict[str, float], rows: Sequence[Pass]) -> str:
    least, middle, best = (bandwidth[name] / 1e9 for name in ("least", "median", "best"))
    lines = [
        f"This machine streamed {middle:.1f} GB/s ({least:.1f} to {best:.1f} while this ran; least times follow it).",
        "",
        text_table([{**as_dict(row), "layers": f"{row.layers}/{row.all_layers}"} for row in rows], COLUMNS),
    ]
    if any(row.layers < row.all_layers for row in rows):
        lines += ["", "Of shapes too large for the memory only some of the layers were built and timed."]
    return "\n".join(lines)


def as_dict(row: Pass) -> dict[str, Any]:
    return {**asdict(row), "achieved": row.floor_ms / row.ms}
