"""What `bench --json` writes and `presets/results` keeps: every run in a line of numbers, and the rows made of them.

A text is saved as a digest of its token ids. Every row can be made again from the runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..racing.race import PLAIN, SPECULATIVE
from ..racing.stats import Pace
from ..studies.prompts import ALL
from ..studies.statistics import best_of, geometric_mean, log_means
from ..studies.tables import grouped
from ..types import AUTO, REJECTION, BadInput
from .cases import TREE
from .hf import HF
from .llamacpp import LLAMA
from .throughput import Run, by_text, cell, drafting, ratios, summarise
from .trees import tree_rows

COLUMNS = (
    *("method", "drafter", "k", "rule", "temperature", "prompt_id", "category", "repeat", "new_tokens", "seconds"),
    *("prompt_seconds", "accepted", "tested", "drafted", "rounds", "draft_cost", "digest"),
)
FACTS = ("command", "environment", "weights", "prompts_sha256", "in_turn", "interrupted")


def record(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a bench as it is saved: its facts, its `rows` over all prompts, its `columns` and its `runs`.

    With trees there are the rows of `tree_rows` as well.
    """
    runs = [[_short(run[name]) for name in COLUMNS] for run in outcome["runs"]]
    facts = {name: value for name, value in outcome.items() if name not in ("runs", "summary")}
    named = _named(runs)
    trees = {"trees": rows} if (rows := tree_rows(named)) else {}
    return {**facts, "rows": rows_of(named), **trees, "columns": COLUMNS, "runs": runs}


def _short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _named(runs: Sequence[Sequence[Any]]) -> list[Run]:
    found = []
    for values in runs:
        run = dict(zip(COLUMNS, values, strict=True))
        run["tokens_per_second"] = Pace(run["new_tokens"], run["seconds"], run["prompt_seconds"]).tokens_per_second
        found.append(run)
    return found


def rows_of(runs: Sequence[Run]) -> list[Run]:
    """The rows over all prompts, without the acceptance by position, which runs do not hold."""
    rows = []
    for row in summarise(runs):
        if row.pop("category") == ALL:
            del row["acceptance_by_place"], row["rows"]  # as the results that are kept
            rows.append(row)
    return rows


def read_record(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """The facts and the runs of a file that `record` made.

    Raises:
        BadInput: it is none, or its rows are not those of its runs.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        facts = {name: saved[name] for name in FACTS}
        if tuple(saved["columns"]) != COLUMNS:
            raise ValueError("other columns")
        runs = _named(saved["runs"])
        rows = json.loads(json.dumps(rows_of(runs), default=asdict))
    except OSError as error:
        raise BadInput(f"The results cannot be read: {error}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path.name} does not hold what `bench --json` writes: {error}.") from error
    if not _alike(rows, saved["rows"]):
        raise BadInput(f"{path.name}: its rows are not those of its runs.")
    return facts, runs


def _alike(one: Any, other: Any) -> bool:
    """Equal but for the last digits, which another version of a library may round otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


NAMES = {PLAIN: "specdemo, target alone", HF: "transformers, `generate`", LLAMA: "llama.cpp"}
HEADINGS = {HF: "times transformers", LLAMA: "times llama.cpp", PLAIN: "times the target alone"}


def markdown(rows: Sequence[Run]) -> list[str]:
    """The rows as the lines of a table in Markdown: geometric means over prompts, and their 95% intervals."""
    hot = len({row["temperature"] for row in rows}) > 1
    bases = [base for base in HEADINGS if any(row["ratio_to"][base] for row in rows)]
    lines = ["| | " + ("T | " if hot else "") + " | ".join(["tokens/s", *(HEADINGS[base] for base in bases)]) + " |"]
    lines.append("|---" * (2 + hot + len(bases)) + "|")
    for row in rows:
        speed = row["tokens_per_second"]
        cells = [_name(row), *([f"{row['temperature']:g}"] if hot else []), f"{speed.mean:.1f}"]
        cells += ["1" if base == row["method"] else cell(row["ratio_to"][base]) for base in bases]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def drafters_markdown(runs: Sequence[Run]) -> list[str]:
    """A line for each drafter and temperature: its fastest K, those that tie with it, and K = auto.

    The interval of the fastest K is corrected for its being picked. The ratio of auto to it flatters that K.
    """
    lines = ["| | T | fastest K | tied with it | its speed-up | K = auto | auto to that K |", "|---" * 7 + "|"]
    alone = by_text(run for run in runs if run["method"] == PLAIN)
    chains = [run for run in runs if run["method"] == SPECULATIVE]
    for (drafter, rule, temperature), group in grouped(chains, drafting).items():
        by_k = grouped(group, itemgetter("k"))
        logs = {k: log_means(ratios(mine, alone)) for k, mine in by_k.items() if k != AUTO}
        best, tied = best_of(logs)
        auto = by_k.get(AUTO, [])
        found = [
            geometric_mean(ratios(by_k[best], alone), of_many=len(logs)),
            geometric_mean(ratios(auto, alone)),
            geometric_mean(ratios(auto, by_text(by_k[best]))),
        ]
        name = f"`{drafter}`" + (f", {rule}" if rule == REJECTION and temperature else "")
        cells = [name, f"{temperature:g}", f"{best}", ", ".join(map(str, tied)) or "-", *map(cell, found)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _name(row: Run) -> str:
    method, drafter, k = row["method"], row["drafter"], row["k"]
    if method in NAMES:
        return NAMES[method]
    program = {SPECULATIVE: "specdemo", TREE: "specdemo"}.get(
        method, method.split("-")[0].replace("hf", "transformers")
    )
    way = {"hf-assisted": "`assistant_model` as it comes", "hf-assisted-tuned": "`assistant_model`"}.get(method)
    rule = f", {REJECTION}" if row["rule"] == REJECTION and row["temperature"] else ""
    size = f", K = {k}" if k is not None else ""
    if method == TREE:
        size = f", trees{size}" if k == AUTO else f", a tree of {k}"
    return f"{program}, {way or f'`{drafter}`'}{size}{rule}"
