"""Prompt files, and which prompts a model can read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadInput
from .tables import group_by

if TYPE_CHECKING:
    from ..models.loaded import Loaded

ALL = "all"  # the category that holds every prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    category: str
    prompt: str


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines of `id`, `category` and `prompt`."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of a line
    except OSError as error:
        raise BadInput(f"The prompts cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name} is no text in UTF-8.") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise BadInput(f"{path.name} holds no prompts.")
    if twice := [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise BadInput(f"{path.name} has two prompts with the id {twice[0]!r}.")
    if any(prompt.category == ALL for prompt in prompts):
        raise BadInput(f"{path.name} has a category called {ALL!r}, which stands for all of them.")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        prompt = Prompt(**json.loads(line))
        if all(isinstance(text, str) for text in astuple(prompt)):
            "".join(astuple(prompt)).encode()  # half a character cannot be written to a file
            return prompt
    except (ValueError, TypeError, RecursionError):
        pass
    raise BadInput(f"{path.name}, line {number}: every line must be an object of id, category and prompt, all texts.")


def readable(loaded: Loaded, prompts: Sequence[Prompt]) -> tuple[list[Prompt], str]:
    """Those that the model can read, and a sentence on the others, if any: a character model may know no digits."""
    can: list[Prompt] = []
    cannot: list[str] = []
    for prompt in prompts:
        try:
            loaded.encode(prompt.prompt)
        except BadInput:
            cannot.append(prompt.id)
        else:
            can.append(prompt)
    names = ", ".join(cannot)
    if cannot and not can:
        raise BadInput(f"This model can read none of the prompts ({names}): they hold characters it does not know.")
    return can, f"Left out, since this model cannot read all their characters: {names}." if cannot else ""


def some(prompts: Sequence[Prompt], each: int) -> list[Prompt]:
    """The first `each` prompts of every category, the categories in turn; all as they come if that is 0."""
    groups = group_by(prompts, lambda prompt: prompt.category).values()
    return [group[place] for place in range(each) for group in groups if place < len(group)] if each else [*prompts]
