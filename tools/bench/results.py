"""What `bench --json` writes and `presets/results` keeps, and the tables of it.

A file holds every run as a line of numbers, with a digest of its text, and the rows that were made from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from specdemo.errors import BadInput
from specdemo.formats import significant
from specdemo.racing.figures import tokens_per_second
from specdemo.racing.request import PLAIN, SPECULATIVE
from specdemo.settings import AUTO, REJECTION
from specdemo.studies.prompts import ALL
from specdemo.studies.statistics import Spread, best_of, geometric_mean
from specdemo.studies.tables import group_by

from .cases import ASSISTED, HF, LLAMA, OPENVINO, OURS, TREE, TUNED
from .rows import Row, Runs, by_text, of_drafting, ratios, speed_ups, tree_rows
from .tables import Columns, markdown_table, text_table

DIGITS = 7  # of a measured number
COLUMNS = (
    "method",
    "drafter",
    "k",
    "rule",
    "temperature",
    "prompt_id",
    "category",
    "repeat",
    "new_tokens",
    "seconds",
    "prompt_seconds",
    "accepted",
    "tested",
    "drafted",
    "rounds",
    "draft_cost",
    "digest",
)
NAMES = {
    PLAIN: "specdemo, target alone",
    HF: "transformers, `generate`",
    LLAMA: "llama.cpp",
    OPENVINO: "OpenVINO GenAI",
}
WAYS = {ASSISTED: "`assistant_model` as it comes", TUNED: "`assistant_model`"}


def record(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a bench as it is saved: its facts, its `rows` over all prompts, its `columns` and its `runs`.

    With trees there are the rows of `tree_rows` as well.
    """
    facts = {name: value for name, value in outcome.items() if name not in ("runs", "summary")}
    rows = [row for row in outcome["summary"] if row["category"] == ALL]
    trees = {"trees": found} if (found := tree_rows(outcome["runs"])) else {}
    runs = [
        [significant(run[name], DIGITS) if isinstance(run[name], float) else run[name] for name in COLUMNS]
        for run in outcome["runs"]
    ]
    return {**facts, "rows": rows, **trees, "columns": COLUMNS, "runs": runs}


