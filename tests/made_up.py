"""A study that is made up: its class is all that there is of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdemo.studies.study import DRAFTER, Study
from specdemo.types import Field


class Counting(Study):
    """This counts."""

    name, title = "counting", "How far?"
    summary = "Count from one on."
    fields = (Field("to", "Count to", "whole", 3, 1, 9, help="The last number."), DRAFTER)
    button = "Count"
    heading, columns = "Counted", (("n", "the number", ".1f"),)

    def run(self) -> Iterator[str]:
        self.steps = self.asked["to"]
        while self.done < self.steps:
            self.done += 1
            yield "Counting"

    def words(self) -> list[str]:
        return [f"Up to {self.done}."]

    def rows(self) -> list[dict[str, Any]]:
        return [{"n": number + 1} for number in range(self.done)]
