"""A person's text to token ids: the ids of the plain path, and special tokens that were typed stay text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specdemo.models import chat
from specdemo.models.loaded import load
from specdemo.models.presets import find_preset
from specdemo.types import BadInput

from .checkpoints import CHATML, make_tokenizer, spaced_tokenizer

TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
DEPENDENT = CHATML.replace("message['content']", "(message['content'] if 'cat' in message['content'] else 'no cats')")
BYTES, SPACED = make_tokenizer(), spaced_tokenizer()
TRIMMING, DEPENDING = make_tokenizer(template=TRIMMED), make_tokenizer(template=DEPENDENT)
SPECIAL_NAMES = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "</s>", "<s>", "<unk>"]
ODDITIES = ["<|im_", "end|>", "<", "|", ">", "{{ x }}", "${x}", "{% raw %}", "[INST]", "<img src=x onerror=alert(1)>"]
ODDITIES += ["\u202e", "\u200d", "👨‍👩‍👧", "é", "▁", "\n", "\n\n", "\t", " ", "  ", "the cat", "12", "\x00"]

plain_texts = st.lists(st.sampled_from(ODDITIES) | st.text(max_size=5), max_size=8).map("".join)
any_texts = st.lists(st.sampled_from(SPECIAL_NAMES + ODDITIES) | st.text(max_size=5), max_size=8).map("".join)


def rendered(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    turns = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """What everyone else does."""
    turns = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])


def unreadable(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    """Whether some of its characters are unknown; then checks that they are refused."""
    if tokenizer.unk_token_id not in tokenizer.encode(text, split_special_tokens=True):
        return False
    for raw in (True, False):
        with pytest.raises(BadInput, match="cannot read some of these characters"):
            chat.encode(tokenizer, text, raw)
    return True


def special_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    return [i for i in ids if i in chat.special_ids(tokenizer) and i != tokenizer.unk_token_id]


def read(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@given(plain_texts)
@pytest.mark.parametrize("tokenizer", [BYTES, TRIMMING, DEPENDING, SPACED], ids=["bytes", "trims", "depends", "spaced"])
def test_ordinary_text_gets_the_ids_of_the_plain_path(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    if not text.strip() or any(name in text for name in SPECIAL_NAMES) or unreadable(tokenizer, text):
        return
    assert chat.encode(tokenizer, text) == plain_ids(tokenizer, text)
    assert chat.encode(tokenizer, text, raw=True) == tokenizer.encode(text)


@given(any_texts)
@pytest.mark.parametrize("tokenizer", [BYTES, TRIMMING], ids=["bytes", "trims"])
def test_typed_special_tokens_are_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    if not text.strip():
        return
    ids = chat.encode(tokenizer, text)
    assert special_of(tokenizer, ids) == special_of(tokenizer, plain_ids(tokenizer, "hello"))
    assert read(tokenizer, ids) == rendered(tokenizer, text)
    raw = chat.encode(tokenizer, text, raw=True)
    assert special_of(tokenizer, raw) == []
    assert read(tokenizer, raw) == text


@given(any_texts)
def test_typed_special_tokens_are_text_where_no_special_token_is_near(text: str) -> None:
    """Llama's template has `<s>` at its very beginning and plain brackets around the person's words."""
    if not text.strip() or unreadable(SPACED, text):
        return
    ids = chat.encode(SPACED, text)
    assert special_of(SPACED, ids) == [SPACED.bos_token_id]
    assert special_of(SPACED, chat.encode(SPACED, text, raw=True)) == special_of(SPACED, SPACED.encode("hello"))


def test_text_next_to_a_typed_special_token_is_encoded_as_in_the_plain_path() -> None:
    ids, plain = chat.encode(BYTES, "the cat <|im_end|> sat"), plain_ids(BYTES, "the cat ")
    common = plain[: plain.index(BYTES.eos_token_id)]
    assert ids[: len(common)] == common
    assert ids[-3:] == plain[-3:]


@pytest.mark.parametrize("prompt", ["", " ", "\n\t ", "\u2003"])
@pytest.mark.parametrize("raw", [True, False])
def test_a_blank_prompt_is_refused(prompt: str, raw: bool) -> None:
    with pytest.raises(BadInput, match="empty"):
        chat.encode(BYTES, prompt, raw)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(BadInput, match="half of a character"):
        chat.encode(BYTES, "smile \ud83d")


def test_characters_that_would_be_lost_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"some of these characters: 'é', '\\u202e'\. Leave them out\."):
        chat.encode(SPACED, "café \u202e é")
    with pytest.raises(BadInput, match=r"'ｈ' and others\."):
        chat.encode(SPACED, "".join(chr(ord(letter) + 0xFEE0) for letter in "abcdefghi"))


def test_a_model_without_a_template_reads_the_text_as_it_is() -> None:
    assert chat.encode(make_tokenizer(template=None), " Hello \n") == BYTES.encode(" Hello \n")


def test_the_template_gets_the_presets_arguments() -> None:
    template = CHATML + "{% if enable_thinking is defined and not enable_thinking %}{{ 'no thinking' }}{% endif %}"
    tokenizer = make_tokenizer(template=template)
    assert read(tokenizer, chat.encode(tokenizer, "Hi", template_kwargs={"enable_thinking": False})).endswith(
        "no thinking"
    )
    assert "no thinking" not in read(tokenizer, chat.encode(tokenizer, "Hi"))


def test_the_token_that_ends_a_turn() -> None:
    assert chat.end_of_turn(BYTES, {}) == BYTES.convert_tokens_to_ids("<|im_end|>")
    assert chat.end_of_turn(SPACED, {}) == SPACED.eos_token_id
    assert chat.end_of_turn(make_tokenizer(template=None), {}) is None
    refuses = CHATML + "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    assert chat.end_of_turn(make_tokenizer(template=refuses), {}) is None
    plain_ends = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    assert chat.end_of_turn(make_tokenizer(template=plain_ends), {}) is None


# The real model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    return load(find_preset("smollm2-135m"), device="cpu").tokenizer


@pytest.mark.real
@given(text=any_texts)
def test_the_real_tokenizer_keeps_to_the_same_rules(smollm2: PreTrainedTokenizerFast, text: str) -> None:
    if not text.strip():
        return
    if unreadable(smollm2, text):
        return
    ids = chat.encode(smollm2, text)
    assert special_of(smollm2, ids) == [1, 2, 1, 2, 1]  # system, user, assistant
    if max(text) < "\U00040000":  # the vocabulary lacks the bytes that characters from there on begin with
        assert read(smollm2, ids) == rendered(smollm2, text)
    if not any(name in text for name in smollm2.get_added_vocab()):
        assert ids == plain_ids(smollm2, text)
        assert chat.encode(smollm2, text, raw=True) == smollm2.encode(text)
