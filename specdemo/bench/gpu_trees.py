"""Trees beside chains by the drafters of a preset, as `bench --tree` compares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..drafters.names import drafter_class
from ..models.loaded import load
from ..models.presets import find_preset
from ..studies.prompts import read_prompts, some
from ..types import AUTO, MATCH
from .cases import ALONE
from .gpu_rounds import Row
from .methods import cases_of_ours
from .throughput import bench
from .trees import size_of, tree_rows

DRAFTERS = "lookup-ngram", "eagle", "medusa"
TEMPERATURES = 0.0, 1.0


def preset_trees(
    preset: str,
    prompts: Path,
    each: int,
    new_tokens: int,
    ks: Sequence[int],
    trees: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Row]:
    """For each of `DRAFTERS` that the preset has: its trees, its chain of the fastest K, and what auto makes of both.

    Args:
        each: the most prompts of a category; 0 takes all.
    """
    loaded = load(find_preset(preset), str(dtype).removeprefix("torch."), str(device))
    try:
        able = [name for name in DRAFTERS if not drafter_class(name).unavailable_reason(loaded.parts)]
        cases = [ALONE, *cases_of_ours(loaded, ",".join(able), [*ks, AUTO], [MATCH], [*trees, AUTO])]
        asked = some(read_prompts(prompts), each)
        runs = bench(loaded, asked, cases, TEMPERATURES, new_tokens, repeats=1, in_turn=True)["runs"]
    finally:
        loaded.release()
    for row in tree_rows(runs):
        to_chain = (row["to_chain"] or {}).get("tokens_per_second")
        yield {
            "part": f"trees of {preset}",
            "what": f"{row['drafter']} at T = {row['temperature']:g}, {size_of(row)}",
            "tokens_per_second": row["tokens_per_second"].mean,
            "tokens_per_round": row["tokens_per_round"],
            "rows": row["rows"],
            "to_best_chain": to_chain.mean if to_chain else None,
        }
