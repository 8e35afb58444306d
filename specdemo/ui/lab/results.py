"""The right side of a view: Gradio's parts that show a picture, see `plots`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.components.plot import PlotData

if TYPE_CHECKING:
    from .plots import Figure, Picture, Section, Table

Updates = dict[Any, Any]
LINES, BARS = "lab-lines", "lab-bars"  # classes: what keeps its height while a plot is redrawn, see lab.css
SLOTS: dict[str, list[tuple[list[str], int]]] = {  # for each section of a view: its figures, and how many tables
    "profile": [([LINES, BARS], 3)],
    "theory": [([LINES, LINES], 1), ([BARS, LINES], 0)],
    "sweep": [([LINES] * 4, 1)],
    "domains": [([BARS] * 3, 1)],
    "lossless": [([BARS], 1), ([LINES], 0), ([BARS, LINES, LINES], 1)],
    "doctor": [([LINES, BARS, LINES, LINES], 5)],
}


def plain(text: str) -> str:
    """Text as Markdown that shows it as it is, whatever it holds."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


@dataclass(frozen=True)
class _Figure:
    column: gr.Column
    words: gr.Markdown
    plot: gr.Plot

    @classmethod
    def add(cls, kind: str) -> _Figure:
        with gr.Column(visible=False, elem_classes=["lab-figure", kind]) as column:
            return cls(column, gr.Markdown(latex_delimiters=[]), gr.Plot(show_label=False, container=False))

    def update(self, figure: Figure | None) -> Updates:
        if figure is None or not figure.plot:
            return {self.column: gr.update(visible=False)}
        words = f"**{plain(figure.title)}**\n\n" + "  \n".join(map(plain, figure.words.splitlines()))
        drawn = PlotData(type="altair", plot=figure.plot)
        return {self.column: gr.update(visible=True), self.words: words, self.plot: drawn}


@dataclass(frozen=True)
class _Section:
    column: gr.Column
    words: gr.Markdown
    figures: list[_Figure]
    tables: list[tuple[gr.Accordion, gr.Dataframe]]

    @classmethod
    def add(cls, figures: list[str], tables: int) -> _Section:
        with gr.Column(visible=False, elem_classes="lab-section") as column:
            words = gr.Markdown(latex_delimiters=[])
            with gr.Row(elem_classes="lab-figures"):
                drawn = [_Figure.add(kind) for kind in figures]
            return cls(column, words, drawn, [_add_table() for _ in range(tables)])

    def parts(self) -> Iterator[Any]:
        yield from (self.column, self.words)
        for figure in self.figures:
            yield from (figure.column, figure.words, figure.plot)
        for table in self.tables:
            yield from table

    def update(self, section: Section | None) -> Updates:
        if section is None:
            return {self.column: gr.update(visible=False)}
        words = [f"### {plain(section.title)}"] * bool(section.title)
        words += [f"**{plain(section.verdict)}**"] * bool(section.verdict)
        words += ["\n".join(f"- {plain(line)}" for line in section.words)]
        updates: Updates = {self.column: gr.update(visible=True), self.words: "\n\n".join(words)}
        for shown, figure in zip_longest(self.figures, section.figures):
            updates |= shown.update(figure)
        for (fold, frame), table in zip(self.tables, [*section.tables, *[None] * len(self.tables)], strict=False):
            updates |= _table(fold, frame, table)
        return updates


def _add_table() -> tuple[gr.Accordion, gr.Dataframe]:
    with gr.Accordion("Table", open=False, visible=False) as fold:
        return fold, gr.Dataframe(interactive=False, wrap=True, max_height=460, show_label=False, buttons=[])


def _table(fold: gr.Accordion, frame: gr.Dataframe, table: Table | None) -> Updates:
    if table is None or not table.rows:
        return {fold: gr.update(visible=False)}
    return {fold: gr.update(visible=True, label=table.title), frame: {"headers": table.headers, "data": table.rows}}


class Results:
    """The parts of one view, added to the page that is being built."""

    def __init__(self, view: str) -> None:
        self.sections = [_Section.add(figures, tables) for figures, tables in SLOTS[view]]

        self.parts = [part for section in self.sections for part in section.parts()]

    def update(self, picture: Picture) -> Updates:
        """What a picture changes; sections that it has not are hidden."""
        updates: Updates = {}
        for shown, section in zip_longest(self.sections, picture):
            updates |= shown.update(section)
        return updates
