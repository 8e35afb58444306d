"""What things cost on this machine: a token of each model of a preset, a pass over several tokens, a guess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import inf
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from ..decoding.events import Event, Prefilled, Round
from ..drafters.names import DRAFTERS, drafter_class
from ..settings import COMMAND, MAX_K, Field, Settings
from ..system.imports import LazyModule
from ..system.progress import check_stopped
from . import theory
from .grid import Grid
from .plots import Axis, Plot
from .prompts import Prompt
from .study import DRAFTERS as SEVERAL
from .study import NEW_TOKENS, PROMPT, form_and_command, k_field
from .summaries import Figure, Figures, Row, Runs, average, summarise, values
from .tables import Rows, Table, group_by, table

if TYPE_CHECKING:
    from ..decoding import batch, loop
    from ..engines.runner import Runner
    from ..models.loaded import Loaded
    from ..racing import race
else:
    batch, loop = LazyModule("specdemo.decoding.batch"), LazyModule("specdemo.decoding.loop")
    race = LazyModule("specdemo.racing.race")

TARGET, DRAFT_MODEL = "target", "draft model"
REPEATS = Field("repeats", "Repeats of each measurement", "whole", low=1, high=20, help="How often everything is run.")
LONGEST = MAX_K + 1  # tokens of a pass
SWEEPS = 3  # over the lengths of a pass, in one step
FREE = 1.25  # a pass over K + 1 tokens that costs no more than this many passes over one is called nearly free


class Profile(Grid):
    """Drafting pays off if a guess is cheap and if checking many tokens takes hardly longer than writing one.
    This view measures both on the server: a pass of the target over 1 to 17 tokens, and a draft of each drafter.
    """

    name = "profile"
    title = "What things cost"
    summary = "Time a token of each model, a pass over 1 to 17 tokens, and what a guess costs."
    fields = (
        replace(SEVERAL, value="all"),
        k_field(4),
        *form_and_command(REPEATS, 2, 3),
        PROMPT,
        replace(NEW_TOKENS, value=32, shown_in=COMMAND),
    )
    most_tables = 3
    plots = (
        (
            Plot(
                "What a pass over several tokens takes",
                "As a multiple of a pass over one token. A flat line is good: checking costs nothing. The whisker ends "
                "at the 90th percentile.",
                {"cost": ""},
                Axis("times a pass over one", "times"),
                "tokens",
                Axis("tokens in the pass"),
                by="model",
                rule=(1, "if checking were free"),
                part="passes",
            ),
            Plot(
                "One token, one guess",
                "Milliseconds for a token that a model writes alone, and for a token that each drafter drafts. "
                "The whisker ends at the 90th percentile.",
                {"p50_ms": "", "ms_per_drafted_token": ""},
                Axis("milliseconds", "ms"),
                "name",
                part="tokens",
            ),
        ),
    )

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, {"max_new_tokens": 32, **chosen})
        (text,) = self.texts_of([Prompt("", "", self.chosen["prompt"])])
        models, parts = [TARGET], loaded.parts
        # A draft model without room for all passes is not timed.
        if parts.make_draft_runner and self._capacity(text) <= (parts.draft_context or inf):
            models.append(DRAFT_MODEL)
        cases = [{"part": part, "model": model} for model in models for part in ("token", "pass")]
        cases += [{"part": "draft", "drafter": drafter} for drafter in self.chosen["drafters"]]
        self.plan([{**text, "repeat": repeat} for repeat in range(self.chosen["repeats"])], cases)

    def settings_of(self, names: Row) -> Settings:
        """Passes go to the longest, past any end of the text; drafts end with it."""
        settings = super().settings_of(names)
        return replace(settings, max_new_tokens=max(settings.max_new_tokens, LONGEST))

    def _capacity(self, names: Row) -> int:
        (ids,) = self.ids_of(names)
        return len(ids) + self.settings_of(names).max_new_tokens

    def write(self, names: Row) -> Iterator[Row]:
        """What one part takes: a token of a model, a pass of one over several tokens, or a draft of a drafter."""
        if names["part"] == "draft":
            with closing(self.events(names)) as events:  # type: ignore[type-var]
                yield from _timed_drafts(events, parallel=DRAFTERS[names["drafter"]].parallel_drafting)
            return
        (ids,), settings = self.ids_of(names), self.settings_of(names)
        make = self.loaded.target_runner if names["model"] == TARGET else self.loaded.draft_runner
        timed = _timed_passes if names["part"] == "pass" else _timed_text
        yield from timed(make(self._capacity(names)), ids, settings)

    def at(self, names: Row) -> str:
        return "Timing passes and drafts"

    def words(self) -> list[str]:
        return in_words(self.result(), self.chosen["k"])

    def tables(self) -> list[Table]:
        times = [("mean_ms", "mean ms", "ms"), ("p50_ms", "median ms", "ms"), ("p90_ms", "p90 (ms)", "ms")]
        speed = [("tokens_per_second", "tokens/s", ".1f"), *times, ("ttft_ms", "first token, ms", "ms")]
        cost = [("ms_per_drafted_token", "ms per guess", "ms"), ("parallel", "all at once", "yes")]
        cost += [("draft_cost", "a guess, or all at once, in target passes (c)", ".1%")]
        found = self.result()
        return [
            table("A token", [("model", "model", ""), *speed], found["models"]),
            table(
                "A guess",
                [("drafter", "drafter", ""), ("drafts", "drafts timed", ",.0f"), *cost],
                found["drafters"],
            ),
            table(
                "A pass",
                [("model", "model", ""), ("tokens", "tokens", ",.0f"), *times, ("cost", "times one", "times")],
                found["passes"],
            ),
        ]

    def drawn(self) -> Mapping[str, Rows]:
        found = self.result()
        passes = [
            {**row, "low": row["cost"], "high": row["cost"] * row["p90_ms"] / row["p50_ms"]} for row in found["passes"]
        ]
        models = [
            {**row, "name": f"{row['model']}: a token", "low": row["p50_ms"], "high": row["p90_ms"]}
            for row in found["models"]
        ]
        drafters = [{**row, "name": f"{row['drafter']}: drafted"} for row in found["drafters"]]
        return {"passes": passes, "tokens": [*models, *drafters]}

    def rows(self) -> list[Row]:
        return [{"part": part, **row} for part, rows in self.result().items() for row in rows]

    def result(self) -> dict[str, Any]:
        return parts_of(self.runs)


def _timed_text(runner: Runner, prompt_ids: Sequence[int], settings: Settings) -> Iterator[Row]:
    """Plain decoding, token by token."""
    alone = race.rule_for(replace(settings, k=0))
    for event in batch.decode(loop.Decoding(runner, drafter_class("none")(), prompt_ids, alone)):
        if isinstance(event, Prefilled):
            yield {"first": event.seconds}
        elif isinstance(event, Round):
            yield {"seconds": event.seconds}


def _timed_passes(runner: Runner, prompt_ids: Sequence[int], settings: Settings) -> Iterator[Row]:
    """Passes over 1 to `LONGEST` tokens after the prompt; the tokens are the prompt's own."""
    try:
        runner.prefill(prompt_ids)
        for count in [*range(1, LONGEST + 1)] * SWEEPS:
            check_stopped()
            ids = [prompt_ids[index % len(prompt_ids)] for index in range(count)]
            began = time.perf_counter()
            float(runner.forward(ids)[-1, 0])  # a GPU is done when a number can be read
            yield {"tokens": count, "seconds": time.perf_counter() - began}
            runner.rollback(len(prompt_ids))
    finally:
        runner.release()


