"""EAGLE's tree: its tokens are those of the largest values, and each row of the head is that of a chain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from specdemo.drafters.heads.backends import NativeBackend, TorchBackend
from specdemo.drafters.heads.shapes import HeadShape
from specdemo.drafters.tree import grow_by_depth
from specdemo.engines.cpu.library import library_for
from specdemo.engines.passes import alone, answered
from specdemo.engines.rows import WIDTH
from specdemo.errors import NotFinite
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_NODES, REJECTION, Settings
from tests.harness.classes import Eagle
from tests.harness.doubles import MODEL_VOCAB, paths_of, proposed
from tests.harness.engines import recorded, tiny_model
from tests.harness.toys import ModelToy, head_after

from ..sentences import refuses

TEXT = torch.randint(0, MODEL_VOCAB, (23,), generator=torch.Generator().manual_seed(3)).tolist()


OTHERS = partial(HeadShape, normed_residual=True, normed_feedback=True, head_norms=True)  # as published heads are


ENGINES = "torch", "library", "captured"


@pytest.fixture(scope="module", params=[*ENGINES, *(f"{engine}, published" for engine in ENGINES)])
def toy(request: pytest.FixtureRequest) -> ModelToy:
    if "library" in request.param and library_for(torch.float32) is None:
        pytest.skip("the library is not for this CPU")
    with pytest.MonkeyPatch.context() as patch:
        if "published" in request.param:
            patch.setattr("tests.harness.toys.HeadShape", OTHERS)
        if "library" not in request.param:
            patch.setattr("specdemo.drafters.heads.ready.native_backend", lambda *_: None)
        toy = ModelToy(model=tiny_model("llama"), window=16)  # shorter than the text
    if "captured" in request.param:
        Eagle.capture(toy.heads["eagle"], recorded)
        assert toy.heads["eagle"].slots is not None
    return toy


@torch.inference_mode()
def shares_along(toy: ModelToy, settings: Settings, path: Sequence[int]) -> dict[int, float]:
    """What the head's chain, having drafted a path, takes for the likeliest next tokens."""
    drafter = head_after(toy, "eagle", TEXT, settings)
    passes, states, tokens = drafter._unread_with(TEXT)
    next_logits = passes.begin(states, tokens, len(path) + 1)
    drawn: list[torch.Tensor] = []
    logits = alone(answered(next_logits(drawn)))
    for token in path:
        drawn.append(torch.tensor([token]))
        logits = alone(answered(next_logits(drawn)))
    known = drafter.ready.token_ids
    columns, shares = rule_for(settings).likeliest(logits, len(TEXT) + len(path), WIDTH, known)
    return dict(zip(known[columns[0]].tolist(), shares[0].tolist(), strict=True))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("settings", [
    Settings(tree=True), Settings(temperature=0.7, seed=3, tree=True), Settings(temperature=1, top_p=0.9, tree=True),
    Settings(temperature=1, rule=REJECTION, tree=True),
], ids=lambda settings: f"T{settings.temperature:g} {settings.rule}")  # fmt: skip
@pytest.mark.parametrize("nodes", [20, 6, 1])
def test_a_tree_holds_the_tokens_of_the_largest_values(toy: ModelToy, settings: Settings, nodes: int) -> None:
    draft = proposed(head_after(toy, "eagle", TEXT, settings), TEXT, nodes, depth=4)
    paths = paths_of(draft)
    assert len(paths) == len(set(paths)) == nodes
    assert max(map(len, paths)) <= 4
    values: dict[tuple[int, ...], float] = {(): 1.0}
    left_out = []
    for path in [(), *paths]:  # parents come first
        if len(path) < 4:
            for token, share in shares_along(toy, settings, path).items():
                child = (*path, token)
                if child in paths:
                    values[child] = values[path] * share
                else:
                    left_out.append(values[path] * share)
    assert len(values) == nodes + 1
    assert max(left_out) <= min(values.values()) * 1.001


def test_the_backends_are_those_meant(toy: ModelToy, request: pytest.FixtureRequest) -> None:
    backend = head_after(toy, "eagle", TEXT, Settings(tree=True))._passes.backend
    assert isinstance(backend, NativeBackend if "library" in request.node.name else TorchBackend)


@pytest.mark.parametrize(("nodes", "depth", "found"), [(MAX_NODES, 9, MAX_NODES), (9, 1, 8), (1, 9, 1), (8, 3, 8)])
def test_a_tree_is_no_larger_and_no_deeper_than_asked(toy: ModelToy, nodes: int, depth: int, found: int) -> None:
    draft = proposed(head_after(toy, "eagle", TEXT, Settings(k=4, tree=True)), TEXT, nodes, depth=depth)
    assert len(draft.token_ids) == found
    assert max(map(len, paths_of(draft))) <= depth


def test_logits_that_are_no_numbers_are_refused(toy: ModelToy) -> None:
    drafter = head_after(toy, "eagle", TEXT, Settings(temperature=1, tree=True))
    drafter._unread = [torch.full_like(drafter._unread[0], math.nan)]
    with refuses(NotFinite, "drafter"):
        proposed(drafter, TEXT, 4, depth=4)


def test_estimates_too_small_for_a_number_are_left_out() -> None:
    after = torch.tensor([[0.0, -69.0, -200.0], [-200.0, 0.0, -200.0], [0.0, 0.0, -200.0]])
    rule = rule_for(Settings(tree=True))
    draft = alone(grow_by_depth(after[:1], lambda token_ids, parents: after[1:], 8, 2, rule, 9))
    assert (draft.token_ids, draft.parents) == ([0, 1, 1, 0, 1], [-1, 0, -1, 2, 2])
    assert draft.q is not None
    assert draft.q.tolist() == pytest.approx([1, 1, math.exp(-69), 0.5, 0.5])


@pytest.mark.sampled(3)
def test_the_noise_of_a_position_ranks_the_children(toy: ModelToy) -> None:
    """Under the match rule the first child is the token that a chain would draw there."""
    for seed in range(12):
        settings = Settings(k=1, temperature=1, seed=seed)
        (drawn,) = proposed(head_after(toy, "eagle", TEXT, settings), TEXT, 1).token_ids
        draft = proposed(head_after(toy, "eagle", TEXT, replace(settings, tree=True)), TEXT, 1, depth=1)
        assert [*draft.token_ids] == [int(drawn)]
