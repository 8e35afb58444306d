"""What the page shows of each study: plots. One that has no picture here is shown by its words and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...studies.causes import Causes
from ...studies.check import OWN_TABLES, Check
from ...studies.domains import CATEGORY, POSITION, Domains
from ...studies.grid import ALONE as ALONE_IN_ROWS
from ...studies.profile import Profile
from ...studies.readers import BatchStudy
from ...studies.report import TABLES
from ...studies.statistics import Spread
from ...studies.study import Study
from ...studies.sweep import Sweep
from .pictures_of_checks import of_lossless
from .pictures_of_theory import of_measured
from .plots import ALONE, DRAFT_LENGTH, SHARE, TIMES, Figure, Picture, Row, Section, bars, lines

if TYPE_CHECKING:
    from ...studies.diagnosis import Diagnosis

NO_BASELINE = "Tokens per round: a speed-up needs a baseline."
Point = list[float | None]


def of_profile(study: Profile) -> Picture:
    if not study.runs:
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
    sentences = study.words() or ["There are too few drafted tokens so far."]
    left_out = [study.left_out] if study.left_out else []
    return [Section("", [*sentences, *left_out], plots, study.tables())]


def of_causes(study: Causes) -> Picture:
    plots, tested = [], {"label": "share of the tested tokens", **SHARE}
    rows = [row for row in study.rows() if row["acceptance_rate"]]
    for cause, group in groupby(rows, lambda row: row["cause"]):
        counted = [_bar(row["condition"], row["acceptance_rate"]) for row in group]
        words = "Of the tested tokens, how many passed."
        plots.append(bars(f"By {cause}", words, tested, counted, whisker="95% confidence interval over texts"))
    return [Section("", [study.left_out] * bool(study.left_out), plots, study.tables())] if rows else []


def of_readers(study: BatchStudy) -> Picture:
    if not study.runs:
        return []
    rows = study.rows()
    names = {ALONE_IN_ROWS: "target alone", study.asked["drafter"]: f"with {study.asked['drafter']}"}

    def series(figure: str) -> list[tuple[str, list[Point]]]:
        return [
            (name, _points([row for row in rows if row["drafter"] == drafter], "batch", figure))
            for drafter, name in names.items()
        ]

    interval = "Above the line drafting pays. Whiskers: 95% confidence interval over groups of prompts."
    plots = [
        _at_once("readers", "All readers together", "What the machine writes.", series("tokens_per_second")),
        _at_once("readers", "Each reader", "What one of them sees.", series("tokens_per_second_per_reader")),
        _at_once("readers", "With the drafter", interval, series("speedup"), TIMES, ALONE),
    ]
    verdict, *words = study.words() or [""]
    return [Section(verdict, words, plots, study.tables())]


def of_check(study: Check) -> Picture:
    """Until a drafter is examined, those that were tried."""
    known = ((row["drafter"], row["speed_up"]) for row in study.rows() if row["speed_up"] is not None)
    rows: list[Row] = [{"name": name, "value": ratio, "low": None, "high": None} for name, ratio in known]
    words = "On a few prompts, to choose the one that is examined. An outlined bar is slower than the target alone."
    x = {"label": "times the target alone", "format": "times"}
    tried = [bars("Drafters tried", words, x, rows, [(1, "the target alone")])] if rows else []
    if study.found is None:
        return [Section("", [], tried, study.tables())] if rows else []
    answer, *words_found = study.words()
    return [Section(answer, words_found, [*tried, *figures_of(study.found)], study.tables())]


def _at_once(
    who: str,
    title: str,
    words: str,
    series: Sequence[tuple[str, list[Point]]],
    y: Mapping[str, Any] = {"label": "tokens/s"},  # never changed
    rules: Any = (),
) -> Figure:
    """A figure against how many readers or requests there are at once."""
    x = {"label": f"{who} at once", "format": ",.0f"}
    return lines(title, words, x, {"format": ".0f", "from": 0, **y}, series, rules)


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
        _at_once(
            "requests",
            "Several requests at once",
            "Tokens per second of all requests together, including their prompts and the waiting.",
            [
                ("with speculation", _points(found.at_once, "at_once", "tokens_per_second")),
                ("the baseline", _points(found.at_once, "at_once", "alone_tokens_per_second")),
            ],
        ),
        _at_once(
            "requests",
            "With speculation",
            "Above the line speculation pays.",
            [("with speculation", _points(found.at_once, "at_once", "speed_up"))],
            TIMES,
            [(1, "the baseline")],
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
    words, tables = study.words(), [table for table in study.tables() if table.rows]
    return [Section("", words, [], tables)] if words or tables else []


BY_WORDS = Shown(of_words, ((0, 3),))
PICTURES: dict[str, Shown] = {
    "check": Shown(of_check, ((6, OWN_TABLES + len(TABLES)),)),
    "profile": Shown(of_profile, ((2, 3),)),
    "theory": Shown(of_measured, ((2, 1), (2, 0))),
    "sweep": Shown(of_sweep, ((4, 1),)),
    "domains": Shown(of_domains, ((2, 1),)),
    "causes": Shown(of_causes, ((7, 1),)),
    "batch": Shown(of_readers, ((3, 1),)),
    "lossless": Shown(of_lossless, ((1, 1), (1, 1), (3, 1))),
}


def shown_by(study: type[Study]) -> Shown:
    return PICTURES.get(study.name, BY_WORDS)
