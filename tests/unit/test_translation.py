"""A draft model with another tokenizer: its words in the target's tokens, and texts that stay the target's own.

That the distribution stays the target's is tested in `test_distribution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdemo.errors import NotFinite
from specdemo.models.loaded import load
from specdemo.models.presets import find_preset
from specdemo.models.translation import Translation
from specdemo.racing.race import start
from specdemo.settings import AUTO, MATCH, RULES, Settings
from specdemo.tokens import DraftOutcome
from tests.harness.classes import LaneFigures, Loaded
from tests.harness.doubles import (
    LETTERS,
    PROMPT,
    Renumbering,
    byte_tokenizer,
    fallback_tokenizer,
    ids_of,
    letters_tokenizer,
    random_table,
    rounds_of,
)
from tests.harness.files import make_tokenizer, spaced_tokenizer
from tests.harness.models import preset_of, save, tiny
from tests.harness.toys import TableToy

from ..sentences import refuses


def lower_case_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, after all letters are made small and composed."""
    core = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, where a digit is always a token by itself, as in Qwen's."""
    core = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), core.pre_tokenizer])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


EXACT = {  # these lose nothing of a text
    "bytes": byte_tokenizer(),
    "merged": make_tokenizer(),
    "digits": digits_tokenizer(),
    "fallback": fallback_tokenizer(),
}
ALL = {**EXACT, "spaced": spaced_tokenizer(), "lower case": lower_case_tokenizer()}
TEXTS = st.text(st.sampled_from("hi lewHIé你好🙂\n\t12e\u0301<|im_end|>\ufffd"), max_size=12)


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


# Words --------------------------------------------------------------------------------------------------------------


@given(target=st.sampled_from([*EXACT]), draft=st.sampled_from([*EXACT]), pieces=st.lists(TEXTS, max_size=3), new=TEXTS)
@example("merged", "bytes", ["he"], "llo")
@example("fallback", "merged", ["hi", " "], " hi")
@example("bytes", "merged", ["你"], "好🙂")
@example("digits", "merged", ["1"], "2 12")
@example("merged", "fallback", ["\n"], "\n\n")
@example("fallback", "bytes", [], "hi hi")
def test_translated_tokens_go_on_with_the_drafted_text(target: str, draft: str, pieces: list[str], new: str) -> None:
    """Pieces are encoded each by itself, as a target may write words that its tokenizer would cut otherwise."""
    of, to = EXACT[target], EXACT[draft]
    written = [index for piece in pieces for index in plain(of, piece)]
    before = decoded(of, written)
    assume(not before.endswith("\ufffd"))
    translation = Translation(of, to)
    read = translation.to_draft(written)
    assert decoded(to, read) == before or "fallback" in (target, draft)  # which adds or takes the first space
    drafted = plain(to, new)
    wanted = decoded(to, read + drafted)[len(decoded(to, read)) :]
    tokens = translation.to_target(written, read, drafted)
    if tokens:
        assert decoded(of, written + tokens) == before + wanted.rstrip("\ufffd")
    elif target != "fallback":  # bytes can spell everything, after anything
        assert not wanted.rstrip("\ufffd") or "\ufffd" in before + wanted


@given(target=st.sampled_from([*ALL]), draft=st.sampled_from([*ALL]), data=st.data())
def test_whatever_tokens_there_are_the_answer_is_tokens(target: str, draft: str, data: st.DataObject) -> None:
    of, to = ALL[target], ALL[draft]
    written = data.draw(st.lists(st.integers(0, len(of) - 1), max_size=24))
    drafted = data.draw(st.lists(st.integers(0, len(to) - 1), max_size=5))
    translation = Translation(of, to)
    read = translation.to_draft(written)
    assert all(0 <= index < len(to) for index in read)
    assert all(0 <= index < len(of) for index in translation.to_target(written, read, drafted))


def test_half_a_character_is_finished_by_the_draft() -> None:
    of, to = byte_tokenizer(), make_tokenizer()
    written = plain(of, "hi 你")[:-1]
    translation = Translation(of, to)
    read = translation.to_draft(written)
    assert decoded(to, read) == "hi "
    tokens = translation.to_target(written, read, plain(to, "你 hi"))
    assert decoded(of, written + tokens) == "hi 你 hi"
    half = plain(to, "é 你")[:-1]
    assert decoded(of, translation.to_target(plain(of, "hi "), plain(to, "hi "), half)) == "é "


def test_special_tokens_become_those_of_the_same_name_or_part() -> None:
    of, to = make_tokenizer(), spaced_tokenizer()
    translation = Translation(of, to)
    began, ended = of.bos_token_id, of.eos_token_id
    hi, there = plain(of, "hi"), plain(of, "there<|im_end|>")
    read = translation.to_draft([began, *hi, ended, 0, *there])  # 0 is `<|endoftext|>`, which the other has not
    parts = "".join(to.convert_ids_to_tokens(read))
    assert parts == "<s>▁hi</s>▁there<|im_end|>"  # typed words stay words
    to.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 1)])
    translation = Translation(of, to)
    assert translation.to_draft(hi)[0] == to.bos_token_id  # every text of this one begins so
    assert translation.to_draft([began, *hi])[:2] == [to.bos_token_id, *plain(to, "h")[:1]]
    drafted = [*plain(to, " you"), to.eos_token_id, *plain(to, "lost")]
    tokens = translation.to_target(hi, translation.to_draft(hi), drafted)
    assert tokens[-1] == ended
    assert decoded(of, tokens[:-1]).strip() == "you"
    assert translation.to_target(hi, translation.to_draft(hi), [to.eos_token_id]) == [ended]
    assert translation.to_target(hi, translation.to_draft(hi), [to.unk_token_id]) == []
    alike = Translation(make_tokenizer(["other words"]), make_tokenizer())
    assert alike.to_draft([0, 1, 2]) == [0, 1, 2]


