"""The speed of the captured engine on a GPU: passes against the speed of the memory, rounds against transformers, and
a preset's texts by chains and trees against the target's own.

Most weights are random, of well-known shapes, so that little is downloaded. Drafts of a random draft model all fail, so
rounds are timed in two ways. *Forced*: the rule accepts a given number of drafted tokens, which measures the time of a
round but no acceptance. *Made pair*: the later layers of a random target change little, and its first layers draft, so
that drafts really pass.

`tests/gpu` checks that the engine is right; `gpu_report` runs both.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from shutil import which
from statistics import median
from subprocess import run
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig, Qwen3Config

from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Event, Round
from specdemo.decoding.rule import Match
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.drafters.none import NoDrafter
from specdemo.engines.gpu.capture import capture_for
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.models.loaded import Loaded, load
from specdemo.models.presets import DEFAULT_PRESET, PRESETS, find_preset
from specdemo.racing.provenance import commit
from specdemo.racing.race import start
from specdemo.racing.request import PLAIN, SPECULATIVE
from specdemo.settings import AUTO, MATCH, MAX_NODES, Settings
from specdemo.studies.prompts import ALL, read_prompts, some
from specdemo.system.hardware import cpu_name, device_name, dtype_name

from .cases import ALONE, TREE, cases_of_ours
from .docs import cells
from .gpu_pair import made_pair
from .gpu_passes import Gpu, Sizes, another_slot, captured_passes, passes, passes_apart, rounds, slots
from .gpu_vllm import beside_vllm
from .models import SHAPES, SMALL, WITH_HEADS, Pair, like, random_head, shape_of
from .results import size_of
from .rows import Row
from .throughput import bench

HEAD_K = 4
DRAFTING = "lookup-eagle", "eagle", "lookup-ngram", "medusa", "block", "ngram"  # drafters of the preset
TEXTS_BY = DRAFTING[:4]
PRESET_K, PRESET_NODES, TEMPERATURES = 4, 16, (0.0, 0.8)
LAUNCHES = "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync"

TINY_TARGET = Qwen3Config(**shape_of(64, 4, 4, 2, 96, 97, head_dim=16, tie_word_embeddings=False))
FULL = Sizes(
    "Qwen3-4B",
    SHAPES["Qwen3-4B"],
    SHAPES["Qwen3-0.6B"],
    {"SmolLM2-135M": SMALL, **{name: SHAPES[name] for name in ("Qwen3-0.6B", "Qwen3-4B")}},
    4,
    512,
    128,
    15,
    2**32,
    (1, 3, 5, 8, 16),
    (8, 16, 32, MAX_NODES),
    DEFAULT_PRESET,
    "domains.jsonl",
    0,
    ("tests/gpu", "-m", "gpu"),
)
REPORT = replace(FULL, repeats=5, buffer=2**30, ks=(4,), trees=(16,), new_tokens=64, each=1)  # in `gpu_report.UNTIL`
TINY = Sizes(
    "tiny",
    TINY_TARGET,
    like(TINY_TARGET, num_hidden_layers=2),
    {"tiny": TINY_TARGET, "tinier": like(TINY_TARGET, num_hidden_layers=1)},
    2,
    24,
    12,
    2,
    2**16,
    (1, 3),
    (3, 6),
    "nanogpt-shakespeare",
    "plays-heldout.jsonl",
    1,
    ("tests/gpu/test_waits.py", "-m", "not gpu"),
)


def environment(device: torch.device) -> dict[str, Any]:
    named = {name: version(name) for name in ("torch", "transformers", "triton") if find_spec(name)}
    here = {"device": device_name(device), "host": cpu_name(), "cores": os.cpu_count(), "driver": None}
    if device.type == "cuda" and which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        here["driver"] = run(asked, check=False, capture_output=True, text=True).stdout.partition("\n")[0]
    made = {"cuda": torch.version.cuda, "python": platform.python_version()}
    return {**here, **made, **named, "commit": commit()}


def measure(on: Gpu, only: Sequence[str] = ()) -> None:
    """Give `on` rows of `part`, `what`, `ms` and more, as they come: of all `PARTS`, or of some."""
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


def shapes(on: Gpu) -> None:
    """Passes and rounds of a model of each shape."""
    for name, config in on.sizes.shapes.items():
        with on.trying(f"passes and rounds of {name}"):
            passes_and_rounds(on, name, config)


def passes_and_rounds(on: Gpu, name: str, config: PreTrainedConfig) -> None:
    """Captured passes, and rounds without a drafter and with captured heads of which half of the guesses pass."""
    target = on.model(config)
    layers = target.config.num_hidden_layers
    if layers < config.num_hidden_layers:
        name += f" with {layers} of its {config.num_hidden_layers} layers"
    graphs, prompt = slots(on, FusedModel.of(target), name), on.prompt(target)
    if not graphs:
        return
    captured_passes(on, name, target, graphs)
    for way, kind in {"alone": None, **WITH_HEADS}.items():
        with on.trying(f"{name}, {way}"):
            runner, k = GraphRunner(graphs, len(prompt) + on.sizes.new_tokens), HEAD_K if kind else 0
            drafter: Drafter = NoDrafter()
            if kind:
                drafter = kind(random_head(kind, target, capture_for(on.device)), runner, Match(Settings()))
            cost = cost_of(rounds(on, runner, drafter, prompt, k, k // 2), k)
            on.add("round of a shape", f"{name}, {way}", **cost)


# The preset ------------------------------------------------------------------------------------------------


def preset(on: Gpu) -> None:
    """The real weights of the preset: what the engine found out about itself, texts, and rounds."""
    loaded = load(find_preset(on.sizes.preset), dtype_name(on.dtype), str(on.device))
    try:
        self_test(on, loaded)
        texts(on, loaded)
        for tree in (False, True):
            preset_rounds(on, loaded, tree)
    finally:
        loaded.release()


def self_test(on: Gpu, loaded: Loaded) -> None:
    """What the engine found when it was loaded; what it replaced counts as failed."""
    known = loaded.environment()
    found = known.get("self_test") or {"rows": known["exact_rows"], "tree_rows": known["exact_tree_rows"]}
    made = "self-test" if "seconds" in found else "no self-test was made; what is claimed"
    figures = {name: found.get(name) for name in ("rows", "tree_rows", "seconds")}
    on.add("exact rows", f"{on.sizes.preset}, engine {known['engine']}: {made}", **figures)
    for sentence in found.get("replaced") or ():
        on.add("exact rows", "replaced", error=sentence)


def texts(on: Gpu, loaded: Loaded, drafters: Sequence[str] = TEXTS_BY) -> None:
    """Texts by chains and by trees of some of the preset's drafters, compared with the target's own.

    One that differs counts as failed if the engine claims exact rows.
    """
    asked = some(read_prompts(PRESETS / "prompts" / on.sizes.prompts), on.sizes.each)
    same, every = Counter[str](), Counter[str]()
    for name in able(loaded, drafters):
        with on.trying(f"texts by {name}"):
            cases = cases_of_ours(loaded, name, [*on.sizes.ks, AUTO], [MATCH], [*on.sizes.trees, AUTO])
            found = bench(loaded, asked, [ALONE, *cases], TEMPERATURES, on.sizes.new_tokens, 1, in_turn=True)
            for row in found["summary"]:
                if row["category"] == ALL:
                    size = "alone" if row["method"] == PLAIN else size_of({**row, "best_chain": False})
                    figures = {figure: row[figure] for figure in ("tokens_per_second", "tokens_per_round", "rows")}
                    figures |= {"to_alone": row["ratio_to"][PLAIN], "texts": row["runs"], "identical": row["identical"]}
                    on.add(f"texts of {on.sizes.preset}", f"{name} at T = {row['temperature']:g}, {size}", **figures)
                    same[row["method"]] += row["identical"]
                    every[row["method"]] += row["runs"]
    for words, method, exact in (
        ("trees", TREE, loaded.exact_tree_rows),
        ("chains", SPECULATIVE, loaded.exact_rows),
    ):
        differ = every[method] - same[method]
        wrong = {"error": f"{differ} differ, though {exact} rows are exact"} if differ and exact else {}
        counts = {"texts": every[method], "identical": same[method]}
        on.add("texts equal to the target's own", f"by {words}", **counts, **wrong)


def able(loaded: Loaded, names: Sequence[str]) -> list[str]:
    """Those of the drafters that the preset has everything for."""
    return [name for name in names if not drafter_class(name).needs(loaded.parts).missing]


def preset_rounds(on: Gpu, loaded: Loaded, tree: bool) -> None:
    """Rounds of the preset's drafters: their time, the draft's, and what they launch. Drafts are chains, or trees."""
    (asked, *_) = read_prompts(PRESETS / "prompts" / on.sizes.prompts)
    ids = loaded.encode(asked.prompt)
    for temperature in TEMPERATURES:
        settings = Settings(k=PRESET_K, temperature=temperature, max_new_tokens=on.sizes.new_tokens)
        every = [("none", replace(settings, k=0)), *((name, settings) for name in able(loaded, DRAFTING))]
        if tree:
            branching = replace(settings, k=PRESET_NODES, tree=True)
            every = [(name, branching) for name, _ in every if DRAFTERS[name].branches]
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
    "shapes": (shapes, forced_rounds),
    "passes": (target_passes,),
    "pair": (made_pair,),
    "preset": (preset,),
    "vllm": (beside_vllm,),
}
NOTES = """\
Weights are random but for those of the preset. Forced: the rule lets a given number of guesses pass, and half of those
of a head. Made pair: the later layers of the target do little, and its first layers draft."""


def line(row: Row) -> str:
    """A row in a line, printed as soon as it is measured, for a run that is cut off."""
    figures = {name: cell for name, cell in cells(row).items() if name != "what"}
    return ", ".join([row["part"], row["what"], *(f"{name} {cell}" for name, cell in figures.items())])
