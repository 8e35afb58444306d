"""Lanes: runs that race, each on its own clock, and their text, token by token."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..decoding.acceptance import parents_of
from ..decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from ..tokens import DraftedToken, Token
from .trace import Entry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Name = TypeVar("Name", bound=Hashable)
Step = TypeVar("Step")

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
WINDOW = 8  # tokens of the prompt kept before the text: a tokenizer needs them to decide about a leading space
LONGEST_CHARACTER = 4  # bytes, and so tokens, of one character


@dataclass(frozen=True, slots=True)
class Lane:
    """One run of a race: its name, its events, and the reader of their text."""

    name: str
    events: Iterator[Event]
    text: TextReader


def race_lanes(lanes: Sequence[Lane], isolated: bool = False) -> Iterator[Entry]:
    """Run any number of lanes, and yield every event with its lane and its text.

    The lane whose engine clock is behind goes next, so that all run under the same load, but never at the same time.
    With `isolated` they run one after the other.
    """
    by_name = {lane.name: lane for lane in lanes}
    step = (lambda event: 0.0) if isolated else (lambda event: event.seconds)
    runs = {lane.name: lane.events for lane in lanes}
    with closing(take_turns(runs, step)) as events:  # type: ignore[type-var]
        for name, event in events:
            text = by_name[name].text
            read = text.read(event)
            if isinstance(read, Round) and read.distributions:
                from .probabilities import probabilities_of  # late: it imports torch, which a replay does without

                yield Entry(name, replace(read, distributions=None), probabilities_of(read, text.name))
            else:
                yield Entry(name, read)


def write_in_turn(runs: Mapping[Name, Iterator[Event]]) -> dict[Name, list[Event]]:
    """The events of several runs, a round each in turn, of which the one that has written least goes next: whatever
    slows down the machine for a while slows all of them, at the same place of the text.

    Raises:
        Stopped: whoever waits for it has stopped it.
    """
    found: dict[Name, list[Event]] = {name: [] for name in runs}
    with closing(take_turns(runs, lambda event: len(emitted_tokens(event)))) as turns:  # type: ignore[type-var]
        for name, event in turns:
            found[name].append(event)
    return found


def take_turns(runs: Mapping[Name, Iterator[Step]], step: Callable[[Step], float]) -> Iterator[tuple[Name, Step]]:
    """What several runs yield, of which the one whose clock is behind goes next.

    Args:
        step: the time that what a run yields adds to its run's clock. If always 0, one run follows the other.
    """
    far = dict.fromkeys(runs, 0.0)
    with ExitStack() as running:
        for events in runs.values():
            running.enter_context(closing(events))  # type: ignore[type-var]
        while far:
            name = min(far, key=far.__getitem__)
            event = next(runs[name], None)
            if event is None:
                del far[name]
            else:
                far[name] += step(event)
                yield name, event


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
