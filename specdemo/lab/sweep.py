"""Which K, which drafter, and what temperature does to them, on easy and on hard prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..decode import check_room
from ..race import check_drafter, start
from ..stats import Stats
from ..types import Settings
from .bench import Prompt
from .tables import Spread

if TYPE_CHECKING:
    from ..models import Loaded

KS = (0, 1, 2, 4, 8, 16)
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
WARM_UP = 8  # tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One text. K = 0 is the target alone, whose drafter is `none`.

    `speedup` is in tokens per second over the target alone on the same prompt, temperature and seed.
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
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: every drafter and K, at every temperature, on every prompt, with every seed."""

    prompts: Sequence[Prompt]
    drafters: Sequence[str]
    ks: Sequence[int | str] = KS
    temperatures: Sequence[float] = (0.0,)
    seeds: Sequence[int] = (0,)
    max_new_tokens: int = 64

    @property
    def cases(self) -> list[tuple[str, int | str]]:
        """The target alone, then each drafter with each K."""
        return [("none", 0), *((drafter, k) for drafter in self.drafters for k in self.ks if k)]

    @property
    def texts(self) -> list[tuple[Prompt, float, int]]:
        """Every prompt at every temperature with every seed."""
        return [(prompt, t, seed) for seed in self.seeds for prompt in self.prompts for t in self.temperatures]

    @property
    def steps(self) -> int:
        """How many runs there are."""
        return len(self.texts) * len(self.cases)

    def settings(self, k: int | str, temperature: float, seed: int) -> Settings:
        return Settings(k=k, temperature=temperature, max_new_tokens=self.max_new_tokens, seed=seed)


def sweep(loaded: Loaded, plan: Plan) -> Iterator[Run]:
    """Run the plan; whatever was yielded by the time it is closed can be summarised.

    The runs of one text follow each other, the target alone first, so that they meet the machine in one state. A
    short run comes before all others, to warm up.

    Raises:
        BadInput: a setting out of range, a drafter that cannot be used here, or a prompt without room.
    """
    prompt_ids = {prompt.id: loaded.encode(prompt.prompt) for prompt in plan.prompts}
    for drafter, k in plan.cases:
        check_drafter(loaded, drafter)
        for prompt, temperature, seed in plan.texts:
            check_room(len(prompt_ids[prompt.id]), plan.settings(k, temperature, seed), loaded.context)
    warm_up = Settings(k=0, max_new_tokens=min(WARM_UP, plan.max_new_tokens))
    Stats.of(start(loaded, "none", prompt_ids[plan.prompts[0].id], warm_up))
    for prompt, temperature, seed in plan.texts:
        alone = 0.0
        for drafter, k in plan.cases:
            stats = Stats.of(start(loaded, drafter, prompt_ids[prompt.id], plan.settings(k, temperature, seed)))
            speed = stats.tokens / stats.seconds
            alone = alone or speed
            yield Run(
                *(prompt.id, prompt.category, drafter, k, temperature, seed),
                *(stats.tokens, stats.rounds, stats.drafted, stats.tested, stats.accepted),
                *(stats.seconds, speed, speed / alone),
            )


FIGURES: dict[str, Callable[[Sequence[Run]], float | None]] = {
    "tokens_per_second": lambda runs: fmean(run.tokens_per_second for run in runs),
    "ms_per_token": lambda runs: fmean(1000 / run.tokens_per_second for run in runs),
    "speedup": lambda runs: fmean(run.speedup for run in runs),
    "tokens_per_round": lambda runs: _share(sum(run.tokens - 1 for run in runs), sum(run.rounds for run in runs)),
    "acceptance_rate": lambda runs: _share(sum(run.accepted for run in runs), sum(run.tested for run in runs)),
    "draft_efficiency": lambda runs: _share(sum(run.accepted for run in runs), sum(run.drafted for run in runs)),
}

SHARES = ("acceptance_rate", "draft_efficiency")


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each category, temperature, drafter and K: every figure as a `Spread`, None where there is none.

    The runs of a prompt with different seeds are taken together first: they say how this prompt goes, not how
    others do. If there is only one prompt, the spread is over its seeds.
    """
    groups: dict[tuple[str, float, str, int | str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.category, run.temperature, run.drafter, run.k), []).append(run)
    rows = []
    for (category, temperature, drafter, k), members in groups.items():
        by_prompt: dict[str, list[Run]] = {}
        for run in members:
            by_prompt.setdefault(run.prompt_id, []).append(run)
        units = list(by_prompt.values()) if len(by_prompt) > 1 else [[run] for run in members]
        row: dict[str, Any] = {"category": category, "temperature": temperature, "drafter": drafter, "k": k}
        for name, figure in FIGURES.items():
            values = [value for unit in units if (value := figure(unit)) is not None]
            row[name] = Spread.of(values, most=1.0 if name in SHARES else inf)
        rows.append(row | {"runs": len(members)})
    return rows


def best_k(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each category, temperature and drafter of a summary the `k` of the largest mean speed-up, and a `sentence`.

    K = 0, do not speculate, if none is above 1. `sure` says whether the whole interval is above 1.
    """
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["k"]:
            groups.setdefault((row["category"], row["temperature"], row["drafter"]), []).append(row)
    named = []
    for (category, temperature, drafter), members in groups.items():
        row = max(members, key=lambda row: row["speedup"].mean)
        gain = row["speedup"]
        sure = gain.low is not None and gain.low > 1
        where = f"{drafter} on {category} prompts at T = {temperature:g}"
        if gain.mean <= 1:
            sentence = f"{where}: do not speculate; the best was {gain.mean:.2f}x, with K = {row['k']}."
        else:
            doubt = "" if sure else ", but the runs are too few or too different to tell it from no gain"
            sentence = f"{where}: K = {row['k']} was best, {gain.mean:.2f}x the target alone{doubt}."
        chosen = row["k"] if gain.mean > 1 else 0
        named.append(
            {"category": category, "temperature": temperature, "drafter": drafter}
            | {"k": chosen, "speedup": gain, "sure": sure, "sentence": sentence}
        )
    return named


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
