"""What a view shows as data: sections of sentences, plots (Vega-Lite, by Altair) and tables of words."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt

from ...studies.statistics import Spread

Row = Mapping[str, Any]
HEIGHT = 340  # px of a plot with its axes and legend; see lab.css
LONGEST = 2  # times the highest point: how far the axis follows whiskers
CROWD = 40  # points of a series; more get small markers
INK, SOFT = "var(--sd-ink)", "var(--sd-soft)"
COLOURS = [f"var(--sd-s{place})" for place in range(6)]  # Okabe and Ito's, dark and light, see lab.css
DASHES = [[1, 0], [7, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 4]]
MARKERS = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
RULE_DASH = [1, 3]
NAME_LETTERS = 27  # in a line beside a bar
VALUE_WIDTH = 62  # px for the number behind it
LINE, APART, AROUND = 17, 12, 24  # px of a line of a name, between two bars, and above and below all of them
SIGNED = {True: "var(--sd-s2)", False: "var(--sd-s1)"}
FORMATS: dict[str, Callable[[Any], str]] = {  # besides those of Python, which mean the same to Vega's axes
    "ms": lambda value: f"{value:.{3 if value < 1 else 2 if value < 100 else 0}f}",
    "times": lambda value: f"{value:.2f}×",
    "times3": lambda value: f"{value:.3f}×",
    "p": lambda value: f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}",
    "yes": lambda value: "✓ yes" if value else "✗ no",
}
AXIS = {  # expressions of Vega
    "times": "format(datum.value, '.2f') + '×'",
    "p": "datum.value < 0.001 ? format(datum.value, '.0e') : datum.value",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot as Vega-Lite's JSON, with what stands above it; an empty text while there is nothing to draw."""

    title: str
    words: str
    plot: str


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    headers: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """One sentence that concludes, more of them, and what they rest on."""

    verdict: str
    words: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    title: str = ""


Picture = Sequence[Section | None]
"""Sections, one below the other; None stands for one that there is not, or not yet."""


def told(value: Any, form: str = "") -> str:
    """A value in words; a `Spread` with its interval, and a dash for what there is not.

    The format is one of Python's or of `FORMATS`; those of `studies.report` that end in a bar draw none here.
    """
    if value is None:
        return "–"
    if not isinstance(value, Spread):
        return FORMATS[form](value) if form in FORMATS else f"{value:{form.rstrip('|')}}"
    return told(value.mean, form) + _between(value.low, value.high, form, " ({} to {})")


def _between(low: float | None, high: float | None, form: str, words: str = ", {} to {}") -> str:
    return "" if low is None or high is None else words.format(told(low, form), told(high, form))


def table(title: str, columns: Sequence[tuple[str, str, str]], rows: Iterable[Row]) -> Table:
    """Columns are (key in a row, heading, format)."""
    cells = [[told(row.get(key), form) for key, _, form in columns] for row in rows]
    return Table(title, [heading for _, heading, _ in columns], cells)


