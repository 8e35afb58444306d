"""The right side of a study: Gradio's parts that show its sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

from ...studies.study import Study
from ...studies.tables import Table
from .draw import Drawn, Figure

Updates = dict[Any, Any]
REDRAW = "() => { setTimeout(() => window.dispatchEvent(new Event('resize')), 50); }"  # a hidden plot has no width
PASTE: dict[str, Any] = {"label": "To paste", "lines": 1, "wrap_lines": True, "show_line_numbers": False}
PASTE |= {"interactive": False, "buttons": ["copy"]}


def plain(text: str) -> str:
    """Text as Markdown that shows it as it is, whatever it holds."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


class _Figure:
    def __init__(self) -> None:
        with gr.Column(visible=False, elem_classes="lab-figure") as self.column:
            self.words = gr.Markdown(latex_delimiters=[])
            with gr.Row() as self.row:
                self.plot = gr.Plot(show_label=False, container=False)
        self.parts = [self.column, self.words, self.row, self.plot]

    def update(self, figure: Figure | None) -> Updates:
        if figure is None:
            return {self.column: gr.update(visible=False)}
        words = f"**{plain(figure.title)}**\n\n" + "  \n".join(map(plain, figure.words.splitlines()))
        drawn = PlotData(type="altair", plot=figure.plot)
        kept = gr.update(min_height=figure.height)  # while a plot is redrawn there is nothing
        return {self.column: gr.update(visible=True), self.words: words, self.row: kept, self.plot: drawn}


class _Section:
    def __init__(self, figures: int, tables: int, folded: bool = False, pasted: bool = False) -> None:
        column = partial(gr.Accordion, "Details", open=False) if folded else gr.Column
        with column(visible=False, elem_classes="lab-section") as self.column:
            self.words = gr.Markdown(latex_delimiters=[])
            with gr.Row(elem_classes="lab-figures"):
                self.figures = [_Figure() for _ in range(figures)]
            self.paste = [gr.Code(visible=False, **PASTE) for _ in range(pasted)]
            self.tables = [_Table() for _ in range(tables)]
        if folded:
            self.column.expand(None, js=REDRAW)
        shown: list[_Figure | _Table] = [*self.figures, *self.tables]
        self.parts = [self.column, self.words, *self.paste, *(part for one in shown for part in one.parts)]

    def update(self, drawn: Drawn | None) -> Updates:
        if drawn is None:
            return {self.column: gr.update(visible=False)}
        section, figures = drawn
        words = [f"### {plain(section.title)}"] * bool(section.title)
        words += [f"**{plain(section.verdict)}**"] * bool(section.verdict)
        words += ["\n".join(f"- {plain(line)}" for line in section.words)]
        updates: Updates = {self.column: gr.update(visible=True), self.words: "\n\n".join(words)}
        for part in self.paste:
            updates[part] = gr.update(value=section.paste, visible=bool(section.paste))
        return updates | _updates(self.figures, figures) | _updates(self.tables, section.tables)


class _Table:
    def __init__(self) -> None:
        with gr.Accordion("Table", open=False, visible=False) as self.fold:
            self.frame = gr.Dataframe(interactive=False, wrap=True, max_height=460, show_label=False, buttons=[])
        self.parts = [self.fold, self.frame]

    def update(self, table: Table | None) -> Updates:
        if table is None or not table.rows:
            return {self.fold: gr.update(visible=False)}
        shown = {"headers": table.headers, "data": table.rows}
        return {self.fold: gr.update(visible=True, label=table.title), self.frame: shown}


def _updates(parts: Sequence[Any], shown: Sequence[Any]) -> Updates:
    """What changes; parts that nothing is left for are hidden."""
    updates: Updates = {}
    for part, one in zip_longest(parts, shown):
        updates |= part.update(one)
    return updates


class Results:
    """The parts of one study, added to the page that is being built."""

    def __init__(self, study: type[Study]) -> None:
        first, *others = ((len(plots), study.most_tables) for plots in study.plots)
        front = _Section(first[0], 0, pasted=True) if study.has_details else _Section(*first)
        self.sections = [front, *(_Section(*one, folded=study.has_details) for one in others)]
        self.parts = [part for section in self.sections for part in section.parts]

    def update(self, sections: Sequence[Drawn | None]) -> Updates:
        """What these change."""
        return _updates(self.sections, sections)
