"""What things cost on this machine: a token of each model of a preset, a pass over several tokens, a drafted token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from ..decoding.events import Prefilled, Round
from ..drafters import names
from ..drafters.names import drafter_class
from ..settings import COMMAND, MAX_K, Field, Settings
from ..system.imports import LazyModule
from . import theory
from .plots import Axis, Plot
from .study import DRAFTERS, NEW_TOKENS, PROMPT, Study, k_field
from .tables import Rows, Table, grouped, table

if TYPE_CHECKING:
    from ..decoding import batch, loop
    from ..engines.runner import Runner
    from ..models.loaded import Loaded
    from ..racing import race
else:
    batch, loop = LazyModule("specdemo.decoding.batch"), LazyModule("specdemo.decoding.loop")
    race = LazyModule("specdemo.racing.race")

TARGET, DRAFT_MODEL = "target", "draft model"
REPEATS_HELP = "How often everything is run."
SWEEPS = 3  # over the lengths of a pass, in one step
FREE = 1.25  # a pass over K + 1 tokens that costs no more than this many passes over one is called nearly free


class Profile(Study):
    """Drafting pays off if a drafted token is cheap and if checking many tokens takes hardly longer than writing one.
    This view measures both on the server: a pass of the target over 1 to 17 tokens, and a draft of each drafter.
    """

    name = "profile"
    title = "What things cost"
    summary = "Time a token of each model, a pass over 1 to 17 tokens, and what a drafted token costs."
    fields = (
        replace(DRAFTERS, value="all"),
        k_field(4),
        Field("repeats", "Repeats of each measurement", "whole", 2, 1, 20, help=REPEATS_HELP, cli_default=3),
        PROMPT,
        replace(NEW_TOKENS, cli_default=32, shown_in=COMMAND),
    )
    most_tables = 3
    plots = (
        (
            Plot(
                "What a pass over several tokens takes",
                "As a multiple of a pass over one token. A flat line is good: checking costs nothing. The whisker ends "
                "where the slowest tenth begins.",
                {"cost": ""},
                Axis("times a pass over one", "times"),
                "tokens",
                Axis("tokens in the pass"),
                by="model",
                rule=(1, "if checking were free"),
                part="passes",
            ),
            Plot(
                "One token, one drafted token",
                "Milliseconds for a token that a model writes alone, and for a token that each drafter drafts. "
                "The whisker ends where the slowest tenth begins.",
                {"p50_ms": "", "ms_per_drafted_token": ""},
                Axis("milliseconds", "ms"),
                "name",
                part="tokens",
            ),
        ),
    )

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.timings: list[Timing] = []
        self.steps = steps(loaded, asked["drafters"], asked["repeats"])

    def run(self) -> Iterator[str]:
        ids, (drafters, k, repeats) = self.loaded.encode(self.asked["prompt"]), self.given("drafters k repeats")
        new_tokens = self.asked.get("max_new_tokens", 32)
        for timings in profile(self.loaded, ids, drafters, k, new_tokens, repeats):
            self.timings += timings
            self.done += 1
            yield timing(timings)

    def words(self) -> list[str]:
        return in_words(self.result(), self.asked["k"])

    def tables(self) -> list[Table]:
        times = [("mean_ms", "mean ms", "ms"), ("p50_ms", "median ms", "ms"), ("p90_ms", "p90 (ms)", "ms")]
        speed = [("tokens_per_second", "tokens/s", ".1f"), *times, ("ttft_ms", "first token, ms", "ms")]
        cost = [("ms_per_drafted_token", "ms per drafted token", "ms"), ("parallel", "all at once", "yes")]
        cost += [("draft_cost", "a drafted token, or all at once, in target passes (c)", ".1%")]
        found = self.result()
        return [
            table("A token", [("model", "model", ""), *speed], found["models"]),
            table(
                "A drafted token",
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

    def rows(self) -> list[dict[str, Any]]:
        return [{"part": part, **row} for part, rows in self.result().items() for row in rows]

    def result(self) -> dict[str, Any]:
        return summarise(self.timings)


@dataclass(frozen=True, slots=True)
class Timing:
    """One thing that was timed.

    `part` is "first token" (a prompt of `tokens` read), "token" (one more emitted), "pass" (one pass over `tokens`
    tokens, through the target or the draft model `name`) or "draft" (`tokens` drafted at once by the drafter `name`).
    """

    part: str
    name: str
    tokens: int
    seconds: float


def steps(loaded: Loaded, drafters: Sequence[str], repeats: int) -> int:
    """How many lists of timings `profile` yields."""
    return (1 + repeats) * (2 * len(_models(loaded)) + len(drafters))


def profile(
    loaded: Loaded,
    prompt_ids: Sequence[int],
    drafters: Sequence[str],
    k: int = 4,
    new_tokens: int = 32,
    repeats: int = 3,
) -> Iterator[list[Timing]]:
    """Time everything in turn, `repeats` times over, so that a slow minute of the machine slows all parts equally.

    All at temperature 0. Passes go to the full `new_tokens`, past any end of the text; drafts end with it. Close it to
    stop. The first time round only warms up, and yields empty lists. A draft model without room for that is not timed.
    """
    longest = MAX_K + 1
    settings = Settings(k=k, max_new_tokens=max(new_tokens, longest))
    for name in drafters:
        race.check_drafter(loaded, name)
    race.check_fits(loaded, len(prompt_ids), settings, *drafters)
    capacity = len(prompt_ids) + settings.max_new_tokens
    for repeat in range(-1, repeats):
        measured = slice(None) if repeat >= 0 else slice(0)
        for name in _models(loaded):
            if name == DRAFT_MODEL and capacity > (loaded.parts.draft_context or capacity):
                yield from ([], [])
                continue
            make = loaded.target_runner if name == TARGET else loaded.draft_runner
            yield _timed_text(name, make(capacity), prompt_ids, settings)[measured]
            yield _timed_passes(name, make(capacity), prompt_ids, longest)[measured]
        for name in drafters:
            yield _timed_drafts(loaded, name, prompt_ids, settings)[measured]


def _models(loaded: Loaded) -> list[str]:
    return [TARGET] if loaded.parts.make_draft_runner is None else [TARGET, DRAFT_MODEL]


def _timed_text(name: str, runner: Runner, prompt_ids: Sequence[int], settings: Settings) -> list[Timing]:
    """Plain decoding, token by token."""
    timings = []
    alone = race.rule_for(replace(settings, k=0))
    for event in batch.decode(loop.Decoding(runner, drafter_class("none")(), prompt_ids, alone)):
        if isinstance(event, Prefilled):
            timings.append(Timing("first token", name, len(prompt_ids), event.seconds))
        elif isinstance(event, Round):
            timings.append(Timing("token", name, 1, event.seconds))
    return timings


def _timed_passes(name: str, runner: Runner, prompt_ids: Sequence[int], longest: int) -> list[Timing]:
    """Passes over 1 to `longest` tokens after the prompt; the tokens are the prompt's own."""
    timings = []
    try:
        runner.prefill(prompt_ids)
        for count in [*range(1, longest + 1)] * SWEEPS:
            ids = [prompt_ids[index % len(prompt_ids)] for index in range(count)]
            began = time.perf_counter()
            float(runner.forward(ids)[-1, 0])  # a GPU is done when a number can be read
            timings.append(Timing("pass", name, count, time.perf_counter() - began))
            runner.rollback(len(prompt_ids))
    finally:
        runner.release()
    return timings


