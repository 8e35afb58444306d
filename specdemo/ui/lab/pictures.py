"""What the page shows of each study: plots. One that has no picture here is shown by its words and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...drafters.names import DRAFTERS
from ...studies import theory
from ...studies.ahead import SIMULATED, TOGETHER, DraftsAhead, outcomes
from ...studies.domains import CATEGORY, KIND, POSITION, Domains
from ...studies.examination import Doctor
from ...studies.explain import Explained, Measured, Theory, explain_race, rounded
from ...studies.profile import Profile
from ...studies.readers import ALONE as ALONE_IN_ROWS
from ...studies.readers import Readers
from ...studies.statistics import Spread
from ...studies.study import Study
from ...studies.sweep import Sweep
from ...types import BadInput
from ..race.run import Run
from .pictures_of_checks import of_lossless
from .plots import ALONE, DRAFT_LENGTH, ROUNDS, SHARE, TIMES, Figure, Picture, Row, Section, bars, lines, spans

if TYPE_CHECKING:
    from ...studies.diagnosis import Diagnosis

NO_BASELINE = "Tokens per round: a speed-up needs a baseline."
Point = list[float | None]


def of_profile(study: Profile) -> Picture:
    if not study.timings:
        return []
    found = study.result()
    curves = [
        (model, [[row["tokens"], row["cost"], None, row["cost"] * row["p90_ms"] / row["p50_ms"]] for row in rows])
        for model, rows in groupby(found["passes"], key=lambda row: row["model"])
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
                    for row in found["models"]
                ),
                *(
                    {"name": f"{row['drafter']}: drafted", "value": row["ms_per_drafted_token"]}
                    for row in found["drafters"]
                    if row["drafts"]
                ),
            ],
            whisker="to the slowest tenth",
        ),
    ]
    verdict, *words = study.words() or [""]
    return [Section(verdict, words, plots, study.tables())]


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
    numbers = rounded(found.draft_cost, target_ms, found.alpha)
    return numbers, Measured(numbers, (), found.parallel, found)


def of_sweep(study: Sweep) -> Picture:
    if not study.runs:
        return []
    rows = study.rows()
    axis, values = ("temperature", study.temperatures) if study.over_temperatures else ("k", study.ks)
    places = {value: place for place, value in enumerate(values)}
    drafters = study.asked["drafters"]
    categories = list(dict.fromkeys(row["category"] for row in rows))

    rows = sorted(({**row, "place": places[row[axis]]} for row in rows), key=lambda row: row["place"])

    def curve(figure: str, category: str, drafter: str) -> list[Point]:
        """The K sweep of a drafter begins with K = 0, the target alone."""
        names = {drafter, "none"} if axis == "k" else {drafter}
        mine = [row for row in rows if row["category"] == category and row["drafter"] in names]
        return _points(mine, "place", figure)

    def plot(title: str, words: str, figure: str, y: dict[str, Any], alone: bool = False, rules: Any = ()) -> Figure:
        shown = [*drafters, "none"] if alone and axis == "temperature" else drafters
        series = [
            (f"{drafter if drafter != 'none' else 'target alone'}, {category}", curve(figure, category, drafter))
            for category in categories
            for drafter in shown
        ]
        x = {"label": DRAFT_LENGTH if axis == "k" else "temperature", "ticks": [f"{at:g}" for at in places]}
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
    return [Section("", study.words(), plots, study.tables())]


def of_domains(study: Domains) -> Picture:
    rows = study.rows()
    titles = {
        CATEGORY: ("By category", "Of the tested tokens, how many passed."),
        KIND: ("By kind of token", "What the drafted token itself was."),
        POSITION: (
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
    told = study.words() or ["There are too few drafted tokens so far."]
    return [Section("", [*told, *[study.left_out] * bool(study.left_out)], plots, study.tables())]


def of_readers(study: Readers) -> Picture:
    if not study.groups:
        return []
    rows = study.rows()
    names = {ALONE_IN_ROWS: "target alone", study.asked["drafter"]: f"with {study.asked['drafter']}"}

    def plot(title: str, words: str, figure: str, y: dict[str, Any], rules: Any = ()) -> Figure:
        series = [
            (name, _points([row for row in rows if row["drafter"] == drafter], "batch", figure))
            for drafter, name in names.items()
        ]
        x = {"label": "readers at once", "format": ",.0f"}
        return lines(title, words, x, {"format": ".0f", "from": 0, **y}, series, rules)

    per_second = {"label": "tokens/s"}
    interval = "Above the line drafting pays. Whiskers: 95% confidence interval over groups of prompts."
    plots = [
        plot("All readers together", "What the machine writes.", "tokens_per_second", per_second),
        plot("Each reader", "What one of them sees.", "tokens_per_second_per_reader", per_second),
        plot("With the drafter", interval, "speedup", TIMES, ALONE),
    ]
    verdict, *words = study.words() or [""]
    return [Section(verdict, words, plots, study.tables())]


def of_ahead(study: DraftsAhead) -> Picture:
    if not study.texts:
        return []
    rows, (verdict, *words) = study.rows(), study.words() or [""]
    named = [
        _bar(f"{row['method']}{', ' + outcomes(row['fan_out']) if row['fan_out'] else ''}", row["tokens_per_second"])
        for row in rows
    ]
    hits = [
        (method, _points([row for row in rows if row["method"] == method], "fan_out", "hits"))
        for method in (TOGETHER, SIMULATED)
    ]
    x, ready = {"label": "outcomes prepared for each place", "format": ",.0f"}, {"label": "of the drafts", **SHARE}
    simulation = next((text for text in reversed(study.texts) if text.timeline), None)
    plots = [
        bars(
            "Tokens per second",
            "Simulated: on two devices of this speed.",
            {"label": "tokens/s", "format": ".0f"},
            named,
        ),
        lines("Drafts that were ready", "How often an outcome that was prepared for came true.", x, ready, hits),
        spans(
            f"Some rounds to scale, simulated, {outcomes(simulation.fan_out)}",
            "The drafter above, the target below. What is prepared while the target verifies is used, or thrown away.",
            simulation.timeline,
        )
        if simulation
        else Figure("", "", ""),
    ]
    return [Section(verdict, words, plots, study.tables())]


def of_doctor(study: Doctor) -> Picture:
    if study.found is None or not study.found.samples:
        return []
    verdict, *words = study.words()
    return [Section(verdict, words, figures_of(study.found), study.tables())]


def figures_of(found: Diagnosis) -> list[Figure]:
    whole = {"format": ",.0f"}
    return [
        lines(
            "What passes at each position",
            "Of the guesses that were tested there, and of all drafts: each guess is tested only if all before it "
            "passed.",
            {"label": "position in the draft", **whole},
            {"label": "share accepted", **SHARE},
            [
                ("of those tested", _points(found.positions, "position", "conditional")),
                ("of all drafts", _points(found.positions, "position", "unconditional")),
            ],
        ),
        _kinds(found),
        lines(
            "Several requests at once",
            "Tokens per second of all requests together, including their prompts and the waiting.",
            {"label": "requests at once", **whole},
            {"label": "tokens/s", "format": ".1f", "from": 0},
            [
                ("with speculation", _points(found.at_once, "at_once", "tokens_per_second")),
                ("the baseline", _points(found.at_once, "at_once", "alone_tokens_per_second")),
            ],
        ),
        lines(
            "Longer prompts",
            "The same questions, each after a long text of notes.",
            {"label": "tokens of the prompt", **whole},
            {"label": "times the baseline", "format": "times", "from": 0},
            [("speed-up", _points(found.contexts, "prompt_tokens", "speed_up"))],
            [(1, "the baseline")],
        ),
    ]


def _kinds(found: Diagnosis) -> Figure:
    """The speed-up, or without a baseline the tokens per round: both are 1 where speculation changes nothing."""
    known = found.speed_up is not None
    key = "speed_up" if known else "tokens_per_round"
    rows = [_bar(row["kind"], row[key]) for row in found.kinds if row[key] is not None]
    words = "After the prompt. An outlined bar is slower than the baseline." if known else NO_BASELINE
    x = {"label": "times the baseline", "format": "times"} if known else {"label": "tokens per round", "format": ".2f"}
    rules = [(1, "the baseline" if known else "without speculation")]
    return bars("By kind of prompt", words, x, rows, rules, whisker="95% confidence interval")


def _points(rows: Sequence[Row], x: str, y: str) -> list[Point]:
    """[x, y, low, high] of the rows in which y is known, a figure or a `Spread`."""
    known = [(row[x], row[y]) for row in rows if row[y] is not None]
    return [[at, value] if isinstance(value, float) else [at, value.mean, value.low, value.high] for at, value in known]


def _bar(name: str, spread: Spread) -> Row:
    return {"name": name, "value": spread.mean, "low": spread.low, "high": spread.high}


@dataclass(frozen=True, slots=True)
class Shown:
    """What a study is shown by: the picture of what there is so far, and for each of its sections how many figures and
    tables that has at most."""

    picture: Callable[[Any], Picture]
    sections: Sequence[tuple[int, int]]


def of_words(study: Study) -> Picture:
    words, tables = study.words(), study.tables()
    return [Section("", words, [], tables)] if words or tables else []


BY_WORDS = Shown(of_words, ((0, 3),))
PICTURES: dict[str, Shown] = {
    "profile": Shown(of_profile, ((2, 3),)),
    "theory": Shown(of_measured, ((2, 1), (2, 0))),
    "sweep": Shown(of_sweep, ((4, 1),)),
    "domains": Shown(of_domains, ((3, 1),)),
    "batch": Shown(of_readers, ((3, 1),)),
    "ahead": Shown(of_ahead, ((3, 1),)),
    "lossless": Shown(of_lossless, ((1, 1), (1, 2), (3, 1))),
    "doctor": Shown(of_doctor, ((4, 5),)),
}


def shown_by(study: type[Study]) -> Shown:
    return PICTURES.get(study.name, BY_WORDS)
