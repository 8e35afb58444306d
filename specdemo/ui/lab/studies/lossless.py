"""Is it lossless? Texts token for token, the emitted distribution on paper, and by sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ....studies.broken import DESCRIPTIONS
from ....studies.prompts import readable
from ....studies.statistics import CONFIDENCE, special
from ....system.imports import Later
from ....types import MATCH, REJECTION, BadInput, Settings
from ..form import DRAFTER, PROMPT, Field, k_field, temperature_field
from ..plots import SHARE, Picture, Section, bars, lines, table
from ..study import Study, some_of_each

if TYPE_CHECKING:
    from ....models.loaded import Loaded
    from ....studies import greedy, lossless
else:
    greedy = Later("specdemo.studies.greedy")
    lossless = Later("specdemo.studies.lossless")


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
        Field("rule", "Verification rule", "choice", MATCH, choices={MATCH: "Match", REJECTION: "Rejection sampling"}),
        Field("broken", "Broken rule to sample with", "list", "", choices={"": "None: the rule above", **DESCRIPTIONS}),
        k_field(2),
        temperature_field(1.0, 0.05),
        Field("rounds", "Samples", "whole", 1600, 0, 20_000),
        Field("prompts", "Prompts at temperature 0", "whole", 4, 0, 24),
        PROMPT,
    )
    sections = (1, 1), (1, 2), (3, 1)

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.checks: list[greedy.GreedyCheck] = []
        self.places: list[lossless.DraftOnPaper] = []
        self.history: list[lossless.Sampled] = []
        self.no_samples = ""  # why none could be rolled
        self.prompts = readable(loaded, some_of_each("domains", 3))[0][: asked["prompts"]]
        batches = -(-asked["rounds"] // lossless.BATCH)
        self.steps = greedy.steps(self.prompts, [asked["drafter"]]) + 1 + (batches + 1 if batches else 0)

    def run(self) -> Iterator[str]:
        drafter, k, temperature, rounds, rule, broken = self.given("drafter k temperature rounds rule broken")
        for check in greedy.greedy(self.loaded, self.prompts, [drafter], Settings(k=k, max_new_tokens=48)):
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

    def picture(self) -> Picture:
        sampled = Section("", [self.no_samples], title="Nothing was sampled") if self.no_samples else None
        if self.history:
            decode = self.loaded.tokenizer.decode
            sampled = of_sampling(self.history, lambda token: str(decode([token])))
        compared = of_greedy(self.checks) if self.checks else None
        exact = of_exact(self.places, self.asked["broken"]) if self.places else None
        return [compared, exact, sampled]

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


def of_greedy(checks: Sequence[greedy.GreedyCheck]) -> Section:
    columns = [
        ("prompt_id", "prompt", ""),
        ("text", "compared with the target alone", ""),
        ("tokens", "tokens", ",.0f"),
        ("identical", "the same", "yes"),
        ("first_difference", "the same until token", ",.0f"),
        ("margin", "tokens apart there", ".3f"),
        ("near_tie", "near-tie", "yes"),
    ]
    rows: list[dict[str, Any]] = []
    for text in dict.fromkeys(check.text for check in checks):
        mine = [check for check in checks if check.text == text]
        same, ties = sum(check.identical for check in mine), sum(bool(check.near_tie) for check in mine)
        rows.append({"name": text, "value": same / len(mine)})
        if ties:
            rows[-1] |= {"low": same / len(mine), "high": (same + ties) / len(mine)}
    plot = bars(
        "Texts that are the target's own",
        "Token for token, as the target alone writes them.",
        {"label": "share of the texts", **SHARE},
        rows,
        whisker="with those that differ from a near-tie on, which rounding decides",
    )
    told = table("Every text", columns, [asdict(check) for check in checks])
    return Section("", greedy.in_words(checks), [plot], [told], "1. At temperature 0, token for token")


def of_exact(drafts: Sequence[lossless.DraftOnPaper], broken: str) -> Section:
    places = [place for draft in drafts for place in draft.positions]
    points = [[number, place.overlap] for number, place in enumerate(places, 1)]
    plot = lines(
        "The chance that a drafted token passes",
        "What the drafter's and the target's probabilities have in common, at every drafted token of one text.",
        {"label": "drafted token, along the text", "format": ",.0f"},
        {"label": "chance", **SHARE},
        [("p and q in common", points)],
    )
    verdict, *words = lossless.exact_in_words(drafts)
    columns = [("rule", "verification rule", ""), ("accepted", "tokens accepted of a draft, on average", ".2f")]
    rows = [{"rule": name, "accepted": mean} for name, mean in lossless.accepted_means(drafts).items()]
    told = table("What each rule accepts of these drafts", columns, rows)
    columns = [
        ("rule", "rule for the children of a token", ""),
        ("children", "children, the drafter's likeliest", ",.0f"),
        ("accepted", "one is accepted", ".0%"),
        ("off", "total variation from p, mean", ".3f"),
        ("worst", "at worst", ".3f"),
    ]
    means = lossless.children_means(drafts)
    branched = table("If drafts branched here: two sound rules, and one that is wrong", columns, means)
    return Section(verdict, words, [plot], [told, branched], "2. On paper" + _broken(broken))


def of_sampling(history: Sequence[lossless.Sampled], text_of: Callable[[int], str]) -> Section:
    last = history[-1]

    def curve(read: Callable[[lossless.Sampled], float | None]) -> list[list[float]]:
        return [[sampled.rounds, value] for sampled in history if (value := read(sampled)) is not None]

    rounds = {"label": "samples", "format": ",.0f"}
    plots = [
        bars(
            "The likeliest first tokens",
            "How often each token came, and the target's own probability of it.",
            {"label": "share of the samples", "format": ".1%"},
            [_likely(likely, last.rounds, text_of(likely.token_id)) for likely in last.likeliest],
            mark="the target's own probability",
            whisker="95% confidence interval",
        ),
        lines(
            "How far off the frequencies are",
            "Total variation: half the sum of all differences. A correct rule falls together with samples of the "
            "target itself. A broken rule stays above them.",
            rounds,
            {"label": "total variation", "format": ".3f", "from": 0},
            [
                ("with the drafter", curve(lambda sampled: sampled.tests[0].distances.total_variation)),
                ("the target itself, sample 1", curve(lambda sampled: sampled.tests[0].floor[0].total_variation)),
                ("the target itself, sample 2", curve(lambda sampled: sampled.tests[0].floor[1].total_variation)),
            ],
        ),
        lines(
            "Could that be chance?",
            "How often a fair sample is at least this far off (chi-square test). Below the dotted line, a "
            "difference is not chance.",
            rounds,
            {"label": "p-value", "format": "p", "log": True, "from": 1e-12, "to": 1},
            [
                ("first token", curve(lambda sampled: sampled.tests[0].p_value)),
                ("first two tokens", curve(lambda sampled: sampled.tests[1].p_value)),
            ],
            [(lossless.CAUGHT, "caught")],
        ),
    ]
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
    rows = [
        {**asdict(test), **asdict(test.distances)}
        | {"floor": " and ".join(f"{sample.total_variation:.3f}" for sample in test.floor)}
        for test in last.tests
    ]
    title = "3. By sampling" + _broken(last.rule)
    *words, verdict = last.in_words()
    return Section(verdict, words, plots, [table("Distances", columns, rows)], title)


def _broken(rule: str) -> str:
    return ", with a rule broken on purpose" if rule in DESCRIPTIONS else ""


def _likely(likely: lossless.Likely, rounds: int, text: str) -> dict[str, Any]:
    share, p = likely.count / rounds, likely.probability
    half = -special.ndtri((1 - CONFIDENCE) / 2) * (p * (1 - p) / rounds) ** 0.5
    span = {"low": max(0.0, share - half), "high": min(1.0, share + half)}
    return {"name": json.dumps(text, ensure_ascii=False), "value": share, **span, "mark": p}
