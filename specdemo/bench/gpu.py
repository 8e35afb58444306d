"""The speed of the captured engine on a GPU: passes against the speed of the memory, and rounds against transformers.

Most weights are random, of well-known shapes, so that little is downloaded. Drafts of a random draft model all fail, so
rounds are timed in two ways. *Forced*: the rule accepts a given number of drafted tokens, which measures the time of a
round but no acceptance. *Made pair*: the later layers of a random target change little, and its first layers draft, so
that drafts really pass. Trees are compared with chains by the drafters of a preset too.

`tests/gpu` checks that the engine is right.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from ..decoding.costs import CostModel, measure_passes
from ..decoding.loop import rule_for
from ..drafters.none import NoDrafter
from ..engines import ops
from ..engines.choose import ops_for
from ..engines.eager import EagerRunner
from ..engines.fused import FusedRunner
from ..engines.gpu.graph import GraphRunner, Graphs
from ..engines.layout import FusedModel
from ..engines.runner import Runner
from ..models.presets import DEFAULT_PRESET, PRESETS
from ..racing.stats import Stats
from ..studies.tables import text_table
from ..system.hardware import device_name, seconds_of, wait
from ..types import AUTO, MAX_K, MAX_NODES, Settings
from .cases import Case
from .gpu_models import Pair, captured, first_layers
from .gpu_parts import parts
from .gpu_rounds import Row, forced_rounds, head_drafters, head_rounds, random_prompt, rounds
from .gpu_trees import preset_trees
from .hf import ASSISTED, HF, TUNED, generate
from .roofline import SHAPES, bytes_read, random_model

log = logging.getLogger(__name__)
FAILED = "failed"  # the part of a row about a measurement that failed
LONGEST_ERROR = 300  # characters
WARM_UPS = 2
IN_A_ROW = 10  # passes
ROOM = 2.0**40  # bytes, more than any of the shapes takes
DAMPED = 0.02  # the later layers of a made target write this share of their output


@dataclass(frozen=True, slots=True)
class Sizes:
    target: PreTrainedConfig
    draft: PreTrainedConfig
    draft_layers: int  # of a made pair
    context: int
    new_tokens: int
    repeats: int
    buffer: int  # bytes
    ks: tuple[int, ...]
    name: str
    with_head: PreTrainedConfig
    trees: tuple[int, ...]
    preset: str  # in which trees and chains are compared
    prompts: str
    each: int  # prompts of a category; 0 stands for all


SMOLLM2_135M = LlamaConfig(
    **{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
)
FULL = Sizes(
    *(SHAPES["Qwen3-4B"], SHAPES["Qwen3-0.6B"], 4, 512, 128, 15, 2**32, (1, 3, 5, 8, 16)),
    name="Qwen3-4B",
    with_head=SMOLLM2_135M,
    trees=(8, 16, 32, MAX_NODES),
    preset=DEFAULT_PRESET,
    prompts="domains.jsonl",
    each=0,
)
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 16}
TINY = Sizes(
    Qwen3Config(**SMALL, intermediate_size=96, num_hidden_layers=4),
    Qwen3Config(**SMALL, intermediate_size=48, num_hidden_layers=2),
    *(2, 24, 12, 2, 2**16, (1, 3)),
    name="tiny",
    with_head=Qwen3Config(**SMALL, intermediate_size=96, num_hidden_layers=4),
    trees=(3, 6),
    preset="nanogpt-shakespeare",
    prompts="plays-heldout.jsonl",
    each=1,
)


def environment(device: torch.device) -> dict[str, Any]:
    named = {name: version(name) for name in ("torch", "transformers", "triton") if find_spec(name)}
    return {"device": device_name(device), "cuda": torch.version.cuda, "python": platform.python_version(), **named}


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

    def against(self, took: float, size: int | None) -> Row:
        """A time and the least time in which the memory delivers `size` bytes, if they can be counted."""
        floor = {} if size is None else {"floor_ms": 1000 * size / self.rate, "achieved": size / self.rate / took}
        return {"ms": 1000 * took, **floor}


def measurements(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Row]:
    """Rows of `part`, `what`, `ms` and more, as they come."""
    on = On(device, dtype, sizes)
    on = replace(on, rate=copying_rate(on))
    yield {"part": "memory", "what": "copying, read and written", "gb_per_second": on.rate / 1e9}
    yield from tried("random pair", random_pair, on)
    yield from tried("heads", heads, on)
    yield from tried("made pair", made_pair, on)
    asked = sizes.preset, PRESETS / "prompts" / sizes.prompts, sizes.each, sizes.new_tokens, sizes.ks, sizes.trees
    yield from tried(f"trees of {sizes.preset}", preset_trees, *asked, device, dtype)


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


def random_pair(on: On) -> Iterator[Row]:
    """The time to capture, and passes and rounds of two unrelated models."""
    target = random_model(on.sizes.target, on.dtype, on.device, ROOM)
    fused = FusedModel.of(target)
    graphs = yield from slots(on, fused, "the target")
    if graphs:
        yield from tried("another slot", another_slot, on, graphs)
        yield from tried("parts of a pass", passes_apart, on, graphs)
    yield from passes(on, target, fused, graphs)
    if graphs:
        yield from tried("forced rounds", random_rounds, on, target, graphs)


def slots(on: On, model: FusedModel, whose: str) -> Generator[Row, None, Graphs | None]:
    """A model's captured passes, and the time to capture: of torch's operations if the fastest fail, else None."""
    for functions in (None, ops):
        try:
            graphs, took = clocked(on.device, partial(captured, model, functions))
        except Exception as error:
            yield failed(f"a slot of {whose}, {'made of ops' if functions else 'as fast as can be'}", error)
        else:
            what = f"a slot of {whose}, made of {name_of(graphs.ops)}, what is new compiled"
            yield {"part": "capture", "what": what, "ms": 1000 * took}
            return graphs
    return None


def another_slot(on: On, graphs: Graphs) -> Iterator[Row]:
    _, took = clocked(on.device, lambda: Graphs(graphs.model, graphs.ops, graphs.capture, 1))
    yield {"part": "capture", "what": "another, nothing to compile", "ms": 1000 * took}


def name_of(functions: ModuleType) -> str:
    """`kernels` are Triton's, `ops` torch's own."""
    return functions.__name__.rpartition(".")[2]


def random_rounds(on: On, target: PreTrainedModel, graphs: Graphs) -> Iterator[Row]:
    sizes = on.sizes
    draft_graphs = yield from slots(
        on, FusedModel.of(random_model(sizes.draft, on.dtype, on.device, ROOM)), "the draft model"
    )
    if draft_graphs:
        pair = Pair(target, graphs, draft_graphs)
        for k in sizes.ks:
            yield from tried(f"forced rounds, K = {k}", forced_rounds, pair, k, sizes.context, sizes.new_tokens)


def heads(on: On) -> Iterator[Row]:
    """Rounds of a small target with heads, where launching an operation takes longer than running it."""
    target = random_model(on.sizes.with_head, on.dtype, on.device, ROOM)
    graphs = yield from slots(on, FusedModel.of(target), "a small target")
    if graphs:
        prompt = random_prompt(target, on.sizes.context)
        for what, make in head_drafters(target).items():
            yield from tried(what, head_rounds, what, make, graphs, prompt, on.sizes.new_tokens)


def clocked(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of some work, and how long it took once."""
    wait(device)
    began = time.perf_counter()
    outcome = work()
    wait(device)
    return outcome, time.perf_counter() - began


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
            took = on.seconds(work)
        except Exception as error:
            yield failed(f"{what}, {name}, T = {count}", error)
        else:
            yield {"part": f"part of a pass, {name}", "what": f"{what}, T = {count}"} | on.against(took, size)


