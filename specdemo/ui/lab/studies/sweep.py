"""Which K, which temperature: the same texts with each, on easy and on hard prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....system.imports import Later
from ....types import MAX_K
from ..form import NEW_TOKENS, Field
from ..plots import ALONE, DRAFT_LENGTH, SHARE, TIMES, Figure, Picture, Row, Section, lines, table
from ..study import Study, some_of_each

if TYPE_CHECKING:
    from ....models.loaded import Loaded
    from ....studies import sweep
else:
    sweep = Later("specdemo.studies.sweep")

K_SWEEP, TEMPERATURE_SWEEP = "K", "temperature"
SEEDS = "One is enough at temperature 0: the text never varies."


class Sweep(Study):
    """A longer draft can gain more, but each of its tokens costs time, and a rejected token discards the rest. Higher
    temperatures make the target less predictable. This view writes the same texts with each setting, on easy prompts
    (lists, counting) and hard ones (stories), and shows what was fastest. The answer can be: do not speculate.
    """

    name = "sweep"
    title = "Which K, which temperature"
    fields = (
        Field(
            "vary",
            "What to vary",
            "choice",
            K_SWEEP,
            choices={K_SWEEP: "K: 0, 1, 2, 4, 8, 16", TEMPERATURE_SWEEP: "Temperature: 0, 0.3, 0.7, 1, 1.5"},
        ),
        Field("drafters", "Drafters", "drafters"),
        Field("k", "K, if the temperature varies", "whole", 4, 1, MAX_K),
        Field("temperature", "Temperature, if K varies", "number", 0.0, 0, 2),
        Field("prompts", "Prompts per category", "whole", 4, 1, 4),
        Field("seeds", "Samples per prompt", "whole", 1, 1, 10, info=SEEDS),
        NEW_TOKENS,
    )
    sections = ((4, 1),)

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.runs: list[sweep.Run] = []
        over_k = asked["vary"] == K_SWEEP
        self.plan = sweep.Plan(
            some_of_each("easy-hard", asked["prompts"]),
            asked["drafters"],
            sweep.KS if over_k else (0, asked["k"]),
            (asked["temperature"],) if over_k else sweep.TEMPERATURES,
            range(asked["seeds"]),
            asked["max_new_tokens"],
        )
        self.steps = self.plan.steps

    def run(self) -> Iterator[str]:
        for run in sweep.sweep(self.loaded, self.plan):
            self.runs.append(run)
            self.done += 1
            yield "Writing texts"

    def picture(self) -> Picture:
        return of_sweep(self.plan, self.runs, self.asked["vary"]) if self.runs else []

    def rows(self) -> list[dict[str, Any]]:
        return sweep.summarise(self.runs)

    def result(self) -> dict[str, Any]:
        return {"runs": self.runs, "summary": self.rows(), "best": sweep.best_k(self.runs)}


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
