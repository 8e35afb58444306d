"""The plots of the studies as Vega-Lite, which Gradio draws: lines and bars, with whiskers and a line to compare with.

Gradio's own `LinePlot` and `BarPlot` have neither whiskers nor such a line.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...formats import formatted
from ...studies.plots import Axis, Plot, Section
from ...studies.statistics import Spread
from ...studies.tables import Rows

Layer = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
HEIGHT, USUAL_NAMES, LEGEND_LINE = 340, 3, 15  # px of a plot with its axes and so many names; of one more
CROWD, MOST_LABELS = 40, 20  # points of a line; more get small markers. Labelled places of an axis
FEW_WORDS = 24  # points that are read aloud one by one: the tables have them all
INK, SOFT, CARD = "var(--sd-ink)", "var(--sd-soft)", "var(--sd-card)"
COLOURS = [f"var(--sd-s{place})" for place in range(6)]  # Okabe and Ito's, dark and light, see lab.css
MARKERS = ["circle", "square", "triangle-up", "diamond", "cross"]  # one fewer: the seventh line is like none of them
LONGEST = 3  # times the highest point: whiskers that are longer leave the plot
NAME_LETTERS = 44  # in a line above a bar
VALUE_WIDTH = 62  # px for the number beside it
LINE, BAR, BELOW_AXIS = 17, 16, 44  # px of a line of text, of a bar, and of what is below the bars
HOVER = {"field": "hover", "type": "nominal"}
BOLD = {"type": "text", "fontWeight": "bold", "color": INK}
EMBED = {"renderer": "svg", "actions": False}  # so colours are the page's, dark or light, and words are text
QUIET = {"labelColor": SOFT, "titleColor": SOFT, "labelFontSize": 13, "titleFontSize": 13, "titleFontWeight": "normal"}
CONFIG = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    **{mark: {"aria": False} for mark in ("line", "rule", "tick", "text")},  # points and bars say all
    # Titles and names that are wider than a phone are cut: they would make the plot narrower.
    "axis": {**QUIET, "titleLimit": 250, **dict.fromkeys(("gridColor", "domainColor", "tickColor"), "var(--sd-line)")},
    "legend": {"labelColor": INK, "labelFontSize": 13, "labelLimit": 220, "symbolSize": 90, "symbolOpacity": 1},
}
AXIS_LABELS = {  # expressions of Vega, to which Python's formats mean the same as here
    "times": "format(datum.value, '.2~f') + '×'",
    "p": "datum.value < 0.001 ? format(datum.value, '.0e') : datum.value",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot as Vega-Lite's JSON, with what stands above it, and its height in px."""

    title: str
    words: str
    plot: str
    height: int


Drawn = tuple[Section, Sequence[Figure | None]]
"""A section with its plots drawn; None stands for one that has no figure, or not yet."""


def drawn(sections: Iterable[Section | None]) -> list[Drawn | None]:
    return [(one, [draw(plot, rows) for plot, rows in one.plots]) if one else None for one in sections]


def draw(plot: Plot, rows: Rows) -> Figure | None:
    """A plot of rows; None while none of them has a figure."""
    points = [point for row in rows for point in _points(plot, row)]
    if not points:
        return None
    ends = [point[end] for point in points for end in ("value", "rule", "from") if point[end] is not None]
    whiskers = [point["high"] for point in points if point["high"] is not None]
    end = plot.y.end or 1.06 * max([*ends, *(min(high, LONGEST * max(ends)) for high in whiskers)]) or 1
    for point in points:  # of two texts an interval can be more pixels long than a browser draws
        point["high"] = None if point["high"] is None else min(point["high"], 1.02 * end)
    scale = {"type": plot.y.scale, "domain": [plot.y.start, end], "nice": False}
    axis = {"tickCount": 5, "labelOverlap": True, "domain": False, "ticks": False, **_labels(plot.y)}
    figures = {"type": "quantitative", "title": plot.y.label, "scale": scale, "axis": axis}
    layers, height = (_lines if plot.x else _bars)(plot, points, figures)
    whole = {
        **{"$schema": SCHEMA, "description": f"{plot.title}. {_aloud(plot, points)}", "data": {"values": points}},
        **{"layer": layers, "encoding": dict.fromkeys(("tooltip", "description"), HOVER)},
        **{"width": "container", "height": height, "config": CONFIG, "usermeta": {"embedOptions": EMBED}},
        "autosize": {"type": "fit", "contains": "padding", "resize": True},
    }
    words = f"{plot.words}\n{'┄' if plot.x else '┃'} {plot.rule[1]}" if plot.rule else plot.words
    return Figure(plot.title, words, json.dumps(whole), height)


