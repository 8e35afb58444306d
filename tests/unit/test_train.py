"""Making text and counting it, on a tiny model and on text written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tests.harness.models
from specdemo.drafters.ngram import NgramTable, load_table
from specdemo.errors import BadInput
from specdemo.studies.statistics import chi_square
from tests.conftest import Command
from tests.harness.toys import write_shard
from tools.train import data
from tools.train.__main__ import app
from tools.train.ngram import DISCOUNT, build_table
from tools.train.states import default_layers, read_states, states_path

from ..sentences import refuses, tells

A, T, U = data.ASSISTANT, data.TEMPLATE, data.USER
MADE: dict[str, Any] = {"preset": "tiny", "seed": 0, "rows": 4, "columns": 60, "vocab_size": 10}

# Counting --------------------------------------------------------------------------------------------------


def table_of(folder: Path, *texts: Any, roles: Any = A, starts: Any = (0,), **facts: Any) -> NgramTable:
    """The table of some texts, each in a folder of its own."""
    folders = [folder / str(place) for place in range(len(texts))]
    for place, text in zip(folders, texts, strict=True):
        write_shard(place, text, roles, starts, **{**MADE, **facts})
    build_table(folders, folder / "t.safetensors", {})
    return load_table(folder / "t.safetensors")


def test_the_table_is_what_counting_by_hand_gives(tmp_path: Path) -> None:
    # One row: a template token 0, the user's 5, then the assistant writes 1 2 1 2 1 3.
    table = table_of(tmp_path, [[0, 5, 1, 2, 1, 2, 1, 3]], roles=[[T, U, A, A, A, A, A, A]])
    unigram = np.array([0, 3, 2, 1, 0, 0, 0, 0, 0, 0]) + 1.0
    unigram /= unigram.sum()
    after_1 = np.zeros(10)  # 1 was followed by 2, 2 and 3
    after_1[2], after_1[3] = (2 - DISCOUNT) / 3, (1 - DISCOUNT) / 3
    bigram = after_1 + (1 - after_1.sum()) * unigram
    np.testing.assert_allclose(table.next_token_probs([9, 1]), bigram, atol=1e-4)
    after_2_1 = np.zeros(10)  # and after 2 1 came 2 once and 3 once
    after_2_1[2] = after_2_1[3] = (1 - DISCOUNT) / 2
    np.testing.assert_allclose(table.next_token_probs([2, 1]), after_2_1 + (1 - after_2_1.sum()) * bigram, atol=1e-4)
    np.testing.assert_allclose(table.next_token_probs([7]), unigram, atol=1e-6)


def test_every_distribution_is_positive_everywhere_and_sums_to_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = table_of(tmp_path, rng.integers(0, 10, (4, 200)), starts=range(0, 200, 50))
    for context in rng.integers(0, 10, (50, 3)).tolist():
        probs = table.next_token_probs(context)
        assert probs.min() > 0
        assert probs.sum() == pytest.approx(1, abs=1e-5)


def test_counts_do_not_cross_from_one_conversation_into_the_next(tmp_path: Path) -> None:
    probs = table_of(tmp_path, [[1, 2, 3, 4]], starts=(0, 2)).next_token_probs([2])
    assert probs[3] == probs[9]  # 2 3 is no pair, since 3 began another conversation: 3 is as unlikely as any other


def test_text_from_several_folders_is_counted_together(tmp_path: Path) -> None:
    probs = table_of(tmp_path, [[1, 2, 1, 2]], [[1, 3, 1, 3]]).next_token_probs([1])
    assert probs[2] == probs[3] > probs[1]
    with refuses(BadInput, "none"):
        build_table([tmp_path / "0", tmp_path / "none"], tmp_path / "t.safetensors", {})
    write_shard(tmp_path / "1", [[1, 2]], **{**MADE, "preset": "other"})
    with refuses(BadInput, "other, tiny"):
        build_table([tmp_path / "0", tmp_path / "1"], tmp_path / "t.safetensors", {})


@pytest.mark.parametrize(("vocab_size", "orders"), [(49152, 4), (151936, 3)])
def test_contexts_are_as_long_as_can_be_told_apart(tmp_path: Path, vocab_size: int, orders: int) -> None:
    last = vocab_size - 1
    table = table_of(tmp_path, [[last, last - 1] * 8], vocab_size=vocab_size)
    assert len(table.orders) == orders
    assert table.next_token_probs([last - 1, last, last - 1, last]).argmax() == last - 1
    assert table.next_token_probs([last, last - 1, last, last - 1]).argmax() == last


def test_the_shipped_table_says_where_it_came_from() -> None:
    path = Path(__file__).parents[2] / "presets/weights/smollm2-135m.ngram.safetensors"
    table = load_table(path)
    beside = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert table.vocab_size == 49152
    assert table.provenance == beside
    assert beside["counted_tokens"] > 500_000
    assert all("b179c952" in json.dumps(text["weights"]) for text in beside["text"])


# Writing ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A random Llama and a word tokenizer with a chat template."""
    words = ["<end>", "<user>", "<bot>", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}<user> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<bot> {% endif %}"
    )
    return tests.harness.models.tiny("llama", len(words), max_position_embeddings=512, initializer_range=0.3), tokenizer


