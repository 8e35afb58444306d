"""Limits of a single request on a page that others use too. The command line has no such limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..models.presets import Defaults


@dataclass(frozen=True, slots=True)
class Budgets:
    """The limits, by default those of a page of one's own. `of` gives those of a Space.

    `new_tokens` are those of each text. What several readers take together is bounded as that of any race: by
    `race_seconds`, by `run.MOST_BYTES` and by `request.MOST_OF_ALL`.
    `race_seconds` and `lab_seconds` are wall-clock time, without the loading of the preset. `own_models` says whether
    visitors may name models and servers: they then read files of this machine, fill its disk and ask its network.
    `watchers` is how many may watch along with one page.
    """

    new_tokens: int = 2_000
    race_seconds: float = 120.0
    lab_seconds: float = 600.0
    own_models: bool = True
    watchers: int = 64

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Budgets:
        """The budgets for the environment that the page runs in: a Space is open to everyone."""
        return cls(512, 60.0, 120.0, watchers=32) if environment.get("SPACE_ID") else cls()


def starting(defaults: Defaults, budgets: Budgets) -> Defaults:
    """A preset's defaults with no more new tokens than the budget."""
    return replace(defaults, max_new_tokens=min(defaults.max_new_tokens, budgets.new_tokens))