def test_a_tokenizer_that_normalises_gets_its_own_spelling() -> None:
    of, to = lower_case_tokenizer(), make_tokenizer()
    written = plain(of, "say ")
    translation = Translation(of, to)
    tokens = translation.to_target(written, translation.to_draft(written), plain(to, "HELLO E\u0301"))
    assert decoded(of, tokens) == "hello é"
    back = Translation(to, of)
    written = plain(to, "SAY ")
    tokens = back.to_target(written, back.to_draft(written), plain(of, "hello"))
    assert decoded(to, tokens) == "hello"


# Drafting -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A target, and itself with its letters numbered backwards as its draft model."""
    folder = tmp_path_factory.mktemp("renumbered")
    of, to = (letters_tokenizer(len(LETTERS), letters) for letters in (LETTERS, LETTERS[::-1]))
    target, draft = (tiny("llama", len(of), tie_word_embeddings=False, eos_token_id=None) for _ in range(2))
    order = torch.arange(len(LETTERS)).flip(0)
    with torch.no_grad():
        for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order])
    preset = preset_of(save(target, of, folder / "target"), save(draft, to, folder / "draft"))
    loaded = load(preset, "float32", "cpu")
    yield loaded
    loaded.release()


def test_a_target_under_other_numbers_drafts_what_it_writes_and_reads_nothing_twice(
    renumbered: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = replace(renumbered)
    assert loaded.parts.translator is not None
    prompt = loaded.encode("the cat sat on", raw=True)
    settings = Settings(k=3, max_new_tokens=33)
    expected = ids_of(list(start(loaded, "none", prompt, settings)))
    assert len(expected) > 8
    passes = []

    def watched(capacity: int):
        runner = renumbered.draft_runner(capacity)
        forward = runner.forward

        def read(ids: Sequence[int] | Tensor) -> Tensor:
            passes.append(len(ids))
            return forward(ids)

        monkeypatch.setattr(runner, "forward", read)
        return runner

    loaded.parts = replace(loaded.parts, make_draft_runner=watched)
    events = list(start(loaded, "draft-model", prompt, settings))
    assert ids_of(events) == expected
    drafted = [token.outcome for event in rounds_of(events) for token in event.drafted]
    assert drafted.count(DraftOutcome.REJECTED) == 0
    assert len(drafted) > 6
    assert max(passes) == 2  # after a draft that passed: its own last token, and the bonus


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [1, 2, 4, AUTO])
def test_the_text_is_that_of_the_target_alone(renumbered: Loaded, temperature: float, k: int | str) -> None:
    prompt = renumbered.encode("once upon", raw=True)
    for seed in range(3):
        settings = Settings(k=k, temperature=temperature, seed=seed, max_new_tokens=40)
        alone = ids_of(list(start(renumbered, "none", prompt, replace(settings, k=0))))
        assert ids_of(list(start(renumbered, "draft-model", prompt, settings))) == alone


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_cache_shorter_than_the_text_drafts_from_its_end(rule: str, temperature: float) -> None:
    settings = Settings(temperature=temperature, k=2, max_new_tokens=40, rule=rule)
    texts = []
    for capacity in (None, 9):
        toy: Any = TableToy(draft_model=random_table(1, support=3), translator=Renumbering(), draft_capacity=capacity)
        texts.append(list(start(toy, "draft-model", PROMPT, settings)))
    assert ids_of(texts[0]) == ids_of(texts[1])  # two tokens decide the third, and the end has them
    assert [event.drafted for event in rounds_of(texts[0])] == [event.drafted for event in rounds_of(texts[1])]
    if rule == MATCH:
        assert ids_of(texts[0]) == ids_of(list(start(toy, "none", PROMPT, settings)))


def test_a_draft_model_whose_logits_are_no_numbers_is_named() -> None:
    toy: Any = TableToy(draft_model=random_table(1) * torch.nan, translator=Renumbering())
    with refuses(NotFinite, "drafter finite"):
        list(start(toy, "draft-model", PROMPT, Settings(k=2, max_new_tokens=8)))


@pytest.mark.slow
@pytest.mark.real
def test_a_small_model_of_another_family_drafts_for_a_real_target() -> None:
    """Downloads 1.2 GB, once."""
    pair = replace(find_preset("qwen2.5-coder"), draft_model=find_preset("smollm2-135m").target)
    loaded = load(pair, None, "cpu")
    assert loaded.parts.translator is not None
    ids = loaded.encode("Write a Python function that says whether a number is prime, with a docstring.")
    for temperature in (0.0, 0.8):
        settings = Settings(k=4, temperature=temperature, max_new_tokens=64)
        drafted = list(start(loaded, "draft-model", ids, settings))
        assert ids_of(drafted) == ids_of(list(start(loaded, "none", ids, settings)))
        stats = LaneFigures.of(drafted)
        assert stats.acceptance_rate is not None
        assert stats.acceptance_rate > 0.4
        assert stats.tokens_per_round is not None
        assert stats.tokens_per_round > 1.5
    loaded.release()
