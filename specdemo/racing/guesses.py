"""The guesses of people, read as tokens, and a game in which people are the drafter, see `game`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from math import inf

from ..decoding.acceptance import parents_of
from ..decoding.events import Event, Finished, Round, emitted_tokens
from ..errors import BadInput
from ..formats import printable
from ..models.chat import special_ids
from ..models.loaded import Loaded
from ..models.translation import last_text, tokens_behind
from ..settings import is_text
from . import race
from .lanes import race_lanes
from .request import PLAIN, Request
from .trace import Entry

SHOWN = 120  # characters of the text before a guess, at most, to one who types it


def guessed_by(loaded: Loaded, ask: Callable[[str], Iterable[str]]) -> Loaded:
    """The same preset with people who guess for its drafter `you`.

    Args:
        ask: gets the text so far, prompt included, and returns guesses of what follows, as they were typed: one that
            begins with a new word begins with a space.
    """
    tokenizer, specials = loaded.tokenizer, special_ids(loaded.tokenizer)

    def guesses(context: Sequence[int]) -> list[list[int]]:
        before = last_text(context, specials)
        text = str(tokenizer.decode(context, clean_up_tokenization_spaces=False))
        typed = [*ask(text)]
        if not all(map(is_text, typed)):
            raise BadInput("A guess holds half of a character (a lone surrogate), which is not text.")
        return [tokens_behind(tokenizer, before, guess) for guess in typed]

    return replace(loaded, parts=replace(loaded.parts, guesses=guesses))


def guessed_in_lines(loaded: Loaded, ask: Callable[[str], str | None]) -> Loaded:
    """The same preset with one person who guesses a line in each round; "" is no guess.

    Args:
        ask: gets the last two lines so far, for a terminal. After None it is not called again.
    """
    ended = False

    def line(text: str) -> list[str]:
        nonlocal ended
        typed = None if ended else ask(printable("\n".join(text.split("\n")[-2:])[-SHOWN:]))
        ended = typed is None
        return [typed] if typed else []

    return guessed_by(loaded, line)


def recorded_guesses(loaded: Loaded, prompt_tokens: int, events: Iterable[Event]) -> Loaded:
    """The same preset with what people guessed in a recorded lane."""
    drafts, read = dict[int, list[list[int]]](), prompt_tokens  # by the number of tokens before them
    for event in events:
        if isinstance(event, Round):
            paths = list[list[int]]()
            for token, parent in zip(event.drafted, parents_of(event.drafted), strict=True):
                paths.append([*(paths[parent] if parent >= 0 else ()), token.id])
            drafts[read] = paths[::-1]  # the whole path of a chain comes first
        read += len(emitted_tokens(event))
    return replace(loaded, parts=replace(loaded.parts, guesses=lambda context: drafts.get(len(context), [])))


def play(loaded: Loaded, request: Request) -> Iterator[Entry]:
    """A game from its beginning: the lane of those who guess goes as far as they have guessed, and then every other
    lane until it has as many tokens. So its lanes are those of a race that was stopped."""
    assert request.guesses is not None
    rounds, far = iter(request.guesses), 0.0  # tokens of the first lane
    asked = guessed_by(loaded, lambda text: next(rounds, ()))

    def as_far_as_guessed(events: Iterator[Event], count: int) -> Iterator[Event]:
        nonlocal far
        with closing(events):  # type: ignore[type-var]
            for event in islice(events, count):
                far += inf if isinstance(event, Finished) else len(emitted_tokens(event))
                yield event
            following = next(events, None)  # of a text that has not ended a pass, which nobody hears of
            if isinstance(following, Finished):
                far = inf
                yield following

    def as_far_as_first(events: Iterator[Event]) -> Iterator[Event]:
        written = 0
        with closing(events):  # type: ignore[type-var]
            for event in events:
                written += len(emitted_tokens(event))
                yield event
                if written >= far:
                    break

    prompt_ids = loaded.encode(request.prompt, request.raw)
    race.check_lanes(asked, [*request.lanes.values()], [prompt_ids], request.settings)
    first, *_ = request.drafted
    runs = {}
    for name in dict.fromkeys((first, *request.lanes)):
        lane = request.lanes[name]
        settings = lane.settings_in(request.settings)
        events = race.start(asked, lane.drafter, prompt_ids, settings, distributions=name != PLAIN)
        runs[name] = as_far_as_guessed(events, 1 + len(request.guesses)) if name == first else as_far_as_first(events)
    yield from race_lanes(race.lanes_of(loaded, prompt_ids, runs), isolated=True)