def write(tiny: Any, folder: Path, tokens: int, **other: Any) -> int:
    model, tokenizer = tiny
    asked = {"rows": 4, "columns": 60, **other}
    return data.write_text(model, tokenizer, frozenset({0}), folder, tokens, {"preset": "tiny"}, **asked)


def test_written_text_is_the_models_own(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a greedy answer is what the model says when it reads that conversation alone."""
    monkeypatch.setattr(data, "ANSWER_TEMPERATURES", (0.0,))
    write(tiny, tmp_path, 1, columns=300)
    wave = load_file(tmp_path / "train-00000.safetensors")
    checked = 0
    for row in range(4):
        begins = [*np.nonzero(wave["starts"][row])[0], 300]
        for begin, end in itertools.pairwise(begins):
            ids = torch.tensor(wave["tokens"][row, begin:end].astype(np.int64))
            with torch.inference_mode():
                best = tiny[0](ids[None]).logits[0].argmax(-1)
            answer = np.nonzero(wave["roles"][row, begin:end] == A)[0]
            assert best[answer - 1].tolist() == ids[answer].tolist()
            checked += len(answer)
    assert checked > 50


def test_more_tokens_go_on_where_the_last_run_stopped(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "train-00000.safetensors"
    assert write(tiny, tmp_path, 1) == 240
    first, stamp = load_file(path), path.stat().st_mtime_ns
    assert write(tiny, tmp_path, 241) == 480
    assert path.stat().st_mtime_ns == stamp
    write(tiny, tmp_path / "again", 1)
    again = load_file(tmp_path / "again" / path.name)
    assert all(np.array_equal(again[name], first[name]) for name in ("tokens", "roles", "starts"))
    with safe_open(tmp_path / "heldout-00001.safetensors", framework="numpy") as file:
        facts = json.loads(file.metadata()["provenance"])
    assert (facts["preset"], facts["wave"], facts["vocab_size"]) == ("tiny", 1, 29)
    for name, other in {"seed": 99, "rows": 5, "columns": 61}.items():  # asked for differently
        with refuses(BadInput, f"train-00000.safetensors {name} {other}"):
            write(tiny, tmp_path, 400, **{name: other})


def test_states_kept_while_writing_are_those_of_reading_the_text_again(tiny: Any, tmp_path: Path) -> None:
    write(tiny, tmp_path, 1, columns=150, states_folder=tmp_path / "states")
    (shard,), layers = data.shard_paths(tmp_path, "train"), default_layers(tiny[0])
    wave = load_file(shard)
    kept = load_file(states_path(tmp_path / "states", shard, layers))["states"]
    again = read_states(tiny[0], layers, *(torch.from_numpy(wave[name]) for name in ("tokens", "starts")))
    assert kept.shape == (4, 150, 3 * 32)
    np.testing.assert_allclose(kept, again, atol=1e-4)


def test_one_wave_in_twenty_is_held_out(tiny: Any, tmp_path: Path) -> None:
    for wave in range(2, data.HELD_OUT_EVERY + 1):
        write_shard(tmp_path, [[1]], name=f"train-{wave:05d}", **MADE)
    write(tiny, tmp_path, 240 * (data.HELD_OUT_EVERY + 2))
    held_out = ["heldout-00001.safetensors", f"heldout-{data.HELD_OUT_EVERY + 1:05d}.safetensors"]
    assert [path.name for path in data.shard_paths(tmp_path, "heldout")] == held_out
    assert len(data.shard_paths(tmp_path, "train")) == data.HELD_OUT_EVERY


def test_a_row_is_drawn_from_the_models_distribution_at_its_own_temperature() -> None:
    rows, size, temperature = 20_000, 2 * data.BLOCK + 88, 0.7  # three blocks of tokens, the last one not full
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1))
    temperatures = torch.full((rows,), temperature)
    temperatures[::2] = 0
    drawn = data.sample_rows(logits.expand(rows, -1), temperatures, torch.Generator().manual_seed(2))
    assert (drawn[::2] == logits.argmax()).all()
    probs = (logits / temperature).double().softmax(-1).numpy()
    assert (chi_square(np.bincount(drawn[1::2].numpy(), minlength=size), probs) or 0) > 1e-3


# The commands ----------------------------------------------------------------------------------------------

HEAD = "head --tokens 1 --preset nanogpt-shakespeare --out a --kind"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bigram --out /no/such/folder/table", "/no/such/folder"),
        ("ngram --out a --text none", "none tools.train"),
        ("chargpt --out {} --width 63", "63 4"),
        ("chargpt --out {} --steps 0", "above 0,"),
        ("chargpt --out {} --context 1", "context above 1."),
        (f"{HEAD} whole", "'whole'. eagle, block, medusa."),
        (f"{HEAD} eagle --rate 1", "rate 0 1."),
        (f"{HEAD} eagle --depth 2", "block several"),
        (f"{HEAD} eagle --layers 1,a", "numbers, '1,a'."),
        (f"{HEAD} medusa --layers 1,2", "medusa last"),
        ("validate --kind eagle --preset nanogpt-shakespeare", "'eagle';"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(
    words: str, said: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*words.format("model").split(), app=app)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert tells(err, said)
    assert [*tmp_path.iterdir()] == []
