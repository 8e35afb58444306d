"""Encodes a prompt as token ids. Whatever a person types stays text."""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from ..errors import BadInput
from ..formats import reason
from ..settings import is_text

MARK = "THE-WORDS-OF-THE-PERSON"  # put in the place of the prompt to find the template's own text
MARKED = re.compile(MARK, re.IGNORECASE)  # some templates change the case
PIECES = re.compile(r"\w+|[^\w\s]")
TAG = re.compile(r"(?=.*[^\W_])(?:[^\w\s▁].*|.*[^\w\s▁])", re.DOTALL)  # a name like `<|User|>`: neither a word nor dots
CONVERSATIONS = ("user",), ("user", "assistant"), ("system", "user")  # in which templates show their markers
RAW = "Raw text (--raw, or raw = true in a preset) does without it."


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    raw: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    rows: int | None = None,
) -> list[int]:
    """Token ids of a prompt: a user's turn in the chat template, or plain text if `raw` or without a template.

    Special tokens and the template's own markers that the person typed, such as `<|im_end|>`, are encoded as plain
    characters. All other text gets the ids that the tokenizer gives it.

    Args:
        rows: of the model's embedding, in which added tokens may be missing; None is enough for all.
    """
    if not prompt.strip():
        raise BadInput("The prompt is empty: type something first.")
    if not is_text(prompt):
        raise BadInput("The prompt holds half of a character (a lone surrogate), which is not text.")
    ids = _ids(tokenizer, prompt, raw, template_kwargs or {})
    lost = tokenizer.unk_token_id  # all unknown characters would become this one token
    if lost in ids and lost in _plain(tokenizer, prompt):
        unknown = [c for c in dict.fromkeys(prompt) if lost in _plain(tokenizer, c)]
        if unknown:
            shown = ", ".join(map(repr, unknown[:8])) + (" and others" if len(unknown) > 8 else "")
            raise BadInput(f"This model cannot read some of these characters: {shown}. Leave them out.")
    if unread := _without_embedding(tokenizer, ids, rows):
        raise BadInput(f"This model cannot read the token {unread}: it has no embedding for it.")
    return ids


def trouble(
    tokenizer: PreTrainedTokenizerBase, raw: bool, template_kwargs: dict[str, Any], rows: int | None
) -> str | None:
    """A sentence on why no prompt at all can be encoded; None if prompts can be. Arguments are as in `encode`."""
    raw = raw or not tokenizer.chat_template
    try:
        ids = _ids(tokenizer, MARK, raw, template_kwargs)
    except BadInput as error:
        return str(error)
    added = tokenizer.added_tokens_decoder  # no words of `MARK` are among them
    unread = _without_embedding(tokenizer, [index for index in ids if index in added], rows)
    puts = f"puts the token {unread} into every prompt, but the model has no embedding for it."
    return unread and (f"Its tokenizer {puts}" if raw else f"Its chat template {puts} {RAW}")


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> int | None:
    """The special or added token that the chat template puts directly after an answer, if there is one."""
    if not tokenizer.chat_template:
        return None
    for as_parts in (False, True):
        try:
            text = _render(tokenizer, template_kwargs, as_parts, user="Hi", assistant=MARK)
        except Exception:  # a template without answers
            continue
        if found := list(MARKED.finditer(text)):
            after = tokenizer.encode(text[found[-1].end() :], add_special_tokens=False)
            return after[0] if after and after[0] in {*special_ids(tokenizer), *_tags(tokenizer)} else None
    return None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of special tokens: markers of turns, of the beginning and of the end."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool, template_kwargs: dict[str, Any]) -> list[int]:
    if tokenizer.chat_template and not raw:
        return _in_template(tokenizer, prompt, template_kwargs)
    ids = _as_text(tokenizer, prompt)
    markers = _markers(tokenizer, ids, template_kwargs)
    return _as_text(_splitting(tokenizer, markers), prompt) if markers else ids


def _as_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Ids with the tokenizer's own first token, if any, but without one that ends a text, since the text goes on."""
    ids, words = list(tokenizer.encode(prompt, split_special_tokens=True)), _plain(tokenizer, prompt)
    ends = (start + len(words) for start in range(len(ids)) if words == ids[start : start + len(words)])
    return ids[: next(ends, len(ids))] if words else ids


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def _without_embedding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], rows: int | None) -> str | None:
    """The name of the first token that is not in an embedding of `rows` rows; None if there is none."""
    missing = next((index for index in ids if rows is not None and index >= rows), None)
    return None if missing is None else repr(tokenizer.convert_ids_to_tokens(missing))


# The chat template -----------------------------------------------------------------------------------------


