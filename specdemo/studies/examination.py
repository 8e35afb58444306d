"""Texts by a server or a preset with speculation, and by its baseline, in turns. `diagnosis` says what they mean."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, TypeVar

from ..errors import BadInput
from ..racing.compare import Comparison, compared
from ..racing.figures import ratio_of_speeds
from ..settings import Settings
from ..system.progress import Stopped, attended, check_stopped
from .prompts import Prompt
from .study import LONG_PROMPTS, some_of_each, with_notes
from .summaries import Row
from .writers import Text, Writer

LEAST_TEXTS = 4  # at each number of requests at once
WARM_UP_TOKENS = 16
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `each` prompts of every kind, requests `at_once`, prompts of about `contexts` tokens."""

    each: int
    settings: Settings = field(default_factory=lambda: Settings(max_new_tokens=96))
    at_once: Sequence[int] = ()
    contexts: Sequence[int] = ()
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, with speculation and, where there is a baseline, without. `context` is how long its prompt was meant
    to be, None of a usual one."""

    prompt: Prompt
    with_drafts: Text
    alone: Text | None
    comparison: Comparison | None = None
    context: int | None = None

    @property
    def speed_up(self) -> float | None:
        """As `racing.figures.speed_up`; None without a baseline, and where nothing was drafted."""
        if self.alone is None or self.with_drafts.drafted == 0:
            return None
        return ratio_of_speeds(self.alone.stats, self.with_drafts.stats)

    @property
    def cost(self) -> float | None:
        """A mean round in mean rounds of the baseline."""
        mine, alone = self.with_drafts, self.alone
        ms = mine.milliseconds["ms"], alone.milliseconds["ms"] if alone else None
        return ms[0] / mine.rounds / (ms[1] / alone.rounds) if alone and ms[0] and ms[1] else None

    @property
    def run(self) -> Row:
        """As a run of a `grid`: its names and figures."""
        written, alone = self.with_drafts, self.alone
        return {
            "prompt": self.prompt.id,
            "kind": self.prompt.category,
            "context": self.context,
            "tokens": len(written.tokens),
            "rounds": written.rounds,
            "drafts": written.drafts,
            "drafted": written.drafted,
            "tested": written.stats.tested,
            "accepted": written.stats.accepted,
            "prompt_tokens": written.stats.prompt_tokens,
            "tokens_per_second": written.stats.tokens_per_second,
            "first_token_seconds": written.stats.ttft_seconds,
            "baseline_tokens_per_second": alone.stats.tokens_per_second if alone else None,
            "speed_up": self.speed_up,
            "cost": self.cost,
            "same_text": self.comparison.identical if self.comparison else None,
            **written.milliseconds,
            "baseline_rounds": alone.rounds if alone else None,
            "baseline_ms": alone.milliseconds["ms"] if alone else None,
        }


class OutOfTime(Exception):
    """The time is over."""


def in_time(end: float, work: Callable[..., Found], *args: Any) -> Found:
    """What the work returns.

    Raises:
        OutOfTime: the clock has passed `end` before.
        Stopped: whoever waits for it has stopped it.
    """
    check_stopped()
    try:
        with attended(lambda: time.monotonic() > end):
            return work(*args)
    except Stopped:
        check_stopped()  # stopped from outside
        raise OutOfTime from None


def sample(
    mine: Writer, alone: Writer | None, prompt: Prompt, settings: Settings, end: float, alone_first: bool = False
) -> Sample:
    """Both sides write one text, in turns and `in_time`."""
    text = prompt.prompt
    if alone is None:
        return Sample(prompt, in_time(end, mine.write, text, settings), None)
    first, second = (alone, mine) if alone_first else (mine, alone)
    written = in_time(end, first.write_beside, second, text, settings)
    theirs, found = written if alone_first else written[::-1]
    comparison = compared(theirs.tokens, found.tokens, settings)
    if comparison and comparison.margin is None and (place := comparison.first_difference) is not None:
        pair = [*theirs.tokens[place : place + 1], *found.tokens[place : place + 1]]
        if len(pair) == 2:  # else one text ends there
            comparison = replace(comparison, margin=alone.gap(text, theirs.tokens[:place], pair))
    return Sample(prompt, found, theirs, comparison)


class Examination:
    """Prompts of eight kinds one after the other, then several requests at once, then longer and longer prompts.

    Attributes:
        samples: what was measured so far; those of long prompts are among the others.
        at_once: a row for each number of requests at once.
        left_out: sentences on what was not measured, and why.
    """

    def __init__(self, with_drafts: Writer, alone: Writer | None, plan: Plan) -> None:
        self.with_drafts, self.alone, self.plan = with_drafts, alone, plan
        self.prompts = some_of_each("domains", plan.each)
        self.samples: list[Sample] = []
        self.at_once: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._end = 0.0

    def run(self) -> Iterator[str]:
        """Measure; yields what it is at. Whatever ends it, what was measured by then stays.

        Raises:
            Stopped: whoever waits for it has stopped it.
        """
        self._end = time.monotonic() + self.plan.seconds
        parts = (
            ("the warm-up", self._warm_up),
            ("the prompts", self._one_by_one),
            ("several requests at once", self._concurrent_runs),
            ("longer prompts", self._longer),
        )
        for at, part in parts:
            try:
                yield from part()
            except OutOfTime:
                self.left_out.append(f"The {self.plan.seconds:.0f} seconds were over in the middle of {at}.")
                return
            except BadInput as error:
                if not self.samples:
                    raise
                self.left_out.append(f"It ended in the middle of {at}: {_without_address(error)}")
                return

    # --- the parts

    def _warm_up(self) -> Iterator[str]:
        self._sample(self.prompts[0], replace(self.plan.settings, max_new_tokens=WARM_UP_TOKENS))
        return iter(())

    def _one_by_one(self) -> Iterator[str]:
        for prompt in self.prompts:
            self.samples.append(self._sample(prompt, self.plan.settings))
            yield f"Prompts of eight kinds, {prompt.category}"

    def _concurrent_runs(self) -> Iterator[str]:
        for count in self.plan.at_once:
            try:
                self.at_once.append(self._concurrent_run(count))
            except BadInput as error:
                self.left_out.append(f"{count} requests at once were not measured: {_without_address(error)}")
                return
            yield f"{count} requests at once"

    def _longer(self) -> Iterator[str]:
        for tokens in self.plan.contexts:
            some_prompts = self.prompts[:: max(1, len(self.prompts) // LONG_PROMPTS)][:LONG_PROMPTS]
            for number, prompt in enumerate(some_prompts):
                long = replace(prompt, prompt=with_notes(prompt.prompt, tokens, number))
                try:
                    self.samples.append(replace(self._sample(long, self.plan.settings), context=tokens))
                except BadInput as error:
                    words = f"Prompts of {tokens:,} tokens and more were not measured: {_without_address(error)}"
                    self.left_out.append(words)
                    return
                yield f"Prompts of {tokens:,} tokens"

    def _sample(self, prompt: Prompt, settings: Settings) -> Sample:
        """Who begins changes, so that neither side is always the first."""
        return sample(self.with_drafts, self.alone, prompt, settings, self._end, len(self.samples) % 2 == 0)

    def _concurrent_run(self, count: int) -> dict[str, Any]:
        """How many tokens of all requests together both sides write in a second, prompts and waiting included."""
        texts = [prompt.prompt for prompt in islice(cycle(self.prompts), max(count, LEAST_TEXTS))]
        speeds = []
        for side in (self.with_drafts, self.alone):
            if side is not None:
                began = time.perf_counter()
                tokens = in_time(self._end, self._together, side, texts, count)
                speeds.append(tokens / (time.perf_counter() - began))
        mine, alone = speeds[0], speeds[1] if self.alone else None
        row = {"at_once": count, "texts": len(texts), "tokens_per_second": mine, "alone_tokens_per_second": alone}
        return {**row, "speed_up": mine / alone if alone else None}

    def _together(self, side: Writer, texts: Sequence[str], count: int) -> int:
        """How many tokens a side writes for these texts, `count` at once."""
        with ThreadPoolExecutor(count) as pool:
            # Each thread gets a copy of the context, in which `check_stopped` finds out whether to stop.
            jobs = [pool.submit(copy_context().run, side.write, text, self.plan.settings, count == 1) for text in texts]
            try:
                return sum(len(job.result().tokens) for job in jobs)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _without_address(error: BadInput) -> str:
    """What a server did: a report is for others."""
    return re.sub(r" at https?://\S+", "", str(error))
