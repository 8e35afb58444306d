"""What a bench measured: rows of names and figures, in Python, in a file and in a table.

A row has the names of what was measured (a method, a drafter, its K, a prompt ...), then its figures: numbers, a mean
with its interval over prompts, or None where nothing is known. The row of a single text is a *run*. A file holds the
rows of a bench with the command, the machine and the commit that made them.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from operator import itemgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from specdemo.racing.figures import tokens_per_second
from specdemo.racing.provenance import provenance
from specdemo.racing.request import PLAIN, SPECULATIVE
from specdemo.settings import AUTO, MATCH
from specdemo.studies.prompts import ALL
from specdemo.studies.statistics import geometric_mean, log_means
from specdemo.studies.summaries import Figures, Row, Runs, by_unit, mean, share, summarise, total
from specdemo.studies.tables import group_by

from .cases import HF, LLAMA, OURS, TREE

if TYPE_CHECKING:
    from specdemo.models.loaded import Loaded

Figure = Callable[[Row], float | None]

BASES = (PLAIN, HF, LLAMA)  # what everything is compared with
KEY = ("method", "drafter", "k", "rule", "temperature", "category")  # of a row of the summary
DRAFTING = ("drafter", "rule", "temperature")
ACCEPTANCE = ("acceptance_rate", "draft_efficiency")
COUNTS = ("accepted", "tested", "drafted", "rounds", "draft_cost")

of_drafting = itemgetter(*DRAFTING)
text_key = itemgetter("prompt_id", "temperature", "repeat")  # runs with the same one are compared
speed = itemgetter("tokens_per_second")


def command(module: str = "tools.bench") -> str:
    """The command line that makes this measurement again, without where its file went."""
    words = iter(sys.argv[1:])
    kept = [word for word in words if not (word == "--json" and next(words, ""))]
    return shlex.join(["python", "-m", module, *(word for word in kept if not word.startswith("--json="))])


def made_by(loaded: Loaded, module: str = "tools.bench") -> Row:
    """What the rows of a bench were made by: the command, the machine and its versions, the commit, the weights."""
    return {"command": command(module), **provenance(loaded)}


def run_of(token_ids: Sequence[int], seconds: float, prompt_seconds: float, tokens: int = 0, **counts: Any) -> Row:
    """The figures of a text of so many `tokens`, by default its ids. What is not known of `COUNTS` is None."""
    tokens = tokens or len(token_ids)
    text = " ".join(map(str, token_ids))
    return {
        **{"new_tokens": tokens, "seconds": seconds, "prompt_seconds": prompt_seconds},
        "tokens_per_second": tokens_per_second(tokens, seconds, prompt_seconds),
        **dict.fromkeys(COUNTS),
        **counts,
        "token_ids": [*token_ids],
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],  # to compare texts for equality
    }


def by_text(runs: Iterable[Row], method: str = "") -> dict[Any, Row]:
    """The runs of one case, or those of a `method`, by `text_key`, to compare others with."""
    return {text_key(run): run for run in runs if method in ("", run["method"])}


def ratio_to(bases: Mapping[Any, Row], figure: Figure = speed) -> Figure:
    """A figure of a run, by default its speed, over that of the base on the same text."""

    def ratio(run: Row) -> float | None:
        base = bases.get(text_key(run))
        own, other = figure(run), figure(base) if base else None
        return own / other if own and other else None

    return ratio


def ratios(runs: Runs, bases: Mapping[Any, Row]) -> dict[str, list[float]]:
    """`ratio_to` by prompt. Texts of a single token have no speed and are left out."""
    return by_unit(runs, ratio_to(bases), "prompt_id")


def speed_ups(runs: Runs, alone: Mapping[Any, Row]) -> dict[int, dict[str, float]]:
    """The logarithm of the speed-up of the chains among some runs of a drafter, by their fixed K and by prompt."""
    chains = group_by((run for run in runs if run["method"] == SPECULATIVE and run["k"] != AUTO), itemgetter("k"))
    return {k: logs for k, mine in chains.items() if (logs := log_means(ratios(mine, alone)))}


def fastest_chain(runs: Runs, alone: Mapping[Any, Row]) -> tuple[int | None, dict[Any, Row]]:
    """The fixed K of the fastest chains among some runs of a drafter, and their runs by `text_key`."""
    logs = speed_ups(runs, alone)
    best = max(logs, key=lambda k: fmean(logs[k].values()), default=None)
    return best, by_text(run for run in runs if (run["method"], run["k"]) == (SPECULATIVE, best))


def figures_of(alone: Mapping[Any, Row]) -> Figures:
    """The figures of a case: the speed as a geometric mean over prompts, rates over all its runs together.

    `rows` are those of a pass. `identical` counts the texts that equal the target's.
    """
    return {
        "tokens_per_second": mean(speed),
        "tokens_per_round": share(lambda run: run["new_tokens"] - 1, "rounds"),
        "rows": share(lambda run: run["rounds"] + (run["drafted"] or 0), "rounds"),
        "acceptance_rate": share("accepted", "tested"),
        "draft_efficiency": share("accepted", "drafted"),
        "identical": total(lambda run: run["digest"] == alone[text_key(run)]["digest"]),
        "runs": len,
    }


def summary(runs: Runs) -> list[Row]:
    """A row for each method, drafter, K, rule, temperature and category; see `figures_of`.

    `ratio_to` is the speed divided by that of each of `BASES` on the same prompt, temperature and repeat.
    `ratio_to_best_k` is the speed of K = auto divided by that of the fastest fixed K on the same texts, a choice that
    favours that K. `identical` is None where the texts need not be the target's.
    """
    bases = {base: by_text(runs, base) for base in BASES}
    each = [{**run, "category": category} for run in runs for category in (ALL, run["category"])]
    of_family = itemgetter("category", *DRAFTING)
    families, figures = group_by(each, of_family), figures_of(bases[PLAIN])

    def identical(mine: Runs) -> int | None:
        return None if mine[0]["temperature"] and mine[0]["rule"] != MATCH else figures["identical"](mine)

    def to_best_k(mine: Runs) -> Row | None:
        if mine[0]["k"] != AUTO or mine[0]["method"] not in OURS:
            return None
        best_k, chain = fastest_chain(families[of_family(mine[0])], bases[PLAIN])
        found = geometric_mean(ratios(mine, chain))
        return {"k": best_k, **asdict(found)} if found else None

    to_bases = {base: mean(ratio_to(of_base)) for base, of_base in bases.items()}
    more: Figures = {
        "identical": identical,
        "ratio_to": lambda mine: {base: figure(mine) for base, figure in to_bases.items()},
        "ratio_to_best_k": to_best_k,
        "draft_cost": _draft_cost,
        "acceptance_by_place": _by_place,
    }
    return summarise(each, KEY, {**figures, **more})


def _draft_cost(runs: Runs) -> float | None:
    drafted = runs[0]["method"] in OURS and any(run["drafted"] for run in runs)
    return median(run["draft_cost"] or 0.0 for run in runs) if drafted else None


def _by_place(runs: Runs) -> list[float]:
    """Accepted / tested at each position of a draft where any was tested."""
    of_each = zip_longest(*(run.get("by_position", ()) for run in runs), fillvalue=(0, 0))
    counts = (map(sum, zip(*position, strict=True)) for position in of_each)
    return [round(accepted / tested, 4) for tested, accepted in counts if tested]


def drafter_rows(summary: Iterable[Row]) -> list[Row]:
    """A row for each drafter, K and temperature over all prompts, as the results of a preset hold them."""
    names = ("drafter", "k", "rule", "temperature", "tokens_per_round", "acceptance_rate", "draft_efficiency")
    rows = []
    for row in summary:
        if row["category"] == ALL and row["method"] == SPECULATIVE and (gain := row["ratio_to"][PLAIN]):
            interval = {"speed_up": gain.mean, "speed_up_from": gain.low, "speed_up_to": gain.high}
            copied = {name: row[name] for name in (*names, "draft_cost", "identical", "runs", "acceptance_by_place")}
            rows.append({**copied, **interval})
    return rows


def tree_rows(runs: Runs) -> list[Row]:
    """For each drafter that drafted trees: its chain of the fastest fixed K, its chains of K = auto, and its trees.

    `to_chain` compares with that chain on the same texts: geometric means over prompts, with intervals. Its K was
    picked for its speed, so that the comparison favours it.
    """
    alone, rows = by_text(runs, PLAIN), list[Row]()
    usual = {name: figure for name, figure in figures_of(alone).items() if name not in ACCEPTANCE}
    for family in group_by((run for run in runs if run["method"] in (SPECULATIVE, TREE)), of_drafting).values():
        best_k, chain = fastest_chain(family, alone)
        rates = {
            "tokens_per_round": mean(ratio_to(chain, _tokens_per_round)),
            "tokens_per_second": mean(ratio_to(chain)),
        }

        def is_best(run: Row, best_k: int | None = best_k) -> bool:
            return bool((run["method"], run["k"]) == (SPECULATIVE, best_k))

        def to_chain(mine: Runs, rates: Figures = rates, is_best: Any = is_best) -> Row | None:
            return None if is_best(mine[0]) else {name: figure(mine) for name, figure in rates.items()}

        figures = {"best_chain": lambda mine: is_best(mine[0]), **usual, "to_alone": mean(ratio_to(alone))}
        shown = [run for run in family if run["method"] == TREE or run["k"] == AUTO or is_best(run)]
        if any(run["method"] == TREE for run in shown):
            rows += summarise(shown, (*DRAFTING, "method", "k"), {**figures, "to_chain": to_chain})
    return rows


def _tokens_per_round(run: Row) -> float | None:
    return (run["new_tokens"] - 1) / run["rounds"] if run.get("rounds") else None
