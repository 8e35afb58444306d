"""Trees beside chains, from the runs of a bench: is a row better spent on a branch or on the end of a chain?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ..racing.race import PLAIN, SPECULATIVE
from ..studies.statistics import geometric_mean, log_means
from ..studies.tables import grouped
from ..types import AUTO, REJECTION
from .cases import TREE
from .throughput import Run, by_text, cell, drafting, mean, rate, ratios, text_key

CHAIN_COLUMNS = "tokens a round, to that chain", "tokens/s, to that chain"
HEADINGS = "drafter", "T", "draft", "tokens a round", "rows a pass", "tokens/s", "to the target alone", *CHAIN_COLUMNS


def tree_rows(runs: Sequence[Run]) -> list[Run]:
    """For each drafter that drafted trees: its chain of the fastest fixed K, its chains of K = auto, and its trees.

    `to_chain` compares with that chain on the same texts: geometric means over prompts, with intervals. Its K was
    picked for its speed, so that the comparison favours it. Rates are over all runs together.
    """
    alone = by_text(run for run in runs if run["method"] == PLAIN)
    drafted = [run for run in runs if run["method"] in (SPECULATIVE, TREE)]
    rows = []
    for (drafter, rule, temperature), group in grouped(drafted, drafting).items():
        by_size = grouped(group, lambda run: (run["method"], run["k"]))
        if not any(method == TREE for method, _ in by_size):
            continue
        logs = {size: log_means(ratios(mine, alone)) for size, mine in by_size.items()}
        fixed = [size for size in by_size if size[0] == SPECULATIVE and size[1] != AUTO and logs[size]]
        best = max(fixed, key=lambda size: fmean(logs[size].values()), default=None)
        chain = by_text(by_size[best]) if best else {}
        for size, mine in by_size.items():
            method, k = size
            if method == SPECULATIVE and k != AUTO and size != best:
                continue
            rows.append(
                {
                    **{"drafter": drafter, "rule": rule, "temperature": temperature, "method": method, "k": k},
                    "best_chain": size == best,
                    "tokens_per_round": rate(mine, lambda run: run["new_tokens"] - 1, "rounds"),
                    "rows": rate(mine, lambda run: run["rounds"] + (run["drafted"] or 0), "rounds"),
                    "tokens_per_second": mean(mine, lambda run: run["tokens_per_second"]),
                    "to_alone": geometric_mean(ratios(mine, alone)),
                    "to_chain": {
                        "tokens_per_round": geometric_mean(ratios(mine, chain, _tokens_per_round)),
                        "tokens_per_second": geometric_mean(ratios(mine, chain)),
                    }
                    if size != best
                    else None,
                    "identical": sum(run["digest"] == alone[text_key(run)]["digest"] for run in mine),
                    "runs": len(mine),
                }
            )
    return rows


def _tokens_per_round(run: Run) -> float | None:
    return (run["new_tokens"] - 1) / run["rounds"] if run.get("rounds") else None


def trees_markdown(rows: Sequence[Run]) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for row in rows:
        name = f"`{row['drafter']}`" + (f", {REJECTION}" if row["rule"] == REJECTION and row["temperature"] else "")
        to_chain = row["to_chain"] or {}
        cells = [name, f"{row['temperature']:g}", size_of(row)]
        cells += [f"{row['tokens_per_round']:.2f}", f"{row['rows']:.1f}", f"{row['tokens_per_second'].mean:.1f}"]
        cells.append(cell(row["to_alone"]))
        figures = "tokens_per_round", "tokens_per_second"
        cells += ["1" if row["best_chain"] else cell(to_chain.get(figure)) for figure in figures]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def size_of(row: Run) -> str:
    """What a row drafted, in words."""
    if row["k"] == AUTO:
        return "trees or chains, K = auto" if row["method"] == TREE else "chains, K = auto"
    kind = "tree" if row["method"] == TREE else "chain"
    return f"a {kind} of {row['k']}" + (", the fastest" if row["best_chain"] else "")
