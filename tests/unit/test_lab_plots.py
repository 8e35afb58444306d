"""The plots of the Lab as data: their axes and scales, lines to compare with, ticks and whiskers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.studies.domains import CATEGORY, POSITION
from specdemo.ui.lab.pictures import figures_of, of_domains
from specdemo.ui.lab.plots import ALONE, BEYOND, HEIGHT, SHARE, TIMES, Figure, bars, lines

from ..fakes.writers import ALONE as WITHOUT_DRAFTS
from ..fakes.writers import DRAFTED, Scripted, examined
from ..sentences import tells

PLACES = {"label": "position in the draft", "format": ",.0f"}


def channels(figure: Figure, channel: str) -> Iterator[dict[str, Any]]:
    """What the layers of a plot say of a channel that has a scale."""
    plot = json.loads(figure.plot)
    for layer in plot["layer"]:
        encoding = layer["encoding"].get(channel, {})
        if "scale" in encoding:
            yield encoding


def axis(figure: Figure, channel: str) -> dict[str, Any]:
    """A channel's scale and axis, which all layers have in common."""
    found = list(channels(figure, channel))
    assert all((encoding["scale"], encoding["axis"]) == (found[0]["scale"], found[0]["axis"]) for encoding in found)
    return {**found[0]["axis"], **found[0]["scale"]}


def drawn(figure: Figure) -> list[dict[str, Any]]:
    """The rows of a plot."""
    return list(json.loads(figure.plot)["data"]["values"])


def rules(figure: Figure) -> list[float]:
    """Where the vertical lines of a plot of bars are."""
    return [encoding["datum"] for encoding in channels(figure, "x") if "datum" in encoding]


# Bars ------------------------------------------------------------------------------------------------------


def test_shares_beside_each_other_have_one_scale_and_an_axis() -> None:
    """The largest of each was once as long as its plot is wide: of 46% there stood 65%, 58% or 100%."""
    rates = {CATEGORY: ("code", 0.71), POSITION: ("1", 0.3)}
    row = {"tested": 100, "accepted": 46, "low": 0.2, "high": 0.8}
    rows = [{"by": by, "name": name, "acceptance_rate": rate, **row} for by, (name, rate) in rates.items()]
    study: Any = SimpleNamespace(rows=lambda: rows, words=list, tables=list, left_out="")
    (section,) = of_domains(study)
    assert section is not None
    for figure in section.figures:
        shown = axis(figure, "x")
        assert shown["domain"] == [0, 1]
        assert not shown["nice"]
        assert tells(shown["title"], "share tested")
        assert shown["format"] == ".0%"


@pytest.mark.parametrize("baseline", [True, False])
def test_speed_ups_have_a_line_at_1_and_what_is_slower_is_outlined(baseline: bool) -> None:
    _, found = examined(Scripted(DRAFTED, 0.3), Scripted(WITHOUT_DRAFTS, 0.1) if baseline else None)
    figure = figures_of(found)[1]
    values = [row["value"] for row in drawn(figure)]
    assert (max(values) < 1) is baseline  # a round takes three times as long and writes 2.4 tokens
    assert rules(figure) == [1]
    assert axis(figure, "x")["domain"][1] >= 1
    assert [row["more"] for row in drawn(figure)] == [value >= 1 for value in values]
    assert tells(figure.words, "1.00×, baseline" if baseline else "1.00, speculation")


def test_an_axis_of_bars_begins_at_0_and_reaches_all_that_is_drawn() -> None:
    rows = [{"name": "a", "value": 1.5, "low": 0.5, "high": 4}, {"name": "b", "value": 1.2, "mark": 5}]
    assert axis(bars("", "", TIMES, rows, ALONE, mark="m"), "x")["domain"] == [0, 5]
    assert axis(bars("", "", TIMES, [{"name": "a", "value": 0.5}], ALONE), "x")["domain"] == [0, 1]
    assert axis(bars("", "", {"label": "ms", "format": "ms"}, [{"name": "a", "value": 0}]), "x")["domain"] == [0, 1]


