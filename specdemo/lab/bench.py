"""Speed of drafters against the target alone, on prompts nothing was made from.

One run after the other on one machine; every speculative run is compared with the plain run of the same
prompt and repeat that was made just before it, so that slow drifts of the machine cancel in the ratio.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..race import PLAIN, SPECULATIVE, report, start
from ..types import BadInput, Settings

if TYPE_CHECKING:
    from ..models import Loaded

ALL = "all"  # the category that holds every prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    category: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter and its K; the target alone is the drafter none with K = 0."""

    drafter: str
    k: int


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines of `id`, `category` and `prompt`.

    Raises:
        BadInput: the file cannot be read, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts = [Prompt(**json.loads(line)) for line in lines if line.strip()]
    except OSError as error:
        raise BadInput(f"The prompts cannot be read: {error}.") from error
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path.name}: every line must be an object of id, category and prompt: {error}.") from error
    if not prompts:
        raise BadInput(f"{path.name} holds no prompts.")
    return prompts


def bench(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    cases: Sequence[Case],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run every case on every prompt: `environment`, `runs` and their `summary`, ready for JSON."""
    runs: list[dict[str, Any]] = []
    for repeat in range(-1, repeats):  # the first time round only warms up
        for prompt in prompts if repeat >= 0 else prompts[:1]:
            for temperature in temperatures:
                settings = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": max(repeat, 0)}
                for case in cases:
                    plain = _run(loaded, prompt, Case("none", 0), settings, repeat)
                    runs += [plain, _run(loaded, prompt, case, settings, repeat)] if repeat >= 0 else []
                    tick()
    return {"environment": loaded.environment(), "runs": runs, "summary": list(summarise(prompts, runs))}


def _run(loaded: Loaded, prompt: Prompt, case: Case, settings: dict[str, Any], repeat: int) -> dict[str, Any]:
    prompt_ids = loaded.encode(prompt.prompt)
    events = list(start(loaded, case.drafter, prompt_ids, Settings(k=case.k, **settings)))
    outcome = report(loaded, prompt_ids, events)
    stats = outcome["stats"]
    copied = ("seconds", "ttft_seconds", "tokens_per_second", "accepted", "tested", "drafted", "rounds")
    return {
        "method": SPECULATIVE if case.k else PLAIN,
        "drafter": case.drafter,
        "k": case.k,
        "temperature": settings["temperature"],
        "prompt_id": prompt.id,
        "repeat": repeat,
        "new_tokens": stats["tokens"],
        **{name: stats[name] for name in copied},
        "draft_cost": stats["draft_cost"],
        "token_ids": outcome["token_ids"],
    }


def summarise(prompts: Sequence[Prompt], runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each drafter, K, temperature and category; `runs` hold each run right after its plain one.

    The ratio to plain is of tokens per second, run by run. Rates are over all runs of a row together.
    """
    category_of = {prompt.id: prompt.category for prompt in prompts}
    rows: dict[tuple[str, int, float, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for plain, run in zip(runs[::2], runs[1::2], strict=True):
        for category in (ALL, category_of[run["prompt_id"]]):
            rows.setdefault((run["drafter"], run["k"], run["temperature"], category), []).append((plain, run))
    for (drafter, k, temperature, category), pairs in rows.items():
        ratios = [run["tokens_per_second"] / plain["tokens_per_second"] for plain, run in pairs]
        total = {name: sum(run[name] for _, run in pairs) for name in ("accepted", "tested", "drafted", "rounds")}
        after_first = sum(run["new_tokens"] - 1 for _, run in pairs)
        yield {
            "method": SPECULATIVE,
            "drafter": drafter,
            "k": k,
            "temperature": temperature,
            "category": category,
            "tokens_per_second": median(run["tokens_per_second"] for _, run in pairs),
            "plain_tokens_per_second": median(plain["tokens_per_second"] for plain, _ in pairs),
            "ratio_to_plain": {"min": min(ratios), "median": median(ratios), "max": max(ratios)},
            "tokens_per_round": after_first / total["rounds"] if total["rounds"] else None,
            "acceptance_rate": total["accepted"] / total["tested"] if total["tested"] else None,
            "draft_efficiency": total["accepted"] / total["drafted"] if total["drafted"] else None,
            "draft_cost": median(run["draft_cost"] or 0.0 for _, run in pairs),
            "identical": sum(plain["token_ids"] == run["token_ids"] for plain, run in pairs)
            if not temperature
            else None,
            "runs": len(pairs),
        }


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary for people."""
    lines = [
        f"{'category':<10}{'T':>4}  {'drafter':<14}{'K':>3}{'plain/s':>9}{'tokens/s':>10}{'ratio (min to max)':>22}"
        f"{'tau':>6}{'accept':>8}{'effic.':>8}{'draft':>7}{'same':>7}"
    ]
    ordered = sorted(summary, key=lambda row: (row["category"] == ALL, row["category"], row["temperature"]))
    for row in ordered:
        ratio = row["ratio_to_plain"]
        span = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        shares = "".join(
            f"{row[name]:>8.0%}" if row[name] is not None else f"{'-':>8}"
            for name in ("acceptance_rate", "draft_efficiency")
        )
        same = f"{row['identical']}/{row['runs']}" if row["identical"] is not None else "-"
        lines.append(
            f"{row['category']:<10}{row['temperature']:>4g}  {row['drafter']:<14}{row['k']:>3}"
            f"{row['plain_tokens_per_second']:>9.1f}{row['tokens_per_second']:>10.1f}{span:>22}"
            f"{row['tokens_per_round'] or 0:>6.2f}{shares}{row['draft_cost']:>7.0%}{same:>7}"
        )
    return "\n".join(lines)
