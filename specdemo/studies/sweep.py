"""Which K, which drafter, and what temperature does to them, on easy and on hard prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import BadInput
from ..formats import formatted
from ..racing.figures import LaneFigures, ratio_of_speeds
from ..racing.request import PLAIN, SPECULATIVE
from ..settings import COMMAND, FORM, MAX_K, Field
from ..system.imports import LazyModule
from .grid import ALONE, Grid, figures_of, rotation
from .plots import ALONE as TARGET_ALONE
from .plots import DRAFT_LENGTH, TIMES, Axis, Plot
from .statistics import best_of, geometric_mean, log_means
from .study import DRAFTERS, NEW_TOKENS, RULE, TEMPERATURES, form_and_command, prompt_fields
from .summaries import ACCEPTANCE_RATE, DRAFT_EFFICIENCY, TOKENS_PER_ROUND, Figures, Row, Runs, by_unit, mean, summarise
from .tables import Rows, group_by

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import lanes
else:
    lanes = LazyModule("specdemo.racing.lanes")

KS_OF_FORM = (0, 1, 2, 4, 8, 16)
TEMPERATURES_OF_FORM = (0.0, 0.3, 0.7, 1.0, 1.5)
K_SWEEP, TEMPERATURE_SWEEP = "K", "temperature"
SWEEPS = {K_SWEEP: "K: 0, 1, 2, 4, 8, 16", TEMPERATURE_SWEEP: "Temperature: 0, 0.3, 0.7, 1, 1.5"}
SEVERAL_KS = "Values of K, separated by commas; 0 is always run."
ONE_IS_ENOUGH = "At temperature 0 all samples are the same: choose 1."
OVER_TEMPERATURES = Axis("temperature", "g", scale="ordinal")
SHARE = Axis("share of guesses", ".0%", end=1)
over_k = partial(Plot, at="k", x=replace(DRAFT_LENGTH, scale="ordinal"), by="name")


class Sweep(Grid):
    """A longer draft can gain more, but each of its tokens costs time, and a rejected token discards the rest. Higher
    temperatures make the target less predictable. This view writes the same texts with each setting, on easy prompts
    (lists, counting) and hard ones (stories), and shows what was fastest. The answer can be: do not speculate.
    """

    name = "sweep"
    title = "Which K, which temperature"
    summary = "Run drafters with several K, at several temperatures, on easy and hard prompts, and name the best K."
    fields = (
        Field("vary", "What to vary", "choice", K_SWEEP, choices=SWEEPS, shown_in=FORM),
        DRAFTERS,
        Field("k", "K, if the temperature varies", "whole", 4, 1, MAX_K, shown_in=FORM),
        Field("temperature", "Temperature, if K varies", "number", 0.0, 0, 2, shown_in=FORM),
        Field("ks", "Values of K", "text", "0,1,2,4,8,16", help=SEVERAL_KS, shown_in=COMMAND),
        TEMPERATURES,
        Field("seeds", "Samples per prompt", "whole", 1, 1, 10, info=ONE_IS_ENOUGH, help="Samples per prompt."),
        *prompt_fields("easy-hard", 4, 4),
        *form_and_command(NEW_TOKENS, 48, 64),
        RULE,
    )
    axes = ("category", "temperature", "drafter", "k")
    figures: ClassVar[Figures] = {
        "tokens_per_second": mean("tokens_per_second"),
        "speedup": mean("speedup"),
        "tokens_per_round": TOKENS_PER_ROUND,
        "acceptance_rate": ACCEPTANCE_RATE,
        "draft_efficiency": DRAFT_EFFICIENCY,
        "runs": len,
    }
    units = ("prompt_id", "seed")
    heading = "All figures, and their 95% intervals over prompts, or over the seeds of a single one"
    columns = (
        ("category", "prompts", ""),
        ("temperature", "T", ".3g"),
        ("drafter", "drafter", ""),
        ("k", "K", ",.0f"),
        ("runs", "texts", ",.0f"),
        ("speedup", "speed-up", "times"),
        ("tokens_per_second", "tokens/s", ".1f"),
        ("acceptance_rate", "acceptance rate", ".0%"),
        ("draft_efficiency", "draft efficiency", ".0%"),
    )
    concludes = False
    plots: Sequence[Sequence[Plot]] = (
        (
            over_k(
                "Speed-up",
                "Compared with the target alone on the same prompt, after the prompt: geometric mean. Whiskers: 95% "
                "confidence interval over prompts.",
                {"speedup": ""},
                TIMES,
                rule=TARGET_ALONE,
            ),
            over_k(
                "Tokens per second", "After the prompt is read.", {"tokens_per_second": ""}, Axis("tokens/s", ".1f")
            ),
            over_k("Acceptance rate", "Accepted / tested.", {"acceptance_rate": ""}, SHARE),
            over_k("Draft efficiency", "Accepted / drafted.", {"draft_efficiency": ""}, SHARE),
        ),
    )

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        self.over_temperatures = chosen.get("vary") == TEMPERATURE_SWEEP
        if self.over_temperatures:
            self.plots = [[replace(plot, at="temperature", x=OVER_TEMPERATURES) for plot in self.plots[0]]]
        if "vary" not in chosen:
            self.ks, self.temperatures = chosen["ks"], chosen["temperatures"]
        elif self.over_temperatures:
            self.ks, self.temperatures = (0, chosen["k"]), TEMPERATURES_OF_FORM
        else:
            self.ks, self.temperatures = KS_OF_FORM, (chosen["temperature"],)
        cases = [{"drafter": drafter, "k": k} for drafter in chosen["drafters"] for k in self.ks if k]
        if not cases:
            raise BadInput("Give at least one drafter and one K above 0: the target alone runs with them anyway.")
        prompts = self.texts_of(self.prompts("easy-hard"))
        texts = [{**prompt, "seed": seed} for seed in range(chosen["seeds"]) for prompt in prompts]
        self.plan(texts, cases, [{"temperature": temperature} for temperature in self.temperatures])

    def write(self, names: Row) -> Iterator[Row]:
        """A race: the drafter and the target alone take turns, so both run on the machine in the same state. The lane
        that begins changes from text to text.
        """
        both = rotation([(PLAIN, ALONE), (SPECULATIVE, names["drafter"])], self.turn)
        written = lanes.write_in_turn({lane: self.events({**names, "drafter": drafter}) for lane, drafter in both})
        plain, drafted = (LaneFigures.of(written[lane]) for lane in (PLAIN, SPECULATIVE))
        ratio = ratio_of_speeds(plain, drafted)
        yield {**figures_of(drafted), "alone": plain.tokens_per_second, "speedup": ratio}

    def words(self) -> list[str]:
        if self.over_temperatures:
            return list(_temperature_words(self.rows()))
        return [row["sentence"] for row in best_k(self.runs)]

    @classmethod
    def with_comparison(cls, runs: Runs) -> Runs:
        """With those of the target alone, K = 0, over all the texts it wrote."""
        return [one for run in runs for one in (_alone(run), run)]

    def drawn(self) -> Mapping[str, Rows]:
        """A line for each drafter and category. Over K it begins with K = 0, the target alone."""
        rows = []
        for row in self.rows():
            if row["drafter"] != ALONE:
                rows.append({**row, "name": f"{row['drafter']}, {row['category']}"})
            elif self.over_temperatures:
                rows.append({**row, "name": f"target alone, {row['category']}", "speedup": None})
            else:
                rows += [{**row, "name": f"{name}, {row['category']}"} for name in self.chosen["drafters"]]
        return {"": rows}

    def result(self) -> dict[str, Any]:
        return {"runs": self.runs, "summary": self.rows(), "best": best_k(self.runs)}


def _alone(run: Row) -> Row:
    """The target alone in a run, as a run of its own."""
    nothing = dict.fromkeys(("rounds", "drafted", "tested", "accepted"))
    return {**run, **nothing, "drafter": ALONE, "k": 0, "tokens_per_second": run["alone"], "speedup": 1.0}


def best_k(runs: Runs) -> list[Row]:
    """For each category, temperature and drafter the fastest `k`, the others that are `tied` with it, and a `sentence`.

    K = 0, do not speculate, is one of them: the target alone has the speed-up 1 on every prompt. Ties are
    what paired tests over prompts, corrected for their number, cannot tell apart. `speedup` is that of the fastest K
    above 0, whose interval is corrected for its being picked; None where no text had a pace. `sure` says that the
    fastest K is above 0 and not tied with 0.
    """
    speedups = {"by_k": lambda runs: {k: by_unit(mine, "speedup") for k, mine in group_by(runs, _k).items()}}
    rows = summarise(runs, ("category", "temperature", "drafter"), speedups, Sweep.units)
    return [row | _best(row, row.pop("by_k")) for row in rows]


def _k(run: Row) -> int | str:
    return run["k"]


def _best(names: Mapping[str, Any], by_k: Mapping[int | str, Mapping[str, Sequence[float]]]) -> Row:
    """Of the speed-ups of each unit by K."""
    where = f"{names['drafter']} on {names['category']} prompts at T = {names['temperature']:g}"
    logs = {k: found for k, speedups in by_k.items() if (found := log_means(speedups))}
    if not logs:
        return {"k": 0, "tied": [], "speedup": None, "sure": False, "sentence": f"{where}: no text is long enough."}
    nothing: dict[int | str, Mapping[str, float]] = {0: {unit: 0.0 for found in logs.values() for unit in found}}
    best, tied = best_of({**nothing, **logs})
    k = best or max(logs, key=lambda k: fmean(logs[k].values()))
    gain = geometric_mean(by_k[k], len(logs))
    gained = f"{formatted(gain, 'times')} the target alone"
    of = f" of {len(logs)}" if len(logs) > 1 else ""
    if best == 0:
        sentence = f"{where}: do not speculate; the fastest{of} was {gained}, with K = {k}."
    else:
        sentence = f"{where}: K = {k} was the fastest{of}, {gained}."
    if others := sorted((k for k in tied if k != 0), key=lambda k: (isinstance(k, str), k)):
        sentence += f" These prompts cannot tell {'it' if best else 'this'} from {_listed(others)}."
    if best != 0 and 0 in tied:
        sentence += " They are too few or too varied to show a gain."
    return {"k": best, "tied": tied, "speedup": gain, "sure": best != 0 and 0 not in tied, "sentence": sentence}


def _listed(ks: Sequence[int | str]) -> str:
    *most, last = (str(k) for k in ks)
    return f"K = {', '.join(most)} or {last}" if most else f"K = {last}"


def _temperature_words(rows: Runs) -> Iterator[str]:
    known = [row for row in rows if row["k"] and row["speedup"]]
    for (drafter, category), mine in group_by(known, lambda row: (row["drafter"], row["category"])).items():
        low, high = (pick(mine, key=lambda row: row["speedup"].mean) for pick in (min, max))
        advice = "; where it is below 1, do not speculate" if low["speedup"].mean < 1 else ""
        yield (
            f"{drafter} on {category} prompts: from {high['speedup'].mean:.2f}× at T = {high['temperature']:g} to "
            f"{low['speedup'].mean:.2f}× at T = {low['temperature']:g}{advice}."
        )
