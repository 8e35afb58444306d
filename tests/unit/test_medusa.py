"""Medusa's tree: the paths through the guesses of its places of which the shares have the largest products."""

from __future__ import annotations

from math import prod

import pytest
import torch

from specdemo.drafters.heads.medusa import Medusa
from specdemo.engines.cpu.library import library_for
from specdemo.engines.rows import WIDTH
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_NODES, Settings
from specdemo.tokens import Draft
from tests.harness.doubles import MODEL_VOCAB, paths_of, proposed
from tests.harness.engines import recorded
from tests.harness.toys import ModelToy, head_after
from tests.unit.test_published_heads import target, toy_with

from ..fakes import published
from ..fakes.published import LAYERS, write

TEXT = torch.randint(0, MODEL_VOCAB, (23,), generator=torch.Generator().manual_seed(3)).tolist()
PLACES = 3  # of the published head


@pytest.fixture(scope="module", params=["torch", "C", "captured"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelToy:
    """A target with a random head in Medusa's format."""
    if request.param == "C" and library_for(torch.float32) is None:
        pytest.skip("no C library here")
    folder = write(tmp_path_factory.mktemp("medusa"), *published.medusa(MODEL_VOCAB))
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "C":
            patch.setattr("specdemo.engines.linear.library_for", lambda dtype: None)
        toy = toy_with(folder, Medusa)
    if request.param == "captured":
        Medusa.capture(toy.heads["medusa"], recorded)
        assert toy.heads["medusa"].slots is not None
    return toy


def tree_of(toy: ModelToy, settings: Settings, nodes: int, depth: int) -> Draft:
    drafter = head_after(toy, "medusa", TEXT, settings)
    try:
        return proposed(drafter, TEXT, nodes, depth=depth)
    finally:
        drafter.release()


def paths_by_hand(settings: Settings, depth: int) -> list[tuple[int, ...]]:
    """All paths through the best guesses of the first places, those of the largest products first."""
    model, (config, tensors) = target(), published.medusa(MODEL_VOCAB)
    _, logits = published.medusa_drafts(model, config, tensors, [LAYERS], TEXT, depth)
    rule, guesses = rule_for(settings), []
    for place in range(depth):
        tokens, shares = rule.likeliest(logits[place : place + 1], len(TEXT) + place, WIDTH)
        guesses.append(list(zip(tokens[0].tolist(), shares[0].tolist(), strict=True)))
    values: dict[tuple[int, ...], float] = {}
    paths: list[tuple[tuple[int, float], ...]] = [()]
    for some in guesses:
        paths = [(*path, guess) for path in paths for guess in some]
        values |= {tuple(token for token, _ in path): prod(share for _, share in path) for path in paths}
    return sorted(values, key=lambda path: -values[path])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (8, 1), (20, 2), (20, 3), (MAX_NODES, 3)])
def test_a_tree_holds_the_paths_of_the_largest_products(
    toy: ModelToy, temperature: float, nodes: int, depth: int
) -> None:
    settings = Settings(k=4, temperature=temperature, seed=3, tree=True)
    draft = tree_of(toy, settings, nodes, depth)
    paths = paths_of(draft)
    assert len(paths) == nodes
    assert set(paths) == set(paths_by_hand(settings, depth)[:nodes])


def test_a_tree_is_no_deeper_than_there_are_places(toy: ModelToy) -> None:
    settings = Settings(k=4, tree=True)
    assert {*tree_of(toy, settings, 40, 9).token_ids} == {*tree_of(toy, settings, 40, PLACES).token_ids}
