"""Is it lossless? Texts token for token, the emitted distribution on paper, and by sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..settings import SETTINGS, Field, Settings
from ..system.imports import LazyModule
from .study import DRAFTER, PROMPT, Study, k_field, some_of_each, temperature_field

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from . import greedy, lossless
else:
    greedy = LazyModule("specdemo.studies.greedy")
    lossless = LazyModule("specdemo.studies.lossless")

DESCRIPTIONS = {  # of the broken rules of `rules`
    "accept-if-p-exceeds-q": "A drafted token passes only if p > q",
    "resample-from-p": "A rejected token is replaced by a draw from p, not from the residual",
    "likeliest-by-ratio": "The drafter's likeliest token is tested as if it had been drawn from q",
    "noise-used-twice": "The noise of a position is used again at the next",
}


class Lossless(Study):
    """Does drafting change what the model says? Three checks answer this. At temperature 0 every text must be the
    target's own, token for token. Above 0 the probabilities of every next token must be the target's own. They are
    first computed from the model's probabilities, then estimated by sampling thousands of rounds. Pick a broken rule
    and watch the test catch it.
    """

    name = "lossless"
    title = "Is it lossless?"
    fields = (
        DRAFTER,
        replace(SETTINGS["rule"], label="Verification rule"),
        Field("broken", "Broken rule to sample with", "list", "", choices={"": "None: the rule above", **DESCRIPTIONS}),
        k_field(2),
        temperature_field(1.0, 0.05),
        Field("rounds", "Samples", "whole", 1600, 0, 20_000),
        Field("prompts", "Prompts at temperature 0", "whole", 4, 0, 24),
        PROMPT,
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.checks: list[greedy.GreedyCheck] = []
        self.places: list[lossless.DraftOnPaper] = []
        self.history: list[lossless.Sampled] = []
        self.no_samples = ""  # why none could be rolled
        self.texts = self.readable(some_of_each("domains", 3))[: asked["prompts"]] if asked["prompts"] else []
        batches = -(-asked["rounds"] // lossless.BATCH)
        self.steps = greedy.steps(self.texts, [asked["drafter"]]) + 1 + (batches + 1 if batches else 0)

    def run(self) -> Iterator[str]:
        names = "drafter", "k", "temperature", "rounds", "rule", "broken"
        drafter, k, temperature, rounds, rule, broken = map(self.asked.__getitem__, names)
        for check in greedy.greedy(self.loaded, self.texts, [drafter], Settings(k=k, max_new_tokens=48)):
            self.checks.append(check)
            self.done += 1
            yield "Comparing texts at temperature 0"
        ids, settings = self.loaded.encode(self.asked["prompt"]), Settings(k, temperature, max_new_tokens=64, rule=rule)
        for places in lossless.exact(self.loaded, drafter, ids, settings, broken):
            self.places.append(places)
            yield "Working out the distribution"
        self.done += 1
        if not rounds:
            return
        try:
            context = lossless.telling_context(self.loaded, drafter, ids, settings)
        except BadInput as error:  # what was found so far stands
            self.no_samples = str(error)
            return
        self.done += 1
        yield "Found a telling place in the text"
        for sampled in lossless.sampling(self.loaded, drafter, context, settings, rounds, broken):
            self.history.append(sampled)
            self.done += 1
            yield "Sampling"

    def rows(self) -> list[dict[str, Any]]:
        sampled = [
            {"part": "sampling", "rounds": sampled.rounds, "rule": sampled.rule, **asdict(test)}
            for sampled in self.history
            for test in sampled.tests
        ]
        sampled = [{**row, "floor": {str(n): sample for n, sample in enumerate(row["floor"], 1)}} for row in sampled]
        return [{"part": "greedy", **asdict(check)} for check in self.checks] + sampled

    def result(self) -> dict[str, Any]:
        return {"greedy": self.checks, "exact": self.places, "sampling": self.history}
