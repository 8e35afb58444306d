"""A real model of another family than Llama: windows, two rotations, norms after each product, GGUF's Q5_0 and Q8_0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdemo.engines.cpu.library import library_for
from specdemo.models.loaded import load
from specdemo.models.presets import load_presets
from specdemo.racing.race import start
from specdemo.settings import Settings
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of
from tests.harness.texts import generated

PRESETS = Path(__file__).parents[1] / "presets"
PROMPT = "The history of the city of Paris begins"
YEARS = "".join(f"In {year} the city of Paris built {year % 37} towers. " for year in range(1200, 1860, 15))
NEW_TOKENS, WINDOW = 48, 512
pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "stored"])
def gemma(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    if library_for(torch.bfloat16) is None:
        pytest.skip("no C library here")
    presets, broken = load_presets(PRESETS)
    assert not broken
    loaded = load(presets["gemma-3-270m"], request.param, "cpu")
    yield loaded
    loaded.release()


@pytest.fixture(params=[PROMPT, YEARS + PROMPT], ids=["short", "beyond the window"])
def prompt(request: pytest.FixtureRequest, gemma: Loaded) -> list[int]:
    ids = gemma.encode(request.param, raw=True)
    assert (len(ids) > WINDOW + NEW_TOKENS) == (request.param != PROMPT)
    return ids


def test_it_runs_in_c_and_writes_the_text_of_generate(gemma: Loaded, prompt: list[int]) -> None:
    assert gemma.engine == "native"
    assert gemma.exact_tree_rows
    alone = ids_of(list(start(gemma, "none", prompt, Settings(k=0, max_new_tokens=NEW_TOKENS))))
    if gemma.dtype == torch.float32:
        assert alone == generated(gemma.model.float(), prompt, NEW_TOKENS)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("drafter", "tree"), [("prompt-lookup", False), ("prompt-lookup", True), ("lookahead", False)])
def test_drafts_change_no_token(gemma: Loaded, prompt: list[int], drafter: str, tree: bool, temperature: float) -> None:
    settings = Settings(k=4, temperature=temperature, seed=7, max_new_tokens=NEW_TOKENS)
    alone = ids_of(list(start(gemma, "none", prompt, settings)))
    assert ids_of(list(start(gemma, drafter, prompt, replace(settings, k=12 if tree else 4, tree=tree)))) == alone
