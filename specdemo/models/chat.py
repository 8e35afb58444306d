"""Encodes a prompt as token ids. Whatever a person typed stays text."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..types import BadInput, is_text

MARK = "THE-WORDS-OF-THE-PERSON"  # takes the place of the prompt to find the template's own tokens


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool = False, template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt: a user's turn in the chat template, or plain text if `raw` or without a template.

    Special tokens that the person typed, such as `<|im_end|>`, are encoded as plain characters. All other text gets the
    ids that the tokenizer gives it.

    Raises:
        BadInput: the prompt is blank, is not text that can be encoded, or has characters the model cannot read.
    """
    if not prompt.strip():
        raise BadInput("The prompt is empty: type something first.")
    if not is_text(prompt):
        raise BadInput("The prompt holds half of a character (a lone surrogate), which is not text.")
    as_it_is = raw or not tokenizer.chat_template
    ids = _as_text(tokenizer, prompt) if as_it_is else _in_template(tokenizer, prompt, template_kwargs or {})
    if (lost := tokenizer.unk_token_id) in ids:  # all unknown characters would become this one token
        unknown = [c for c in dict.fromkeys(prompt) if lost in _as_text(tokenizer, c)]
        if unknown:
            shown = ", ".join(map(repr, unknown[:8])) + (" and others" if len(unknown) > 8 else "")
            raise BadInput(f"This model cannot read some of these characters: {shown}. Leave them out.")
    return ids


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> int | None:
    """The special token that the chat template puts right after an answer, if there is one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARK}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, **template_kwargs))
    except TemplateError:  # a template without answers
        return None
    after = tokenizer.encode(text.rpartition(MARK)[2], add_special_tokens=False)
    return after[0] if after and after[0] in special_ids(tokenizer) else None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of special tokens: markers of turns, of the beginning and of the end."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _as_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    return list(tokenizer.encode(prompt, split_special_tokens=True))  # with the tokenizer's own first token, if any


def _in_template(tokenizer: PreTrainedTokenizerBase, prompt: str, template_kwargs: dict[str, Any]) -> list[int]:
    def render(content: str) -> str:
        turns = [{"role": "user", "content": content}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **template_kwargs))

    def plain(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    specials = special_ids(tokenizer)
    text, around = render(prompt), render(MARK)
    ids = plain(text)
    # Unknown characters become the unknown token too. It is a special one that was typed only if its name was typed.
    telling = specials - {tokenizer.unk_token_id} if str(tokenizer.unk_token) not in prompt else specials
    if [i for i in ids if i in telling] == [i for i in plain(around) if i in telling]:
        return ids  # every special token is one of the template's own

    # Cut the text at the template's special tokens next to the prompt, and encode what is between them with special
    # tokens as plain text. The cuts change nothing else, since no token spans a special one.
    before, _, after = around.partition(MARK)
    names = [tokenizer.convert_ids_to_tokens(i) for i in specials]
    start = max((before.rfind(name) + len(name) for name in names if name in before), default=0)
    end = min((after.find(name) for name in names if name in after), default=len(after))
    whole = text.startswith(before) and text.endswith(after)
    words = text[len(before) : len(text) - len(after)] if whole else prompt  # some templates strip it
    middle = tokenizer.encode(before[start:] + words + after[:end], add_special_tokens=False, split_special_tokens=True)
    return [*plain(before[:start]), *middle, *plain(after[end:])]
