"""What the loop asks before each round how many tokens to draft, and whether as a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol

from ..settings import Settings
from .drafter import Drafter
from .events import Round


class Form(NamedTuple):
    """Of a draft: K, whether it is a tree, and when it stops, see `DraftOptions`."""

    k: int
    tree: bool = False
    stop_below: float = 0.0


class Chooser(Protocol):
    """Chooses for one run. K = auto is `adaptive_k.DraftLengthController`."""

    def choose(self, most: int, last: Round | None, drafter: Drafter, ids: Sequence[int], readers: int) -> Form:
        """The form of the draft that follows the text `ids`, after the `last` round of this run.

        Args:
            most: tokens for which a path of the draft has room.
            readers: the prompts that are decoded at once, and share their passes.
        """


class Given:
    """The form of each round as it is given: always the same, or as a trace recorded it."""

    def __init__(self, forms: Iterable[Form]) -> None:
        self.forms = iter(forms)

    def choose(self, most: int, last: Round | None, drafter: Drafter, ids: Sequence[int], readers: int) -> Form:
        k, tree, stop_below = next(self.forms)
        return Form(k if tree and most else min(k, most), tree, stop_below)


def fixed(settings: Settings) -> Given:
    """The K and the form that were asked for, in every round."""
    assert isinstance(settings.k, int), "K = auto needs a chooser"
    return Given(repeat(Form(settings.k, settings.tree)))
