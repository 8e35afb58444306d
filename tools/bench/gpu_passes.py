"""Passes of a captured model on a GPU against the speed of the memory: whole, and each operation by itself."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdemo.decoding.acceptance import Answer
from specdemo.decoding.batch import decode
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Round
from specdemo.decoding.loop import Decoding
from specdemo.decoding.rejection import one_hot
from specdemo.decoding.rule import Capturing, Match
from specdemo.drafters.none import NoDrafter
from specdemo.engines import ops
from specdemo.engines.choose import ops_for
from specdemo.engines.eager import EagerRunner
from specdemo.engines.fused import Cache as Buffers
from specdemo.engines.fused import FusedRunner
from specdemo.engines.gpu import graph
from specdemo.engines.gpu.graph import GraphRunner, Graphs, Outcome
from specdemo.engines.layout import FusedModel, Layer
from specdemo.engines.linear import swiglu
from specdemo.engines.rows import MOST_ROWS, branches_of
from specdemo.engines.runner import Runner
from specdemo.settings import MAX_K, Settings
from specdemo.system.device import seconds_of
from specdemo.tokens import Draft

from . import roofline
from .models import bytes_read, captured, random_model
from .rows import Row

log = logging.getLogger(__name__)
FAILED = "failed"  # the part of a row about a measurement that failed
LONGEST_ERROR = 300  # characters
WARM_UPS = 2
IN_A_ROW = 10  # passes
ROOM = 2.0**40  # bytes, more than any of the shapes takes
SHARE = 0.4  # of the free memory of a GPU that random weights may take; the engine may need as much again


@dataclass(frozen=True, slots=True)
class Sizes:
    name: str
    target: PreTrainedConfig
    draft: PreTrainedConfig
    shapes: dict[str, PreTrainedConfig]  # of which passes and rounds are measured
    draft_layers: int  # of a made pair
    context: int
    new_tokens: int
    repeats: int
    buffer: int  # bytes
    ks: tuple[int, ...]
    trees: tuple[int, ...]
    preset: str  # in which trees and chains are compared
    prompts: str
    each: int  # prompts of a category; 0 stands for all
    tests: tuple[str, ...]  # what pytest is asked for


@dataclass(slots=True)
class Gpu:
    """Where everything is measured: the device, the number type, the sizes, and what takes the rows as they come."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    take: Callable[[Row], object]
    rate: float = 0.0  # bytes per second of the memory, once a pass is compared with it

    def add(self, part: str, what: str, **figures: Any) -> None:
        self.take({"part": part, "what": what, **figures})

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What fails inside becomes a row, with the beginning of its error: the next measurement may succeed."""
        try:
            yield
        except Exception as error:
            log.error("%s could not be measured", what, exc_info=error)
            self.add(FAILED, what, error=" ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_ERROR])

    def seconds(self, work: Callable[[], object]) -> float:
        """The median time of some work, from the call to its end on the device."""
        times = [seconds_of(self.device, work) for _ in range(WARM_UPS + self.sizes.repeats)]
        return median(times[WARM_UPS:])

    def against_memory(self, seconds: float, size: int | None) -> Row:
        """See `roofline.against_memory`. The first call measures the memory."""
        if not self.rate:
            self.rate = copying_rate(self)
            self.add("memory", "copying, read and written", gb_per_second=self.rate / 1e9)
        return roofline.against_memory(seconds, size, self.rate)

    def model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Random weights, of fewer layers where the memory is short."""
        self.free()
        room = SHARE * torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else ROOM
        return random_model(config, self.dtype, self.device, room)

    def free(self) -> None:
        """Free what former models took."""
        gc.collect()
        torch.cuda.empty_cache()

    def prompt(self, model: PreTrainedModel) -> list[int]:
        return torch.randint(model.config.get_text_config().vocab_size, (self.sizes.context,)).tolist()


