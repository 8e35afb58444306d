"""The speed of the captured engine on a GPU: passes against the speed of the memory, and rounds against transformers.

Most weights are random, of well-known shapes, so that little is downloaded. Drafts of a random draft model all fail, so
rounds are timed in two ways. *Forced*: the rule accepts a given number of drafted tokens, which measures the time of a
round but no acceptance. *Made pair*: the later layers of a random target change little, and its first layers draft, so
that drafts really pass. Trees are compared with chains by the drafters of a preset.

`tests/gpu` checks that the engine is right.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config

from specdemo.decoding.events import Event, Round
from specdemo.decoding.rule import Match
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.drafters.none import NoDrafter
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.formats import formatted
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, PRESETS, find_preset
from specdemo.racing.provenance import commit
from specdemo.racing.race import start
from specdemo.settings import AUTO, MATCH, MAX_NODES, Settings
from specdemo.studies.prompts import read_prompts, some
from specdemo.system.hardware import device_name

from .cases import ALONE, TREE, cases_of_ours
from .gpu_pair import made_pair
from .gpu_passes import Gpu, Sizes, another_slot, copying_rate, passes, passes_apart, rounds, slots, smaller_passes
from .models import SHAPES, SMALL, WITH_HEADS, Pair, capture_for, like, random_head, shape_of
from .results import size_of
from .rows import Row, tree_rows
from .tables import text_table
from .throughput import bench

HEAD_K = 4
ROUNDS_OF = "eagle", "lookup-eagle", "block", "medusa", "lookup-ngram", "ngram"
TREE_DRAFTERS, TREE_TEMPERATURES = ("lookup-ngram", "eagle", "medusa"), (0.0, 1.0)
PRESET_K, PRESET_NODES, PRESET_TEMPERATURES = 4, 16, (0.0, 0.8)
LAUNCHES = "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync"

TINY_TARGET = Qwen3Config(**shape_of(64, 4, 4, 2, 96, 97, head_dim=16, tie_word_embeddings=False))
FULL = Sizes(
    "Qwen3-4B",
    SHAPES["Qwen3-4B"],
    SHAPES["Qwen3-0.6B"],
    SMALL,
    4,
    512,
    128,
    15,
    2**32,
    {"Qwen3-0.6B": SHAPES["Qwen3-0.6B"], "SmolLM2-135M": SMALL},
    (1, 3, 5, 8, 16),
    (8, 16, 32, MAX_NODES),
    DEFAULT_PRESET,
    "domains.jsonl",
    0,
)
QUICK = replace(FULL, repeats=5, ks=(3, 5), trees=(16, 32), new_tokens=96, each=1)
TINY = Sizes(
    "tiny",
    TINY_TARGET,
    like(TINY_TARGET, num_hidden_layers=2),
    TINY_TARGET,
    2,
    24,
    12,
    2,
    2**16,
    {"tinier": like(TINY_TARGET, num_hidden_layers=1)},
    (1, 3),
    (3, 6),
    "nanogpt-shakespeare",
    "plays-heldout.jsonl",
    1,
)


def environment(device: torch.device) -> dict[str, Any]:
    named = {name: version(name) for name in ("torch", "transformers", "triton") if find_spec(name)}
    here = {"device": device_name(device), "cuda": torch.version.cuda, "python": platform.python_version()}
    return {**here, **named, "commit": commit()}


def measure(on: Gpu, only: Sequence[str] = ()) -> None:
    """Give `on` rows of `part`, `what`, `ms` and more, as they come: of all `PARTS`, or of some."""
    on.rate = copying_rate(on)
    on.add("memory", "copying, read and written", gb_per_second=on.rate / 1e9)
    for name in only or PARTS:
        for part in PARTS[name]:
            with on.trying(part.__name__.replace("_", " ")):
                part(on)


def target_passes(on: Gpu) -> None:
    """The time to capture, and passes of a random model."""
    target = on.model(on.sizes.target)
    fused = FusedModel.of(target)
    graphs = slots(on, fused, "the target")
    if graphs:
        with on.trying("another slot"):
            another_slot(on, graphs)
        with on.trying("parts of a pass"):
            passes_apart(on, graphs)
    passes(on, target, fused, graphs)


def cost_of(run: Sequence[Round], k: int) -> Row:
    """The median time of the rounds of a run. Those cut short by the end of the text do not count."""
    full = [event for event in run if len(event.drafted) == k]
    took = median(event.seconds for event in full)
    return {
        "ms": 1000 * took,
        "draft_ms": 1000 * median(event.draft_seconds for event in full),
        "tokens_per_second": median(len(event.emitted) for event in full) / took,
    }


def forced_rounds(on: Gpu) -> None:
    """The time of a round with an unrelated draft model, where none, half or all of its guesses pass."""
    target = on.model(on.sizes.target)
    graphs = slots(on, FusedModel.of(target), "the target")
    draft_graphs = slots(on, FusedModel.of(on.model(on.sizes.draft)), "the draft model")
    if not graphs or not draft_graphs:
        return
    pair, prompt = Pair(target, graphs, draft_graphs), on.prompt(target)
    capacity = len(prompt) + on.sizes.new_tokens
    for k in on.sizes.ks:
        with on.trying(f"forced rounds, K = {k}"):
            for passing in sorted({0, k // 2, k}):
                drafter, runner = pair.drafter(capacity, Match(Settings())), GraphRunner(graphs, capacity)
                cost = cost_of(rounds(on, runner, drafter, prompt, k, passing), k)
                on.add("round, forced", f"K = {k}, {passing} pass", **cost, drafted_token_ms=cost["draft_ms"] / k)


def heads(on: Gpu) -> None:
    """Rounds of a small target with heads, where launching an operation takes longer than running it.

    No drafter, and heads with captured passes and without; half of the guesses pass.
    """
    target = on.model(on.sizes.with_head)
    graphs, prompt = slots(on, FusedModel.of(target), "a small target"), on.prompt(target)
    if not graphs:
        return
    captures = {"captured": capture_for(on.device), "as it comes": None}
    ways = {f"{name}, {how}": (kind, captures[how]) for name, kind in WITH_HEADS.items() for how in captures}
    for what, (kind, capture) in {"alone": (None, None), **ways}.items():
        with on.trying(what):
            runner, k = GraphRunner(graphs, len(prompt) + on.sizes.new_tokens), HEAD_K if kind else 0
            drafter = kind(random_head(kind, target, capture), runner, Match(Settings())) if kind else NoDrafter()
            on.add("round with a head", what, **cost_of(rounds(on, runner, drafter, prompt, k, k // 2), k))


# Trees -----------------------------------------------------------------------------------------------------


def preset_trees(on: Gpu) -> None:
    """For each drafter that the preset has: its trees, its chain of the fastest K, and what auto makes of both."""
    asked = some(read_prompts(PRESETS / "prompts" / on.sizes.prompts), on.sizes.each)
    loaded = load(find_preset(on.sizes.preset), str(on.dtype).removeprefix("torch."), str(on.device))
    try:
        able = [name for name in TREE_DRAFTERS if not drafter_class(name).needs(loaded.parts).missing]
        drafting = cases_of_ours(loaded, ",".join(able), [*on.sizes.ks, AUTO], [MATCH], [*on.sizes.trees, AUTO])
        texts = on.sizes.new_tokens, 1, True
        runs = bench(loaded, asked, [ALONE, *drafting], TREE_TEMPERATURES, *texts)["runs"]
    finally:
        loaded.release()
    summed = tree_rows(runs)
    for row in summed:
        what = f"{row['drafter']} at T = {row['temperature']:g}, {size_of(row)}"
        to_chain = (row["to_chain"] or {}).get("tokens_per_second")
        figures = {"tokens_per_second": row["tokens_per_second"].mean, "tokens_per_round": row["tokens_per_round"]}
        figures |= {"rows": row["rows"], "to_best_chain": to_chain.mean if to_chain else None}
        on.add(f"trees of {on.sizes.preset}", what, **figures)
    for words, trees in (("trees", True), ("chains", False)):
        mine = [row for row in summed if (row["method"] == TREE) == trees]
        same, texts = (sum(row[count] for row in mine) for count in ("identical", "runs"))
        on.add(f"texts by {words} equal to the target's own", f"{same} of {texts}", identical=same, texts=texts)


def preset_rounds(on: Gpu, tree: bool = False) -> None:
    """Rounds of the preset's drafters: their time, the draft's, and what they launch. Drafts are chains, or trees."""
    (asked, *_) = read_prompts(PRESETS / "prompts" / on.sizes.prompts)
    loaded = load(find_preset(on.sizes.preset), str(on.dtype).removeprefix("torch."), str(on.device))
    able = [name for name in ROUNDS_OF if not drafter_class(name).needs(loaded.parts).missing]
    ids = loaded.encode(asked.prompt)
    try:
        for temperature in PRESET_TEMPERATURES:
            settings = Settings(k=PRESET_K, temperature=temperature, max_new_tokens=on.sizes.new_tokens)
            every = [("none", replace(settings, k=0)), *((name, settings) for name in able)]
            if tree:
                branching = replace(settings, k=PRESET_NODES, tree=True)
                every = [(name, branching) for name in able if DRAFTERS[name].branches]
            for name, asked_for in every:
                what = f"{name}, {'a tree of' if tree else 'K ='} {asked_for.k} at T = {temperature:g}"
                with on.trying(what):
                    for _ in range(2):  # captures come in the first
                        run = [event for event in start(loaded, name, ids, asked_for) if isinstance(event, Round)][1:]
                    run = [event for event in run if event.drafted or name == "none"]
                    on.add(
                        f"rounds of {on.sizes.preset}",
                        what,
                        ms=1000 * median(event.seconds for event in run),
                        draft_ms=1000 * median(event.draft_seconds or 0 for event in run),
                        **launches(on, partial(start, loaded, name, ids, asked_for)),
                    )
    finally:
        loaded.release()


def preset_tree_rounds(on: Gpu) -> None:
    """`preset_rounds` of trees."""
    preset_rounds(on, tree=True)


def launches(on: Gpu, run: Callable[[], Iterable[Event]]) -> dict[str, float]:
    """Of a round, on average, the `launches` of the host (kernels outside captured work, graphs and copies) and the
    `kernels` that run on the GPU, captured or not. Nothing without a GPU.

    The prompt and the first round, in which a draft model reads it, do not count.
    """
    if on.device.type != "cuda":
        return {}
    events = iter(run())
    next(event for event in events if isinstance(event, Round))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        count = sum(isinstance(event, Round) for event in events)
    every = seen.key_averages()
    there = [each for each in every if each.device_type == DeviceType.CUDA]
    found = {
        "launches": [each for each in every if each.key.startswith(LAUNCHES)],
        "kernels": [each for each in there if not each.key.startswith(("Memcpy", "Memset"))],
    }
    return {name: sum(each.count for each in those) / count for name, those in found.items()}


PARTS: dict[str, tuple[Callable[[Gpu], None], ...]] = {
    "passes": (target_passes, smaller_passes),
    "rounds": (forced_rounds, heads, preset_rounds, made_pair),
    "trees": (preset_tree_rounds, preset_trees),
}

# What is printed -------------------------------------------------------------------------------------------

SHAPES_OF_ROWS = {
    **{"part": "", "what": "", "gb_per_second": ".0f", "ms": ".3f", "floor_ms": ".3f", "achieved": ".0%"},
    **{
        "draft_ms": ".3f",
        "drafted_token_ms": ".3f",
        "launches": ".1f",
        "kernels": ".1f",
        "tokens_per_second": ".1f",
        "tokens_per_round": ".2f",
        "rows": ".1f",
    },
    **{
        "acceptance_rate": ".0%",
        "to_best_assisted": ".2f",
        "to_compiled": ".2f",
        "to_best_chain": ".2f",
    },
}


def line(row: Row) -> str:
    """A row in a line, printed as soon as it is measured, for a run that is cut off."""
    known = {name: shape for name, shape in SHAPES_OF_ROWS.items() if shape and row.get(name) is not None}
    found = [f"{name} {formatted(row[name], shape, '-')}" for name, shape in known.items()]
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
