"""The measured results of a preset's drafters. `tools.bench drafters` writes them, and the drafter menu shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..settings import AUTO


def results_path(preset: Path) -> Path:
    """The path of a preset's results: `NAME.results.json` beside `NAME.toml`."""
    return preset.with_suffix(".results.json")


def read_results(path: Path) -> Mapping[str, Any] | None:
    """The results in a file; None if there is none."""
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        for drafter in {"", *(row["drafter"] for row in results["rows"])}:  # finds rows that cannot be described
            describe_results(results, drafter)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(
            f"{path.name} does not hold the results of `python -m tools.bench drafters`. Remove it or measure again."
        ) from error
    return results


def describe_results(results: Mapping[str, Any], drafter: str) -> str:
    """A drafter's speed-up at each temperature, with the best K; empty if not measured."""
    rows = [row for row in results["rows"] if row["drafter"] == drafter]
    there = results["environment"]
    dtype, weights = there["dtype"], there["weights_dtype"]
    numbers = dtype if weights == dtype else f"{dtype} with {weights} weights"
    where = f"{there['cores']} cores of {there['cpu']}, {numbers}, {results['prompts']} prompts"
    best = _best(rows)
    speed_ups = [f"{row['speed_up']:.2f}× at temperature {at:g} (K = {row['k']})" for at, row in best.items()]
    return f"Measured speed-up: {', '.join(speed_ups)}. On {where}." if speed_ups else ""


def greedy_speed_ups(results: Mapping[str, Any]) -> dict[str, float]:
    """The speed-up of each measured drafter at the lowest temperature, with its best K."""
    names = {row["drafter"] for row in results["rows"]}
    best = {name: _best([row for row in results["rows"] if row["drafter"] == name]) for name in names}
    return {name: next(iter(rows.values()))["speed_up"] for name, rows in best.items()}


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[float, Mapping[str, Any]]:
    """The fastest row at each temperature, from the lowest on."""
    at = sorted({row["temperature"] for row in rows})
    return {each: max((row for row in rows if row["temperature"] == each), key=_speed_up) for each in at}


def _speed_up(row: Mapping[str, Any]) -> tuple[float, bool]:
    return row["speed_up"], row["k"] == AUTO
