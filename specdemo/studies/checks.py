"""Is it lossless? Texts token for token, the emitted distribution on paper, and by sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..settings import SETTINGS, Field, Settings
from ..system.imports import LazyModule
from .plots import Axis, Plot, Section
from .statistics import CONFIDENCE, special
from .study import DRAFTER, PROMPT, Study, k_field, some_of_each, temperature_field
from .tables import grouped, table

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
SAMPLES = Axis("samples")
PLOTS = (
    (
        Plot(
            "Texts that are the target's own",
            "Token for token, as the target alone writes them. The whisker adds those that differ from a near-tie on, "
            "which rounding decides.",
            "name",
            {"same": ""},
            Axis("share of the texts", ".0%", end=1),
        ),
    ),
    (
        Plot(
            "The chance that a drafted token passes",
            "What the drafter's and the target's probabilities have in common, at every drafted token of one text.",
            "number",
            {"overlap": "p and q in common"},
            Axis("chance", ".0%", end=1),
            Axis("drafted token, along the text"),
        ),
    ),
    (
        Plot(
            "The likeliest first tokens",
            "How often each token came, and the target's own probability of it. Whiskers: 95% confidence interval.",
            "text",
            {"share": ""},
            Axis("share of the samples", ".1%"),
            rule=("probability", "the target's own probability"),
        ),
        Plot(
            "How far off the frequencies are",
            "Total variation: half the sum of all differences. A correct rule falls together with samples of the "
            "target itself. A broken rule stays above them.",
            "rounds",
            {
                "distance": "with the drafter",
                "floor_1": "the target itself, sample 1",
                "floor_2": "the target itself, sample 2",
            },
            Axis("total variation", ".3f"),
            SAMPLES,
        ),
        Plot(
            "Could that be chance?",
            "How often a fair sample is at least this far off (chi-square test). Below the dotted line, a difference "
            "is not chance.",
            "rounds",
            {"p_value": "first token", "p_value_of_two": "first two tokens"},
            Axis("p-value", "p", 1e-12, 1, "log"),
            SAMPLES,
            rule=("caught", "caught"),
        ),
    ),
)


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
    plots = PLOTS

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
        drafter, k, temperature, rounds, rule, broken = self.given("drafter k temperature rounds rule broken")
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

    def sections(self) -> list[Section | None]:
        sampled = Section(words=[self.no_samples], title="Nothing was sampled") if self.no_samples else None
        return [
            self._compared() if self.checks else None,
            self._computed() if self.places else None,
            self._sampled(self.history[-1]) if self.history else sampled,
        ]

    def _compared(self) -> Section:
        columns = [
            ("prompt_id", "prompt", ""),
            ("text", "compared with the target alone", ""),
            ("tokens", "tokens", ",.0f"),
            ("identical", "the same", "yes"),
            ("first_difference", "the same until token", ",.0f"),
            ("margin", "tokens apart there", ".3f"),
            ("near_tie", "near-tie", "yes"),
        ]
        rows = []
        for text, mine in grouped(self.checks, lambda check: check.text).items():
            same, ties = (
                sum(map(bool, found)) / len(mine) for found in ((c.identical for c in mine), (c.near_tie for c in mine))
            )
            rows.append({"name": text, "same": same} | ({"low": same, "high": same + ties} if ties else {}))
        every = table("Every text", columns, map(asdict, self.checks))
        (plot,) = self.plots[0]
        return Section(
            "", greedy.in_words(self.checks), [(plot, rows)], [every], "1. At temperature 0, token for token"
        )

    def _computed(self) -> Section:
        places = [place for draft in self.places for place in draft.positions]
        (plot,), rows = (
            self.plots[1],
            [{"number": number, "overlap": place.overlap} for number, place in enumerate(places, 1)],
        )
        verdict, *words = lossless.exact_in_words(self.places)
        columns = [("rule", "verification rule", ""), ("accepted", "tokens accepted of a draft, on average", ".2f")]
        means = [{"rule": name, "accepted": mean} for name, mean in lossless.accepted_means(self.places).items()]
        accepted = table("What each rule accepts of these drafts", columns, means)
        return Section(verdict, words, [(plot, rows)], [accepted], f"2. On paper{self._broken}")

    def _sampled(self, last: lossless.Sampled) -> Section:
        columns = [
            ("tokens", "tokens", ",.0f"),
            ("cells", "outcomes", ",.0f"),
            ("total_variation", "total variation", ".3f"),
            ("kl", "KL, nats", ".3f"),
            ("jensen_shannon", "Jensen-Shannon, nats", ".3f"),
            ("floor", "total variation of the target's own samples", ""),
            ("p_value", "p-value", "p"),
            ("smallest_caught", "smallest total variation caught in 95% of such runs", ".3f"),
        ]
        floors = [" and ".join(f"{sample.total_variation:.3f}" for sample in test.floor) for test in last.tests]
        tests = [
            {**asdict(test), **asdict(test.distances), "floor": floor}
            for test, floor in zip(last.tests, floors, strict=True)
        ]
        likeliest = [self._likely(likely, last.rounds) for likely in last.likeliest]
        along = [self._along(sampled) for sampled in self.history]
        plots = [*zip(self.plots[2], (likeliest, along, along), strict=True)]
        *words, verdict = last.in_words()
        return Section(verdict, words, plots, [table("Distances", columns, tests)], f"3. By sampling{self._broken}")

    @property
    def _broken(self) -> str:
        return ", with a rule broken on purpose" if self.asked["broken"] else ""

    def _likely(self, likely: lossless.Likely, rounds: int) -> dict[str, Any]:
        text, share, p = self.loaded.tokenizer.decode([likely.token_id]), likely.count / rounds, likely.probability
        half = -special.ndtri((1 - CONFIDENCE) / 2) * (p * (1 - p) / rounds) ** 0.5
        row = {"text": json.dumps(text, ensure_ascii=False), "share": share, "probability": p}
        return {**row, "low": max(0.0, share - half), "high": min(1.0, share + half)}

    def _along(self, sampled: lossless.Sampled) -> dict[str, Any]:
        one, two = sampled.tests
        floors = {f"floor_{n}": sample.total_variation for n, sample in enumerate(one.floor, 1)}
        row = {"rounds": sampled.rounds, "distance": one.distances.total_variation, **floors}
        return {**row, "p_value": one.p_value, "p_value_of_two": two.p_value, "caught": lossless.CAUGHT}
