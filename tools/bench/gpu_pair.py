"""Texts of a *made pair* on a GPU: of a random target whose later layers do little, and whose first layers draft."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from specdemo.decoding.costs import CostModel
from specdemo.decoding.measuring import measure_passes
from specdemo.drafters.none import NoDrafter
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.racing.figures import LaneFigures
from specdemo.racing.race import rule_for
from specdemo.settings import AUTO, MAX_K, Settings

from .cases import ASSISTED, COMPILED, HF, TUNED, Case
from .gpu_passes import Gpu, slots
from .hf import generate
from .models import Pair, first_layers, like

DAMPED = 0.02  # the later layers of a made target write this share of their output


def made_target(on: Gpu) -> PreTrainedModel:
    """A random model whose layers after those that draft do little.

    It does not share its embedding with its output: a random model that does repeats its last token for ever.
    """
    model = on.model(like(on.sizes.target, tie_word_embeddings=False))
    layers: Any = model.base_model.layers
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1) if weight.dim() == 1 else weight.uniform_(-0.02, 0.02)  # norms, and all else
        for layer in layers[on.sizes.draft_layers :]:
            layer.self_attn.o_proj.weight.mul_(DAMPED)
            layer.mlp.down_proj.weight.mul_(DAMPED)
    return model


def paired(on: Gpu, target: PreTrainedModel, draft: PreTrainedModel) -> Pair | None:
    """The two with captured passes; None, and a row that says why, where these cannot be made."""
    graphs = slots(on, FusedModel.of(target), "the made target")
    draft_graphs = slots(on, FusedModel.of(draft), "its draft model")
    return Pair(target, graphs, draft_graphs) if graphs and draft_graphs else None


def made_pair(on: Gpu) -> None:
    """Whole texts of a made pair, by transformers and by ours, alone and assisted; all greedy, of the same weights."""
    target = made_target(on)
    draft, prompt = first_layers(target, on.sizes.draft_layers), on.prompt(target)
    settings = Settings(k=0, max_new_tokens=on.sizes.new_tokens)
    loaded: Any = SimpleNamespace(model=target, draft_model=draft, eos_ids=frozenset())
    speeds, ours = dict[Case, float](), dict[str, float]()
    for case in cases_of_others(on):
        name = case.method + (f", K = {case.k}" if case.k else "")
        with on.trying(f"transformers, {name}"):
            runs = [generate(loaded, case, prompt, settings) for _ in range(3)][1:]
            speed = median(filter(None, (run["tokens_per_second"] for run in runs)))  # None where it was held up
            on.add("made pair, transformers", name, tokens_per_second=speed)
            speeds[case] = speed
    assisted = max((speed for case, speed in speeds.items() if case.method in (ASSISTED, TUNED)), default=0.0)
    compiled = speeds.get(Case(COMPILED))
    if (pair := paired(on, target, draft)) is None:
        return
    costs = None
    every = [replace(settings, k=k) for k in (0, *on.sizes.ks)]
    with on.trying("the costs for K = auto"):
        costs = CostModel(measure_passes(GraphRunner(pair.graphs, MAX_K + 2), rule_for(settings)))
        every.append(replace(settings, k=AUTO))
    for asked in [*every, *(replace(settings, k=nodes, tree=True) for nodes in on.sizes.trees)]:
        size = f"{'a tree of' if asked.tree else 'K ='} {asked.k}"
        with on.trying(f"ours, {size}"):
            drafter = None if asked.k else NoDrafter()
            known = None if asked.tree else costs
            stats = [LaneFigures.of(pair.events(prompt, asked, drafter, known)) for _ in range(4)][1:]
            speed = median(stat.tokens / stat.seconds for stat in stats)
            name = f"draft model, {size}" if asked.k else "alone"
            ours[name] = speed
            on.add(
                "made pair, ours",
                name,
                tokens_per_second=speed,
                acceptance_rate=stats[-1].acceptance_rate,
                tokens_per_round=stats[-1].tokens_per_round,
                rows=stats[-1].drafted / stats[-1].rounds + 1,
                to_best_assisted=speed / assisted if assisted else None,
                to_compiled=speed / compiled if compiled else None,
            )
    if ours and compiled:
        fastest = max(ours, key=lambda name: ours[name])
        on.add("made pair, the fastest to transformers compiled", fastest, to_compiled=ours[fastest] / compiled)


def cases_of_others(on: Gpu) -> list[Case]:
    """The ways of transformers to write a text: compiled on a GPU only, where others use it."""
    compiled = [Case(COMPILED)] if on.device.type == "cuda" else []
    tuned = [Case(TUNED, "draft-model", k) for k in on.sizes.ks if k < MAX_K]
    return [Case(HF), *compiled, Case(ASSISTED, "draft-model"), *tuned]
