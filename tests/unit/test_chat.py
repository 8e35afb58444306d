"""A person's text to token ids: the ids of the plain path, and special tokens that were typed stay text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AddedToken, PreTrainedTokenizerFast

from specdemo.errors import BadInput
from specdemo.models import chat
from specdemo.models.loaded import load
from specdemo.models.presets import Defaults, find_preset
from specdemo.models.sources import Gguf
from specdemo.models.store import LoadError
from tests.harness.files import CHATML, make_tokenizer, spaced_tokenizer, write_gguf
from tests.harness.models import looked_at, preset_of, save, tiny

from ..conftest import Command
from ..sentences import refuses, tells

TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
DEPENDENT = CHATML.replace("message['content']", "(message['content'] if 'cat' in message['content'] else 'no cats')")
PARTS = CHATML.replace(
    "+ message['content'] + '<|im_end|>' + '\n' }}",
    "}}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}",
)
ROLES = (  # as DeepSeek has them
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% else %}{{ '<|Assistant|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
BUILT = CHATML.replace("'<|im_start|>' + message['role'] + '\n'", "'<|' + message['role'].title() + '|>'")
WORDS = "<think>", "<|Tool|>", "  ", "cat", "user"  # added tokens that no template here takes for a marker
BYTES, SPACED = make_tokenizer(), spaced_tokenizer()
TRIMMING, DEPENDING = make_tokenizer(template=TRIMMED), make_tokenizer(template=DEPENDENT)
ROLE_NAMES = ["<|User|>", "<|Assistant|>"]
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
    for raw, whole in ((True, text), (False, rendered(tokenizer, text))):  # a template may strip a line break
        if tokenizer.unk_token_id in tokenizer.encode(whole, split_special_tokens=True):
            with refuses(BadInput, "characters"):
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
    if tokenizer is not DEPENDING or "cat" in text:
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
    with refuses(BadInput, "empty"):
        chat.encode(BYTES, prompt, raw)


def test_half_a_character_is_refused() -> None:
    with refuses(BadInput, "half"):
        chat.encode(BYTES, "smile \ud83d")


def test_characters_that_would_be_lost_are_refused_by_name() -> None:
    with refuses(BadInput, "'é', '\\u202e'."):
        chat.encode(SPACED, "café \u202e é")
    with refuses(BadInput, "'ｈ' others."):
        chat.encode(SPACED, "".join(chr(ord(letter) + 0xFEE0) for letter in "abcdefghi"))


def test_a_first_token_that_is_also_the_unknown_one_is_no_unknown_character() -> None:
    """As OPT has it: every text begins with `</s>`, which stands for what is unknown as well."""
    tokenizer = begun(make_tokenizer(template=None), "<|endoftext|>")
    assert chat.encode(tokenizer, "the cat sat") == [0, *BYTES.encode("the cat sat")]
    assert chat.encode(tokenizer, "<|endoftext|>") == [0, *BYTES.encode("<|endoftext|>", split_special_tokens=True)]
    with refuses(BadInput, "'é'."):
        chat.encode(begun(spaced_tokenizer(), "<unk>"), "café", raw=True)


def begun(tokenizer: PreTrainedTokenizerFast, first: str, last: str = "") -> PreTrainedTokenizerFast:
    """The same, with a token before every text, and perhaps one after it."""
    parts = [(name, tokenizer.convert_tokens_to_ids(name)) for name in (first, last) if name]
    single = " ".join(part for part in (first, "$A", last) if part)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=parts)
    return tokenizer


def test_a_text_to_go_on_with_is_not_ended() -> None:
    """Some tokenizers put their last token after every text."""
    tokenizer = begun(make_tokenizer(), "<|im_start|>", "<|im_end|>")
    words = BYTES.encode("the cat <|im_end|>", split_special_tokens=True)
    assert chat.encode(tokenizer, "the cat <|im_end|>", raw=True) == [1, *words]
    assert chat.encode(tokenizer, "the cat") == plain_ids(BYTES, "the cat")


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
    assert chat.end_of_turn(make_tokenizer(template=PARTS), {}) == 2
    assert chat.end_of_turn(make_tokenizer(template=DROPS), {}) is None
    added = make_tokenizer(template=CHATML.replace("<|im_end|>", "<|end|>"))
    added.add_tokens(["<|end|>", "\n"])  # not special
    assert chat.end_of_turn(added, {}) == added.convert_tokens_to_ids("<|end|>")
    added.chat_template = added.chat_template.replace("<|end|>", "")  # a line break follows
    assert chat.end_of_turn(added, {}) is None


# Templates and what they do with the words ---------------------------------------------------------------------

DROPS = CHATML.replace("message['content']", "(message['words'] or '')")
FAILS = {
    "it raises": ("{{ raise_exception('Only system prompts.') }}", "fails: Only system prompts."),
    "its syntax": ("{% for message in %}", "fails:"),
    "another type": ("{{ 1 + messages[0]['content'] }}", "fails: unsupported"),
    "no template is the default": ({"tool_use": CHATML}, "fails: default"),
    "no words": (DROPS, "leaves"),
}


@given(any_texts)
def test_a_template_that_loops_over_parts_gets_parts(text: str) -> None:
    if text.strip():
        assert chat.encode(make_tokenizer(template=PARTS), text) == chat.encode(BYTES, text)


@pytest.mark.parametrize("prompt", ["Hi", "user", "a", "?", "<|im_start|>", "assistant\n"])
def test_a_prompt_that_the_template_drops_is_refused(prompt: str) -> None:
    """Also one of words that the template has anyway."""
    with refuses(BadInput, "template leaves"):
        chat.encode(make_tokenizer(template=DROPS), prompt)
    with refuses(BadInput, "template leaves"):
        chat.encode(DEPENDING, prompt)


def test_a_template_may_change_a_prompt() -> None:
    lower = make_tokenizer(template=CHATML.replace("['content']", "['content'] | lower"))
    assert chat.encode(lower, "The CAT <|IM_END|>") == chat.encode(BYTES, "the cat <|im_end|>")
    switch = make_tokenizer(template=CHATML.replace("['content']", "['content'].replace('/no_think', '')"))
    assert chat.encode(switch, "the cat /no_think") == chat.encode(BYTES, "the cat ")
    with refuses(BadInput, "template leaves"):
        chat.encode(switch, "/no_think")
    twice = make_tokenizer(template=CHATML.replace("['content']", "['content'] + ' or ' + message['content']"))
    assert chat.encode(twice, "the cat <|im_end|>") == chat.encode(BYTES, "the cat <|im_end|> or the cat <|im_end|>")
    cats = chat.encode(DEPENDING, "the cat <|im_end|> sat")
    assert read(DEPENDING, cats) == rendered(BYTES, "the cat <|im_end|> sat")
    assert special_of(DEPENDING, cats) == special_of(BYTES, plain_ids(BYTES, "hello"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("template", "words"), FAILS.values(), ids=FAILS.keys())
def test_a_template_that_fails_is_one_sentence(template: Any, words: str, tmp_path: Path, command: Command) -> None:
    tokenizer = make_tokenizer(template=template)
    with refuses(BadInput, words) as caught:
        chat.encode(tokenizer, "the cat")
    assert "\n" not in str(caught.value)
    assert chat.encode(tokenizer, "the cat", raw=True) == BYTES.encode("the cat")
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "away")  # it is said before weights are read
    for look in (load, looked_at):
        with refuses(LoadError, words):
            look(preset_of(folder), "float32", "cpu")
    (tmp_path / "away").rename(folder / "model.safetensors")
    named = ["--target", str(folder), "--prompt", "the cat", "--max-new-tokens", "2"]
    status, out, err = command("generate", *named)
    assert (status, out) == (2, "")
    assert tells(err, f"specdemo: {folder} template {words}")
    assert tells(err.splitlines()[-1], "--raw")
    assert command("generate", *named, "--raw")[0] == 0
    load(preset_of(folder, defaults=Defaults(raw=True)), "float32", "cpu").release()


def test_a_template_that_fails_for_some_prompts_fails_at_them(tmp_path: Path, command: Command) -> None:
    refuses = "{% if 'dog' in messages[0]['content'] %}{{ raise_exception('No dogs.') }}{% endif %}"
    folder = save(tiny("llama", len(BYTES)), make_tokenizer(template=refuses + CHATML), tmp_path / "model")
    named = ["race", "--target", str(folder), "--max-new-tokens", "2", "--prompt"]
    assert command(*named, "the cat")[0] == 0
    status, _, err = command(*named, "the dog")
    assert status == 2
    assert tells(err.splitlines()[-1], "template fails: No dogs. --raw")


# Tokens that are not flagged as special ------------------------------------------------------------------------


def with_roles(template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(template=template)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in (*ROLE_NAMES, *WORDS)])
    return tokenizer


ROLES_KEPT = {"written": with_roles(ROLES), "built": with_roles(BUILT), "parts": with_roles(PARTS + "<|User|>")}


@given(st.lists(st.sampled_from([*ROLE_NAMES, *SPECIAL_NAMES, *WORDS, *ODDITIES]), max_size=8).map("".join))
@pytest.mark.parametrize("kind", ["written", "built"])
def test_typed_roles_are_text_and_other_added_words_are_themselves(kind: str, text: str) -> None:
    if not text.strip():
        return
    tokenizer = ROLES_KEPT[kind]
    roles = set(tokenizer.convert_tokens_to_ids(ROLE_NAMES))
    ids, raw = chat.encode(tokenizer, text), chat.encode(tokenizer, text, raw=True)
    assert [i for i in ids if i in roles] == [i for i in plain_ids(tokenizer, "hello") if i in roles]
    assert not roles & {*raw}
    assert (read(tokenizer, ids), read(tokenizer, raw)) == (rendered(tokenizer, text), text)
    if not any(name in text for name in (*ROLE_NAMES, *SPECIAL_NAMES)):
        assert (ids, raw) == (plain_ids(tokenizer, text), tokenizer.encode(text))


def test_a_typed_role_is_text_in_each_of_its_forms() -> None:
    tokenizer = ROLES_KEPT["written"]
    user, assistant = tokenizer.convert_tokens_to_ids(ROLE_NAMES)
    ids = chat.encode(tokenizer, "hi<|Assistant|>ok <think>")
    middle = [*BYTES.encode("hi<|Assistant|>ok "), tokenizer.convert_tokens_to_ids("<think>")]
    assert ids == [user, *middle, assistant]
    for other in ROLES_KEPT.values():
        assert chat.encode(other, "<|User|>", raw=True) == BYTES.encode("<|User|>")
    respelled = with_roles(ROLES.replace("'] }}", "'].replace('user', 'User') }}"))
    assert chat.encode(respelled, "<|user|>") == [user, *BYTES.encode("<|User|>"), assistant]
    assert chat.encode(with_roles(CHATML), "<|User|>", raw=True) == [user]  # a word like others for this template
    listed = with_roles(CHATML)
    listed.chat_control_tokens = ["<|User|>"]
    assert chat.encode(listed, "<|User|>", raw=True) == BYTES.encode("<|User|>")


def test_a_typed_role_of_a_gguf_file_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    tokenizer = with_roles(ROLES)
    write_gguf(tmp_path / "tiny.gguf", tokenizer=tokenizer)
    loaded = load(preset_of(Gguf(str(tmp_path / "tiny.gguf"))), "float32", "cpu")
    user, assistant, think = tokenizer.convert_tokens_to_ids([*ROLE_NAMES, "<think>"])
    assert loaded.encode("hi<|Assistant|>ok <think>") == [user, *BYTES.encode("hi<|Assistant|>ok "), think, assistant]
    loaded.release()


# Tokens without an embedding -----------------------------------------------------------------------------------


def test_a_token_without_an_embedding_is_refused_by_name(tmp_path: Path, command: Command) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    folder = save(tiny("llama", len(BYTES)), tokenizer, tmp_path / "model")
    loaded = load(preset_of(folder), "float32", "cpu")
    assert loaded.encode("the cat") == plain_ids(BYTES, "the cat")
    for raw in (True, False):
        with refuses(BadInput, "'<tool>'"):
            loaded.encode("the <tool>", raw)
    loaded.release()
    status, _, err = command("race", "--target", str(folder), "--prompt", "a <tool>")
    assert status == 2
    assert tells(err, "'<tool>' embedding")


@pytest.mark.parametrize("where", ["template", "tokenizer"])
def test_a_token_without_an_embedding_in_every_prompt_is_refused_at_load(tmp_path: Path, where: str) -> None:
    tokenizer = make_tokenizer(template="<turn>" + CHATML if where == "template" else None)
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    if where == "tokenizer":
        begun(tokenizer, "<turn>")
    folder = save(tiny("llama", len(BYTES)), tokenizer, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for look in (load, looked_at):
        with refuses(LoadError, f"model {where} '<turn>'"):
            look(preset_of(folder), "float32", "cpu")


# The real model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    return load(find_preset("smollm2-135m"), device="cpu").tokenizer


@pytest.mark.slow
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
