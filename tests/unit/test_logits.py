"""Every pass of every engine gives the logits and states of transformers' forward, for every family of models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdemo.decoding.batch import read_together
from specdemo.engines.families import FAMILIES as KNOWN
from specdemo.engines.families import knows
from specdemo.engines.runner import Pass, Runner
from specdemo.errors import BadInput
from specdemo.system.hardware import compute_dtype
from tests.harness.models import (
    EAGER,
    ENGINES,
    FAMILIES,
    MODELS,
    SWITCH,
    VOCAB,
    config_of,
    load_by,
    model_of,
    rounded,
    save,
)

from ..sentences import refuses

IDS: list[int] = torch.randint(3, VOCAB, (96,), generator=torch.Generator().manual_seed(1)).tolist()
TREE = [-1, 0, 0, 1, 1, 2, 5, 3, -1, 8]
KEPT = [0, 2, 5]  # rows of one path
BRANCHES = [(11 * row + 3) % 50 for row in range(len(TREE))]
STATES = [2, 0]  # layers
TYPES = "float16", "bfloat16", "bfloat16 avx2"  # of weights; on such a CPU bfloat16 is widened
WAYS = [*((engine, "float32") for engine in ENGINES), *((engine, dtype) for engine in ENGINES[:2] for dtype in TYPES)]
CASES = [(name, *way) for name in FAMILIES for way in WAYS] + [(name, "eager", "float32") for name in EAGER]
DEPENDING = "longrope", "longrope, two scales", "dynamic"  # their angles depend on how long a run can get
STATEFUL = {kind for kind, family in KNOWN.items() if family.state}
MASKED = {"gpt2", "llama", "qwen2", "qwen3", "smollm3", "mistral"}  # transformers gives all their layers one mask


def can_branch(name: str, engine: str) -> bool:
    if name in DEPENDING or MODELS[name][0] in STATEFUL:
        return False
    return engine != "eager" or (MODELS[name][0] in MASKED and name != "mistral with a window")


def path_to(row: int) -> list[int]:
    return [] if row < 0 else [*path_to(TREE[row]), row]


def stack_of(model: Any) -> tuple[str, ModuleList]:
    base = model.base_model
    name = "h" if hasattr(base, "h") else "layers"
    return name, getattr(base, name)


@torch.inference_mode()
def fresh(model: PreTrainedModel, ids: Sequence[int], states: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits after each token and the outputs of layers beside each other, without any cache."""
    kept: dict[int, Tensor] = {}

    def keep(layer: int, output: Any) -> None:
        kept[layer] = (output[0] if isinstance(output, tuple) else output).view(len(ids), -1)

    _, stack = stack_of(model)
    hooks = [
        stack[layer].register_forward_hook(lambda _module, _inputs, output, layer=layer: keep(layer, output))
        for layer in states
    ]
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([kept[layer] for layer in states], -1) if states else logits[:, :0]