def _timed_drafts(events: Iterable[Event], parallel: bool) -> Iterator[Row]:
    """What drafts take, and `cost`: see `theory.Costs`; nothing is known of an empty one."""
    for event in events:
        if isinstance(event, Round):
            tokens, seconds = len(event.drafted), event.draft_seconds
            each = seconds / tokens if tokens else None
            yield {"tokens": tokens or None, "each": each, "cost": seconds if parallel and tokens else each}


def _milliseconds(of: str, mean: Callable[[Sequence[float]], float]) -> Figure:
    return average(of, lambda seconds: 1000 * mean(seconds))


def _p90(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


TIMES: Figures = {
    "mean_ms": _milliseconds("seconds", fmean),
    "p50_ms": _milliseconds("seconds", median),
    "p90_ms": _milliseconds("seconds", _p90),
}
MODELS: Figures = {
    "tokens_per_second": average("seconds", lambda seconds: 1 / fmean(seconds)),
    **TIMES,
    "ttft_ms": _milliseconds("first", median),
}
DRAFTS: Figures = {
    "drafts": lambda runs: len(values(runs, "tokens")),
    "tokens_per_draft": average("tokens"),
    "ms_per_drafted_token": _milliseconds("each", median),
    "draft_cost": _milliseconds("cost", median),
}


def parts_of(runs: Runs) -> dict[str, list[Row]]:
    """`models`, `passes` and `drafters`, a row each, from any runs so far; times in milliseconds.

    `cost` is in passes of the same model over one token. A drafter's `draft_cost` is c, in target passes: drafting one
    token, or with `parallel` a whole draft (`theory.Costs`); None where it never drafted.
    """
    parts = group_by(runs, lambda run: run["part"])
    passes = summarise(parts.get("pass", []), ("model", "tokens"), TIMES)
    one = {row["model"]: row["p50_ms"] for row in passes if row["tokens"] == 1}
    drafts = summarise(parts.get("draft", []), ("drafter",), DRAFTS)
    for row in drafts:
        known = row["draft_cost"] is not None and TARGET in one
        row["draft_cost"] = row["draft_cost"] / one[TARGET] if known else None
    return {
        "models": summarise(parts.get("token", []), ("model",), MODELS),
        "passes": [{**row, "cost": row["p50_ms"] / one[row["model"]]} for row in passes],
        "drafters": [{**row, "parallel": DRAFTERS[row["drafter"]].parallel_drafting} for row in drafts],
    }


def costs(summary: dict[str, list[Row]], drafter: str) -> theory.Costs | None:
    """The costs of a drafter in a profile, as the theory takes them; None if it never drafted."""
    found = next((row for row in summary["drafters"] if row["drafter"] == drafter), None)
    measured = [row["cost"] for row in summary["passes"] if row["model"] == TARGET]
    if found is None or found["draft_cost"] is None:
        return None
    return theory.Costs(found["draft_cost"], measured, found["parallel"])


def in_words(summary: dict[str, list[Row]], k: int) -> list[str]:
    """What the profile means, in sentences."""
    lines = []
    measured = {row["tokens"]: row["cost"] for row in summary["passes"] if row["model"] == TARGET}
    if k + 1 in measured:
        cost = measured[k + 1]
        verdict = "checking is nearly free here" if cost <= FREE else "checking is not free here"
        lines.append(f"One pass over {k + 1} tokens takes {cost:.2f} times as long as over one: {verdict}.")
    for row in summary["drafters"]:
        found = costs(summary, row["drafter"])
        if found is None:
            lines.append(f"{row['drafter']}: it found nothing to draft in this text.")
            continue
        least = theory.break_even(k, found)
        needed = (
            "no share of passing guesses is enough"
            if least is None
            else f"{theory.share_in_words(least)} of its guesses must pass"
        )
        what = "a draft, however long," if found.parallel else "a guess"
        lines.append(f"{row['drafter']}: {what} costs {found.draft:.1%} of a target pass; to pay at K = {k}, {needed}.")
    return lines
