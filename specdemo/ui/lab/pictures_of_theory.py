"""What the theory of speed-up is shown by: curves over K, and a measured race beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...drafters.names import DRAFTERS
from ...errors import BadInput
from ...studies import theory
from ...studies.explain import Explained, Measured, Theory, explain_race, rounded
from ..race.run import RaceRun
from .plots import ALONE, ROUNDS, SHARE, TIMES, Picture, Row, Section, bars, lines


def of_measured(study: Theory) -> Picture:
    if study.costs and study.explained:
        return of_theory(study.costs, study.explained.alpha, study.explained)
    return [Section(study.nothing)] if study.nothing else []


def of_theory(costs: theory.Costs, alpha: float, found: Explained | None = None) -> Picture:
    ks = range(costs.largest_k + 1)

    def curve(costs: theory.Costs) -> list[list[float]]:
        return [[k, theory.speed_up(alpha, k, costs)] for k in ks]

    series = [("if checking is free", curve(replace(costs, passes=())))]
    if costs.passes:
        series.append(("with what checking takes here", curve(costs)))
    if found is not None:
        series.append(("measured", [[found.k, found.measured]]))
    plots = [
        lines(
            "Speed-up for each K",
            f"If {alpha:.0%} of the tested tokens pass, at every position.",
            ROUNDS,
            TIMES,
            series,
            ALONE,
        ),
        lines(
            "Acceptance rate that pays off",
            "Below the curve, drafting is slower than the target alone. Above it, drafting is faster.",
            ROUNDS,
            {"label": "acceptance rate", **SHARE},
            [("break-even", [[k, at] for k in ks if k and (at := theory.break_even(k, costs)) is not None])],
            [(alpha, "alpha")],
        ),
    ]
    *words, verdict = theory.in_words(costs, alpha)
    sections = [Section(verdict, words, plots, [theory.for_each_k(costs, alpha)])]
    return sections if found is None else [*sections, _explained(found)]


def _explained(found: Explained) -> Section:
    rows: list[Row] = [{"name": "what the formula says", "value": found.predicted}]
    before = found.predicted
    for part in found.parts:
        rows.append({"name": part.words, "start": before, "value": part.speedup})
        before = part.speedup
    plots = [
        bars(
            "From the formula to the clock",
            "The formula leaves things out. Each bar puts one of them back: an outlined one to the left costs, a "
            "filled one to the right helps. Its length is its mean over all orders of the bars (its Shapley value).",
            TIMES,
            [*rows, {"name": "what was measured", "value": found.measured}],
            ALONE,
        ),
        lines(
            "Acceptance rate by position in the draft",
            "The formula assumes that they are all equal.",
            {"label": "position in the draft", "ticks": [str(place) for place in range(1, found.k + 1)]},
            {"label": "acceptance rate", **SHARE},
            [("measured", [[place, rate] for place, rate in enumerate(found.by_position) if rate is not None])],
            [(found.alpha, "alpha, all together")],
        ),
    ]
    return Section(found.in_words()[0], [], plots, title="A real run beside it")


def theory_of(values: Mapping[str, Any], measured: Measured | None = None) -> Picture:
    """The theory for numbers that someone tries, and beside it what was measured."""
    read = {field.name: field.read(values.get(field.name)) for field in Theory.fields[:3]}
    costs = theory.Costs(read["draft_ms"] / read["target_ms"])
    if measured and all(read[name] == measured.numbers[name] for name in ("draft_ms", "target_ms")):
        costs = replace(costs, passes=measured.passes, parallel=measured.parallel)
    return of_theory(costs, read["alpha"], measured.race if measured else None)


def race_numbers(run: RaceRun | None) -> tuple[dict[str, float], Measured]:
    """The numbers of a race for the form, and what the theory says to it."""
    if run is None or not run.entries or run.request.drafter not in DRAFTERS:  # a server's race has no costs
        raise BadInput("There is no race to take numbers from, or no longer: run one in the Race tab first.")
    found = explain_race(run.entries, run.request.drafter)
    target_ms = 1000 * found.one_pass
    numbers = rounded(found.draft_cost, target_ms, found.alpha)
    return numbers, Measured(numbers, (), found.parallel, found)
