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
from safetensors.numpy import load_file, save_file
from scipy import stats

from specdemo.drafters.ngram import load_table
from specdemo.train import data
from specdemo.train.ngram import DISCOUNT, build_table
from specdemo.train.states import default_layers, read_states, states_path
from specdemo.types import BadInput

A, T, U = data.ASSISTANT, data.TEMPLATE, data.USER


def write_shard(folder: Path, tokens, roles, starts, vocab_size: int = 10, wave: int = 0, preset: str = "tiny") -> None:
    arrays = {
        "tokens": np.array(tokens, dtype=np.int32),
        "roles": np.array(roles, dtype=np.uint8),
        "starts": np.array(starts, dtype=bool),
    }
    folder.mkdir(exist_ok=True)
    facts = {"vocab_size": vocab_size, "wave": wave, "preset": preset, "seed": 0, "rows": 4, "columns": 60}
    save_file(arrays, folder / f"train-{wave:05d}.safetensors", metadata={"provenance": json.dumps(facts)})


def test_the_table_is_what_counting_by_hand_gives(tmp_path):
    # One row: a template token 0, the user's 5, then the assistant writes 1 2 1 2 1 3.
    write_shard(tmp_path / "text", [[0, 5, 1, 2, 1, 2, 1, 3]], [[T, U, A, A, A, A, A, A]], [[True] + [False] * 7])
    build_table([tmp_path / "text"], tmp_path / "t.safetensors", {})
    table = load_table(tmp_path / "t.safetensors")

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


def test_every_distribution_is_positive_everywhere_and_sums_to_one(tmp_path):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 10, (4, 200))
    starts = np.zeros((4, 200), dtype=bool)
    starts[:, ::50] = True
    write_shard(tmp_path / "text", tokens, np.full((4, 200), A), starts)
    build_table([tmp_path / "text"], tmp_path / "t.safetensors", {})
    table = load_table(tmp_path / "t.safetensors")
    for context in rng.integers(0, 10, (50, 3)).tolist():
        probs = table.next_token_probs(context)
        assert probs.min() > 0
        assert probs.sum() == pytest.approx(1, abs=1e-5)


def test_counts_do_not_cross_from_one_conversation_into_the_next(tmp_path):
    write_shard(tmp_path / "text", [[1, 2, 3, 4]], [[A, A, A, A]], [[True, False, True, False]])
    build_table([tmp_path / "text"], tmp_path / "t.safetensors", {})
    probs = load_table(tmp_path / "t.safetensors").next_token_probs([2])
    assert probs[3] == probs[9]  # 2 3 is no pair, since 3 began another conversation: 3 is as unlikely as any other


def test_text_from_several_folders_is_counted_together(tmp_path):
    for name, tokens in (("one", [1, 2, 1, 2]), ("two", [1, 3, 1, 3])):
        write_shard(tmp_path / name, [tokens], [[A, A, A, A]], [[True, False, False, False]])
    build_table([tmp_path / "one", tmp_path / "two"], tmp_path / "t.safetensors", {})
    probs = load_table(tmp_path / "t.safetensors").next_token_probs([1])
    assert probs[2] == probs[3] > probs[1]
    with pytest.raises(ValueError, match=r"none holds no training text"):
        build_table([tmp_path / "one", tmp_path / "none"], tmp_path / "t.safetensors", {})


def test_text_of_different_targets_is_not_counted_together(tmp_path):
    for name in ("one", "two"):
        write_shard(tmp_path / name, [[1, 2]], [[A, A]], [[True, False]], preset=name)
    with pytest.raises(ValueError, match=r"written by two, not by one"):
        build_table([tmp_path / "one", tmp_path / "two"], tmp_path / "t.safetensors", {})


@pytest.mark.parametrize(("vocab_size", "orders"), [(49152, 4), (151936, 3)])
def test_contexts_are_as_long_as_can_be_told_apart(tmp_path, vocab_size, orders):
    last = vocab_size - 1
    write_shard(tmp_path, [[last, last - 1] * 8], [[A] * 16], [[True] + [False] * 15], vocab_size)
    build_table([tmp_path], tmp_path / "t.safetensors", {})
    table = load_table(tmp_path / "t.safetensors")
    assert len(table.orders) == orders
    assert table.next_token_probs([last - 1, last, last - 1, last]).argmax() == last - 1
    assert table.next_token_probs([last, last - 1, last, last - 1]).argmax() == last


def test_the_shipped_table_says_where_it_came_from():
    path = Path(__file__).parents[2] / "presets/weights/smollm2-135m.ngram.safetensors"
    table = load_table(path)
    beside = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert table.vocab_size == 49152
    assert table.provenance == beside
    assert beside["counted_tokens"] > 500_000
    assert all("b179c952" in json.dumps(text["weights"]) for text in beside["text"])
    assert path.stat().st_size < 10_000_000


