"""What the Lab shows of its measurements: sentences, plots and tables for each view."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from scipy.special import ndtri

from ...studies import domains, greedy, lossless, profile, sweep, theory
from ...studies.broken import DESCRIPTIONS
from ...studies.explain import Explained
from ...studies.statistics import CONFIDENCE
from .plots import Figure, Picture, Row, Section, bars, lines, table
from .views import K_SWEEP

DRAFT_LENGTH = "draft length K (tokens per round)"
ROUNDS = {"label": DRAFT_LENGTH, "format": ",.0f"}
SHARE = {"format": ".0%", "from": 0, "to": 1}
TIMES = {"label": "times the target alone", "format": "times", "from": 0}
ALONE = [(1, "the target alone")]


# What things cost ------------------------------------------------------------------------------------------


def of_profile(summary: Mapping[str, list[dict[str, Any]]], k: int) -> Picture:
    curves = [
        (model, [[row["tokens"], row["cost"], None, row["cost"] * row["p90_ms"] / row["p50_ms"]] for row in rows])
        for model, rows in groupby(summary["passes"], key=lambda row: row["model"])
    ]
    plots = [
        lines(
            "What a pass over several tokens takes",
            "As a multiple of a pass over one token. A flat line is good: checking costs nothing. The whisker ends "
            "where the slowest tenth begins.",
            {"label": "tokens in the pass", "format": ",.0f"},
            {"label": "times a pass over one", "format": "times", "from": 0},
            curves,
            [(1, "if checking were free")],
        ),
        bars(
            "One token, one drafted token",
            "Milliseconds for a token that a model writes alone, and for a token that each drafter drafts.",
            {"label": "milliseconds", "format": "ms"},
            [
                *(
                    {"name": f"{row['model']}: a token", "value": row["p50_ms"], "high": row["p90_ms"]}
                    for row in summary["models"]
                ),
                *(
                    {"name": f"{row['drafter']}: drafted", "value": row["ms_per_drafted_token"]}
                    for row in summary["drafters"]
                    if row["drafts"]
                ),
            ],
            whisker="to the slowest tenth",
        ),
    ]
    times = [("mean_ms", "mean ms", "ms"), ("p50_ms", "median ms", "ms"), ("p90_ms", "p90 (ms)", "ms")]
    speed = [("tokens_per_second", "tokens/s", ".1f"), *times, ("ttft_ms", "first token, ms", "ms")]
    cost = [("ms_per_drafted_token", "ms per drafted token", "ms"), ("parallel", "all at once", "yes")]
    cost += [("draft_cost", "a drafted token, or all at once, in target passes (c)", ".1%")]
    tables = [
        table("A token", [("model", "model", ""), *speed], summary["models"]),
        table(
            "A drafted token",
            [("drafter", "drafter", ""), ("drafts", "drafts timed", ",.0f"), *cost],
            summary["drafters"],
        ),
        table(
            "A pass",
            [("model", "model", ""), ("tokens", "tokens", ",.0f"), *times, ("cost", "times one", "times")],
            summary["passes"],
        ),
    ]
    verdict, *words = profile.in_words(dict(summary), k) or [""]
    return [Section(verdict, words, plots, tables)]


# What to expect --------------------------------------------------------------------------------------------


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


# Which K, which temperature --------------------------------------------------------------------------------


def of_sweep(plan: sweep.Plan, runs: Sequence[sweep.Run], vary: str) -> Picture:
    rows = sweep.summarise(runs)
    axis, values = ("k", plan.ks) if vary == K_SWEEP else ("temperature", plan.temperatures)
    places = {value: place for place, value in enumerate(values)}
    drafters = list(plan.drafters)
    categories = list(dict.fromkeys(row["category"] for row in rows))

    def curve(figure: str, category: str, drafter: str) -> list[list[float | None]]:
        """The K sweep of a drafter begins with K = 0, the target alone."""
        names = {drafter, "none"} if axis == "k" else {drafter}
        mine = [row for row in rows if row["category"] == category and row["drafter"] in names]
        points = [(places[row[axis]], row[figure]) for row in mine if row[figure] is not None]
        return [[at, spread.mean, spread.low, spread.high] for at, spread in sorted(points, key=lambda point: point[0])]

    def plot(title: str, words: str, figure: str, y: dict[str, Any], alone: bool = False, rules: Any = ()) -> Figure:
        shown = [*drafters, "none"] if alone and axis == "temperature" else drafters
        series = [
            (f"{drafter if drafter != 'none' else 'target alone'}, {category}", curve(figure, category, drafter))
            for category in categories
            for drafter in shown
        ]
        x = {
            "label": DRAFT_LENGTH if axis == "k" else "temperature",
            "ticks": [f"{at:g}" for at in places],
        }
        return lines(title, words, x, {"format": ".1f", "from": 0, **y}, series, rules)

    share = {"label": "share of drafted tokens", **SHARE}
    plots = [
        plot(
            "Speed-up",
            "Compared with the target alone on the same prompt, after the prompt: geometric mean. Whiskers: 95% "
            "confidence interval over prompts.",
            "speedup",
            TIMES,
            rules=ALONE,
        ),
        plot("Tokens per second", "The speed itself.", "tokens_per_second", {"label": "tokens/s"}, alone=True),
        plot("Acceptance rate", "Accepted / tested.", "acceptance_rate", share),
        plot("Draft efficiency", "Accepted / drafted.", "draft_efficiency", share),
    ]
    columns = [
        ("category", "prompts", ""),
        ("temperature", "T", ".3g"),
        ("drafter", "drafter", ""),
        ("k", "K", ",.0f"),
        ("runs", "texts", ",.0f"),
        ("speedup", "speed-up", "times"),
        ("tokens_per_second", "tokens/s", ".1f"),
        ("acceptance_rate", "acceptance rate", ".0%"),
        ("draft_efficiency", "draft efficiency", ".0%"),
    ]
    words = [row["sentence"] for row in sweep.best_k(runs)] if axis == "k" else list(_temperature_words(rows))
    over = "prompts" if len(plan.prompts) > len(categories) else "seeds"  # see `sweep.summarise`
    return [Section("", words, plots, [table(f"All figures, and their 95% intervals over {over}", columns, rows)])]


def _temperature_words(rows: Sequence[Row]) -> Iterator[str]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["k"] and row["speedup"]:
            found.setdefault((row["drafter"], row["category"]), []).append(row)
    for (drafter, category), mine in found.items():
        low, high = (pick(mine, key=lambda row: row["speedup"].mean) for pick in (min, max))
        told = "; where it is below 1, do not speculate" if low["speedup"].mean < 1 else ""
        yield (
            f"{drafter} on {category} prompts: from {high['speedup'].mean:.2f}× at T = {high['temperature']:g} to "
            f"{low['speedup'].mean:.2f}× at T = {low['temperature']:g}{told}."
        )


# Where drafts pass -----------------------------------------------------------------------------------------


def of_domains(counts: domains.Counts, left_out: Sequence[str] = ()) -> Picture:
    """`left_out` names the prompts that the model cannot read."""
    rows = counts.rows()
    titles = {
        domains.CATEGORY: ("By category", "Of the tested tokens, how many passed."),
        domains.KIND: ("By kind of token", "What the drafted token itself was."),
        domains.POSITION: (
            "By position in the draft",
            "A later token of a draft builds on the earlier ones. Only tested tokens count.",
        ),
    }
    plots, tested = [], {"label": "share of the tested tokens", **SHARE}
    for by, (title, words) in titles.items():
        counted = [
            {"name": row["name"], "value": row["acceptance_rate"], "low": row["low"], "high": row["high"]}
            | {"words": f"{row['accepted']} of {row['tested']} tested tokens passed"}
            for row in rows
            if row["by"] == by and row["tested"]
        ]
        plots.append(bars(title, words, tested, counted, whisker="95% confidence interval over texts"))
    columns = [("by", "by", ""), ("name", "group", "")]
    columns += [(name, name, ",.0f") for name in ("drafted", "tested", "accepted")]
    columns += [("acceptance_rate", "acceptance rate", ".0%"), ("draft_efficiency", "draft efficiency", ".0%")]
    told = counts.in_words() or ["There are too few drafted tokens so far."]
    told += [f"Left out, since this model cannot read all their characters: {', '.join(left_out)}."] if left_out else []
    return [Section("", told, plots, [table("Counts", columns, rows)])]


# Is it lossless? -------------------------------------------------------------------------------------------


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
    half = -ndtri((1 - CONFIDENCE) / 2) * (p * (1 - p) / rounds) ** 0.5
    span = {"low": max(0.0, share - half), "high": min(1.0, share + half)}
    return {"name": json.dumps(text, ensure_ascii=False), "value": share, **span, "mark": p}
