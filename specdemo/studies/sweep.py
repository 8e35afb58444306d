"""Which K, which drafter, and what temperature does to them, on easy and on hard prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..racing.asked import PLAIN, SPECULATIVE
from ..racing.figures import LaneFigures, ratio_of_speeds
from ..settings import COMMAND, FORM, MATCH, MAX_K, Field, Settings
from ..system.imports import LazyModule
from .statistics import Spread, best_of, geometric_mean, log_means, pooled_rate
from .study import DRAFTERS, NEW_TOKENS, RULE, Study, prompt_fields
from .tables import Rows, Table, grouped, table

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from ..racing import lanes, race
else:
    lanes, race = LazyModule("specdemo.racing.lanes"), LazyModule("specdemo.racing.race")

KS = (0, 1, 2, 4, 8, 16)
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
WARM_UP = 8  # tokens
ALONE = "none"  # the target alone, in a summary
K_SWEEP, TEMPERATURE_SWEEP = "K", "temperature"
SWEEPS = {K_SWEEP: "K: 0, 1, 2, 4, 8, 16", TEMPERATURE_SWEEP: "Temperature: 0, 0.3, 0.7, 1, 1.5"}
SEVERAL_KS = "Values of K, separated by commas; 0 is always run."
ONE_IS_ENOUGH = "One is enough at temperature 0: the text never varies."


class Sweep(Study):
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
        Field("ks", "Values of K", "wholes", "0,1,2,4,8,16", help=SEVERAL_KS, shown_in=COMMAND),
        Field(
            "temperatures", "Temperatures", "numbers", "0", help="Temperatures, separated by commas.", shown_in=COMMAND
        ),
        Field("seeds", "Samples per prompt", "whole", 1, 1, 10, info=ONE_IS_ENOUGH, help="Samples per prompt."),
        *prompt_fields("easy-hard", 4, 4),
        NEW_TOKENS,
        RULE,
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.runs: list[SweepRun] = []
        self.over_temperatures = asked.get("vary") == TEMPERATURE_SWEEP
        if "vary" not in asked:
            self.ks, self.temperatures = self.given("ks temperatures")
        elif self.over_temperatures:
            self.ks, self.temperatures = (0, asked["k"]), TEMPERATURES
        else:
            self.ks, self.temperatures = KS, (asked["temperature"],)
        self.texts = self.prompts("easy-hard")
        # The target alone runs with every one of the cases.
        self.cases = [(drafter, k) for drafter in asked["drafters"] for k in self.ks if k]
        self.steps = len(self.texts) * len(self.temperatures) * asked["seeds"] * len(self.cases)

    def settings(self, k: int | str, temperature: float, seed: int) -> Settings:
        """Those of one text."""
        new_tokens, rule = self.asked["max_new_tokens"], self.asked.get("rule", MATCH)
        return Settings(k=k, temperature=temperature, max_new_tokens=new_tokens, seed=seed, rule=rule)

    def run(self) -> Iterator[str]:
        """Each run is a race: the drafter and the target alone take turns, so both run on the machine in the same
        state. The order of the cases moves on by one with every text, and within a case the lane that begins changes,
        so no case always comes first. A short race of each case comes before all others, to warm up.
        """
        loaded, cases = self.loaded, self.cases
        if not cases:
            raise BadInput("Give at least one drafter and one K above 0: the target alone runs with them anyway.")
        texts = [*product(range(self.asked["seeds"]), self.texts, self.temperatures)]
        prompt_ids = {prompt.id: loaded.encode(prompt.prompt) for prompt in self.texts}
        for drafter, k in cases:
            race.check_drafter(loaded, drafter)
            for seed, prompt, temperature in texts:
                race.check_fits(loaded, len(prompt_ids[prompt.id]), self.settings(k, temperature, seed), drafter)
        for drafter, k in cases:
            short = self.settings(k, self.temperatures[0], 0)
            short = replace(short, max_new_tokens=min(WARM_UP, short.max_new_tokens))
            _race(loaded, drafter, prompt_ids[self.texts[0].id], short, False)
        for turn, (seed, prompt, temperature) in enumerate(texts):
            first = turn % len(cases)
            for index, (drafter, k) in enumerate([*cases[first:], *cases[:first]]):
                settings = self.settings(k, temperature, seed)
                plain, stats = _race(loaded, drafter, prompt_ids[prompt.id], settings, (turn + index) % 2 == 1)
                run = SweepRun(
                    prompt.id,
                    prompt.category,
                    drafter,
                    k,
                    temperature,
                    seed,
                    stats.tokens,
                    stats.rounds,
                    stats.drafted,
                    stats.tested,
                    stats.accepted,
                    stats.seconds,
                    stats.tokens_per_second,
                    plain.tokens_per_second,
                    ratio_of_speeds(plain, stats),
                )
                self.runs.append(run)
                self.done += 1
                yield "Writing texts"

    def words(self) -> list[str]:
        if self.over_temperatures:
            return list(_temperature_words(self.rows()))
        return [row["sentence"] for row in best_k(self.runs)]

    def tables(self) -> list[Table]:
        rows = self.rows()
        several = len(self.texts) > len({row["category"] for row in rows})  # see `summarise`
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
        return summarise(self.runs)

    def result(self) -> dict[str, Any]:
        return {"runs": self.runs, "summary": self.rows(), "best": best_k(self.runs)}


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One text with a drafter, and the pace of the target alone, which wrote its own text in turns.

    `tokens_per_second`, `alone` and `speedup` leave out the prompt, None of a text of one token.
    """

    prompt_id: str
    category: str
    drafter: str
    k: int | str
    temperature: float
    seed: int
    tokens: int
    rounds: int
    drafted: int
    tested: int
    accepted: int
    seconds: float
    tokens_per_second: float | None
    alone: float | None
    speedup: float | None