@pytest.fixture(scope="module")
def tiny():
    """A random Llama and a word tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", "<user>", "<bot>", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}<user> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<bot> {% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def write(tiny, folder: Path, tokens: int, columns: int = 60) -> int:
    model, tokenizer = tiny
    facts = {"preset": "tiny"}
    return data.write_text(model, tokenizer, frozenset({0}), folder, tokens, facts, rows=4, columns=columns)


def test_written_text_is_the_models_own(tiny, tmp_path, monkeypatch):
    """Each token of a greedy answer is what the model says when it reads that conversation alone."""
    monkeypatch.setattr(data, "ANSWER_TEMPERATURES", (0.0,))
    model, _ = tiny
    write(tiny, tmp_path, 1, columns=300)
    wave = load_file(tmp_path / "train-00000.safetensors")
    checked = 0
    for row in range(4):
        begins = [*np.nonzero(wave["starts"][row])[0], 300]
        for begin, end in itertools.pairwise(begins):
            ids = torch.tensor(wave["tokens"][row, begin:end].astype(np.int64))
            with torch.inference_mode():
                best = model(ids[None]).logits[0].argmax(-1)
            answer = np.nonzero(wave["roles"][row, begin:end] == A)[0]
            assert best[answer - 1].tolist() == ids[answer].tolist()
            checked += len(answer)
    assert checked > 50


def test_more_tokens_go_on_where_the_last_run_stopped(tiny, tmp_path):
    assert write(tiny, tmp_path, 1) == 240
    first = load_file(tmp_path / "train-00000.safetensors")
    stamp = (tmp_path / "train-00000.safetensors").stat().st_mtime_ns
    assert write(tiny, tmp_path, 241) == 480
    assert (tmp_path / "train-00000.safetensors").stat().st_mtime_ns == stamp
    write(tiny, tmp_path / "again", 1)
    again = load_file(tmp_path / "again" / "train-00000.safetensors")
    assert all(np.array_equal(again[name], first[name]) for name in ("tokens", "roles", "starts"))
    with safe_open(tmp_path / "heldout-00001.safetensors", framework="numpy") as file:
        facts = json.loads(file.metadata()["provenance"])
    assert (facts["preset"], facts["wave"], facts["vocab_size"]) == ("tiny", 1, 29)


def test_states_kept_while_writing_are_those_of_reading_the_text_again(tiny, tmp_path):
    model, tokenizer = tiny
    data.write_text(
        model, tokenizer, frozenset({0}), tmp_path, 1, {}, rows=4, columns=150, states_folder=tmp_path / "states"
    )
    (shard,) = data.shard_paths(tmp_path, "train")
    layers = default_layers(model)
    wave = load_file(shard)
    kept = load_file(states_path(tmp_path / "states", shard, layers))["states"]
    again = read_states(model, layers, *(torch.from_numpy(wave[name]) for name in ("tokens", "starts")))
    assert kept.shape == (4, 150, 3 * 32)
    np.testing.assert_allclose(kept, again, atol=1e-4)


def test_text_that_was_asked_for_differently_is_not_gone_on_with(tiny, tmp_path):
    write(tiny, tmp_path, 1)
    model, tokenizer = tiny
    for name, other in {"seed": 99, "rows": 5, "columns": 61}.items():
        asked: dict[str, Any] = {"seed": 0, "rows": 4, "columns": 60, name: other}
        with pytest.raises(BadInput, match=rf"train-00000.safetensors was written with {name} \d+, not {other}"):
            data.write_text(model, tokenizer, frozenset({0}), tmp_path, 400, {"preset": "tiny"}, **asked)


def test_one_wave_in_twenty_is_held_out(tiny, tmp_path):
    for wave in range(2, data.HELD_OUT_EVERY + 1):
        write_shard(tmp_path, [[1]], [[A]], [[True]], wave=wave)
    write(tiny, tmp_path, 240 * (data.HELD_OUT_EVERY + 2))
    held_out = ["heldout-00001.safetensors", f"heldout-{data.HELD_OUT_EVERY + 1:05d}.safetensors"]
    assert [path.name for path in data.shard_paths(tmp_path, "heldout")] == held_out
    assert len(data.shard_paths(tmp_path, "train")) == data.HELD_OUT_EVERY


def test_a_row_is_drawn_from_the_models_distribution_at_its_own_temperature_and_greedy_rows_take_the_favourite():
    rows, size, temperature = 20_000, 2 * data.BLOCK + 88, 0.7  # three blocks of tokens, the last one not full
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1))
    temperatures = torch.full((rows,), temperature)
    temperatures[::2] = 0
    drawn = data.sample_rows(logits.expand(rows, -1), temperatures, torch.Generator().manual_seed(2))
    assert (drawn[::2] == logits.argmax()).all()
    probs = (logits / temperature).double().softmax(-1).numpy()
    seen = np.bincount(drawn[1::2].numpy(), minlength=size)
    often = probs * rows / 2 >= 5
    expected = np.append(probs[often], probs[~often].sum()) * rows / 2
    assert stats.chisquare(np.append(seen[often], seen[~often].sum()), expected).pvalue > 1e-3