def _points(plot: Plot, row: Any) -> Iterable[Layer]:
    """The figures of a row as data of Vega."""
    at, words = plot.rule or (None, "")
    rule = row.get(at) if isinstance(at, str) else at
    for column, of_column in plot.figures.items():
        if (value := row.get(column)) is None:
            continue
        spread = value if isinstance(value, Spread) else Spread(value, row.get("low"), row.get("high"), 1)
        where, start = formatted(row[plot.at], plot.x.format if plot.x else ""), row.get("start")
        name = row[plot.by] if plot.by else of_column
        place = [name] * bool(name) + [f"{plot.x.label} {where}" if plot.x else where]
        hover = [f"{', '.join(place)}: {formatted(spread, plot.y.format)}"]
        hover += [f"{words}: {formatted(rule, plot.y.format)}"] * isinstance(at, str)
        least = start if start is not None else 0 if isinstance(at, str) else at or 0
        shown = formatted(spread.mean if start is None else abs(spread.mean - start), plot.y.format)
        sign = "" if start is None else "+" if spread.mean >= start else "−"
        yield {
            "at": row[plot.at],
            "name": name,
            "value": max(spread.mean, plot.y.start),
            "low": spread.low,
            "high": spread.high,
            "from": start or 0,
            "rule": rule,
            "outlined": spread.mean < least,
            "where": where,
            "shown": f"{sign}{shown}",
            "hover": ". ".join(hover),
        }


def _aloud(plot: Plot, points: Sequence[Layer]) -> str:
    lines = []
    for name in dict.fromkeys(point["name"] for point in points):
        mine = [point for point in points if point["name"] == name]
        shown = mine if len(mine) <= FEW_WORDS or not plot.x else [mine[0], mine[-1]]
        line = ", ".join(f"{point['where']}: {point['shown']}" for point in shown)
        lines.append(f"{name}: {line}" if name else line)
    return ". ".join(lines)


def _lines(plot: Plot, points: Sequence[Layer], figures: Layer) -> tuple[list[Layer], int]:
    """A line for each name. They differ by colour and marker: none is known by its colour alone."""
    assert plot.x
    names = Counter(point["name"] for point in points)
    places = sorted({point["at"] for point in points})
    ordinal = plot.x.scale == "ordinal"
    axis = {"grid": False, "labelAngle": 0, "labelOverlap": True, "tickMinStep": 1, **_labels(plot.x)}
    axis |= {"values": places} if len(places) <= MOST_LABELS else {}
    across = {"field": "at", "type": "ordinal" if ordinal else "quantitative", "title": plot.x.label, "axis": axis}
    across["scale"] = {} if ordinal else {"domain": [places[0], places[-1]], "nice": False, "padding": 14}
    upright = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleY": -12, "titleX": -44}
    up = {**figures, "axis": figures["axis"] | upright}
    legend = {"title": None, "orient": "bottom", "columns": 1}
    colour, shape = (
        {"field": "name", "type": "nominal", "legend": legend, "scale": {"domain": [*names], "range": looks}}
        for looks in (COLOURS, MARKERS)
    )
    place: Layer = {"x": across, "color": colour}
    if ordinal:  # or whiskers would hide each other
        place["xOffset"] = {"field": "name", "type": "nominal", "scale": {"paddingOuter": 3}}
    value = {**place, "y": {**up, "field": "value"}}
    size = 22 if max(names.values()) > CROWD else 60
    alone = json.dumps([name for name, count in names.items() if count == 1])
    level = {"values": [{"rule": points[0]["rule"], "hover": plot.rule and plot.rule[1]}]}
    rule = {"data": level, **_rule({"y": {**up, "field": "rule"}}, type="rule", strokeDash=[1, 3])}
    return [
        {"mark": {"type": "line", "strokeWidth": 2.2}, "encoding": value},
        _whiskers("y", up, place, opacity=0.8),
        *[rule] * bool(plot.rule),
        {"mark": {"type": "point", "filled": True, "size": size, "opacity": 1}, "encoding": {**value, "shape": shape}},
        {
            "transform": [{"filter": f"indexof({alone}, datum.name) >= 0"}],
            "mark": {**BOLD, "align": "left", "dx": 9, "dy": -9, "fontSize": 15},
            "encoding": {**value, "text": {"field": "shown"}},
        },
    ], HEIGHT + LEGEND_LINE * max(0, len(names) - USUAL_NAMES)


