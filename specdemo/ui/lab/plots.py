"""What a view shows as data: sections of sentences, plots (Vega-Lite, by Altair) and tables of words."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...formats import formatted
from ...studies.tables import Table
from ...system.imports import LazyModule

if TYPE_CHECKING:
    import altair as alt
else:
    alt = LazyModule("altair")

Row = Mapping[str, Any]
HEIGHT, USUAL_NAMES, LEGEND_LINE = 340, 3, 15  # px of a plot with its axes and so many names; of one more
CROWD = 40  # points of a series; more get small markers
INK, SOFT = "var(--sd-ink)", "var(--sd-soft)"
COLOURS = [f"var(--sd-s{place})" for place in range(6)]  # Okabe and Ito's, dark and light, see lab.css
DASHES = [[1, 0], [7, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 4]]
MARKERS = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
RULE_DASH, RULE_MARKER = [1, 3], "M-1.5,0h.3m.5,0h.3m.5,0h.3m.5,0h.3m.3,0"  # dotted, also in the legend
LONGEST = 3  # times the highest point: how far an axis follows whiskers
BEYOND = "The interval goes on beyond the plot."
MOST_TICKS = 20  # whole numbers on an axis that each have a place of their own
NAME_LETTERS = 44  # in a line above a bar
VALUE_WIDTH = 62  # px for the number beside it
LINE, BAR, APART, AXIS = 17, 16, 10, 44  # px of a line of a name, of a bar, between two rows, and of the axis
SIGNED = {True: "var(--sd-s2)", False: "var(--sd-s1)"}
AXIS_LABELS = {  # expressions of Vega, to which Python's formats mean the same as here
    "times": "format(datum.value, '.2~f') + '×'",
    "p": "datum.value < 0.001 ? format(datum.value, '.0e') : datum.value",
}
AXIS_FORMATS = ".0%", ".1%", ".3f"

DRAFT_LENGTH = "draft length K (tokens per round)"
ROUNDS = {"label": DRAFT_LENGTH, "format": ",.0f"}
SHARE = {"format": ".0%", "from": 0, "to": 1}
TIMES = {"label": "times the target alone", "format": "times", "from": 0}
ALONE = [(1, "the target alone")]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot as Vega-Lite's JSON, with what stands above it; an empty text while there is nothing to draw.

    `height` is that of the plot in px.
    """

    title: str
    words: str
    plot: str
    height: int = 0


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