def read_record(path: Path) -> dict[str, Any]:
    """What a file holds that `record` made; its `runs` are rows again."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"), object_hook=spread)
        runs = [dict(zip(saved["columns"], values, strict=True)) for values in saved["runs"]]
        for run in runs:
            run["tokens_per_second"] = tokens_per_second(run["new_tokens"], run["seconds"], run["prompt_seconds"])
        return {"trees": [], **saved, "runs": runs}
    except OSError as error:
        raise BadInput(f"The results cannot be read: {error}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path.name} does not hold what `bench --json` writes: {error}.") from error


def spread(value: dict[str, Any]) -> Any:
    """An object of a file: a figure with its interval is a `Spread`."""
    return Spread(**value) if value.keys() == {"mean", "low", "high", "count"} else value


def joined(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """New results with the old rows of drafters that were not measured again, if nothing else has changed.

    Each row names its commit. Hardware, versions, weights and settings are the same for all rows.
    """
    rows = [{**row, "commit": new["environment"]["commit"]} for row in new["rows"]]
    measured = {row["drafter"] for row in rows}
    if old is not None and _circumstances(old) == _circumstances(new):
        kept = [row for row in old["rows"] if row["drafter"] not in measured]
        rows = [*({"commit": old["environment"]["commit"], **row} for row in kept), *rows]
    return {**new, "rows": rows}


def _circumstances(results: Mapping[str, Any]) -> dict[str, Any]:
    return {**results, "environment": {**results["environment"], "commit": None}, "rows": None}


# Tables ----------------------------------------------------------------------------------------------------


def table(summary: Sequence[Row]) -> str:
    """The summary for people: geometric means with 95% intervals over prompts; empty columns are left out."""
    columns: Columns = {
        **{"category": "", "temperature": "g", "method": "", "drafter": "", "k": "", "rule": ""},
        **{"tokens/s": ("tokens_per_second", ".1f"), "to alone": (lambda row: row["ratio_to"][PLAIN], ".2f")},
        "to hf": (lambda row: row["ratio_to"][HF], ".2f"),
        "to llama.cpp": (lambda row: row["ratio_to"][LLAMA], ".2f"),
        "to best K": (lambda row: (row["ratio_to_best_k"] or {}).get("mean"), ".2f"),
        **{"tokens_per_round": ".2f", "rows": ".1f", "acceptance_rate": ".0%", "draft_efficiency": ".0%"},
        "draft_cost": ".0%",
        "same": (lambda row: None if row["identical"] is None else f"{row['identical']}/{row['runs']}", ""),
    }
    rows = sorted(summary, key=lambda row: (row["category"] == ALL, row["category"], row["temperature"]))
    return text_table(rows, columns, sparse=True)


def markdown(rows: Sequence[Row]) -> list[str]:
    """The rows as a table in Markdown: geometric means over prompts, and their 95% intervals."""

    def to(base: str) -> tuple[Callable[[Row], Any], str]:
        return lambda row: "1" if row["method"] == base else row["ratio_to"][base], ".2f"

    hot: Columns = {"T": ("temperature", "g")} if len({row["temperature"] for row in rows}) > 1 else {}
    headings = {HF: "times transformers", LLAMA: "times llama.cpp", PLAIN: "times the target alone"}
    bases = {headings[base]: to(base) for base in headings if any(row["ratio_to"][base] for row in rows)}
    same: Columns = {"texts of the target": (_same, "")}
    return markdown_table(rows, {"": (_name, ""), **hot, "tokens/s": (_speed, ".1f"), **bases, **same})


def _same(row: Row) -> str | None:
    """How many texts are those of the target alone; None where they need not be."""
    return None if row["identical"] is None else f"{row['identical']} of {row['runs']}"


def _name(row: Row) -> str:
    method, k = str(row["method"]), row["k"]
    if row["drafter"] is None or method in NAMES:
        return NAMES.get(method, method)
    program = "specdemo" if method in OURS else method.split("-", maxsplit=1)[0].replace("hf", "transformers")
    size = f", K = {k}" if k is not None else ""
    if method == TREE:
        size = f", trees{size}" if k == AUTO else f", a tree of {k}"
    return f"{program}, {WAYS.get(method, _drafter(row))}{size}{_rule(row)}"


def _drafter(row: Row) -> str:
    return f"`{row['drafter']}`"


def drafting(row: Row) -> str:
    """The drafter and, where it is not the default, the rule."""
    return _drafter(row) + _rule(row)


def _rule(row: Row) -> str:
    return f", {REJECTION}" if row["rule"] == REJECTION and row["temperature"] else ""


def _speed(row: Row) -> float | None:
    return row["tokens_per_second"] and row["tokens_per_second"].mean


def drafters_markdown(runs: Runs) -> list[str]:
    """A line for each drafter and temperature: its fastest K, those that tie with it, and K = auto.

    The interval of the fastest K is corrected for its being picked. The ratio of auto to it flatters that K.
    """
    alone, rows = by_text(runs, PLAIN), []
    for family in group_by((run for run in runs if run["method"] == SPECULATIVE), of_drafting).values():
        by_k, logs = group_by(family, itemgetter("k")), speed_ups(family, alone)
        best, tied = best_of(logs)
        auto = by_k.get(AUTO, [])
        rows.append(
            {
                **{"": drafting(family[0]), "T": family[0]["temperature"], "fastest K": best},
                "tied with it": ", ".join(map(str, tied)) or None,
                "its speed-up": geometric_mean(ratios(by_k[best], alone), of_many=len(logs)),
                "K = auto": geometric_mean(ratios(auto, alone)),
                "auto to that K": geometric_mean(ratios(auto, by_text(by_k[best]))),
            }
        )
    shapes = {"": "", "T": "g", "fastest K": "", "tied with it": "", "its speed-up": ".2f", "K = auto": ".2f"}
    return markdown_table(rows, {**shapes, "auto to that K": ".2f"})


def size_of(row: Row) -> str:
    """What a row of `tree_rows` drafted, in words."""
    if row["k"] == AUTO:
        return "trees or chains, K = auto" if row["method"] == TREE else "chains, K = auto"
    kind = "tree" if row["method"] == TREE else "chain"
    return f"a {kind} of {row['k']}" + (", the fastest" if row["best_chain"] else "")


def trees_markdown(rows: Sequence[Row]) -> list[str]:
    """The rows of `tree_rows` as a table in Markdown."""

    def to_chain(name: str) -> tuple[Callable[[Row], Any], str]:
        return lambda row: "1" if row["best_chain"] else (row["to_chain"] or {}).get(name), ".2f"

    columns: Columns = {
        **{"drafter": (drafting, ""), "T": ("temperature", "g"), "draft": (size_of, "")},
        **{"tokens a round": ("tokens_per_round", ".2f"), "rows a pass": ("rows", ".1f"), "tokens/s": (_speed, ".1f")},
        "to the target alone": ("to_alone", ".2f"),
        "tokens a round, to that chain": to_chain("tokens_per_round"),
        "tokens/s, to that chain": to_chain("tokens_per_second"),
    }
    return markdown_table(rows, columns)