def _race(
    loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings, drafter_first: bool
) -> tuple[LaneFigures, LaneFigures]:
    """The figures of the target alone and of the drafter; the lane whose clock is behind goes next."""
    names = {PLAIN: ALONE, SPECULATIVE: drafter}
    order = (SPECULATIVE, PLAIN) if drafter_first else (PLAIN, SPECULATIVE)
    stats = {lane: LaneFigures() for lane in order}
    runs = {lane: race.start(loaded, names[lane], prompt_ids, settings) for lane in order}
    with closing(lanes.take_turns(runs, lambda event: event.seconds)) as events:  # type: ignore[type-var]
        for lane, event in events:
            stats[lane].add(event)
    return stats[PLAIN], stats[SPECULATIVE]


def summarise(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """A row for each category, temperature, drafter and K: every figure as a `Spread`, None where there is none.

    Speeds and speed-ups are geometric means, rates are over all texts together; the intervals are over prompts, or over
    the seeds of a single prompt. The rows of the target alone, K = 0, are over all the texts it wrote.
    """
    groups: dict[tuple[str, float, str, int | str], list[SweepRun]] = {}
    for run in runs:
        for drafter, k in ((ALONE, 0), (run.drafter, run.k)):
            groups.setdefault((run.category, run.temperature, drafter, k), []).append(run)
    seen = [*dict.fromkeys(name for category, _, drafter, _ in groups for name in (category, drafter))]

    def order(key: tuple[str, float, str, int | str]) -> tuple[Any, ...]:
        return seen.index(key[0]), key[1], key[2] != ALONE, seen.index(key[2]), isinstance(key[3], str), key[3]

    return [
        {**dict(zip(("category", "temperature", "drafter", "k"), key, strict=True)), **_figures(groups[key], key[2])}
        for key in sorted(groups, key=order)
    ]


def _figures(runs: Sequence[SweepRun], drafter: str) -> dict[str, Any]:
    units = _units(runs)
    if drafter == ALONE:
        speeds = {unit: [run.alone for run in mine if run.alone] for unit, mine in units.items()}
        rates = dict.fromkeys(("tokens_per_round", "acceptance_rate", "draft_efficiency"))
        return {
            "tokens_per_second": geometric_mean(speeds),
            "speedup": Spread(1.0, None, None, len(units)),
            **rates,
            "runs": len(runs),
        }

    def rate(part: Callable[[SweepRun], int], whole: Callable[[SweepRun], int], most: float = 1.0) -> Spread | None:
        return pooled_rate([(sum(map(part, mine)), sum(map(whole, mine))) for mine in units.values()], most)

    speeds = {unit: [run.tokens_per_second for run in mine if run.tokens_per_second] for unit, mine in units.items()}
    return {
        "tokens_per_second": geometric_mean(speeds),
        "speedup": geometric_mean(_speedups(runs)),
        "tokens_per_round": rate(lambda run: run.tokens - 1, lambda run: run.rounds, inf),
        "acceptance_rate": rate(lambda run: run.accepted, lambda run: run.tested),
        "draft_efficiency": rate(lambda run: run.accepted, lambda run: run.drafted),
        "runs": len(runs),
    }


def _units(runs: Sequence[SweepRun]) -> dict[str, list[SweepRun]]:
    """The runs by prompt, or by seed if there is only one."""
    several = len({run.prompt_id for run in runs}) > 1
    return grouped(runs, lambda run: run.prompt_id if several else str(run.seed))


def _speedups(runs: Sequence[SweepRun]) -> dict[str, list[float]]:
    return {unit: [run.speedup for run in mine if run.speedup] for unit, mine in _units(runs).items()}


def best_k(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """For each category, temperature and drafter the fastest `k`, the others that are `tied` with it, and a `sentence`.

    K = 0, do not speculate, is one of them: the target alone has the speed-up 1 on every prompt. Ties are
    what paired tests over prompts, corrected for their number, cannot tell apart. `speedup` is that of the fastest K
    above 0, whose interval is corrected for its being picked; None where no text had a pace. `sure` says that the
    fastest K is above 0 and not tied with 0.
    """
    found = []
    for (category, temperature, drafter), group in grouped(
        runs, lambda run: (run.category, run.temperature, run.drafter)
    ).items():
        row = {"category": category, "temperature": temperature, "drafter": drafter}
        where = f"{drafter} on {category} prompts at T = {temperature:g}"
        found.append(row | _best(where, grouped(group, lambda run: run.k)))
    return found


def _best(where: str, by_k: Mapping[int | str, Sequence[SweepRun]]) -> dict[str, Any]:
    logs = {k: found for k, runs in by_k.items() if (found := log_means(_speedups(runs)))}
    if not logs:
        return {"k": 0, "tied": [], "speedup": None, "sure": False, "sentence": f"{where}: no text is long enough."}
    nothing: dict[int | str, Mapping[str, float]] = {0: {unit: 0.0 for found in logs.values() for unit in found}}
    best, tied = best_of({**nothing, **logs})
    k = best or max(logs, key=lambda k: fmean(logs[k].values()))
    gain = geometric_mean(_speedups(by_k[k]), len(logs))
    assert gain is not None
    gained = f"{gain.mean:.2f}× the target alone"
    if gain.low is not None:
        gained += f" ({gain.low:.2f} to {gain.high:.2f})"
    of = f" of {len(logs)}" if len(logs) > 1 else ""
    if best == 0:
        sentence = f"{where}: do not speculate; the fastest{of} was {gained}, with K = {k}."
    else:
        sentence = f"{where}: K = {k} was the fastest{of}, {gained}."
    if others := sorted((k for k in tied if k != 0), key=lambda k: (isinstance(k, str), k)):
        sentence += f" These prompts cannot tell {'it' if best else 'this'} from {_listed(others)}."
    if best != 0 and 0 in tied:
        sentence += " They are too few or too different to tell it from no gain."
    return {"k": best, "tied": tied, "speedup": gain, "sure": best != 0 and 0 not in tied, "sentence": sentence}


def _listed(ks: Sequence[int | str]) -> str:
    *most, last = (str(k) for k in ks)
    return f"K = {', '.join(most)} or {last}" if most else f"K = {last}"


def _temperature_words(rows: Rows) -> Iterator[str]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["k"] and row["speedup"]:
            found.setdefault((row["drafter"], row["category"]), []).append(row)
    for (drafter, category), mine in found.items():
        low, high = (pick(mine, key=lambda row: row["speedup"].mean) for pick in (min, max))
        advice = "; where it is below 1, do not speculate" if low["speedup"].mean < 1 else ""
        yield (
            f"{drafter} on {category} prompts: from {high['speedup'].mean:.2f}× at T = {high['temperature']:g} to "
            f"{low['speedup'].mean:.2f}× at T = {low['temperature']:g}{advice}."
        )
