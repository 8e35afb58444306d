"""Studies that are made up: a class is all that there is of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from specdemo.settings import Field
from specdemo.studies.study import DRAFTER, Study


class Counting(Study):
    """This counts."""

    name, title = "counting", "How far?"
    summary = "Count from one on."
    fields = (Field("to", "Count to", "whole", 3, 1, 9, help="The last number."), DRAFTER)
    button = "Count"
    heading, columns = "Counted", (("n", "the number", ".1f"),)

    def run(self) -> Iterator[str]:
        self.steps = self.chosen["to"]
        while self.done < self.steps:
            self.done += 1
            yield "Counting"

    def words(self) -> list[str]:
        return [f"Up to {self.done}."]

    def rows(self) -> list[dict[str, Any]]:
        return [{"n": number + 1} for number in range(self.done)]


class Long(Study):
    """A study of a hundred steps that take a second in all, but for the middle, where it waits until it may go on."""

    gate = True

    def run(self) -> Iterator[str]:
        self.steps = 100
        while self.done < self.steps:
            self.done += 1
            yield "Counting"
            time.sleep(0.01)
            while self.done == 50 and not Long.gate:
                time.sleep(0.01)
                yield "Counting"

    def rows(self) -> list[dict[str, Any]]:
        return []


class Endless(Study):
    """A study that measures for as long as it is let."""

    name = "endless"

    def run(self) -> Iterator[str]:
        while True:
            self.done += 1
            time.sleep(0.01)
            yield "Counting"

    def words(self) -> list[str]:
        return [f"{self.done} steps"] * bool(self.done)

    def rows(self) -> list[dict[str, Any]]:
        return [{"steps": self.done}]
