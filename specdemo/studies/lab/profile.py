"""What things cost: a token of each model, a pass over several tokens, a drafted token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...system.imports import Later
from ...types import COMMAND, Field
from ..tables import Table, table
from .study import DRAFTERS, NEW_TOKENS, PROMPT, Study, k_field

if TYPE_CHECKING:
    from ...models.loaded import Loaded
    from .. import profile
else:
    profile = Later("specdemo.studies.profile")


class Profile(Study):
    """Drafting pays off if a drafted token is cheap and if checking many tokens takes hardly longer than writing one.
    This view measures both on the server: a pass of the target over 1 to 17 tokens, and a draft of each drafter.
    """

    name = "profile"
    title = "What things cost"
    summary = "Time a token of each model, a pass over 1 to 17 tokens, and what a drafted token costs."
    fields = (
        replace(DRAFTERS, value="all"),
        k_field(4),
        Field(
            *("repeats", "Repeats of each measurement", "whole", 2, 1, 20), help="How often everything is run.", typed=3
        ),
        PROMPT,
        replace(NEW_TOKENS, typed=32, only=COMMAND),
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.timings: list[profile.Timing] = []
        self.steps = profile.steps(loaded, asked["drafters"], asked["repeats"])

    def run(self) -> Iterator[str]:
        ids, (drafters, k, repeats) = self.loaded.encode(self.asked["prompt"]), self.given("drafters k repeats")
        new_tokens = self.asked.get("max_new_tokens", 32)
        for timings in profile.profile(self.loaded, ids, drafters, k, new_tokens, repeats):
            self.timings += timings
            self.done += 1
            yield timing(timings)

    def words(self) -> list[str]:
        return profile.in_words(self.result(), self.asked["k"])

    def tables(self) -> list[Table]:
        times = [("mean_ms", "mean ms", "ms"), ("p50_ms", "median ms", "ms"), ("p90_ms", "p90 (ms)", "ms")]
        speed = [("tokens_per_second", "tokens/s", ".1f"), *times, ("ttft_ms", "first token, ms", "ms")]
        cost = [("ms_per_drafted_token", "ms per drafted token", "ms"), ("parallel", "all at once", "yes")]
        cost += [("draft_cost", "a drafted token, or all at once, in target passes (c)", ".1%")]
        found = self.result()
        return [
            table("A token", [("model", "model", ""), *speed], found["models"]),
            table(
                "A drafted token",
                [("drafter", "drafter", ""), ("drafts", "drafts timed", ",.0f"), *cost],
                found["drafters"],
            ),
            table(
                "A pass",
                [("model", "model", ""), ("tokens", "tokens", ",.0f"), *times, ("cost", "times one", "times")],
                found["passes"],
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [{"part": part, **row} for part, rows in self.result().items() for row in rows]

    def result(self) -> dict[str, Any]:
        return profile.summarise(self.timings)


def timing(timings: Sequence[profile.Timing]) -> str:
    """What a step of the profile is at: the first ones give nothing."""
    return "Timing passes and drafts" if timings else "Warming up"