def _render(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], as_parts: bool, **turns: str) -> str:
    """Turns by role in the chat template, and the beginning of an answer if the last turn is the person's.

    Args:
        as_parts: give messages as lists of parts, for templates of models that also see pictures.
    """
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
        for role, text in turns.items()
    ]
    answering = messages[-1]["role"] == "user"
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering, **template_kwargs)
    return str(text)


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: str, template_kwargs: dict[str, Any]) -> tuple[str, str]:
    """The text of a person's turn with the prompt, and with `MARK` instead."""
    failure = None
    for as_parts in (False, True):
        try:
            text, around = (_render(tokenizer, template_kwargs, as_parts, user=words) for words in (prompt, MARK))
        except Exception as error:  # a template is foreign code
            failure = failure if as_parts else error
        else:
            if _comes_through(prompt, text, MARKED.sub(" ", around)):
                return text, around
    wrong = f"fails: {reason(failure) or type(failure).__name__}" if failure else "leaves the prompt out"
    raise BadInput(f"The chat template of this model {wrong}. {RAW}") from failure


def _comes_through(prompt: str, text: str, around: str) -> bool:
    """Whether a text holds some of the prompt, beyond what the template's own text holds anyway.

    Templates may change a prompt: they strip it, or take out switches such as `/no_think`.
    """
    text, around = text.casefold(), around.casefold()
    return any(text.count(piece) > around.count(piece) for piece in PIECES.findall(prompt.casefold()))


def _in_template(tokenizer: PreTrainedTokenizerBase, prompt: str, template_kwargs: dict[str, Any]) -> list[int]:
    def plain(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    text, around = _rendered(tokenizer, prompt, template_kwargs)
    ids, around_ids = plain(text), plain(around)
    markers = _markers(tokenizer, ids, template_kwargs, around_ids)
    specials = special_ids(tokenizer) | markers.keys()
    # Unknown characters become the unknown token too. A special token was typed only if its name was typed.
    telling = specials - {tokenizer.unk_token_id} if str(tokenizer.unk_token) not in prompt else specials
    if _among(telling, ids) == _among(telling, around_ids):
        return ids  # all special tokens are the template's own

    # Cut the text at the template's special tokens next to the prompt, and encode what is between them as plain text.
    # The cuts change nothing else, since no token spans a special one.
    names = sorted((str(tokenizer.convert_ids_to_tokens(index)) for index in specials), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, names)))
    marks = list(MARKED.finditer(around))  # none if the template reads the prompt, and writes it only then
    if marks:
        before, after = around[: marks[0].start()], around[marks[-1].end() :]
    else:
        before, _, after = text.partition(prompt.strip())
    found = list(special.finditer(text))
    first = len(special.findall(before))
    last = max(len(found) - len(special.findall(after)), first)
    start = found[first - 1].end() if first else 0
    end = found[last].start() if last < len(found) else len(text)
    return [*plain(text[:start]), *_plain(_splitting(tokenizer, markers), text[start:end]), *plain(text[end:])]


def _markers(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], template_kwargs: dict[str, Any], around: Sequence[int] = ()
) -> dict[int, str]:
    """Tokens, by id, that structure a conversation in the chat template but are not flagged as special.

    Args:
        ids: of the text in which they may be.
        around: ids of the template's own text; if it has the same ones, none was typed.
    """
    tags = _tags(tokenizer)
    found = _among(tags, ids)
    if found == _among(tags, around) or not tokenizer.chat_template:
        return {}
    written = [*(tokenizer.chat_control_tokens or ())]
    with suppress(ValueError):  # with several templates and no default
        written.append(tokenizer.get_chat_template(template_kwargs.get("chat_template")))
    for roles, as_parts in product(CONVERSATIONS, (False, True)):  # a template may build a name, say from a role
        with suppress(Exception):  # it may not support a role
            written.append(_render(tokenizer, template_kwargs, as_parts, **dict.fromkeys(roles, MARK)))
    return {i: tags[i] for i in found if any(tags[i] in text for text in written)}


def _tags(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Added tokens, by id, that are not flagged as special but look like markers."""
    added = tokenizer.added_tokens_decoder.items()
    return {i: token.content for i, token in added if not token.special and TAG.fullmatch(token.content.strip())}


def _among(some: Container[int], ids: Sequence[int]) -> list[int]:
    return [index for index in ids if index in some]


def _splitting(tokenizer: PreTrainedTokenizerBase, markers: Mapping[int, str]) -> PreTrainedTokenizerBase:
    """A tokenizer that treats these tokens as special, since only special tokens can be split."""
    if not markers:
        return tokenizer
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(name, special=True) for name in markers.values()], special_tokens=True)
    return other
