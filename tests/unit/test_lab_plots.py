"""The plots of the Lab as data: their axes and scales, lines to compare with, whiskers and names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdemo.studies.check import Check
from specdemo.studies.domains import Domains
from specdemo.studies.lab import STUDIES
from specdemo.studies.plots import ALONE, IN_DRAFT, TIMES, Axis, Plot
from specdemo.studies.report import SPEED_UP
from specdemo.studies.statistics import Spread
from specdemo.ui.lab.draw import HEIGHT, draw

from ..fakes.writers import ALONE as WITHOUT_DRAFTS
from ..fakes.writers import DRAFTED, Scripted, examined
from ..sentences import tells

LINES = Plot("", "", {"value": "a"}, TIMES, "at", IN_DRAFT)
BARS = Plot("", "", {"value": ""}, TIMES, "at")


def drawn(plot: Plot, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    figure = draw(plot, rows)
    assert figure
    return dict(json.loads(figure.plot))


def points(plot: dict[str, Any], *fields: str) -> list[Any]:
    rows = [tuple(row[field] for field in fields) for row in plot["data"]["values"]]
    return [row if len(fields) > 1 else row[0] for row in rows]


def axis(plot: dict[str, Any], channel: str) -> dict[str, Any]:
    """A channel's scale and axis, which all layers have in common."""
    channels = [layer["encoding"].get(channel, {}) for layer in plot["layer"]]
    found = [(each["title"], each["axis"], each["scale"]) for each in channels if "title" in each]
    assert all(each == found[0] for each in found)
    return {"title": found[0][0], **found[0][1], **found[0][2]}


@pytest.mark.parametrize("study", STUDIES.values())
def test_plots_have_titles_of_their_own(study: Any) -> None:
    titles = [plot.title for plots in study.plots for plot in plots]
    assert len({*titles}) == len(titles)


def test_nothing_is_drawn_of_rows_without_the_figure() -> None:
    assert draw(LINES, []) is None
    assert draw(BARS, [{"at": "a", "value": None}]) is None


# Bars ------------------------------------------------------------------------------------------------------


def test_shares_beside_each_other_have_one_scale_and_an_axis() -> None:
    """The largest of each was once as long as its plot is wide: of 46% there stood 65%, 58% or 100%."""
    for plot, rate in zip(Domains.plots[0], (0.71, 0.3), strict=True):
        shown = axis(drawn(plot, [{"name": "a", "acceptance_rate": rate, "low": 0.2, "high": 0.8}]), "x")
        assert shown["domain"] == [0, 1]
        assert not shown["nice"]
        assert tells(shown["title"], "share tested")
        assert shown["format"] == ".0%"


@pytest.mark.parametrize("baseline", [True, False])
def test_what_is_slower_is_outlined(baseline: bool) -> None:
    _, found = examined(Scripted(DRAFTED, 0.3), Scripted(WITHOUT_DRAFTS, 0.1) if baseline else None)
    figure = draw(SPEED_UP, found.kinds)
    assert bool(figure) is baseline
    if figure:
        speed_up = json.loads(figure.plot)
        assert {*points(speed_up, "outlined", "rule")} == {(True, 1)}  # a round takes three times as long
        assert axis(speed_up, "x")["domain"][1] >= 1
        assert tells(figure.words, "┃ target alone")


def test_an_axis_of_bars_begins_at_0_and_reaches_all_that_is_drawn() -> None:
    rows = [{"at": "a", "value": Spread(1.5, 0.5, 4, 2)}, {"at": "b", "value": 1.2}]
    assert axis(drawn(BARS, rows), "x")["domain"] == [0, pytest.approx(1.06 * 4)]
    assert axis(drawn(replace(BARS, rule=ALONE), [{"at": "a", "value": 0.5}]), "x")["domain"] == [0, 1.06]
    of_its_own = replace(BARS, rule=("own", "its own"))
    assert axis(drawn(of_its_own, [{"at": "a", "value": 1, "own": 5}]), "x")["domain"] == [0, pytest.approx(1.06 * 5)]
    assert axis(drawn(replace(BARS, y=Axis("ms", "ms")), [{"at": "a", "value": 0}]), "x")["domain"] == [0, 1]