@dataclass
class Reading:
    """A runner that reads a text, of which each pass is compared with transformers."""

    runner: Runner
    model: PreTrainedModel
    rounds: bool = False  # the inputs of each product to 16 bits, which now and then chooses another expert
    states: Sequence[int] = ()
    text: list[int] = field(default_factory=list)
    known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)  # of transformers
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # logits, and what they were at first

    def prefill(self, ids: Sequence[int]) -> None:
        self.runner.capture_hidden_states(self.states)
        self.text = [*ids]
        self.check("a prompt", self.runner.prefill(ids), 1)

    def forward(self, form: str, ids: Any) -> None:
        self.text += list(map(int, ids))
        self.check(form, self.runner.forward(ids), len(ids))

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
        del self.text[length:]
        assert self.runner.length == length

    def tree(self, form: str, path: Sequence[int]) -> None:
        """Read one, and keep a path of it."""
        logits, states, length = self.runner.forward(BRANCHES, TREE), self.runner.hidden_states, len(self.text)
        assert states is not None
        for leaf in set(range(len(TREE))) - set(TREE):
            rows = path_to(leaf)
            wanted = self.wanted([*self.text, *(BRANCHES[row] for row in rows)])
            self.close(f"{form}, to row {leaf}", logits[rows], wanted[0][length:])
            self.close(f"{form}, states to row {leaf}", states[rows], wanted[1][length:])
        self.runner.keep(path)
        self.text += [BRANCHES[row] for row in path]
        self.check(f"{form}, kept", logits[path], len(path))

    def wanted(self, text: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What follows a text changes nothing before it, but for the angles of a run that can get so long."""
        whole = *text, *IDS[len(text) : self.runner.context]
        if whole not in self.known:
            self.known[whole] = fresh(self.model, whole, self.states)
        logits, states = self.known[whole]
        return logits[: len(text)], states[: len(text)]

    def check(self, form: str, logits: Tensor, rows: int) -> None:
        assert self.runner.length == len(self.text)
        assert all(torch.equal(*both) for both in self.given), "a pass has written over the logits of an earlier one"
        self.given.append((logits, logits.clone()))
        wanted, states = self.wanted(self.text)
        self.close(form, logits, wanted[-rows:])
        if self.states:
            assert self.runner.hidden_states is not None
            kept = self.runner.hidden_states
            self.close(f"{form}, states", kept, states[-len(kept) :])

    def close(self, form: str, found: Tensor, wanted: Tensor) -> None:
        apart, size = found.float() - wanted, wanted.square().mean().sqrt()
        if self.rounds:
            assert apart.square().mean().sqrt() < 0.4 * size, form
        else:
            assert apart.abs().max() < 1e-4 * wanted.abs().max(), form


def first_two(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its other layers."""
    short = copy.deepcopy(model)
    name, stack = stack_of(short)
    setattr(short.base_model, name, stack[:2])
    short.config.num_hidden_layers = 2
    return short


def test_every_family_is_here() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == {kind for kind, family in KNOWN.items() if family.fused}
    assert all(knows(config_of(name)) for name in FAMILIES)
    assert not any(knows(config_of(name)) for name in EAGER)
    assert {kind for kind, _ in EAGER.values()} >= STATEFUL


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "engine", "dtype"), CASES, ids=map(" by ".join, CASES))
def test_the_logits_of_every_pass_are_those_of_transformers(
    name: str,
    engine: str,
    dtype: str,
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, _, level = dtype.partition(" ")
    if level:
        request.getfixturevalue("run_as")(level)
    weights = getattr(torch, stored)
    model = rounded(model_of(name), weights)
    for buffer, number in model.named_buffers():
        if buffer.endswith("embed_scale"):  # transformers rounds it to the type of the weights
            number.copy_(number.to(weights))
    loaded = load_by(engine, save(model, tokenizer, tmp_path), monkeypatch, stored)
    rounds = compute_dtype(weights, torch.device("cpu")) != torch.float32
    for context in (SWITCH - 4, SWITCH + 8) if name in DEPENDING else (SWITCH + 8,):
        read = Reading(loaded.target_runner(context), model, rounds, STATES)
        assert read.runner.hidden_states is None
        read.prefill(IDS[:14])
        read.forward("one row", [IDS[14]])
        read.forward("several rows", IDS[15:22])
        read.forward("rows on the device", torch.tensor(IDS[22:24]))
        read.forward("more rows than a round has", IDS[24:44])
        read.runner.rollback(50)  # there is nothing to forget there
        read.rollback(41)
        read.forward("after a rollback", [9, 5, 2, 9])
        read.rollback(5)
        read.forward("after a rollback into the prompt", IDS[50:62])
        assert (read.runner.cannot_branch is None) == can_branch(name, engine)
        if can_branch(name, engine):
            read.tree("a tree", KEPT)
            read.forward("after a path", [7, 1])
            read.rollback(16)
            read.tree("a tree in place of a path", [8])
        else:
            with refuses(BadInput, str(read.runner.cannot_branch)):
                read.runner.check_branches()
        read.forward("up to the end", IDS[: context - len(read.text) - 1])
        read.forward("the last token", [4])
        for more in ([1], [1, 1]):
            with refuses(ValueError, f"cache {context}"):
                read.runner.forward(more)
        read.runner.release()
        read.runner.release()
        assert (read.runner.length, read.runner.hidden_states) == (0, None)
        read.prefill(IDS[70:73])
        read.prefill(IDS[60:65])  # without a release
        first = Reading(read.runner.first_layers(2, context), first_two(model), rounds)
        first.prefill(IDS[:5])
        first.forward("of the first layers", IDS[5:11])
        first.rollback(6)
        first.forward("of the first layers after a rollback", IDS[30:32])
        read.forward("beside its first layers", [4, 5])
        several = [read, *(Reading(loaded.target_runner(context), model, rounds, STATES) for _ in range(2))]
        several[1].prefill(IDS[30:33])
        several[2].prefill(IDS[:23])
        pieces = [[6], [4, 9, 3], IDS[40:58]]
        together = read_together([Pass(one.runner, ids) for one, ids in zip(several, pieces, strict=True)])
        for one, ids, logits in zip(several, pieces, together, strict=True):
            one.text += ids
            one.check("beside other texts", logits, len(ids))
    loaded.release()