def test_changes_are_outlined_where_they_cost_whatever_they_begin_with() -> None:
    rows = [
        {"name": "the formula", "value": 0.9},
        {"name": "a cost", "start": 0.9, "value": 0.7},
        {"name": "a gain", "start": 0.7, "value": 0.8},
        {"name": "measured", "value": 0.8},
    ]
    figure = bars("", "", TIMES, rows, ALONE)
    assert [(row["shown"], row["more"]) for row in drawn(figure)] == [
        ("0.90×", True),
        ("−0.20×", False),
        ("+0.10×", True),
        ("0.80×", True),
    ]
    assert [row.get("mark") for row in drawn(figure)] == [0.9, None, None, 0.8]


def test_bars_lie_below_their_names_and_below_each_other() -> None:
    long = "a pass that checks guesses takes 1.46 times as long as one over a single token"
    rows = drawn(bars("", "", SHARE | {"label": ""}, [{"name": "short", "value": 1}, {"name": long, "value": 1}]))
    assert [len(row["lines"]) for row in rows] == [1, 2]
    assert " ".join(rows[1]["lines"]) == long
    places = [row[part] for row in rows for part in ("top", "begins", "middle", "ends")]
    assert places == sorted(places)


# Lines -----------------------------------------------------------------------------------------------------


def test_each_whole_number_is_labelled_once() -> None:
    """Vega wrote 1 2 2 3 3 4 4: its ticks were half numbers, too."""
    points = [[place, 0.5] for place in range(1, 5)]
    assert axis(lines("", "", PLACES, {"label": "", **SHARE}, [("a", points)]), "x")["values"] == [1, 2, 3, 4]
    long = [[place, 0.5] for place in range(1, 88)]
    assert "values" not in axis(lines("", "", PLACES, {"label": "", **SHARE}, [("a", long)]), "x")
    named = {"label": "", "ticks": ["0", "0.3"]}
    assert axis(lines("", "", named, TIMES, [("a", [[0, 1], [1, 2]])]), "x")["values"] == [0, 1]


def test_whiskers_are_whole() -> None:
    """They were cut at twice the highest point, and by half at the first and the last place."""
    points: list[list[float | None]] = [[1, 2.47, 0.9, 6.9], [4, 1.95, 0.8, 4.7]]
    figure = lines("", "", PLACES, TIMES, [("a", points)])
    assert axis(figure, "y")["domain"][1] >= 6.9
    first, last = axis(figure, "x")["domain"]
    assert first < 1
    assert last > 4
    assert "clip" not in figure.plot
    assert BEYOND not in figure.words
    low = lines("", "", PLACES, {"label": "", "format": ".2f"}, [("a", points)])
    assert axis(low, "y")["domain"][0] <= 0.8


def test_a_whisker_of_a_thousand_times_the_points_ends_in_an_arrow_and_says_so() -> None:
    """Of two texts a 95% interval can be that long."""
    points: list[list[float | None]] = [[1, 1.5, 0.0, 1400.0], [2, 1.0, 0.5, 4.5]]
    figure = lines("", "", PLACES, TIMES, [("a", points)], ALONE)
    assert axis(figure, "y")["domain"] == [0, pytest.approx(1.06 * 4.5)]
    assert [(dot["reach"], dot["beyond"]) for dot in drawn(figure) if "reach" in dot] == [(4.5, True), (4.5, False)]
    assert "0.00× to 1400.00×" in drawn(figure)[0]["told"]  # in the tooltip
    rows = [{"name": "a", "value": 1.5, "low": 0.0, "high": 1400.0}]
    for shown in (figure, bars("", "", TIMES, rows)):
        assert BEYOND in shown.words
    assert axis(bars("", "", TIMES, rows), "x")["domain"] == [0, 4.5]


def test_many_names_make_a_plot_higher_instead_of_flatter() -> None:
    def height(names: int) -> int:
        series = [(f"series {name}", [[1, 1.0], [2, 2.0]]) for name in range(names)]
        return int(json.loads(lines("", "", PLACES, TIMES, series).plot)["height"])

    assert height(1) == height(3) == HEIGHT
    assert height(20) > HEIGHT + 17 * 13  # of text