def _timed_drafts(loaded: Loaded, name: str, prompt_ids: Sequence[int], settings: Settings) -> list[Timing]:
    with closing(race.start(loaded, name, prompt_ids, settings)) as events:  # type: ignore[type-var]
        rounds = [event for event in events if isinstance(event, Round)]
    return [Timing("draft", name, len(event.drafted), event.draft_seconds) for event in rounds]


def summarise(timings: Sequence[Timing]) -> dict[str, list[dict[str, Any]]]:
    """`models`, `passes` and `drafters`, a row each, from any timings so far; times in milliseconds.

    `cost` is in passes of the same model over one token. A drafter's `draft_cost` is c, in target passes: drafting one
    token, or with `parallel` a whole draft (`theory.Costs`); None where it never drafted.
    """
    groups = grouped(timings, lambda timing: (timing.part, timing.name, timing.tokens))
    seconds = {key: [timing.seconds for timing in group] for key, group in groups.items()}
    one = {name: median(values) for (part, name, tokens), values in seconds.items() if (part, tokens) == ("pass", 1)}
    models, passes = [], []
    for (part, name, tokens), values in seconds.items():
        if part == "token":
            first = [timing.seconds for timing in timings if (timing.part, timing.name) == ("first token", name)]
            row = {"model": name, "tokens_per_second": 1 / fmean(values), **_milliseconds(values)}
            models.append({**row, "ttft_ms": 1000 * median(first)})
        elif part == "pass":
            row = {"model": name, "tokens": tokens, **_milliseconds(values)}
            passes.append({**row, "cost": median(values) / one[name]})
    return {"models": models, "passes": passes, "drafters": list(_drafters(timings, one.get(TARGET)))}


def _drafters(timings: Sequence[Timing], one_pass: float | None) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys(timing.name for timing in timings if timing.part == "draft"):
        drafts = [timing for timing in timings if (timing.part, timing.name) == ("draft", name) and timing.tokens]
        parallel = names.DRAFTERS[name].parallel_drafting
        each = [draft.seconds / draft.tokens for draft in drafts]
        cost = [draft.seconds for draft in drafts] if parallel else each
        yield {
            "drafter": name,
            "parallel": parallel,
            "drafts": len(drafts),
            "tokens_per_draft": fmean(draft.tokens for draft in drafts) if drafts else None,
            "ms_per_drafted_token": 1000 * median(each) if drafts else None,
            "draft_cost": median(cost) / one_pass if drafts and one_pass else None,
        }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    p90 = quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {"mean_ms": 1000 * fmean(seconds), "p50_ms": 1000 * median(seconds), "p90_ms": 1000 * p90}


def costs(summary: dict[str, list[dict[str, Any]]], drafter: str) -> theory.Costs | None:
    """The costs of a drafter in a profile, as the theory takes them; None if it never drafted."""
    found = next((row for row in summary["drafters"] if row["drafter"] == drafter), None)
    measured = [row["cost"] for row in summary["passes"] if row["model"] == TARGET]
    if found is None or found["draft_cost"] is None:
        return None
    return theory.Costs(found["draft_cost"], measured, found["parallel"])


def in_words(summary: dict[str, list[dict[str, Any]]], k: int) -> list[str]:
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
        what = "a draft, however long," if found.parallel else "a drafted token"
        lines.append(f"{row['drafter']}: {what} costs {found.draft:.1%} of a target pass; to pay at K = {k}, {needed}.")
    return lines


def timing(timings: Sequence[Timing]) -> str:
    """What a step of the profile is at: the first ones give nothing."""
    return "Timing passes and drafts" if timings else "Warming up"
