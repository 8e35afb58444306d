"""Token ids to text, as they come: whole characters only, and one string for every token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .events import Event, Finished, Round, Spans, emitted_tokens

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
WINDOW = 8  # tokens of the prompt's end that are read again, for tokenizers that join words by their neighbours


class Detokenizer:
    """Decodes one token at a time; the bytes of an incomplete character wait for its last token.

    The returned strings, joined, are the decoded text: a token that only carries the first bytes of a
    character gets an empty string, and the one that completes it gets the character.

    Only the tokens of the last string are decoded again with the new ones. They begin where a character
    begins, and they tell the tokenizer that what follows is not the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._last = list(before[-WINDOW:])  # the tokens of the last string
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        self._waiting.append(token_id)
        new = self._new()
        return "" if new.endswith(UNFINISHED) else self._show(new)

    def flush(self) -> str:
        """What waits at the end of a text: bytes that never became a character."""
        return self._show(self._new())

    def fork(self) -> Detokenizer:
        """An independent copy, to read drafted tokens that may never become text."""
        other = Detokenizer(self.tokenizer)
        other._last, other._waiting = list(self._last), list(self._waiting)
        return other

    def _new(self) -> str:
        return self._decode([*self._last, *self._waiting])[len(self._decode(self._last)) :]

    def _show(self, new: str) -> str:
        if new:
            self._last, self._waiting = self._waiting, []
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class StopStrings:
    """Answers, token by token, whether one of the strings is now complete. For one run of `decode`."""

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


class LaneText:
    """Gives every event of one lane the text of its tokens, and keeps the text so far.

    `text` leaves out the tokens of `hidden` (the end-of-sequence ones), which `Spans` show literally.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], hidden: frozenset[int] = frozenset()
    ) -> None:
        self.text = ""
        self._hidden = hidden
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)

    def read(self, event: Event) -> Spans:
        """The strings of an event's emitted and drafted tokens."""
        drafted: list[str] = []
        if isinstance(event, Round):
            fork = self._detokenizer.fork()
            drafted = [fork.push(token.id) for token in event.drafted]
        emitted = []
        for token in emitted_tokens(event):
            emitted.append(self._detokenizer.push(token.id))
            self.text += "" if token.id in self._hidden else emitted[-1]
        if isinstance(event, Finished) and (rest := self._detokenizer.flush()):
            emitted.append(rest)
            self.text += rest
        return Spans(tuple(emitted), tuple(drafted))
