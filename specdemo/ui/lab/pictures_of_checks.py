"""What the check of exactness shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ...studies.checks import DESCRIPTIONS, Lossless, greedy, lossless
from ...studies.statistics import CONFIDENCE, special
from ...studies.tables import table
from .plots import SHARE, Picture, Section, bars, lines


def of_lossless(study: Lossless) -> Picture:
    sampled = Section("", [study.no_samples], title="Nothing was sampled") if study.no_samples else None
    if study.history:
        decode = study.loaded.tokenizer.decode
        sampled = of_sampling(study.history, lambda token: str(decode([token])))
    compared = of_greedy(study.checks) if study.checks else None
    exact = of_exact(study.places, study.asked["broken"]) if study.places else None
    return [compared, exact, sampled]


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
    every = table("Every text", columns, [asdict(check) for check in checks])
    return Section("", greedy.in_words(checks), [plot], [every], "1. At temperature 0, token for token")


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
    accepted = table("What each rule accepts of these drafts", columns, rows)
    return Section(verdict, words, [plot], [accepted], "2. On paper" + _broken(broken))


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