def lines(
    title: str,
    words: str,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    series: Iterable[tuple[str, Sequence[Sequence[float | None]]]],
    rules: Iterable[tuple[float, str]] = (),
) -> Figure:
    """Series of points [x, y, low, high] by name (the whiskers may be missing), and horizontal lines to compare with.

    Series differ by colour, dash and marker, so that none is told by colour alone. An axis has a `label`, a `format`,
    perhaps where it begins and ends (`from`, `to`), `log`, or `ticks`: the names of its places 0, 1, 2, ...
    """
    series, rules = [(name, points) for name, points in series if points], list(rules)
    if not series:
        return Figure(title, words, "")
    ticks = x.get("ticks")
    apart = min(0.08, 0.7 / len(series)) if ticks else 0  # or whiskers would hide each other
    dots: list[dict[str, Any]] = []
    for place, (name, points) in enumerate(series):
        for at, value, *reach in points:
            low, high = reach or (None, None)
            low = value if low is None else low
            where = ticks[int(at or 0)] if ticks else told(at, x.get("format", ",.0f"))
            what = f"{told(value, y['format'])}{_between(low, high, y['format'])}"
            aside = (at or 0) + apart * (place - (len(series) - 1) / 2)
            dots.append({"x": aside, "y": value, "low": low, "high": high, "name": name})
            dots[-1] |= {"told": f"{x['label']} {where}: {what}", "shown": told(value, y["format"])}
    seen = [dot["x"] for dot in dots]
    ends = (-0.3, len(ticks) - 0.7) if ticks else (min(seen), max(seen))
    heights = [dot["y"] for dot in dots] + [at for at, _ in rules]
    reach_up = min(LONGEST * max(heights), max(dot["high"] or dot["y"] for dot in dots))
    top = y.get("to") or 1.06 * max(*heights, reach_up) or 1
    domain = [y.get("from", min(heights)), top]
    level = [{"x": end, "y": at, "name": name} for at, name in rules for end in ends]

    drawn = [name for name, _ in series]
    names = [*drawn, *(name for _, name in rules)]
    styles = [((place + place // 6) % 6, place % 6) for place in range(len(drawn))]  # a seventh: another shape
    more = len(names) - len(drawn)
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns={"expr": "width < 420 ? 1 : 2"},
        labelLimit=300,
        symbolOpacity=1,
        symbolStrokeWidth=2,
    )

    def scale(values: Sequence[Any], rule: Any) -> alt.Scale:
        return alt.Scale(domain=names, range=[*values, *[rule] * more])

    colour = alt.Color("name:N", scale=scale([COLOURS[place] for _, place in styles], INK), legend=legend)
    dash = alt.StrokeDash("name:N", scale=scale([DASHES[shape] for shape, _ in styles], RULE_DASH), legend=None)
    shape = alt.Shape("name:N", scale=scale([MARKERS[shape] for shape, _ in styles], "stroke"), legend=legend)
    named = {"values": list(range(len(ticks or ()))), "labelExpr": f"{json.dumps(ticks)}[datum.value]"}
    across = named if ticks else {"format": ",d", "tickMinStep": 1}
    horizontal = alt.X(
        "x:Q", title=x["label"], axis=alt.Axis(grid=False, **across), scale=alt.Scale(domain=list(ends), nice=False)
    )
    kind = {"type": "log"} if y.get("log") else {}
    form = y["format"]
    labels = {"labelExpr": AXIS[form]} if form in AXIS else {"format": form} if form in (".0%", ".3f") else {}
    upright = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleY": -12, "titleX": -44}
    vertical = alt.Y(
        "y:Q",
        title=y["label"],
        axis=alt.Axis(tickCount=5, domain=False, ticks=False, **upright, **labels),
        scale=alt.Scale(domain=domain, nice=False, clamp=True, **kind),
    )
    values = [*dots, *level]
    base = alt.Chart(alt.Data(values=values)).encode(horizontal)
    layers = [base.mark_line(strokeWidth=2.2).encode(vertical, colour, dash, detail="name:N")]
    if any(dot["high"] is not None for dot in dots):
        layers += _whiskers(base.encode(colour), alt.Y, alt.Y2("high"), domain[1], clip=True, opacity=0.8)
    size = 22 if max(len(points) for _, points in series) > CROWD else 60
    layers.append(
        base.transform_filter("isValid(datum.told)")
        .mark_point(filled=True, size=size, opacity=1)
        .encode(vertical, colour, shape, tooltip=[alt.Tooltip("told:N", title="name")], description="told:N")
    )
    if alone := [name for name, points in series if len(points) == 1]:
        point = base.transform_filter(f"indexof({json.dumps(alone)}, datum.name) >= 0 && isValid(datum.told)")
        layers.append(
            point.mark_text(dx=9, dy=-9, align="left", fontSize=15, fontWeight="bold", color=INK).encode(
                vertical, text="shown:N"
            )
        )
    spoken = ". ".join(f"{name}: {_aloud([dot for dot in dots if dot['name'] == name], x, ticks)}" for name in drawn)
    return Figure(title, words, _json(alt.layer(*layers), f"{title}. {x['label']}: {y['label']}. {spoken}"))


def _aloud(dots: list[dict[str, Any]], x: Mapping[str, Any], ticks: Any) -> str:
    shown = [dots[0], dots[-1]] if len(dots) > 24 else dots  # the table has them all
    return ", ".join(dot["told"].removeprefix(f"{x['label']} ").split(",")[0] for dot in shown)


def bars(title: str, words: str, form: str, rows: Iterable[Row], mark: str = "", whisker: str = "") -> Figure:
    """Rows of `name` and `value`, and perhaps `low` and `high` (called `whisker`), a `mark`, a `start`, and `words`.

    Where rows have a `start`, the bars are changes: filled where they add, outlined where they take away. What has no
    start is then a mark.
    """
    shown = [dict(row) for row in rows]
    if not shown:
        return Figure(title, words, "")
    changes = any("start" in row for row in shown)
    for row in shown:
        start = row.get("start")
        row["more"] = start is None or row["value"] >= start
        low, high = row.get("low"), row.get("high")
        parts = [told(row["value"], form) + _between(row["value"] if low is None else low, high, form)]
        parts += [row["words"]] if "words" in row else []
        parts += [f"{mark}: {told(row['mark'], form)}"] if mark and "mark" in row else []
        row["told"] = ". ".join(parts)
        row["shown"] = told(row["value"], form)
        if changes and start is not None:
            row["shown"] = f"{'+' if row['more'] else '−'}{told(abs(row['value'] - start), form)}"
        if changes and start is None:
            row["mark"] = row["value"]
        row["low"] = row["value"] if high is not None and low is None else low
        row["from"] = start if changes else 0
    seen = [row[part] for row in shown for part in ("value", "high", "start", "mark") if row.get(part) is not None]
    least, most = (min(seen), max(seen)) if changes else (0, max(seen) or 1)
    margin = 0.06 * ((most - least) or 1) * changes
    domain = [least - margin, most + margin]

    order = list(dict.fromkeys(row["name"] for row in shown))
    split = {name: textwrap.wrap(name, NAME_LETTERS, drop_whitespace=False) or [name] for name in order}
    row_height = LINE * max(map(len, split.values())) + APART
    lines_of = f"{json.dumps(split)}[datum.value]"
    middle = [{"test": f"length({lines_of}) == {count}", "value": 7.5 * (1 - count)} for count in (2, 3)]
    label = {"labelExpr": lines_of, "labelOffset": {"condition": middle, "value": 0}, "labelLimit": 220}
    bare = {"domain": False, "ticks": False, "title": None, "labelColor": INK, "labelPadding": 8}
    axis = alt.Axis(**label, **bare)
    base = alt.Chart(alt.Data(values=shown)).encode(alt.Y("name:N", sort=order, axis=axis))
    along = {"axis": None, "scale": alt.Scale(domain=domain, nice=False, range=[0, {"expr": f"width - {VALUE_WIDTH}"}])}
    tip = [alt.Tooltip("told:N", title="name")]
    track = base.mark_bar(color="var(--sd-fill)", cornerRadius=4, height={"band": 0.72})
    whole = alt.X(datum=domain[0], type="quantitative", **along)
    layers = [track.encode(whole, alt.X2(datum=domain[1]), tooltip=tip)]
    bar = base.transform_filter("isValid(datum.from)").mark_bar(cornerRadius=4, height={"band": 0.72}, strokeWidth=2)
    hue = alt.condition("datum.more", alt.value(SIGNED[True] if changes else COLOURS[0]), alt.value("var(--sd-card)"))
    edge = alt.condition("datum.more", alt.value("none"), alt.value(SIGNED[False]))
    layers.append(
        bar.encode(alt.X("from:Q", **along), alt.X2("value"), fill=hue, stroke=edge, tooltip=tip, description="told:N")
    )
    key = []
    if any(row.get("high") is not None for row in shown):
        layers += _whiskers(base, partial(alt.X, **along), alt.X2("high"), domain[1], color=INK)
        key += [f"├─┤ {whisker}"] * bool(whisker)
    if any(row.get("mark") is not None for row in shown):
        marked = base.transform_filter("isValid(datum.mark)").mark_point(
            shape="diamond", filled=True, size=110, opacity=1, fill=COLOURS[4], stroke="var(--sd-card)"
        )
        layers.append(marked.encode(alt.X("mark:Q", **along), tooltip=tip))
        key += [f"◆ {mark}"] * bool(mark)
    layers.append(
        base.mark_text(align="right", fontWeight="bold", fontSize=14, color=INK).encode(
            x=alt.value({"expr": "width"}), text="shown:N"
        )
    )
    spoken = ", ".join(f"{row['name']}: {row['shown']}" for row in shown)
    return Figure(
        title,
        "\n".join([words, *key]),
        _json(alt.layer(*layers), f"{title}. {spoken}", len(shown) * row_height + AROUND),
    )


def _whiskers(base: alt.Chart, along: Any, high: Any, top: float, **look: Any) -> list[alt.Chart]:
    """From `low` to `high` of the values that have them, with caps except beyond the `top` of the axis."""
    reaches = base.transform_filter("isValid(datum.high)")
    caps = [reaches.transform_filter(f"datum.{end} <= {top}").encode(along(f"{end}:Q")) for end in ("low", "high")]
    orient = "horizontal" if along is alt.Y else "vertical"
    ticks = [cap.mark_tick(orient=orient, size=10, thickness=1.6, **look) for cap in caps]
    return [reaches.mark_rule(strokeWidth=1.6, **look).encode(along("low:Q"), high), *ticks]


def _json(chart: alt.LayerChart, spoken: str, height: int = HEIGHT) -> str:
    """As wide as there is room, drawn as SVG: so its colours are the page's, dark or light, and its words are text."""
    whole = chart.properties(
        width="container",
        height=height,
        autosize=alt.AutoSizeParams(type="fit", contains="padding", resize=True),
        description=spoken,
        background="transparent",
        usermeta={"embedOptions": {"renderer": "svg", "actions": False}},
    ).configure(font="system-ui, sans-serif")
    whole = whole.configure_view(stroke=None).configure_legend(labelColor=INK, labelFontSize=13, symbolSize=90)
    line = dict.fromkeys(("gridColor", "domainColor", "tickColor"), "var(--sd-line)")
    quiet = {"labelColor": SOFT, "titleColor": SOFT, "labelFontSize": 13, "titleFontSize": 13} | line
    return str(whole.configure_axis(titleFontWeight="normal", **quiet).to_json(indent=None, validate=False))
