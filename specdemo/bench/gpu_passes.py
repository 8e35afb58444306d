"""Passes of a captured model on a GPU against the speed of the memory: whole, and each operation by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..decoding.drafter import Drafter
from ..decoding.events import Round
from ..decoding.loop import decode
from ..decoding.match import Match
from ..decoding.sampling import one_hot
from ..drafters.none import NoDrafter
from ..engines import ops
from ..engines.choose import ops_for
from ..engines.eager import EagerRunner
from ..engines.fused import Cache as Buffers
from ..engines.fused import FusedRunner
from ..engines.gpu import graph
from ..engines.gpu.graph import GraphRunner, Graphs, Outcome
from ..engines.layout import FusedModel, Layer
from ..engines.linear import swiglu
from ..engines.runner import Runner
from ..system.hardware import seconds_of
from ..types import MAX_K, Draft, Settings, Verdict
from .models import bytes_read, captured, random_model
from .roofline import against_memory
from .rows import Row

log = logging.getLogger(__name__)
FAILED = "failed"  # the part of a row about a measurement that failed
LONGEST_ERROR = 300  # characters
WARM_UPS = 2
IN_A_ROW = 10  # passes
ROOM = 2.0**40  # bytes, more than any of the shapes takes
Part = Callable[[Layer, Tensor, Tensor], Tensor]  # of a layer, its keys and its values


@dataclass(frozen=True, slots=True)
class Sizes:
    name: str
    target: PreTrainedConfig
    draft: PreTrainedConfig
    with_head: PreTrainedConfig
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


@dataclass(frozen=True, slots=True)
class On:
    """Where everything is measured: the device, the number type, the sizes, and the bytes per second of its memory."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    rate: float = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        """The median time of some work, from the call to its end on the device."""
        times = [seconds_of(self.device, work) for _ in range(WARM_UPS + self.sizes.repeats)]
        return median(times[WARM_UPS:])

    def model(self, config: PreTrainedConfig) -> PreTrainedModel:
        return random_model(config, self.dtype, self.device, ROOM)

    def prompt(self, model: PreTrainedModel) -> list[int]:
        return torch.randint(model.config.get_text_config().vocab_size, (self.sizes.context,)).tolist()


def copying_rate(on: On) -> float:
    source = torch.rand(on.sizes.buffer // 4, device=on.device)
    target = torch.empty_like(source)
    return 2 * on.sizes.buffer / on.seconds(lambda: target.copy_(source))


def tried(what: str, measure: Callable[..., Iterable[Row]], *arguments: Any) -> Iterator[Row]:
    """The rows of a measurement, and a row of its error if it fails: the next one may succeed."""
    try:
        yield from measure(*arguments)
    except Exception as error:
        yield failed(what, error)


def failed(what: str, error: Exception) -> Row:
    """The row of a measurement that failed, with the beginning of what the error says."""
    log.error("%s could not be measured", what, exc_info=error)
    return {"part": FAILED, "what": what, "error": " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_ERROR]}


def slots(on: On, model: FusedModel, whose: str) -> Generator[Row, None, Graphs | None]:
    """A model's captured passes, and the time to capture: of torch's operations if the fastest fail, else None."""
    for functions in (None, ops):
        made: list[Graphs] = []
        try:
            took = seconds_of(on.device, lambda: made.append(captured(model, functions)))  # noqa: B023  # called at once
        except Exception as error:
            yield failed(f"a slot of {whose}, {'made of ops' if functions else 'as fast as can be'}", error)
        else:
            what = f"a slot of {whose}, made of {name_of(made[0].ops)}, what is new compiled"
            yield {"part": "capture", "what": what, "ms": 1000 * took}
            return made[0]
    return None


def another_slot(on: On, graphs: Graphs) -> Iterator[Row]:
    took = seconds_of(on.device, lambda: Graphs(graphs.model, graphs.ops, graphs.capture, 1))
    yield {"part": "capture", "what": "another, nothing to compile", "ms": 1000 * took}


def name_of(functions: ModuleType) -> str:
    """`kernels` are Triton's, `ops` torch's own."""
    return functions.__name__.rpartition(".")[2]


def passes_apart(on: On, graphs: Graphs) -> Iterator[Row]:
    """The operations of a pass, each by itself in all layers: where the time goes, and which fails."""
    for functions in dict.fromkeys((ops_for(graphs.model), ops)):
        for count in (1, 6, MAX_K + 1):
            what = f"parts of a pass, {name_of(functions)}, T = {count}"
            yield from tried(what, parts_of, on, graphs, functions, count)


def parts_of(on: On, graphs: Graphs, functions: ModuleType, count: int) -> Iterator[Row]:
    name = name_of(functions)
    for what, work, size in parts(graphs, functions, count, on.sizes.context):
        try:
            took = against_memory(on.seconds(work), size, on.rate)
        except Exception as error:
            yield failed(f"{what}, {name}, T = {count}", error)
        else:
            yield {"part": f"part of a pass, {name}", "what": f"{what}, T = {count}", **took}


def passes(on: On, model: PreTrainedModel, fused: FusedModel, graphs: Graphs | None) -> Iterator[Row]:
    """Passes of every length against the floor, and plain decoding, by one engine after the other."""
    capacity = on.sizes.context + on.sizes.new_tokens + MAX_K + 1
    engines: dict[str, Callable[[], Runner]] = {"graph": lambda: GraphRunner(graphs, capacity)} if graphs else {}
    engines |= {
        "eager: transformers": lambda: EagerRunner(model, capacity),
        "fused, not captured": lambda: FusedRunner(fused, capacity),
        "graph of ops": lambda: GraphRunner(captured(fused, ops), capacity),
    }
    for name, make in engines.items():
        yield from tried(f"pass, {name}", passes_by, on, name, make, model)


def passes_by(on: On, name: str, make: Callable[[], Runner], model: PreTrainedModel) -> Iterator[Row]:
    runner, context, prompt = make(), on.sizes.context, on.prompt(model)
    runner.prefill(prompt)
    for count in range(1, MAX_K + 2) if name == "graph" else (1, 6):

        def read(times: int, ids: Sequence[int] = prompt[:count]) -> None:
            for _ in range(times):
                runner.forward(ids)
                runner.rollback(context)

        in_a_row = {f", one of {IN_A_ROW} in a row": IN_A_ROW} if count in (1, 6) else {}
        for how, times in {"": 1, **in_a_row}.items():  # the host prepares each pass during the one before
            took = against_memory(on.seconds(partial(read, times)) / times, bytes_read(model, context, count), on.rate)
            yield {"part": f"pass, {name}", "what": f"T = {count}{how}", **took}
    runner.release()
    seconds = median(round.seconds for round in rounds(on, runner, NoDrafter(), prompt, 0))
    took = against_memory(seconds, bytes_read(model, context, 1), on.rate)
    yield {"part": "plain decoding", "what": name, "tokens_per_second": 1 / seconds, **took}


def parts(
    graphs: Graphs, functions: ModuleType, count: int, live: int
) -> Iterator[tuple[str, Callable[[], object], int | None]]:
    """Each operation of a pass over `count` tokens behind `live` others: name, function, bytes.

    An operation runs in all layers, captured, with each layer's own weights, keys and values, so that no cache holds
    them. It is captured on its first call, with inputs made by torch's own operations, so that one which fails does
    not stop the others. Its bytes are those of the weights or of the keys and values that it reads, None if neither.
    """
    model = graphs.model
    buffers = Buffers(model, max(live + count, graph.ROOM))
    start = torch.tensor([live], device=model.embedding.device)
    first, keys, values, rotation = model.layers[0], buffers.keys, buffers.values, buffers.rotation
    x = torch.randn(count, model.embedding.shape[1]).to(start.device, model.dtype)

    def write_kv(layer: Layer, keys: Tensor, values: Tensor, by: ModuleType = functions) -> Tensor:
        return by.write_kv(qkv, layer.head_norms, rotation if layer.rotated else None, keys, values, rows[by])

    def activate(layer: Layer, *_: Tensor) -> Tensor:
        return functions.swiglu(up) if layer.activate is swiglu else layer.activate(up)

    with torch.inference_mode():  # the inputs
        rows = {by: by.placed(start, None, count, keys.shape[2]) for by in (ops, functions)}
        qkv = ops.product(first.qkv, x, norm=first.attention_norm)
        q = write_kv(first, keys[0], values[0], ops)
        attended = ops.attend(q, keys[0], values[0], rows[ops])
        up = ops.product(first.up, x, norm=first.mlp_norm)
        inner = first.activate(up)
    # These must live as long as the captured passes.
    read = [x, start, *rows.values(), qkv, q, attended, up, inner, keys, values]

    def in_all(part: Part) -> Callable[[], Tensor]:
        def run() -> Tensor:
            for layer, own_keys, own_values in zip(model.layers, keys, values, strict=True):
                out = part(layer, own_keys, own_values)
            return out

        return run

    def weights(inputs: Tensor, outputs: int) -> int:
        return inputs.shape[-1] * outputs * model.embedding.element_size()

    every: dict[str, tuple[Part, int | None]] = {
        "qkv": (lambda layer, *_: functions.product(layer.qkv, x, norm=layer.attention_norm), weights(x, qkv.shape[1])),
        "write_kv": (write_kv, None),
        "attend": (
            lambda _, keys, values: functions.attend(q, keys, values, rows[functions]),
            2 * keys[0, :, : live + count].nbytes,
        ),
        "out": (lambda layer, *_: functions.product(layer.out, attended, plus=x), weights(attended, x.shape[1])),
        "up": (lambda layer, *_: functions.product(layer.up, x, norm=layer.mlp_norm), weights(x, up.shape[1])),
        "activate": (activate, None),
        "down": (lambda layer, *_: functions.product(layer.down, inner, plus=x), weights(inner, x.shape[1])),
    }
    layers = len(model.layers)
    works = [(name, in_all(part), None if size is None else layers * size) for name, (part, size) in every.items()]
    works.append(("head", lambda: functions.product(model.head, x, norm=model.norm), weights(x, model.vocab_size)))
    for name, run, size in works:

        @torch.inference_mode()
        def work(run: Callable[[], Tensor] = run) -> Outcome:
            return run(), read

        @cache
        def captured(work: Callable[[], Outcome] = work) -> Callable[[], Outcome]:
            return graphs.capture(work)

        yield name, lambda captured=captured: captured()(), size  # type: ignore[misc]


class Forced(Match):
    """Lets the first `passing` guesses of a greedy draft pass; the others must be right."""

    def __init__(self, settings: Settings, passing: int) -> None:
        super().__init__(settings)
        self.passing = passing

    def verify(self, logits: Tensor, draft: Draft, position: int) -> Verdict:
        ids = torch.as_tensor(draft.token_ids, dtype=torch.long)[: self.passing]
        certain = one_hot(ids.to(logits.device), logits.shape[-1], logits.dtype)
        return super().verify(torch.cat([certain, logits[len(certain) :]]), draft, position)


def rounds(on: On, runner: Runner, drafter: Drafter, prompt: Sequence[int], k: int, passing: int = 0) -> list[Round]:
    """The rounds of a greedy run without the first, in which a draft model reads the prompt."""
    rule = Forced(Settings(k=k, max_new_tokens=on.sizes.new_tokens), passing)
    return [event for event in decode(runner, drafter, prompt, rule) if isinstance(event, Round)][1:]
