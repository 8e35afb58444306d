"""The grid that studies share: every case writes every text with every setting, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, product
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..racing.figures import LaneFigures
from ..settings import Settings
from ..system.imports import LazyModule
from .prompts import Prompt
from .study import Study, settings_in
from .summaries import Figures, Row, Runs, summarise

if TYPE_CHECKING:
    from ..decoding.events import Event
    from ..models.loaded import Loaded
    from ..racing import race
else:
    race = LazyModule("specdemo.racing.race")

Value = TypeVar("Value")

ALONE = "none"  # the drafter of the target alone
WARM_UP = 8  # tokens
OF_TEXT = ("tokens", "rounds", "drafted", "tested", "accepted", "seconds", "tokens_per_second")


def rotation(items: Sequence[Value], turn: int) -> list[Value]:
    """The items in their order, from another one on in each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


class Grid(Study):
    """A study whose cases write texts in turns. It names its axes, figures and words.

    `texts`, `settings` and `cases` are lists of names, see `plan`. The cases begin with another one at each text, so
    that with no setting one always comes first.

    Attributes:
        axes: see `summarise`, as `units`.
        figures: of a row, by name.
        timed: whether times matter: then each case writes a few tokens before all others, to warm up.
        runs: what was measured so far.
        turn: the number of the text that is being written.
    """

    axes: ClassVar[Sequence[str]] = ()
    figures: ClassVar[Figures] = {}
    units: ClassVar[Sequence[str]] = ("prompt_id",)
    timed: ClassVar[bool] = True

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        self.runs: list[Row] = []
        self.prompt_ids: dict[str, list[int]] = {}
        self.turn = 0
        self.plan([])

    def plan(self, texts: Sequence[Row], cases: Sequence[Row] = ({},), settings: Sequence[Row] = ({},)) -> None:
        """Say what is written, and refuse what cannot be. Names of `settings_in` hold for their runs."""
        self.texts, self.cases, self.settings = texts, cases, settings
        warm_up = len(cases) if self.timed else 0
        self.steps = warm_up + len(texts) * len(settings) * len(cases)
        for text, case, setting in product(texts, cases, settings):
            self.check_run({**text, **case, **setting})

    def texts_of(self, prompts: Sequence[Prompt]) -> list[Row]:
        """The names of some prompts."""
        self.prompt_ids |= {prompt.id: self.loaded.encode(prompt.prompt) for prompt in prompts}
        return [{"prompt_id": prompt.id, "category": prompt.category} for prompt in prompts]

    def run(self) -> Iterator[str]:
        for case in self.cases if self.timed else ():
            names = {**self.texts[0], **case, **self.settings[0]}
            few = min(WARM_UP, self.settings_of(names).max_new_tokens)
            for _ in self.write({**names, "max_new_tokens": few}):
                pass
            self.done += 1
            yield "Warming up"
        for turn, text in enumerate(self.texts):
            self.turn = turn
            for settings in self.settings:
                before, found = len(self.runs), list[list[Row]]([] for _ in self.cases)
                for place in rotation(range(len(self.cases)), turn):
                    names = {**text, **self.cases[place], **settings}
                    found[place] = [{**names, **one} for one in self.write(names)]
                    self.runs[before:] = chain(*found)  # in the order of the cases, whichever began
                    self.done += 1
                    yield self.at(names)

    def check_run(self, names: Row) -> None:
        """Refuse what cannot be written."""
        race.check_run(self.loaded, self.drafter_of(names), self.ids_of(names), self.settings_of(names))

    def at(self, names: Row) -> str:
        """What was written, in words."""
        return "Writing texts"

    def ids_of(self, names: Row) -> list[list[int]]:
        """The prompts that are read."""
        return [self.prompt_ids[names["prompt_id"]]]

    def settings_of(self, names: Row) -> Settings:
        return settings_in({**self.chosen, **names})

    def drafter_of(self, names: Row) -> str:
        """The drafter that is named, or that was asked for."""
        return str(names.get("drafter", self.chosen.get("drafter", ALONE)))

    def events(self, names: Row) -> Iterator[Event]:
        (ids,) = self.ids_of(names)
        return race.start(self.loaded, self.drafter_of(names), ids, self.settings_of(names))

    def write(self, names: Row) -> Iterator[Row]:
        """Write one text: its figures, in one row or more; none if it is too short to have any."""
        with closing(self.events(names)) as events:  # type: ignore[type-var]
            yield figures_of(LaneFigures.of(events))

    @classmethod
    def with_comparison(cls, runs: Runs) -> Runs:
        """The runs with what is known of them beside others."""
        return runs

    @classmethod
    def rows_of(cls, runs: Runs) -> list[Row]:
        return summarise(cls.with_comparison(runs), cls.axes, cls.figures, cls.units)

    def rows(self) -> list[Row]:
        return self.rows_of(self.runs)


def figures_of(stats: LaneFigures) -> Row:
    """The figures of a text by the names of `OF_TEXT`."""
    return {name: getattr(stats, name) for name in OF_TEXT}
