"""Does speculation pay here, and if not, why: texts by a server or a preset, with speculation and without.

Three parts: prompts of eight kinds one after the other, several requests at once, and longer and longer prompts. Both
sides take turns, those of a preset a round each, and a part that the time does not allow is left out and said to be.
`diagnosis` says what it means.
"""

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
from ..settings import REJECTION, Settings
from ..system.progress import Stopped, attended, check_stopped
from .prompts import Prompt, read_prompts
from .study import PROMPT_FILES, some_of_each
from .writers import Writer, Written

AT_ONCE = 1, 2, 4, 8, 16
CONTEXTS = 256, 1024, 4096  # tokens of a prompt, about
LEAST_TEXTS = 4  # at each number of requests at once
CONTEXT_PROMPTS = 4  # at each length
WARM_UP_TOKENS = 16
TOKEN_LETTERS = 4.2  # of a token of English, about
MAX_AT_ONCE = 64
Found = TypeVar("Found")
SECONDS = 600.0


# The examination --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DoctorPlan:
    """What is measured: `each` prompts of every kind, requests `at_once`, prompts of about `contexts` tokens."""

    each: int = 2
    settings: Settings = field(default_factory=lambda: Settings(max_new_tokens=96))
    at_once: Sequence[int] = AT_ONCE
    contexts: Sequence[int] = CONTEXTS
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        if not all(1 <= count <= MAX_AT_ONCE for count in self.at_once):
            raise BadInput(f"From 1 to {MAX_AT_ONCE} requests can be made at once.")
        if not all(1 <= length <= 1_000_000 for length in self.contexts):
            raise BadInput("A prompt has from 1 to 1,000,000 tokens.")
        if not self.seconds > 0:
            raise BadInput("The time must be above 0 seconds.")

    def prompts(self) -> list[Prompt]:
        return some_of_each("domains", self.each)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, with speculation and, where there is a baseline, without. `context` is how long its prompt was meant
    to be, None of a usual one."""

    prompt: Prompt
    with_drafts: Written
    alone: Written | None
    comparison: Comparison | None = None
    context: int | None = None

    @property
    def speed_up(self) -> float | None:
        """As `racing.stats.speed_up`; None without a baseline, and where nothing was drafted."""
        if self.alone is None or self.with_drafts.drafted == 0:
            return None
        return self.with_drafts.stats.pace.to(self.alone.stats.pace)

    @property
    def cost(self) -> float | None:
        """A mean round in mean rounds of the baseline."""
        mine = self.with_drafts.round_seconds
        theirs = self.alone.round_seconds if self.alone else None
        return mine / theirs if mine and theirs else None


@dataclass(frozen=True, slots=True)
class ConcurrentRun:
    """So many requests at once: how many tokens both sides wrote in how many seconds, prompts and waiting included."""

    at_once: int
    texts: int
    tokens: int
    seconds: float
    alone_tokens: int | None = None
    alone_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds

    @property
    def alone_tokens_per_second(self) -> float | None:
        return self.alone_tokens / self.alone_seconds if self.alone_tokens and self.alone_seconds else None

    @property
    def speed_up(self) -> float | None:
        theirs = self.alone_tokens_per_second
        return self.tokens_per_second / theirs if theirs else None


class Doctor:
    """One examination. `done` of its `steps` steps are over.

    Attributes:
        samples, concurrent_runs: what was measured so far; samples of long prompts are among the others.
        left_out: sentences on what was not measured, and why.
    """

    def __init__(self, with_drafts: Writer, alone: Writer | None, plan: DoctorPlan) -> None:
        self.with_drafts, self.alone, self.plan = with_drafts, alone, plan
        self.prompts = plan.prompts()
        self.samples: list[Sample] = []
        self.concurrent_runs: list[ConcurrentRun] = []
        self.left_out: list[str] = []
        self.at_once = plan.at_once if with_drafts.at_once else ()
        self.done, self.steps = 0, len(self.prompts) + len(self.at_once) + CONTEXT_PROMPTS * len(plan.contexts)
        self._until, self._at = 0.0, ""

    def run(self) -> Iterator[str]:
        """Measure; yields what it is at. Close it to stop. Whatever ends it, what was measured by then stays.

        Raises:
            Stopped: whoever waits for it has stopped it.
        """
        self._until = time.monotonic() + self.plan.seconds
        parts = (
            ("the prompts", self._one_by_one),
            ("several requests at once", self._concurrent_runs),
            ("longer prompts", self._longer),
        )
        if not self.with_drafts.at_once:
            self.left_out.append("Several requests at once were not measured: `lab batch` does that.")
        self._at = "the warm-up"
        try:
            self._pair(self.prompts[0].prompt, replace(self.plan.settings, max_new_tokens=WARM_UP_TOKENS))
            for self._at, part in parts:
                for words in part():
                    self.done += 1
                    yield words
        except _Late:
            self.left_out.append(f"The {self.plan.seconds:.0f} seconds were over in the middle of {self._at}.")
        except BadInput as error:
            if not self.samples:
                raise
            self.left_out.append(f"It ended in the middle of {self._at}: {_said(error)}")

    # --- the three parts

    def _one_by_one(self) -> Iterator[str]:
        for prompt in self.prompts:
            self.samples.append(self._sample(prompt, prompt.prompt))
            yield f"Prompts of eight kinds, {prompt.category}"

    def _concurrent_runs(self) -> Iterator[str]:
        for count in self.at_once:
            try:
                self.concurrent_runs.append(self._concurrent_run(count))
            except BadInput as error:
                self.left_out.append(f"{count} requests at once were not measured: {_said(error)}")
                return
            yield f"{count} requests at once"

    def _longer(self) -> Iterator[str]:
        for tokens in self.plan.contexts:
            some_prompts = self.prompts[:: max(1, len(self.prompts) // CONTEXT_PROMPTS)][:CONTEXT_PROMPTS]
            for number, prompt in enumerate(some_prompts):
                try:
                    self.samples.append(self._sample(prompt, lengthened(prompt.prompt, tokens, number), tokens))
                except BadInput as error:
                    self.left_out.append(f"Prompts of {tokens:,} tokens and more were not measured: {_said(error)}")
                    return
                yield f"Prompts of {tokens:,} tokens"

    # --- one measurement

    def _sample(self, prompt: Prompt, text: str, context: int | None = None) -> Sample:
        mine, theirs = self._pair(text, self.plan.settings)
        comparison = compared(theirs.tokens, mine.tokens, self.plan.settings) if theirs else None
        if theirs and comparison:
            place = comparison.first_difference
            if place is not None and comparison.margin is None and place < min(len(mine.tokens), len(theirs.tokens)):
                pair = theirs.tokens[place], mine.tokens[place]
                assert self.alone is not None
                comparison = replace(comparison, margin=self.alone.gap(text, theirs.tokens[:place], pair))
        return Sample(prompt, mine, theirs, comparison, context)

    def _pair(self, text: str, settings: Settings) -> tuple[Written, Written | None]:
        """Both sides write one text; who begins changes, so that neither is always the first."""
        mine, alone = self.with_drafts, self.alone
        if alone is None:
            return self._in_time(mine.write, text, settings), None
        if len(self.samples) % 2:
            return self._in_time(mine.write_beside, alone, text, settings)
        theirs, written = self._in_time(alone.write_beside, mine, text, settings)
        return written, theirs

    def _concurrent_run(self, count: int) -> ConcurrentRun:
        texts = [prompt.prompt for prompt in islice(cycle(self.prompts), max(count, LEAST_TEXTS))]
        figures: list[float | int] = []
        for side in (self.with_drafts, self.alone):
            if side is not None:
                began = time.perf_counter()
                tokens = self._in_time(self._together, side, texts, count)
                figures += [tokens, time.perf_counter() - began]
        return ConcurrentRun(count, len(texts), *figures)  # type: ignore[arg-type]

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

    def _in_time(self, work: Callable[..., Found], *args: Any) -> Found:
        check_stopped()
        try:
            with attended(self._is_late):
                return work(*args)
        except Stopped:
            check_stopped()  # stopped from outside
            raise _Late from None

    def _is_late(self) -> bool:
        return time.monotonic() > self._until


def _said(error: BadInput) -> str:
    """What a server did, without its address: a report is for others."""
    return re.sub(r" at https?://\S+", "", str(error))


class _Late(Exception):
    """The plan's time is over."""


def lengthened(question: str, tokens: int, number: int) -> str:
    """A question after notes that make it about as long as `tokens`; other notes for each `number`.

    The notes do not repeat themselves within 5,000 tokens, or a look-up of n-grams would find too much.
    """
    notes = [prompt.prompt for prompt in read_prompts(PROMPT_FILES / "written.jsonl")]
    begin = number * len(notes) // CONTEXT_PROMPTS
    wanted, text = int(tokens * TOKEN_LETTERS) - len(question), ""
    for note in islice(cycle(notes), begin, None):
        if len(text) >= wanted:
            break
        text += f"- {note}\n"
    return f"Here are some notes:\n{text[: max(0, wanted)]}\n\nLeave them aside. {question}"


def settings_of(temperature: float, max_new_tokens: int, server: bool) -> Settings:
    """Above temperature 0 the texts of two servers are not to be compared: they share no random numbers."""
    made = Settings(0 if server else 4, temperature, max_new_tokens=max_new_tokens)
    return replace(made, rule=REJECTION) if server else made
