"""What to expect: the speed-up by the formula, and a real run beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ....drafters.names import DRAFTERS
from ....racing.trace import Entry
from ....studies import theory
from ....studies.explain import Explained, explain_race
from ....system.imports import Later
from ....types import BadInput, Settings
from ...race.run import Run
from ..form import Field, k_field
from ..plots import ALONE, ROUNDS, SHARE, TIMES, Picture, Row, Section, bars, lines, table
from ..study import Study
from .profile import timing

if TYPE_CHECKING:
    from ....models.loaded import Loaded
    from ....racing import race
    from ....studies import profile
else:
    race = Later("specdemo.racing.race")
    profile = Later("specdemo.studies.profile")

REPEATS = 2  # of the profile that gives the costs
TRY, MEASURE = "Numbers to try", "Or measure them here"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement or a race adds to the three numbers of the theory: the costs of passes, and the real run.

    The costs of passes hold for the `numbers` they were measured with.
    """

    numbers: Mapping[str, float]
    passes: Sequence[float] = ()
    parallel: bool = False
    race: Explained | None = None


class Theory(Study):
    """How much faster can it be? Three numbers decide: how long a drafted token takes, how long a pass of the target
    takes, and how often a drafted token passes (alpha). Change them to see what the theory predicts for each K. Then
    measure, to see how far a real run is from the prediction, and why.
    """

    name = "theory"
    title = "What to expect"
    fields = (
        Field("draft_ms", "Time for one drafted token, ms", "number", 1.0, 0, 10_000, group=TRY),
        Field("target_ms", "Time for one pass of the target, ms", "number", 30.0, 0.001, 10_000, group=TRY),
        Field("alpha", "Acceptance rate, alpha", "number", 0.6, 0, 1, group=TRY),
        Field("drafter", "Drafter", "drafter", group=MEASURE),
        k_field(4, MEASURE),
        Field("prompt", "Prompt", "text", "Write a Python function that reverses a string.", group=MEASURE),
    )
    button = "Measure"
    sections = (2, 1), (2, 0)

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.timings: list[profile.Timing] = []
        self.entries: list[Entry] = []
        self.costs: theory.Costs | None = None
        self.explained: Explained | None = None
        self.nothing = ""  # why there is nothing to show
        self.steps = profile.steps(loaded, [asked["drafter"]], REPEATS) + 1

    def run(self) -> Iterator[str]:
        ids, (drafter, k) = self.loaded.encode(self.asked["prompt"]), self.given("drafter k")
        for timings in profile.profile(self.loaded, ids, [drafter], k, repeats=REPEATS):
            self.timings += timings
            self.done += 1
            yield timing(timings)
        with closing(race.race(self.loaded, drafter, ids, Settings(k=k, max_new_tokens=96))) as entries:  # type: ignore[type-var]
            for entry in entries:
                self.entries.append(entry)
                yield "Racing"
        self.done += 1
        with suppress(BadInput):  # nothing was tested
            self.explained = explain_race(self.entries, drafter)
            self.costs = profile.costs(profile.summarise(self.timings), drafter)
        if self.costs is None:
            self.nothing = (
                f"The drafter {drafter} drafted too little in this text to time it and to see what passes. Choose "
                "another prompt, or another drafter."
            )
        yield "Comparing"

    def picture(self) -> Picture:
        if self.costs and self.explained:
            return of_theory(self.costs, self.explained.alpha, self.explained)
        return [Section(self.nothing)] if self.nothing else []

    def rows(self) -> list[dict[str, Any]]:
        if self.costs and self.explained:
            return [dict(row) for row in theory.table(self.costs, self.explained.alpha)]
        return []

    def result(self) -> dict[str, Any]:
        found = {"passes": self.costs.passes, "parallel": self.costs.parallel} if self.costs else {}
        return {**super().result(), **self.values(), **found, "race": self.explained}

    def values(self) -> dict[str, Any]:
        if not (self.costs and self.explained):
            return {}
        passes = profile.summarise(self.timings)["passes"]
        one = next(row["p50_ms"] for row in passes if (row["model"], row["tokens"]) == (profile.TARGET, 1))
        return _numbers(self.costs.draft, one, self.explained.alpha)

    def measured(self) -> Measured | None:
        if not self.costs:
            return None
        return Measured(self.values(), self.costs.passes, self.costs.parallel, self.explained)


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
    columns = [
        ("k", "K", ",.0f"),
        ("ideal_speedup", "speed-up if all pass and checking is free", "times3"),
        ("verify_cost", "a checking pass takes", "times"),
        ("break_even_alpha", "break-even alpha", ".3f"),
        ("expected_tokens", "tokens per round", ".2f"),
        ("speedup", "speed-up", "times3"),
    ]
    rows = table("For each K", columns, theory.table(costs, alpha))
    *words, verdict = theory.in_words(costs, alpha)
    sections = [Section(verdict, words, plots, [rows])]
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
    """The theory for numbers that someone tries, and beside it what was measured.

    Raises:
        BadInput: a number is out of range.
    """
    read = {field.name: field.read(values.get(field.name)) for field in Theory.fields[:3]}
    costs = theory.Costs(read["draft_ms"] / read["target_ms"])
    if measured and all(read[name] == measured.numbers[name] for name in ("draft_ms", "target_ms")):
        costs = replace(costs, passes=measured.passes, parallel=measured.parallel)
    return of_theory(costs, read["alpha"], measured.race if measured else None)


def race_numbers(run: Run | None) -> tuple[dict[str, float], Measured]:
    """The numbers of a race for the form, and what the theory says to it.

    Raises:
        BadInput: there is no race, or nothing was drafted in it.
    """
    if run is None or not run.entries or run.request.drafter not in DRAFTERS:  # a server's race tells no costs
        raise BadInput("There is no race to take numbers from, or no longer: run one in the Race tab first.")
    found = explain_race(run.entries, run.request.drafter)
    target_ms = 1000 * found.one_pass
    numbers = _numbers(found.draft_cost, target_ms, found.alpha)
    return numbers, Measured(numbers, (), found.parallel, found)


def _numbers(draft_cost: float, target_ms: float, alpha: float) -> dict[str, float]:
    """The three numbers of the form, as a person would write them."""
    numbers = {"draft_ms": draft_cost * target_ms, "target_ms": target_ms, "alpha": alpha}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}
