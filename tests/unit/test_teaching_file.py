"""docs/speculative_decoding.py writes what the engine writes, round by round, with the engine's random numbers."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdemo.decoding import noise
from specdemo.decoding.acceptance import parents_of
from specdemo.decoding.events import Prefilled, Round
from specdemo.decoding.rejection import DRAFTING, TESTING
from specdemo.models.loaded import load
from specdemo.models.presets import PRESETS, find_preset
from specdemo.racing.race import start
from specdemo.settings import REJECTION, Settings
from tests.harness.classes import Loaded

FILE = Path(__file__).parents[2] / "docs" / "speculative_decoding.py"
SEED, K, TOKENS = 3, 4, 48
at_temperatures = pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])

Branch = tuple[int, ...]


@pytest.fixture(scope="module")
def teaching() -> Any:
    spec = spec_from_file_location("speculative_decoding", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(find_preset("nanogpt-shakespeare-large"), device="cpu")


class Model:
    """A shipped GPT as the file has its models, by transformers' own forward."""

    def __init__(self, name: str) -> None:
        self.gpt = AutoModelForCausalLM.from_pretrained(PRESETS / "weights" / name, dtype=torch.float32)
        self.passes = 0

    @torch.inference_mode()
    def __call__(self, ids: Branch) -> Tensor:
        self.passes += 1
        return self.gpt(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def target() -> Model:
    return Model("nanogpt-shakespeare-large")


@pytest.fixture(scope="module")
def drafter() -> Model:
    return Model("nanogpt-shakespeare")


def engine(loaded: Loaded, **chosen: Any) -> tuple[Branch, list[Round]]:
    """The text of the engine up to its first round, and its rounds."""
    ids = loaded.encode("ROMEO:\nBut soft! what light")
    settings = Settings(seed=SEED, max_new_tokens=TOKENS, k=K, **chosen)
    first, *rounds = (e for e in start(loaded, "draft-model", ids, settings) if isinstance(e, Prefilled | Round))
    assert isinstance(first, Prefilled)
    return (*ids, first.token.id), rounds  # type: ignore[return-value]


def gumbel(position: int) -> Tensor:
    """The engine's noise of a position."""
    return -(-torch.log1p(-noise.uniforms(noise.key_of(SEED, position), torch.arange(64)))).log()


def uniform(index: int, purpose: int, places: range) -> list[float]:
    """The engine's numbers of a round of rejection sampling."""
    return [noise.uniform(noise.key_of(SEED, index, purpose), place) for place in places]


def emitted(found: Round) -> Branch:
    return tuple(token.id for token in found.emitted)


def drafted(found: Round) -> list[Branch]:
    """The branches of the engine's draft."""
    parents, tokens = parents_of(found.drafted), [token.id for token in found.drafted]

    def branch(node: int) -> Branch:
        return () if node < 0 else (*branch(parents[node]), tokens[node])

    return [branch(leaf) for leaf in sorted({-1, *range(len(tokens))} - set(parents))]


@at_temperatures
def test_the_match_rule_writes_the_engines_text_with_a_chain_a_tree_and_alone(
    teaching: Any, loaded: Loaded, target: Model, drafter: Model, temperature: float
) -> None:
    text, rounds = engine(loaded, temperature=temperature)
    whole = text + tuple(id for found in rounds for id in emitted(found))
    for found in rounds:
        branches = teaching.draft(drafter, text, (1,) * len(found.drafted), temperature, gumbel)
        assert branches == drafted(found)
        before = target.passes
        written = teaching.match(target, text, branches, temperature, gumbel)
        assert target.passes == before + 1
        assert written[: len(found.emitted)] == emitted(found)
        text += emitted(found)
    for widths in (), (2, 2, 1):
        text = whole[:-TOKENS]
        while len(text) < len(whole):
            branches = teaching.draft(drafter, text, widths, temperature, gumbel)
            text += teaching.match(target, text, branches, temperature, gumbel)
        assert text[: len(whole)] == whole


@at_temperatures
def test_the_match_rule_accepts_of_the_engines_trees_what_the_engine_accepts(
    teaching: Any, loaded: Loaded, target: Model, temperature: float
) -> None:
    text, rounds = engine(loaded, temperature=temperature, tree=True)
    assert any(len(drafted(found)) > 1 for found in rounds)
    for found in rounds[:-1]:
        assert teaching.match(target, text, drafted(found), temperature, gumbel) == emitted(found)
        text += emitted(found)


@at_temperatures
def test_rejection_sampling_writes_the_engines_text(
    teaching: Any, loaded: Loaded, target: Model, drafter: Model, temperature: float
) -> None:
    text, rounds = engine(loaded, temperature=temperature, rule=REJECTION)
    assert any(len(found.emitted) > 1 for found in rounds)
    for index, found in enumerate(rounds, start=1):
        k = len(found.drafted)
        u = uniform(index, DRAFTING, range(len(text), len(text) + k))
        written = teaching.reject(target, drafter, text, temperature, u, uniform(index, TESTING, range(k + 1)))
        assert written[: len(found.emitted)] == emitted(found)
        text += emitted(found)


def test_the_file_is_short_stands_alone_and_runs(teaching: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 120
    assert "specdemo" not in "".join(re.findall(r"^(?:import|from) .*", source, re.MULTILINE))
    teaching.main(length=40)
    shown = re.sub(r"\033\[\d+m", "", capsys.readouterr().out)
    alone, *more = re.split(r"\n(.+): (\d+) rounds for \d+ tokens\n\n", shown)[:-1]
    rounds = dict(zip(more[::3], map(int, more[1::3]), strict=True))
    _, _, chain, _, _, tree, *_ = more
    assert len(alone) == rounds["Alone"] == 40 - len("ROMEO:\n")
    assert chain[: len(alone)] == tree[: len(alone)] == alone
    assert max(rounds["A chain of 4"], rounds["A tree of 14"], rounds["Rejection"]) < rounds["Alone"]
