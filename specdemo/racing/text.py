"""Turns token ids into text one by one: whole characters only, and one string for every token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ..decoding.acceptance import parents_of
from ..decoding.events import Event, Finished, Prefilled
from ..types import DraftedToken, Token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
WINDOW = 8  # tokens of the prompt kept before the text: a tokenizer needs them to decide about a leading space
LONGEST_CHARACTER = 4  # bytes, and so tokens, of one character


class Detokenizer:
    """Decodes one token at a time. The bytes of an incomplete character wait for its last token.

    The returned strings, joined, are the decoded text: a token that only carries the first bytes of a
    character gets an empty string, and the one that completes it gets the character.

    Each token is decoded together with the span before it. That window always begins at the beginning of a character,
    since a tokenizer with byte fallback (Llama's) turns a whole run of bytes into marks if one is missing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        windows = (list(before[-length:]) for length in range(min(WINDOW, len(before)), 0, -1))
        self._ids = next((ids for ids in windows if UNFINISHED not in self._decode(ids)), list(before[-WINDOW:]))
        self._finished = 0  # where in `_ids` the newest finished span ends
        self._waiting = 0  # tokens after it
        self._shown = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        self._ids.append(token_id)
        self._waiting += 1
        text = self._decode(self._ids)
        if text.endswith(UNFINISHED):
            return "" if self._waiting < LONGEST_CHARACTER else self._give_up(text)
        new = text[len(self._shown) :]
        self._ids = self._ids[self._finished :]
        self._finished, self._waiting = len(self._ids), 0
        self._shown = self._decode(self._ids)
        return new

    def flush(self) -> str:
        """The rest at the end of a text: bytes that never completed a character."""
        text = self._decode(self._ids)
        new, self._shown = text[len(self._shown) :], text
        return new

    def fork(self) -> Detokenizer:
        """An independent copy, to read drafted tokens that may never become text."""
        other = copy.copy(self)
        other._ids = list(self._ids)
        return other

    def _give_up(self, text: str) -> str:
        """The waiting bytes are no character: all replacement marks but the last are final; it may still become one."""
        new, self._shown = text[len(self._shown) : -1], text[:-1]
        if len(self._ids) > 2 * WINDOW:
            self._ids, self._finished = self._ids[-WINDOW:], 0
            self._shown = self._decode(self._ids)[:-1]
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class StopStrings:
    """Says after every token whether one of the strings is complete. For one run of `decode`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], strings: Sequence[str]) -> None:
        self.strings = strings
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._longest = max(map(len, strings), default=0)
        self._read = 0
        self._tail = ""

    def __call__(self, ids: Sequence[int]) -> bool:
        if not self.strings:
            return False
        for token_id in ids[self._read :]:
            self._tail = self._tail[-self._longest :] + self._detokenizer.push(token_id)
        self._read = len(ids)
        return any(string in self._tail for string in self.strings)


class TextReader(Protocol):
    """Reads the events of one lane in order and fills in the text of their tokens; `text` is the text so far."""

    text: str

    def read(self, event: Event) -> Event:
        """The same event with text."""

    def name(self, token_id: int) -> str:
        """The text of any token by itself."""


class LaneText:
    """The `TextReader` of a lane whose tokenizer we have.

    `text` leaves out the tokens of `hidden` (the end-of-sequence ones), which the events show literally.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], hidden: frozenset[int] = frozenset()
    ) -> None:
        self.text = ""
        self._hidden = hidden
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._first = self._detokenizer.fork()
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """A token by itself: its text at the beginning of a text, with marks for bytes of incomplete characters."""
        if token_id not in self._names:
            alone = self._first.fork()
            self._names[token_id] = alone.push(token_id) + alone.flush()
        return self._names[token_id]

    def read(self, event: Event) -> Event:
        if isinstance(event, Finished):
            rest = self._detokenizer.flush()
            self.text += rest
            return replace(event, text=rest)
        if isinstance(event, Prefilled):
            return replace(event, token=self._emit(event.token))
        drafted, read = list[DraftedToken](), [self._detokenizer]  # up to the text and to each drafted token
        for guess, parent in zip(event.drafted, parents_of(event.drafted), strict=True):
            read.append(read[parent + 1].fork())
            drafted.append(replace(guess, text=read[-1].push(guess.id)))
        return replace(event, drafted=tuple(drafted), emitted=tuple(map(self._emit, event.emitted)))

    def _emit(self, token: Token) -> Token:
        """The token with its text, which is added to that of the lane."""
        hidden = token.id in self._hidden
        before = self._detokenizer.flush() if hidden else ""  # bytes that it cuts off are text
        new = self._detokenizer.push(token.id)
        self.text += before if hidden else new
        return replace(token, text=before + new)
