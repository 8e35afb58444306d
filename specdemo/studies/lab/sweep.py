"""Which K, which temperature: the same texts with each, on easy and on hard prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...system.imports import Later
from ...types import COMMAND, FORM, MATCH, MAX_K, Field
from ..tables import Rows, Table, table
from .study import DRAFTERS, NEW_TOKENS, RULE, Study, prompt_fields

if TYPE_CHECKING:
    from ...models.loaded import Loaded
    from .. import sweep
else:
    sweep = Later("specdemo.studies.sweep")

K_SWEEP, TEMPERATURE_SWEEP = "K", "temperature"


class Sweep(Study):
    """A longer draft can gain more, but each of its tokens costs time, and a rejected token discards the rest. Higher
    temperatures make the target less predictable. This view writes the same texts with each setting, on easy prompts
    (lists, counting) and hard ones (stories), and shows what was fastest. The answer can be: do not speculate.
    """

    name = "sweep"
    title = "Which K, which temperature"
    summary = "Run drafters with several K, at several temperatures, on easy and hard prompts, and name the best K."
    fields = (
        Field(
            *("vary", "What to vary", "choice", K_SWEEP),
            choices={K_SWEEP: "K: 0, 1, 2, 4, 8, 16", TEMPERATURE_SWEEP: "Temperature: 0, 0.3, 0.7, 1, 1.5"},
            only=FORM,
        ),
        DRAFTERS,
        Field("k", "K, if the temperature varies", "whole", 4, 1, MAX_K, only=FORM),
        Field("temperature", "Temperature, if K varies", "number", 0.0, 0, 2, only=FORM),
        Field(
            *("ks", "Values of K", "wholes", "0,1,2,4,8,16"),
            help="Values of K, separated by commas; 0 is always run.",
            only=COMMAND,
        ),
        Field(
            *("temperatures", "Temperatures", "numbers", "0"), help="Temperatures, separated by commas.", only=COMMAND
        ),
        Field(
            *("seeds", "Samples per prompt", "whole", 1, 1, 10),
            info="One is enough at temperature 0: the text never varies.",
            help="Samples per prompt.",
        ),
        *prompt_fields("easy-hard", "Prompts per category", 4, 1, 4),
        NEW_TOKENS,
        RULE,
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.runs: list[sweep.Run] = []
        self.over_temperatures = asked.get("vary") == TEMPERATURE_SWEEP
        if "vary" not in asked:
            ks, temperatures = self.given("ks temperatures")
        elif self.over_temperatures:
            ks, temperatures = (0, asked["k"]), sweep.TEMPERATURES
        else:
            ks, temperatures = sweep.KS, (asked["temperature"],)
        drafters, seeds, new_tokens = self.given("drafters seeds max_new_tokens")
        prompts, rule = self.prompts("easy-hard"), asked.get("rule", MATCH)
        self.plan = sweep.SweepPlan(prompts, drafters, ks, temperatures, range(seeds), new_tokens, rule)
        self.steps = self.plan.steps

    def run(self) -> Iterator[str]:
        for run in sweep.sweep(self.loaded, self.plan):
            self.runs.append(run)
            self.done += 1
            yield "Writing texts"

    def words(self) -> list[str]:
        if self.over_temperatures:
            return list(_temperature_words(self.rows()))
        return [row["sentence"] for row in sweep.best_k(self.runs)]

    def tables(self) -> list[Table]:
        rows = self.rows()
        several = len(self.plan.prompts) > len({row["category"] for row in rows})  # see `sweep.summarise`
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
        title = f"All figures, and their 95% intervals over {'prompts' if several else 'seeds'}"
        return [table(title, columns, rows)]

    def rows(self) -> list[dict[str, Any]]:
        return sweep.summarise(self.runs)

    def result(self) -> dict[str, Any]:
        return {"runs": self.runs, "summary": self.rows(), "best": sweep.best_k(self.runs)}


def _temperature_words(rows: Rows) -> Iterator[str]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
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