def copying_rate(on: Gpu) -> float:
    source = torch.rand(on.sizes.buffer // 4, device=on.device)
    target = torch.empty_like(source)
    return 2 * on.sizes.buffer / on.seconds(lambda: target.copy_(source))


def slots(on: Gpu, model: FusedModel, whose: str) -> Graphs | None:
    """A model's captured passes, and the time to capture: of torch's operations if the fastest fail, else None."""
    for functions in (None, ops):
        with on.trying(f"a slot of {whose}, {'made of ops' if functions else 'as fast as can be'}"):
            made: list[Graphs] = []
            took = seconds_of(on.device, lambda: made.append(captured(model, functions)))  # noqa: B023  # called at once
            what = f"a slot of {whose}, made of {name_of(made[0].ops)}, what is new compiled"
            on.add("capture", what, ms=1000 * took)
            return made[0]
    return None


def another_slot(on: Gpu, graphs: Graphs) -> None:
    took = seconds_of(on.device, lambda: Graphs(graphs.model, graphs.ops, graphs.capture, 1))
    on.add("capture", "another, nothing to compile", ms=1000 * took)


def name_of(functions: ModuleType) -> str:
    """`kernels` are Triton's, `ops` torch's own."""
    return functions.__name__.rpartition(".")[2]


def passes(on: Gpu, model: PreTrainedModel, fused: FusedModel, graphs: Graphs | None) -> None:
    """Passes of every length against the floor, and plain decoding, by one engine after the other."""
    context, prompt = on.sizes.context, on.prompt(model)
    capacity = context + on.sizes.new_tokens + MAX_K + 1
    engines: dict[str, Callable[[], Runner]] = {"graph": lambda: GraphRunner(graphs, capacity)} if graphs else {}
    engines |= {
        "eager: transformers": lambda: EagerRunner(model, capacity),
        "fused, not captured": lambda: FusedRunner(fused, capacity),
        "graph of ops": lambda: GraphRunner(captured(fused, ops), capacity),
    }
    for name, make in engines.items():
        with on.trying(f"pass, {name}"):
            runner = make()
            runner.prefill(prompt)
            for count in range(1, MAX_K + 2) if name == "graph" else (1, 6):
                size = bytes_read(model, context, count)
                for times in (1, IN_A_ROW) if count in (1, 6) else (1,):  # the host prepares each during the one before
                    took = on.seconds(partial(_read, runner, prompt[:count], times)) / times
                    what = f"T = {count}" + (f", one of {times} in a row" if times > 1 else "")
                    on.add(f"pass, {name}", what, **on.against_memory(took, size))
            runner.release()
            took = median(round.seconds for round in rounds(on, runner, NoDrafter(), prompt, 0))
            floor = on.against_memory(took, bytes_read(model, context, 1))
            on.add("plain decoding", name, tokens_per_second=1 / took, **floor)


def captured_passes(on: Gpu, name: str, model: PreTrainedModel, graphs: Graphs) -> None:
    """Captured passes of a shape, one after the other."""
    runner, prompt = GraphRunner(graphs, on.sizes.context + MAX_K + 1), on.prompt(model)
    runner.prefill(prompt)
    for count in (1, 6, MAX_K + 1):
        took = on.seconds(partial(_read, runner, prompt[:count], IN_A_ROW)) / IN_A_ROW
        floor = on.against_memory(took, bytes_read(model, on.sizes.context, count))
        on.add("pass of a shape", f"{name}, T = {count}, one of {IN_A_ROW} in a row", **floor)
    runner.release()


def _read(runner: Runner, ids: Sequence[int], times: int) -> None:
    length = runner.length
    for _ in range(times):
        runner.forward(ids)
        runner.rollback(length)


def rounds(on: Gpu, runner: Runner, drafter: Drafter, prompt: Sequence[int], k: int, passing: int = 0) -> list[Round]:
    """The rounds of a greedy run without the first, in which a draft model reads the prompt."""
    rule = ForcedMatch(Settings(k=k, max_new_tokens=on.sizes.new_tokens), passing)
    return [event for event in decode(Decoding(runner, drafter, prompt, rule)) if isinstance(event, Round)][1:]


class ForcedMatch(Match):
    """Lets the first `passing` guesses of a greedy draft pass; the others must be right."""

    def __init__(self, settings: Settings, passing: int) -> None:
        super().__init__(settings)
        self.passing = passing

    def verify(self, logits: Tensor, draft: Draft, position: int, captured: Capturing | None = None) -> Answer:
        ids = torch.as_tensor(draft.token_ids, dtype=torch.long)[: self.passing]
        certain = one_hot(ids.to(logits.device), logits.shape[-1], logits.dtype)
        return super().verify(torch.cat([certain, logits[len(certain) :]]), draft, position, captured)


# The operations of a pass ----------------------------------------------------------------------------------


def passes_apart(on: Gpu, graphs: Graphs) -> None:
    """The operations of a pass, each by itself in all layers: where the time goes, and which fails."""
    for functions in dict.fromkeys((ops_for(graphs.model.width, graphs.model.embedding.device), ops)):
        for count in (1, 6, MAX_K + 1):
            name, tokens = name_of(functions), f"T = {count}"
            with on.trying(f"parts of a pass, {name}, {tokens}"):
                for what, work, size in parts(graphs, functions, count, on.sizes.context):
                    with on.trying(f"{what}, {name}, {tokens}"):
                        took = on.against_memory(on.seconds(work), size)
                        on.add(f"part of a pass, {name}", f"{what}, {tokens}", **took)


def parts(
    graphs: Graphs, functions: ModuleType, count: int, live: int
) -> Iterator[tuple[str, Callable[[], object], int | None]]:
    """Each operation of a pass over `count` tokens after `live` others: name, function, bytes.

    An operation runs in all layers, captured, with each layer's own weights, keys and values, so that no cache holds
    them. It is captured on its first call, with inputs made by torch's own operations, so that one which fails does
    not stop the others. Its bytes are those of the weights or of the keys and values that it reads, None if neither.
    """
    model, made = graphs.model, functions
    buffers = Buffers(model, graphs.capacity_for(live + count))
    where = torch.zeros(2, max(graph.TOGETHER), dtype=torch.long, device=model.embedding.device)
    where[0] = live  # lines of the engine's length: where the second one lies, decides which kernel Triton compiles
    first, keys, values = model.layers[0], buffers.keys, buffers.values
    x = torch.randn(count, model.embedding.shape[1]).to(where.device, model.dtype)

    def write_kv(layer: Layer, keys: Tensor, values: Tensor, by: ModuleType = functions) -> Tensor:
        rotation = None if layer.rope is None else buffers.rotations[layer.rope]
        return by.write_kv(qkv, layer.head_norms, rotation, keys, values, rows[by])

    with torch.inference_mode():  # the inputs
        table = branches_of(range(-1, MOST_ROWS - 1)).to(where.device)
        chain = where, table[:count], table[-1, :count], keys.shape[2]
        rows = {by: by.placed(*chain) for by in (ops, functions)}
        qkv = ops.product(first.qkv, x, norm=first.attention_norm)
        q = write_kv(first, keys[0], values[0], ops)
        attended = ops.attend(q, keys[0], values[0], rows[ops])
        up = ops.product(first.up[0], x, norm=first.mlp_norm)
        inner, gated = first.activate(up), first.activate is swiglu
    # These must live as long as the captured passes.
    read = [x, where, *rows.values(), qkv, q, attended, up, inner, keys, values]

    def weights(inputs: Tensor, outputs: int) -> int:
        return inputs.shape[-1] * outputs * model.embedding.dtype.itemsize

    cached = 2 * keys[0, :, : live + count].nbytes
    # Of a layer, its keys and its values.
    every: dict[str, tuple[Callable[[Layer, Tensor, Tensor], Tensor], int | None]] = {
        "qkv": (lambda layer, *_: made.product(layer.qkv, x, norm=layer.attention_norm), weights(x, qkv.shape[1])),
        "write_kv": (write_kv, None),
        "attend": (lambda _, keys, values: made.attend(q, keys, values, rows[made]), cached),
        "out": (lambda layer, *_: made.product(layer.out, attended, plus=x), weights(attended, x.shape[1])),
        "up": (
            lambda layer, *_: made.product(layer.up[0], x, norm=layer.mlp_norm, gated=gated),
            weights(x, up.shape[1]),
        ),
        "down": (lambda layer, *_: made.product(layer.down[0], inner, plus=x), weights(inner, x.shape[1])),
    }

    @torch.inference_mode()
    def in_all(part: Callable[[Layer, Tensor, Tensor], Tensor]) -> Outcome:
        for of_layer in zip(model.layers, keys, values, strict=True):
            out = part(*of_layer)
        return out, read

    @torch.inference_mode()
    def head() -> Outcome:
        return made.product(model.head, x, norm=model.norm), read

    works: list[tuple[str, Callable[[], Outcome], int | None]] = [
        (name, partial(in_all, part), size and len(model.layers) * size) for name, (part, size) in every.items()
    ]
    for name, work, size in [*works, ("head", head, weights(x, model.vocab_size))]:
        capture = cache(partial(graphs.capture, work))
        yield name, lambda capture=capture: capture()(), size  # type: ignore[misc]