def _bars(plot: Plot, points: Sequence[Layer], figures: Layer) -> tuple[list[Layer], int]:
    """Bars below their names, with a number each; outlined is what takes away, or is less than the rule."""
    line = 0.0
    for point in points:
        lines = textwrap.wrap(point["where"], NAME_LETTERS) or [point["where"]]
        point |= {"lines": lines, "top": line, "middle": line + len(lines) + 0.5}
        line += len(lines) + 1.6
    down = {"type": "quantitative", "axis": None, "scale": {"domain": [line, 0], "nice": False}}
    place = {"y": {**down, "field": "middle"}}
    across = {**figures, "scale": figures["scale"] | {"range": [0, {"expr": f"width - {VALUE_WIDTH}"}]}}
    fill, stroke = (
        {"condition": {"test": "datum.outlined", "value": outlined}, "value": filled}
        for outlined, filled in ((CARD, COLOURS[0]), (COLOURS[1], None))
    )
    bar = {"type": "bar", "orient": "horizontal", "size": BAR, "cornerRadius": 3, "strokeWidth": 2}
    name = {"type": "text", "align": "left", "baseline": "top", "lineHeight": LINE, "fontSize": 13, "color": INK}
    across_bar = {"x": {**across, "field": "from"}, "x2": {"field": "value"}}
    return [
        {"mark": bar, "encoding": {**across_bar, **place, "fill": fill, "stroke": stroke}},
        {"mark": name, "encoding": {"x": {"value": 0}, "y": {**down, "field": "top"}, "text": {"field": "lines"}}},
        *[_rule({"x": {**across, "field": "rule"}, **place}, type="tick", size=BAR + 8)] * bool(plot.rule),
        _whiskers("x", across, place, color=INK),
        {
            "mark": {**BOLD, "align": "right", "fontSize": 14},
            "encoding": {"x": {"value": "width"}, **place, "text": {"field": "shown"}},
        },
    ], round(LINE * line) + BELOW_AXIS


def _labels(axis: Axis) -> Layer:
    """How an axis writes its numbers."""
    labels = AXIS_LABELS.get(axis.format)
    return {"labelExpr": labels} if labels else {"format": axis.format} if axis.format.endswith("%") else {}


def _rule(encoding: Layer, **mark: Any) -> Layer:
    return {"mark": {"color": INK, "strokeWidth": 2, "thickness": 3, **mark}, "encoding": encoding}


def _whiskers(along: str, figures: Layer, place: Layer, **look: Any) -> Layer:
    """From `low` to `high` of the points that have them; a longer one than the plot ends at its edge, uncapped."""
    return {
        "transform": [{"filter": "isValid(datum.high)"}],
        "mark": {"type": "errorbar", "ticks": {"size": 10}, "thickness": 1.6, "clip": True, **look},
        "encoding": {**place, along: {**figures, "field": "high"}, f"{along}2": {"field": "low"}},
    }
