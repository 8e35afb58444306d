"""One measurement of the Lab, from the request to the files of what came of it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from sys import getsizeof
from typing import Any

from ...drafters.names import drafter_class
from ...formats import formatted
from ...studies.study import Study
from ...studies.tables import csv_text, json_text
from ..engine import Engine
from ..jobs import STUDY, Job
from .draw import Drawn, drawn

PICTURE_SECONDS = 2.0  # between two pictures: what the browser draws, the engine pays for


class LabRun(Job):
    """A measurement that was asked for, and what there is of it so far.

    Attributes:
        picture: all that there is to show.
        pictured: how many pictures there were.
        values, measured: what was measured for fields of the form, and beside them.
        files: the result as JSON and CSV, and as a page of HTML where there is one, once it is over.
        outcome: how it ended, in words.
    """

    kind = STUDY

    def __init__(self, preset: str, study: type[Study], chosen: dict[str, Any], seconds: float | None = None) -> None:
        super().__init__(preset, seconds)
        self.study, self.chosen = study, chosen
        self.picture: list[Drawn | None] = []
        self.pictured = 0
        self.values: dict[str, Any] = {}
        self.measured: Any = None
        self.files: dict[str, str] = {}
        self.outcome = ""
        self._ends: float | None = None  # when it is likely to end, by the monotonic clock

    @property
    def work(self) -> str:
        return work_of(self.study)

    def seconds_left(self) -> float | None:
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    @property
    def size(self) -> int:
        figures = [figure for drawn in self.picture if drawn for figure in drawn[1] if figure]
        plots = sum(getsizeof(figure.plot) for figure in figures)
        return super().size + plots + sum(map(getsizeof, self.files.values()))

    def _play(self, engine: Engine) -> Iterator[str]:
        """How far it is: its `share`, None if that is not known, in `words`, and how many pictures there are; then its
        `end` in words."""
        for status in self._load(engine):
            if status.stage == "loading":
                yield self.message(share=status.fraction, words=f"The model is not ready yet: {status.words}")
        with closing(engine.stream(self.preset, self._measure, self.local, self.work, self.seconds_left)) as batches:
            for batch in batches:
                if steps := [item for item in batch if not isinstance(item, str)]:  # its own steps say enough
                    share, words = steps[-1]
                    yield self.message(share=share, words=words, pictured=self.pictured)
        yield self.message(end=self.outcome, pictured=self.pictured)

    def _measure(self, loaded: Any) -> Generator[tuple[float, str]]:
        """The measurement in the engine's thread: yields how far it is, from 0 to 1 and in words. Pictures are made
        between two steps, when nothing is being timed."""
        # Which of them can be used was not known if another preset was loaded.
        several = self.chosen.get("drafters", [])
        if able := [name for name in several if not drafter_class(name).needs(loaded.parts).missing]:
            self.chosen["drafters"] = able
        study = self.study(loaded, self.chosen)
        self.chosen = study.without_secrets(self.chosen)
        began = pictured = time.monotonic()
        yield 0.0, "Warming up"
        whole = False
        with self._limited(), closing(study.run()) as steps:  # type: ignore[type-var]
            for words in steps:
                now = time.monotonic()
                if self.stop.is_set():
                    break
                if now - pictured >= PICTURE_SECONDS:
                    self._show(study)
                    pictured = now
                if study.done:
                    self._ends = now + (now - began) * (study.steps - study.done) / study.done
                share = study.done / study.steps
                yield share, f"{words}, {share:.0%}. {self._left_in_words()}".rstrip()
            else:
                whole = True
        self.values, self.measured = study.values(), study.measured()
        self._show(study)
        stopped = not whole and self.stop.is_set()
        until = "These are the results so far." if self.picture else "There are no results yet."
        after = f" after {self.limit}" if self.overdue and stopped else ""
        self.outcome = f"Stopped{after}. {until}" if stopped else "Done."
        if self.picture:
            self.files = self._files(loaded, study)

    def _left_in_words(self) -> str:
        left = self.seconds_left()
        return "" if left is None else f"About {formatted(left, 'wait')} left"

    def _show(self, study: Study) -> None:
        """What there is to show, once there is something: until then the page keeps what it shows."""
        if any(picture := drawn(study.sections())):
            self.picture, self.pictured = picture, self.pictured + 1

    def _files(self, loaded: Any, study: Study) -> dict[str, str]:
        chosen = {"view": self.study.name, "preset": self.preset, "stopped": self.stop.is_set(), "asked": self.chosen}
        whole = {**chosen, "weights": loaded.weights, "environment": loaded.environment(), **study.result()}
        page = study.page()
        return {"json": json_text(whole), "csv": csv_text(study.rows())} | ({"html": page} if page else {})


def work_of(study: type[Study]) -> str:
    """What a study is called in the line."""
    return f"{STUDY} {study.name}"
