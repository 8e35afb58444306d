"""One measurement of the Lab, from the request to its last message.

A message holds the run's id, a sequence number and, as far as there is news, one of these:

    progress  {"done", "of", "words"}: how far it is
    picture   all that there is to show so far, see `lab_pictures`
    values    what was measured for the fields of the form, by name
    end       {"stopped"}: it is over, and the files can be had
    status    what the model is doing before it can begin
    error     a sentence for the person
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..drafters import DRAFTERS
from .engine import Engine
from .lab_views import View
from .lanes import to_json
from .runs import Job

if TYPE_CHECKING:
    from .lab_studies import Study

PICTURE_SECONDS = 1.0  # between two pictures: what the browser draws, the engine pays for


class LabRun(Job):
    """A measurement that was asked for; `study` holds what came of it, `files` that as JSON and CSV once it is over."""

    def __init__(self, preset: str, view: View, asked: dict[str, Any]) -> None:
        super().__init__(preset)
        self.view, self.asked = view, asked
        self.study: Study | None = None
        self.files: dict[str, str] = {}
        self._pictured: int | None = None

    def _play(self, engine: Engine) -> Iterator[str]:
        yield from self._load(engine)
        batches = engine.stream(self.preset, self._measure, self.local)
        with closing(batches):
            for batch in batches:
                news: dict[str, Any] = {}
                for step in batch:
                    news |= step
                if "picture" in news:
                    self._forget_picture()
                yield self.message(**news)

    def _forget_picture(self) -> None:
        """Who comes late needs the latest picture only; the others would fill the memory."""
        if self._pictured is not None:
            self.messages[self._pictured] = to_json({"run": self.id, "seq": self._pictured})
        self._pictured = len(self.messages)

    def _measure(self, loaded: Any) -> Generator[dict[str, Any]]:
        """The measurement in the engine's thread. Pictures are made between two steps, when nothing is being timed."""
        from .lab_studies import STUDIES

        several = self.asked.get("drafters", [])  # which of them can be used was not known if another preset was loaded
        if able := [name for name in several if not DRAFTERS[name].missing(loaded)]:
            self.asked["drafters"] = able
        study = self.study = STUDIES[self.view.name](loaded, self.asked)
        began = pictured = time.monotonic()
        yield {"progress": {"done": 0, "of": study.steps, "words": "Warming up."}}
        with closing(study.run()) as steps:  # type: ignore[type-var]
            for words in steps:
                now = time.monotonic()
                if self.stop.is_set():
                    break
                left = _left(now - began, study.done, study.steps)
                news: dict[str, Any] = {
                    "progress": {"done": study.done, "of": study.steps, "words": f"{words}. {left}"}
                }
                if now - pictured >= PICTURE_SECONDS:
                    news |= _picture(study)
                    pictured = now
                yield news
        self.files = self._files(loaded, study)
        yield {**_picture(study), "values": study.values(), "end": {"stopped": self.stop.is_set()}}

    def _files(self, loaded: Any, study: Study) -> dict[str, str]:
        from ..lab.tables import csv_text, json_text

        asked = {"view": self.view.name, "preset": self.preset, "stopped": self.stop.is_set(), "asked": self.asked}
        whole = {**asked, "weights": loaded.weights, "environment": loaded.environment(), **study.result()}
        return {"json": json_text(whole), "csv": csv_text(study.rows())}


def _picture(study: Study) -> dict[str, Any]:
    """What there is to show, as news; none while that is nothing, so that the page keeps what it shows."""
    picture = study.picture()
    return {"picture": picture} if picture else {}


def _left(seconds: float, done: int, steps: int) -> str:
    if not done:
        return ""
    return f"About {max(1, round(seconds * (steps - done) / done))} s left."