def passes(on: On, model: PreTrainedModel, fused: FusedModel, graphs: Graphs | None) -> Iterator[Row]:
    """Passes of every length against the floor, and plain decoding, by one engine after the other."""
    capacity = on.sizes.context + on.sizes.new_tokens + MAX_K + 1
    engines: list[tuple[str, Callable[[], Runner], Sequence[int]]] = [
        ("eager: transformers", lambda: EagerRunner(model, capacity), (1, 6)),
        ("fused, not captured", lambda: FusedRunner(fused, capacity), (1, 6)),
        ("graph of ops", lambda: GraphRunner(captured(fused, ops), capacity), (1, 6)),
    ]
    if graphs:
        engines.insert(0, ("graph", lambda: GraphRunner(graphs, capacity), range(1, MAX_K + 2)))
    for name, make, lengths in engines:
        yield from tried(f"pass, {name}", passes_by, on, name, make, lengths, model)


def passes_by(
    on: On, name: str, make: Callable[[], Runner], lengths: Sequence[int], model: PreTrainedModel
) -> Iterator[Row]:
    runner, context = make(), on.sizes.context
    prompt = random_prompt(model, context)
    runner.prefill(prompt)
    for count in lengths:

        def read(times: int, ids: Sequence[int] = prompt[:count]) -> None:
            for _ in range(times):
                runner.forward(ids)
                runner.rollback(context)

        size = bytes_read(model, context, count)
        yield {"part": f"pass, {name}", "what": f"T = {count}"} | on.against(on.seconds(partial(read, 1)), size)
        if count in (1, 6):  # the host prepares each pass during the one before
            each = on.seconds(partial(read, IN_A_ROW)) / IN_A_ROW
            yield {"part": f"pass, {name}", "what": f"T = {count}, one of {IN_A_ROW} in a row"} | on.against(each, size)
    runner.release()
    took = median(round.seconds for round in rounds(runner, NoDrafter(), prompt, 0, on.sizes.new_tokens))
    row = {"part": "plain decoding", "what": name, "tokens_per_second": 1 / took}
    yield row | on.against(took, bytes_read(model, context, 1))


