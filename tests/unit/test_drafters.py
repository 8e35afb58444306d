"""The drafters: what each owes, their list, and what each of them does by itself.

That the text is the target's own whatever they propose is tested in `test_texts`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import specdemo.drafters
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.either import source_of
from specdemo.decoding.events import Event, Round
from specdemo.drafters import names
from specdemo.drafters.chain import draw_chain
from specdemo.drafters.names import DRAFTERS, drafter_class
from specdemo.drafters.ngram import key_of, load_table
from specdemo.drafters.prompt_lookup import LONGEST, SHORTEST
from specdemo.engines.passes import alone
from specdemo.errors import BadInput
from specdemo.models.presets import load_presets
from specdemo.racing.race import check_drafter, drafters_of, rule_for, start
from specdemo.racing.request import read_request
from specdemo.settings import AUTO, MAX_K, Settings
from specdemo.tokens import DraftOutcome, TokenKind
from specdemo.ui.race.form import describe
from tests.harness.doubles import MODEL_VOCAB, PROMPT, Scripted, accepting, costs_with, ids_of, proposed, random_table
from tests.harness.engines import ARCHITECTURES, mixed, tiny_model
from tests.harness.texts import decode, plain_text
from tests.harness.toys import DRAFTER_NAMES, ModelToy, TableToy, drafter_for, ngram_file

from ..sentences import refuses, tells

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 20
REPEATING = [7, 12, 3, 44, 7, 12, 3, 44, 7, 12]


@pytest.fixture(scope="module")
def table_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ngram_file(tmp_path_factory.mktemp("ngram"), MODEL_VOCAB)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def toy(request: pytest.FixtureRequest, table_path: Path) -> ModelToy:
    model, other = (tiny_model(request.param, seed, layers=2) for seed in (0, 1))
    return ModelToy(model=model, draft_model=mixed(model, other, 0.05), ngram_table=table_path, skip_layers=1)


def greedy(toy: Any, name: str, prompt: list[int], k: int) -> list[Event]:
    return list(start(toy, name, prompt, Settings(k=k, max_new_tokens=LENGTH)))


def test_the_models_drafts_are_partly_right_so_that_every_path_is_taken(toy: ModelToy) -> None:
    outcomes: Counter[DraftOutcome] = Counter()
    kinds: Counter[TokenKind] = Counter()
    for event in start(cast(Any, toy), "draft-model", REPEATING, Settings(k=3, temperature=0.9, max_new_tokens=60)):
        if isinstance(event, Round):
            outcomes.update(token.outcome for token in event.drafted)
            kinds.update(token.kind for token in event.emitted)
    assert set(outcomes) == set(DraftOutcome)
    assert set(kinds) >= {TokenKind.ACCEPTED, TokenKind.RESAMPLED, TokenKind.BONUS}


# What every drafter owes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_every_drafter_has_its_name_and_describes_itself_in_one_line(name: str) -> None:
    assert drafter_class(name).name == name
    description = DRAFTERS[name].description
    assert description.endswith(".")
    assert "\n" not in description
    assert len(description) <= 120


def test_a_drafter_is_seven_names() -> None:
    assert {name for name in dir(Drafter) if not name.startswith("_")} | {"name"} == {
        "name",
        "needs",
        "build",
        "propose",
        "observe",
        "release",
        "waited",
    }


@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_a_drafter_that_lacks_something_says_so_in_words(name: str) -> None:
    bare = ModelToy(model=tiny_model("gpt2", layers=2), skip_layers=None)
    bare.heads.clear()
    bare.mtp = bare.guesses = None
    needs_nothing = name in {"none", "prompt-lookup", "suffix", "lookahead"}
    assert (drafter_class(name).needs(bare.parts).missing is None) == needs_nothing
    if not needs_nothing:
        assert tells(drafter_class(name).needs(bare.parts).missing, "preset")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTER_NAMES)
def test_proposals_are_within_k_and_their_probs_add_up(name: str, temperature: float, tmp_path: Path) -> None:
    toy = TableToy(ngram_table=ngram_file(tmp_path, 4))
    settings = Settings(temperature=temperature)
    runner = toy.target_runner(64)
    drafter = toy.drafter(name, runner, settings)
    runner.prefill(PROMPT)
    drafter.observe(accepting(0))
    context = [*PROMPT, 2]
    for k in (1, 2, 5):
        draft = proposed(drafter, context, k)
        assert len(draft.token_ids) <= k
        if draft.probs is not None:
            assert draft.probs.shape == (len(draft.token_ids), runner.vocab_size)
            assert draft.probs.sum(-1).tolist() == pytest.approx([1] * len(draft.token_ids), abs=1e-6)
            assert all(row[token] > 0 for row, token in zip(draft.probs, draft.token_ids, strict=True))
        runner.forward(context[-1:])
        drafter.observe(accepting(0, 3))
        context.append(3)
    drafter.release()
    drafter.release()


# Their list --------------------------------------------------------------------------------------------------


def test_a_new_file_and_a_line_as_in_the_docs_add_a_drafter(
    toy: ModelToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
    code, line = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "repeat_last.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(specdemo.drafters, "__path__", [*specdemo.drafters.__path__, str(tmp_path)])
    (name, entry), *others = eval(f"{{{line}}}", vars(names)).items()
    assert not others
    monkeypatch.setitem(DRAFTERS, name, entry)

    loaded: Any = toy
    assert name in drafters_of(loaded, "")  # the benches'
    check_drafter(loaded, name)  # the command line's
    assert read_request(prompt="a", preset="p", drafter=name).drafter == name  # the page's
    assert describe(load_presets()[0]["smollm2-135m"], name).startswith(entry.description)
    prompt = [0, 0, 0, 0]
    drafted = [event for event in greedy(toy, name, prompt, 3) if isinstance(event, Round)]
    assert all(len({token.id for token in event.drafted}) == 1 for event in drafted[:-1])
    assert ids_of(greedy(toy, name, prompt, 3)) == ids_of(greedy(toy, "none", prompt, 0))


# Prompt lookup -----------------------------------------------------------------------------------------------


LOOKUPS = TableToy()


def lookup() -> Drafter:
    drafter: Drafter = drafter_for(LOOKUPS, "prompt-lookup", Settings())
    return drafter


def looked_up(context: list[int], k: int) -> list[int]:
    """What prompt lookup should propose, by a plain search."""
    for n in range(min(LONGEST, len(context) - 1), SHORTEST - 1, -1):
        for end in range(len(context) - 1, n - 1, -1):
            if context[end - n : end] == context[-n:]:
                copied = context[end:]
                return (copied * k)[:k]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 16))
def test_prompt_lookup_copies_what_followed_the_latest_longest_match(context: list[int], k: int) -> None:
    assert list(proposed(lookup(), context, k).token_ids) == looked_up(context, k)


def test_prompt_lookup_copies_what_followed_the_last_time() -> None:
    assert proposed(lookup(), [1, 2, 3, 1, 2, 4, 1, 2], 1).token_ids == [4]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(1, 6), max_size=12))
def test_prompt_lookup_answers_the_same_when_the_text_grows_step_by_step(text: list[int], steps: list[int]) -> None:
    drafter = lookup()
    end = 1
    for step in steps:
        context = text[:end]
        assert list(proposed(drafter, context, 4).token_ids) == looked_up(context, 4)
        end = min(len(text), end + step)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_whoever_looks_up_first_says_before_whose_draft_it_will_be(context: list[int]) -> None:
    other = Scripted(lambda context, k: [9] * k)
    drafter = drafter_class("lookup-ngram")(other)  # type: ignore[call-arg]
    first = drafter.first  # type: ignore[attr-defined]
    source = source_of(drafter, context)
    assert source is (other if list(proposed(drafter, context, 3).token_ids) == [9, 9, 9] else first)


# The n-gram table --------------------------------------------------------------------------------------------


def test_the_probs_of_a_table_written_out_by_hand(tmp_path: Path) -> None:
    half = 255 * 256 // 2
    arrays = {
        "unigram": np.array([1, 1, 2], dtype=np.uint32),
        "keys1": np.array([1, 1], dtype=np.int64),  # contexts (1) and (2)
        "lengths1": np.array([1, 2], dtype=np.uint8),
        "tokens1": np.array([2, 0, 1], dtype=np.uint16),
        "probs1": np.array([half, half, half // 2], dtype=np.uint16),
        "keys2": np.array([key_of([0, 1], 3)], dtype=np.int64),
        "lengths2": np.array([1], dtype=np.uint8),
        "tokens2": np.array([0], dtype=np.uint16),
        "probs2": np.array([half], dtype=np.uint16),
    }
    save_file(arrays, tmp_path / "hand.safetensors", metadata={"provenance": "{}"})
    table = load_table(tmp_path / "hand.safetensors")
    floor = np.array([0.25, 0.25, 0.5])
    after_1 = 0.5 * floor + [0, 0, 0.5]
    after_2 = 0.25 * floor + [0.5, 0.25, 0]
    assert table.next_token_probs([]) == pytest.approx(floor)
    assert table.next_token_probs([0]) == pytest.approx(floor)  # unknown: the floor alone
    assert table.next_token_probs([1]) == pytest.approx(after_1)
    assert table.next_token_probs([2]) == pytest.approx(after_2)
    assert table.next_token_probs([0, 1]) == pytest.approx(0.5 * after_1 + [0.5, 0, 0])
    assert table.next_token_probs([2, 1]) == pytest.approx(after_1)  # the pair is unknown: back to one token
    assert table.next_token_probs([1, 2, 0, 1]) == pytest.approx(table.next_token_probs([0, 1]))


def test_a_table_that_cannot_be_read_is_refused_in_words(tmp_path: Path, table_path: Path) -> None:
    with refuses(BadInput, "n-gram table gone.safetensors read:"):
        load_table(tmp_path / "gone.safetensors")
    whole = table_path.read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("empty", b""), ("text", b"<html>not found</html>")):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        with refuses(BadInput, f"n-gram table {name}.safetensors"):
            load_table(path)
    arrays = load_file(table_path)
    for name, kept, metadata in (
        ("bare", arrays, None),
        ("partial", {key: value for key, value in arrays.items() if key != "tokens1"}, {"provenance": "{}"}),
        ("other", {"weight": np.zeros(3)}, {"provenance": "{}"}),
        ("deep", arrays, {"provenance": "[" * 100_000}),
    ):
        save_file(kept, tmp_path / f"{name}.safetensors", metadata=metadata)
        with refuses(BadInput, f"n-gram table {name}.safetensors"):
            load_table(tmp_path / f"{name}.safetensors")


def test_a_table_of_another_vocabulary_is_refused_in_words(table_path: Path) -> None:
    toy = TableToy(ngram_table=table_path)
    with refuses(BadInput, "n-gram table 61 4:"):
        drafter_for(toy, "ngram", Settings())


# The draft model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_vocab", [3, 4, 6])
def test_a_padding_entry_of_the_draft_models_vocabulary_is_never_proposed(draft_vocab: int, temperature: float) -> None:
    toy = TableToy(draft_model=random_table(8, vocab=6)[..., :draft_vocab])
    drafter = drafter_for(toy, "draft-model", Settings(temperature=temperature))
    draft = proposed(drafter, [0, 1], 64)
    assert set(map(int, draft.token_ids)) <= set(range(min(4, draft_vocab)))
    if draft.probs is not None:
        assert draft.probs.shape == (64, 4)
        assert bool((draft.probs[:, draft_vocab:] == 0).all())


# Stopping early --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stop_below", [0.0, 0.05, 0.3, 0.9])
def test_a_chain_ends_with_the_token_that_makes_it_unlikely_to_pass(stop_below: float, temperature: float) -> None:
    k, rule = 6, rule_for(Settings(k=6, temperature=temperature, seed=3))
    logits = 3 * torch.randn(k, 1, MODEL_VOCAB, generator=torch.Generator().manual_seed(4))
    whole = alone(draw_chain(lambda drawn: logits[len(drawn)], k, rule, 9))
    draft = alone(draw_chain(lambda drawn: logits[len(drawn)], k, rule, 9, stop_below=stop_below))
    tokens = torch.as_tensor(whole.token_ids)
    chances = (logits[:, 0] / (temperature or 1.0)).softmax(-1).gather(-1, tokens[:, None])[:, 0].cumprod(0)
    made = 1 + int((chances[:-1] >= stop_below).cumprod(0).sum()) if stop_below else k
    assert list(draft.token_ids) == list(whole.token_ids)[:made]
    assert draft.q is not None
    assert len(draft.q) == made
    assert made < k or stop_below < 0.3


@pytest.mark.sampled(3)
def test_auto_with_drafts_that_stop_writes_the_targets_text_and_can_be_run_again(toy: ModelToy) -> None:
    for temperature in (0.0, 0.8):
        settings = Settings(k=AUTO, temperature=temperature, seed=5, max_new_tokens=LENGTH)
        plain = plain_text(toy.target_runner(64), PROMPT, settings)
        costs = costs_with({1: 1.0, MAX_K + 1: 2.0})
        for _ in range(2):
            costs.drafts["draft-model", False].learn_cost(1, 0.1 / costs.baseline_seconds)
        drafted = []
        for _ in range(8):
            runner = toy.target_runner(64)
            drafter = toy.drafter("draft-model", runner, settings)
            events = list(decode(runner, drafter, PROMPT, settings, costs=costs))
            assert ids_of(events) == plain
            drafted += [event for event in events if isinstance(event, Round)]
        assert any(0 < len(event.drafted) < (event.k or 0) for event in drafted)