def test_changes_are_outlined_where_they_cost_whatever_they_begin_with() -> None:
    rows = [
        {"at": "the formula", "value": 1.9},
        {"at": "a cost", "start": 1.9, "value": 1.7},
        {"at": "a gain", "start": 0.7, "value": 0.8},
        {"at": "measured", "value": 0.8},
    ]
    assert points(drawn(replace(BARS, rule=ALONE), rows), "from", "shown", "outlined") == [
        (0, "1.90×", False),
        (1.9, "−0.20×", True),
        (0.7, "+0.10×", False),
        (0, "0.80×", True),
    ]


def test_bars_lie_below_their_names_and_below_each_other() -> None:
    long = "a pass that checks guesses takes 1.46 times as long as one over a single token"
    plot = drawn(BARS, [{"at": "short", "value": 1}, {"at": long, "value": 1}])
    short, wrapped = points(plot, "lines")
    assert (len(short), " ".join(wrapped)) == (1, long)
    (top, middle), (second, last) = points(plot, "top", "middle")
    assert top + 1 < middle < second - 0.5 < last - 2.5


# Lines -----------------------------------------------------------------------------------------------------


def test_each_place_is_labelled_once() -> None:
    """Vega wrote 1 2 2 3 3 4 4: its ticks were half numbers, too."""
    few = axis(drawn(LINES, [{"at": place, "value": 0.5} for place in range(1, 5)]), "x")
    assert few["values"] == [1, 2, 3, 4]
    many = axis(drawn(LINES, [{"at": place, "value": 0.5} for place in range(1, 88)]), "x")
    assert "values" not in many
    assert many["tickMinStep"] == 1


def test_whiskers_are_whole() -> None:
    """They were cut at twice the highest point, and by half at the first and the last place."""
    plot = drawn(LINES, [{"at": 1, "value": Spread(2.47, 0.9, 6.9, 3)}, {"at": 4, "value": Spread(1.95, 0.8, 4.7, 3)}])
    assert axis(plot, "y")["domain"][1] >= 6.9
    assert axis(plot, "x")["padding"] > 5  # half a cap


def test_a_whisker_of_a_thousand_times_the_points_leaves_the_plot() -> None:
    """Of two texts a 95% interval can be that long."""
    rows = [{"at": 1, "value": Spread(1.5, 0.0, 1400.0, 2)}, {"at": 2, "value": Spread(1.0, 0.5, 1.2, 2)}]
    for plot, channel in ((LINES, "y"), (BARS, "x")):
        shown = drawn(plot, [{**row, "at": str(row["at"])} if plot is BARS else row for row in rows])
        end = axis(shown, channel)["domain"][1]
        assert end == pytest.approx(1.06 * 4.5)
        assert points(shown, "high") == [1.02 * end, 1.2]  # its cap is cut off, and no browser draws a much longer one
        assert "0.00× to 1400.00×" in points(shown, "hover")[0]


def test_many_names_make_a_plot_higher_instead_of_flatter() -> None:
    def height(names: int) -> int:
        rows = [{"at": place, "value": 1, "name": str(name)} for name in range(names) for place in (1, 2)]
        return int(drawn(replace(LINES, by="name"), rows)["height"])

    assert height(1) == height(3) == HEIGHT
    assert height(20) > HEIGHT + 17 * 13  # of text


def test_no_two_of_many_lines_look_alike() -> None:
    plot = drawn(LINES, [{"at": 1, "value": 1}])
    (colours, markers) = (
        next(layer["encoding"][look]["scale"]["range"] for layer in plot["layer"] if look in layer["encoding"])
        for look in ("color", "shape")
    )
    looks = {(colours[place % len(colours)], markers[place % len(markers)]) for place in range(24)}
    assert len(looks) == 24


def test_a_check_has_room_for_all_that_is_found() -> None:
    assert {plot.part for plots in Check.plots for plot in plots} == {"", "positions", "kinds", "at_once", "contexts"}