def made_target(on: On) -> PreTrainedModel:
    """A random model whose layers behind those that draft do little.

    It does not share its embedding with its output: a random model that does repeats its last token for ever.
    """
    config = type(on.sizes.target)(**{**on.sizes.target.to_dict(), "tie_word_embeddings": False})
    model = random_model(config, on.dtype, on.device, ROOM)
    layers: Any = model.base_model.layers
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1) if weight.dim() == 1 else weight.uniform_(-0.02, 0.02)  # norms, and all else
        for layer in layers[on.sizes.draft_layers :]:
            layer.self_attn.o_proj.weight.mul_(DAMPED)
            layer.mlp.down_proj.weight.mul_(DAMPED)
    return model


def made_pair(on: On) -> Iterator[Row]:
    """Whole texts of a made pair, by transformers and by ours, alone and assisted; all greedy, of the same weights."""
    target, sizes = made_target(on), on.sizes
    draft = first_layers(target, sizes.draft_layers)
    prompt = random_prompt(target, sizes.context)
    settings = Settings(k=0, max_new_tokens=sizes.new_tokens)
    loaded: Any = SimpleNamespace(model=target, draft_model=draft, eos_ids=frozenset())
    theirs = [Case(HF), Case(ASSISTED, "draft-model"), *(Case(TUNED, "draft-model", k) for k in sizes.ks if k < MAX_K)]
    best = 0.0
    for case in theirs:
        name = case.method + (f", K = {case.k}" if case.k else "")
        for row in tried(f"transformers, {name}", by_transformers, loaded, case, name, prompt, settings):
            best = max(best, row.get("tokens_per_second", 0.0)) if case.method != HF else best
            yield row
    graphs = yield from slots(on, FusedModel.of(target), "the made target")
    draft_graphs = yield from slots(on, FusedModel.of(draft), "its draft model")
    if not graphs or not draft_graphs:
        return
    pair, costs = Pair(target, graphs, draft_graphs), None
    try:
        costs = CostModel(measure_passes(GraphRunner(graphs, MAX_K + 2), rule_for(settings), MAX_K))
    except Exception as error:
        yield failed("the costs for K = auto", error)
    ks: list[int | str] = [0, *sizes.ks, *([AUTO] if costs else [])]
    for k in ks:
        yield from tried(f"ours, K = {k}", by_ours, pair, prompt, replace(settings, k=k), costs, best)
    for nodes in sizes.trees:
        asked = replace(settings, k=nodes, tree=True)
        yield from tried(f"ours, a tree of {nodes}", by_ours, pair, prompt, asked, None, best)


def by_transformers(loaded: Any, case: Case, name: str, prompt: list[int], settings: Settings) -> Iterator[Row]:
    runs = [generate(loaded, case, prompt, settings) for _ in range(3)][1:]
    speed = median(run["tokens_per_second"] for run in runs if run["tokens_per_second"])  # None where it was held up
    yield {"part": "made pair, transformers", "what": name, "tokens_per_second": speed}


def by_ours(pair: Pair, prompt: list[int], settings: Settings, costs: CostModel | None, best: float) -> Iterator[Row]:
    drafter = None if settings.k else NoDrafter()
    stats = [Stats.of(pair.events(prompt, settings, drafter, costs)) for _ in range(4)][1:]
    speed = median(stat.tokens / stat.seconds for stat in stats)
    yield {
        "part": "made pair, ours",
        "what": f"draft model, {'a tree of' if settings.tree else 'K ='} {settings.k}" if settings.k else "alone",
        "tokens_per_second": speed,
        "acceptance_rate": stats[-1].acceptance_rate,
        "tokens_per_round": stats[-1].tokens_per_round,
        "rows": stats[-1].drafted / stats[-1].rounds + 1,
        "to_best_assisted": speed / best if best else None,
    }


SHAPES_OF_ROWS = {
    **{"part": "", "what": "", "gb_per_second": ".0f", "ms": ".3f", "floor_ms": ".3f", "achieved": ".0%"},
    **{"draft_ms": ".3f", "tokens_per_second": ".1f", "tokens_per_round": ".2f", "rows": ".1f"},
    "acceptance_rate": ".0%",
    **{"to_best_assisted": ".2f", "to_best_chain": ".2f"},
}


def line(row: Row) -> str:
    """A row in a line, printed as soon as it is measured, for a run that is cut off."""
    found = [
        f"{name} {row[name]:{shape}}" for name, shape in SHAPES_OF_ROWS.items() if shape and row.get(name) is not None
    ]
    return ", ".join([row["part"], row["what"], *found, *filter(None, [row.get("error")])])


def table(rows: Sequence[Row], sizes: Sizes) -> str:
    return "\n".join(
        [
            text_table(rows, SHAPES_OF_ROWS),
            "",
            f"Weights are random, of the shape {sizes.name}, but for those of the preset. floor_ms: every weight and "
            "the cache read once at the copy's speed.",
            "Forced: the rule let a given number of guesses pass. Made pair: the later layers of the target do little, "
            "and its first layers draft.",
            f"Round with a head: of a target of hidden size {sizes.with_head.hidden_size}, forced too: half of the "
            "guesses pass.",
        ]
    )