def _between(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f", {formatted(low, form)} to {formatted(high, form)}"


def lines(
    title: str,
    words: str,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    series: Iterable[tuple[str, Sequence[Sequence[float | None]]]],
    rules: Iterable[tuple[float, str]] = (),
) -> Figure:
    """Series of points [x, y, low, high] by name (the whiskers may be missing), and horizontal lines to compare with.

    Series differ by colour, dash and marker, so that none is known by colour alone. An axis has a `label`, a `format`,
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
            where = ticks[int(at or 0)] if ticks else formatted(at, x.get("format", ",.0f"))
            what = f"{formatted(value, y['format'])}{_between(low, high, y['format'])}"
            aside = (at or 0) + apart * (place - (len(series) - 1) / 2)
            dots.append({"x": aside, "y": value, "low": low, "high": high, "name": name})
            dots[-1] |= {"told": f"{x['label']} {where}: {what}", "shown": formatted(value, y["format"])}
    seen = [dot["x"] for dot in dots]
    margin = 0.3 if ticks else 0.03 * (max(seen) - min(seen)) or 0.5  # so that whiskers at the ends are whole
    ends = (-margin, len(ticks) - 1 + margin) if ticks else (min(seen) - margin, max(seen) + margin)
    goes_on = _cut(dots, LONGEST * max(_ends(dots, ("y",), rules)))
    heights = _ends(dots, ("y", "low", "reach"), rules)
    domain = [y.get("from", min(heights)), y.get("to") or 1.06 * max(heights) or 1]
    level = [{"x": end, "y": at, "name": name} for at, name in rules for end in ends]

    drawn = [name for name, _ in series]
    names = [*drawn, *(name for _, name in rules)]
    styles = [((place + place // 6) % 6, place % 6) for place in range(len(drawn))]  # a seventh: another shape
    more = len(names) - len(drawn)
    legend = _legend(symbolOpacity=1, symbolStrokeWidth=2)

    def scale(values: Sequence[Any], rule: Any, *others: str) -> alt.Scale:
        return alt.Scale(domain=[*names, *others], range=[*values, *[rule] * more])

    colour = alt.Color("name:N", scale=scale([COLOURS[place] for _, place in styles], INK), legend=legend)
    shape = alt.Shape("name:N", scale=scale([MARKERS[shape] for shape, _ in styles], RULE_MARKER), legend=legend)
    # One more name, or Vega would take this scale for those above, and warn that their legends are on and this one off.
    dashes = scale([DASHES[shape] for shape, _ in styles], RULE_DASH, "")
    dash = alt.StrokeDash("name:N", scale=dashes, legend=None)
    places = range(len(ticks)) if ticks else range(math.ceil(min(seen)), math.floor(max(seen)) + 1)
    across: dict[str, Any] = {"values": list(places)} if len(places) <= MOST_TICKS else {}
    across |= {"labelExpr": f"{json.dumps(ticks)}[datum.value]"} if ticks else {"format": ",d"}
    horizontal = alt.X(
        "x:Q", title=x["label"], axis=alt.Axis(grid=False, **across), scale=alt.Scale(domain=list(ends), nice=False)
    )
    kind = {"type": "log"} if y.get("log") else {}
    upright = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleY": -12, "titleX": -44}
    vertical = alt.Y(
        "y:Q",
        title=y["label"],
        axis=alt.Axis(tickCount=5, domain=False, ticks=False, **upright, **_labels(y["format"])),
        scale=alt.Scale(domain=domain, nice=False, clamp=True, **kind),
    )
    values = [*dots, *level]
    base = alt.Chart(alt.Data(values=values)).encode(horizontal)
    layers = [base.mark_line(strokeWidth=2.2).encode(vertical, colour, dash, detail="name:N")]
    if any(dot["high"] is not None for dot in dots):
        layers += _whiskers(base.encode(colour), alt.Y, alt.Y2("reach"), opacity=0.8, aria=False)
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
    height = HEIGHT + LEGEND_LINE * max(0, len(names) - USUAL_NAMES)
    words = f"{words}\n▲ {BEYOND}" if goes_on else words
    spoken = f"{title}. {x['label']}: {y['label']}. {spoken}"
    return Figure(title, words, _json(alt.layer(*layers), spoken, height), height)


def _aloud(dots: list[dict[str, Any]], x: Mapping[str, Any], ticks: Any) -> str:
    shown = [dots[0], dots[-1]] if len(dots) > 24 else dots  # the table has them all
    return ", ".join(dot["told"].removeprefix(f"{x['label']} ").split(",")[0] for dot in shown)


def bars(
    title: str,
    words: str,
    x: Mapping[str, Any],
    rows: Iterable[Row],
    rules: Sequence[tuple[float, str]] = (),
    mark: str = "",
    whisker: str = "",
) -> Figure:
    """Rows of `name` and `value`, and perhaps `low` and `high` (called `whisker`), a `mark`, a `start`, and `words`.

    The axis is as for `lines`. It begins at 0 and reaches all that is drawn. The `rules` are vertical lines to compare
    with; a bar that ends before the first one is outlined.

    Where rows have a `start`, the bars are changes: filled where they add, outlined where they take away. What has no
    start is then a mark.
    """
    shown = _bar_rows([dict(row) for row in rows], x["format"], rules, mark)
    if not shown:
        return Figure(title, words, "")
    changes = any("start" in row for row in shown)
    height = shown[-1]["ends"] + APART
    goes_on = _cut(shown, LONGEST * max(_ends(shown, ("value", "start", "mark"), rules)))
    reach = x.get("to") or max(_ends(shown, ("value", "reach", "start", "mark"), rules)) or 1
    scale = alt.Scale(domain=[0, reach], nice="to" not in x, range=[0, {"expr": f"width - {VALUE_WIDTH}"}])
    axis = alt.Axis(title=x["label"], tickCount=5, domain=False, ticks=False, **_labels(x["format"]))
    across = partial(alt.X, axis=axis, scale=scale)
    down = partial(alt.Y, axis=None, scale=alt.Scale(domain=[height, 0], nice=False, zero=False))
    end, of_bar = alt.value({"expr": "width"}), {"y": down("begins:Q"), "y2": alt.Y2("ends")}

    base = alt.Chart(alt.Data(values=shown))
    hue = alt.condition("datum.more", alt.value(SIGNED[True] if changes else COLOURS[0]), alt.value("var(--sd-card)"))
    edge = alt.condition("datum.more", alt.value("none"), alt.value(SIGNED[False]))
    bar = base.transform_filter("isValid(datum.from)").mark_bar(cornerRadius=3, strokeWidth=2, aria=False)
    name = base.mark_text(align="left", baseline="top", lineHeight=LINE, fontSize=13, color=INK, aria=False)
    layers = [
        bar.encode(x=across("from:Q"), x2="value", fill=hue, stroke=edge, **of_bar),
        name.encode(x=alt.value(0), y=down("top:Q"), text="lines:N"),
    ]
    key = []
    for value, words_of_rule in rules:
        rule = base.mark_rule(strokeDash=RULE_DASH, strokeWidth=2, color=INK, aria=False)
        layers.append(rule.encode(x=across(datum=value, type="quantitative"), **of_bar))
        key.append(f"┊ {formatted(value, x['format'])}, {words_of_rule}")
    if any(row.get("high") is not None for row in shown):
        layers += _whiskers(base.encode(y=down("middle:Q")), across, alt.X2("reach"), color=INK, aria=False)
        key += [f"├─┤ {whisker}"] * bool(whisker) + [f"▶ {BEYOND}"] * goes_on
    if any(row.get("mark") is not None for row in shown):
        marked = base.transform_filter("isValid(datum.mark)").mark_point(
            shape="diamond", filled=True, size=110, opacity=1, fill=COLOURS[4], stroke="var(--sd-card)", aria=False
        )
        layers.append(marked.encode(x=across("mark:Q"), y=down("middle:Q")))
        key += [f"◆ {mark}"] * bool(mark)
    value = base.mark_text(align="right", fontWeight="bold", fontSize=14, color=INK, aria=False)
    layers.append(value.encode(x=end, y=down("middle:Q"), text="shown:N"))
    whole = base.mark_bar(opacity=0)  # it describes its row, also where the bar is short
    tip = [alt.Tooltip("told:N", title="name")]
    layers.append(whole.encode(x=alt.value(0), x2=end, y=down("top:Q"), y2="ends", tooltip=tip, description="told:N"))
    spoken = ", ".join(f"{row['name']}: {row['shown']}" for row in shown)
    plot = _json(alt.layer(*layers), f"{title}. {spoken}", height + AXIS)
    return Figure(title, "\n".join([words, *key]), plot, height + AXIS)


def _bar_rows(
    rows: list[dict[str, Any]], form: str, rules: Sequence[tuple[float, str]], mark: str
) -> list[dict[str, Any]]:
    """The rows with what is drawn of them, and where: `top`, `begins`, `middle` and `ends` in px from above."""
    changes = any("start" in row for row in rows)
    ends = -APART
    for row in rows:
        value, start, low, high = row["value"], *(row.get(part) for part in ("start", "low", "high"))
        row["more"] = value >= start if start is not None else changes or not rules or value >= rules[0][0]
        parts = [formatted(value, form) + _between(value if low is None else low, high, form)]
        parts += [row["words"]] if "words" in row else []
        parts += [f"{mark}: {formatted(row['mark'], form)}"] if mark and "mark" in row else []
        row["told"] = ". ".join(parts)
        row["shown"] = formatted(value, form)
        if start is not None:
            row["shown"] = f"{'+' if row['more'] else '−'}{formatted(abs(value - start), form)}"
        elif changes:
            row["mark"] = value
        row["low"] = value if high is not None and low is None else low
        row["from"] = start if changes else 0
        row["lines"] = textwrap.wrap(row["name"], NAME_LETTERS) or [row["name"]]
        top = ends + APART
        begins = top + LINE * len(row["lines"])
        ends = begins + BAR
        row |= {"top": top, "begins": begins, "middle": begins + BAR / 2, "ends": ends}
    return rows


def _ends(rows: Iterable[Row], parts: Sequence[str], rules: Iterable[tuple[float, str]]) -> list[float]:
    """All values that an axis has to reach."""
    drawn = [row[part] for row in rows for part in parts if row.get(part) is not None]
    return [*drawn, *(value for value, _ in rules)]


def _legend(**look: Any) -> alt.Legend:
    return alt.Legend(title=None, orient="bottom", columns=1, labelLimit=220, **look)


def _labels(form: str) -> dict[str, Any]:
    """How an axis writes its numbers."""
    return {"labelExpr": AXIS_LABELS[form]} if form in AXIS_LABELS else {"format": form} if form in AXIS_FORMATS else {}


def _cut(rows: Sequence[dict[str, Any]], most: float) -> bool:
    """Note how far the whisker of each row is drawn (`reach`) and whether it goes on `beyond`; return whether any does.

    With few texts a whisker may be a thousand times as long as all points are high.
    """
    for row in rows:
        if row.get("high") is not None:
            row |= {"reach": min(row["high"], most), "beyond": bool(row["high"] > most)}
    return any(row.get("beyond") for row in rows)


def _whiskers(base: alt.Chart, along: Any, reach: Any, **look: Any) -> list[alt.Chart]:
    """From `low` to `reach` of the values that have them, with caps, or an arrow where the whisker goes on."""
    reaches = base.transform_filter("isValid(datum.reach)")
    upright = along is alt.Y
    cap = {"orient": "horizontal" if upright else "vertical", "size": 10, "thickness": 1.6}
    arrow = {"shape": "triangle-up" if upright else "triangle-right", "filled": True, "size": 70}
    return [
        reaches.mark_rule(strokeWidth=1.6, **look).encode(along("low:Q"), reach),
        reaches.mark_tick(**cap, **look).encode(along("low:Q")),
        reaches.transform_filter("!datum.beyond").mark_tick(**cap, **look).encode(along("reach:Q")),
        reaches.transform_filter("datum.beyond").mark_point(**arrow, **look).encode(along("reach:Q")),
    ]


def _json(chart: alt.LayerChart, spoken: str, height: int) -> str:
    """As wide as there is room, drawn as SVG: so its colours are the page's, dark or light, and its words are text.

    Titles and names that are wider than a phone are cut: they would make the plot narrower at each move of the mouse.
    """
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
    quiet = {"titleLimit": 250, "labelColor": SOFT, "titleColor": SOFT, "labelFontSize": 13, "titleFontSize": 13} | line
    return str(whole.configure_axis(titleFontWeight="normal", **quiet).to_json(indent=None, validate=False))
