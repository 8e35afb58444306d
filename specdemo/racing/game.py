"""What is asked for in a game, in which people guess what the target writes next; `guesses.play` plays it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ..drafters.names import behind
from ..errors import BadInput
from ..models.presets import Defaults
from ..settings import AUTO, MATCH, SETTINGS
from .request import DraftedLane, Request

OPENING = 8  # tokens that the target writes before the first guess, in rounds without one
MOST_ROUNDS = OPENING + 10  # of a game
MOST_GUESSES = 65  # in a round: of the most watchers of a page, and of the one who shares it
LONGEST_GUESS = 80  # characters
Guess = Annotated[str, Field(min_length=1, max_length=LONGEST_GUESS)]
ROUNDS = TypeAdapter(
    Annotated[list[Annotated[list[Guess], Field(max_length=MOST_GUESSES)]], Field(max_length=MOST_ROUNDS)]
)


def read_guesses(text: Any) -> tuple[tuple[str, ...], ...]:
    """The guesses of a game as a page sends them: a JSON list with a list of texts for each round."""
    try:
        return tuple(map(tuple, ROUNDS.validate_json(text, strict=True)))
    except ValidationError as error:
        raise BadInput(
            f"A game has at most {MOST_ROUNDS} rounds with {MOST_GUESSES} guesses each, and a guess has at most "
            f"{LONGEST_GUESS} characters."
        ) from error


def game(request: Request, guesses: tuple[tuple[str, ...], ...], defaults: Defaults) -> Request:
    """The race in which people guess for this prompt, against the preset's drafter and prompt lookup. They draft a tree
    if a round has several guesses."""
    k, tree = SETTINGS["k"].value, any(len(each) > 1 for each in guesses)
    rivals = dict.fromkeys((behind(defaults.drafter), "prompt-lookup"))
    settings = replace(request.settings, k=AUTO, tree=tree, rule=MATCH, ahead=0, grammar="")
    more = tuple(DraftedLane(name, k) for name in rivals if name != "none")
    return Request(request.prompt, request.preset, "you", settings, request.raw, True, more, guesses=guesses)
