"""What to expect: the costs, and a real run to set beside the formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...racing.trace import Entry
from ...system.imports import Later
from ...types import BadInput, Field, Settings
from .. import theory
from ..explain import Explained, explain_race
from .profile import timing
from .study import DRAFTER, PROMPT, Study, k_field

if TYPE_CHECKING:
    from ...models.loaded import Loaded
    from ...racing import race
    from .. import profile
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
        replace(DRAFTER, group=MEASURE),
        k_field(4, MEASURE),
        replace(PROMPT, value="Write a Python function that reverses a string.", group=MEASURE),
    )
    button = "Measure"

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
        return rounded(self.costs.draft, one, self.explained.alpha)

    def measured(self) -> Measured | None:
        if not self.costs:
            return None
        return Measured(self.values(), self.costs.passes, self.costs.parallel, self.explained)


def rounded(draft_cost: float, target_ms: float, alpha: float) -> dict[str, float]:
    """The three numbers of the form, as a person would write them."""
    numbers = {"draft_ms": draft_cost * target_ms, "target_ms": target_ms, "alpha": alpha}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}
