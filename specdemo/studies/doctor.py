"""Does speculation pay here, and if not, why: texts by a server or a preset, with speculation and without.

Three parts: prompts of eight kinds one after the other, several requests at once, and longer and longer prompts. Both
sides take turns, and a part that the time does not allow is left out and said to be. `diagnosis` says what it means.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, Protocol, TypeVar

from ..decoding.events import Event, Round, emitted_tokens
from ..models.loaded import Loaded
from ..racing.compare import Comparison, compared, tokens_of
from ..racing.lanes import race_lanes
from ..racing.race import start
from ..racing.stats import Stats, counts_by_place
from ..servers.dialects import Dialect
from ..servers.race import gap, server_lane
from ..servers.steps import Told
from ..system.progress import Stopped, attended, check_stopped
from ..types import REJECTION, BadInput, DraftOutcome, Settings, Token
from .prompts import Prompt, read_prompts
from .study import PROMPT_FILES, some_of_each

AT_ONCE = 1, 2, 4, 8, 16
CONTEXTS = 256, 1024, 4096  # tokens of a prompt, about
LEAST_TEXTS = 4  # at each number of requests at once
CONTEXT_PROMPTS = 4  # at each length
WARM_UP_TOKENS = 16
TOKEN_LETTERS = 4.2  # of a token of English, about
MAX_AT_ONCE = 64
Found = TypeVar("Found")
SECONDS = 600.0


# Who writes -------------------------------------------------------------------------------------------------

Places = list[tuple[int | None, int]]
"""For each position of a draft how many tokens were tested there, None if that is unknown, and how many accepted."""


@dataclass(frozen=True, slots=True)
class Written:
    """One text and its figures.

    `rounds` are all after the first token, `drafts` those with a draft. `drafts` and `places` are None where they are
    not told.
    """

    tokens: Sequence[Token]
    stats: Stats
    rounds: int
    drafts: int | None
    drafted: int | None
    places: Places | None
    notes: Sequence[str] = ()
    halves: Sequence[tuple[int, int]] = ()
    """How many tokens were tested and accepted in the rounds of the first half of the text, and of the second."""

    @property
    def round_seconds(self) -> float | None:
        """Of a mean round."""
        after = self.stats.seconds - self.stats.prompt_seconds
        return after / self.rounds if self.rounds and after > 0 else None


class Writer(Protocol):
    """`facts` are the engine, its version and the model; `at_once` says whether it takes several requests."""

    facts: dict[str, Any]
    at_once: bool

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Written:
        """One text.

        Args:
            alone: whether nothing else is asked of it meanwhile.

        Raises:
            BadInput: it cannot be had: one sentence.
            Stopped: whoever waits for it has stopped it.
        """

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        """How far apart the logits of two tokens are after a text; None if that is unknown."""


class ServerWriter:
    """A `Writer`: a server, as it is."""

    at_once = True

    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.facts = dialect, dict(dialect.facts)

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Written:
        lane, told = server_lane("", self.dialect, prompt, False, settings, alone)
        entries = list(race_lanes([lane]))
        return _of_server([entry.event for entry in entries], tokens_of(entries), told)

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        return gap(self.dialect, self.dialect.prompt_of(prompt, False), before, pair)


def _of_server(events: Sequence[Event], tokens: Sequence[Token], told: Told) -> Written:
    """Where the rounds of a stream cannot be told apart, the server's totals are taken."""
    stats = Stats.of(events)
    if stats.drafted is not None:
        places: Places | None = [*counts_by_place(events)]
        known = stats.rounds, stats.drafts, stats.drafted, places
        return Written(tokens, stats, *known, told.notes, _halves(events, len(tokens)))
    rounds = stats.rounds if told.accepted is None else max(len(tokens) - 1 - told.accepted, 1)
    places = None
    if told.by_position and told.rounds:
        full = told.drafted == told.rounds * len(told.by_position)  # then one is tested if those before it passed
        reached = [told.rounds, *told.by_position]
        places = [(reached[place] if full else None, count) for place, count in enumerate(told.by_position)]
    return Written(tokens, stats, rounds, told.rounds, told.drafted, places, told.notes)


def _halves(events: Sequence[Event], tokens: int) -> list[tuple[int, int]]:
    """See `Written.halves`; a round belongs to where it begins."""
    at, found = 1, [[0, 0], [0, 0]]
    for event in events:
        if isinstance(event, Round):
            counts = found[at >= tokens / 2]
            counts[0] += sum(token.outcome is not DraftOutcome.UNTESTED for token in event.drafted)
            counts[1] += sum(token.outcome is DraftOutcome.ACCEPTED for token in event.drafted)
            at += len(event.emitted)
    return [(tested, accepted) for tested, accepted in found]


class PresetWriter:
    """A `Writer`: the target of a loaded preset with a drafter, `none` for the target alone."""

    at_once = False

    def __init__(self, loaded: Loaded, drafter: str, k: int | str) -> None:
        self.loaded, self.drafter, self.k = loaded, drafter, k
        named = {"engine": "specdemo", "version": loaded.engine, "model": loaded.preset.name}
        self.facts = {**named, "drafter": drafter, "k": k}

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Written:
        ids, events = self.loaded.encode(prompt), []
        with closing(start(self.loaded, self.drafter, ids, replace(settings, k=self.k))) as run:  # type: ignore[type-var]
            for event in run:
                check_stopped()
                events.append(event)
        stats = Stats.of(events)
        tokens = [token for event in events for token in emitted_tokens(event)]
        places: Places | None = [*counts_by_place(events)]
        halves = _halves(events, len(tokens))
        return Written(tokens, stats, stats.rounds, stats.drafts, stats.drafted, places, halves=halves)

    def gap(self, prompt: str, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
        return None  # its tokens have margins


# The examination --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DoctorPlan:
    """What is measured: `each` prompts of every kind, requests `at_once`, prompts of about `contexts` tokens.

    Raises:
        BadInput: a number is out of range.
    """

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
class Crowd:
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
        samples, crowds: what was measured so far; samples of long prompts are among the others.
        left_out: sentences on what was not measured, and why.
    """

    def __init__(self, with_drafts: Writer, alone: Writer | None, plan: DoctorPlan) -> None:
        self.with_drafts, self.alone, self.plan = with_drafts, alone, plan
        self.prompts = plan.prompts()
        self.samples: list[Sample] = []
        self.crowds: list[Crowd] = []
        self.left_out: list[str] = []
        self.at_once = plan.at_once if with_drafts.at_once else ()
        self.done, self.steps = 0, len(self.prompts) + len(self.at_once) + CONTEXT_PROMPTS * len(plan.contexts)
        self._until, self._at = 0.0, ""

    def run(self) -> Iterator[str]:
        """Measure; yields what it is at. Close it to stop. Whatever ends it, what was measured by then stays.

        Raises:
            BadInput: a server cannot be asked or answers something else, and nothing has been measured yet.
            Stopped: whoever waits for it has stopped it.
        """
        self._until = time.monotonic() + self.plan.seconds
        parts = (
            ("the prompts", self._one_by_one),
            ("several requests at once", self._crowds),
            ("longer prompts", self._longer),
        )
        if not self.with_drafts.at_once:
            self.left_out.append("Several requests at once were not measured: this engine runs one text at a time.")
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

    def _crowds(self) -> Iterator[str]:
        for count in self.at_once:
            try:
                self.crowds.append(self._crowd(count))
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
        sides = [side for side in (self.with_drafts, self.alone) if side is not None]
        found = {}
        for side in sides if len(self.samples) % 2 else reversed(sides):
            found[side] = self._in_time(side.write, text, settings)
        return found[self.with_drafts], found[self.alone] if self.alone else None

    def _crowd(self, count: int) -> Crowd:
        texts = [prompt.prompt for prompt in islice(cycle(self.prompts), max(count, LEAST_TEXTS))]
        figures: list[float | int] = []
        for side in (self.with_drafts, self.alone):
            if side is not None:
                began = time.perf_counter()
                tokens = self._in_time(self._together, side, texts, count)
                figures += [tokens, time.perf_counter() - began]
        return Crowd(count, len(texts), *figures)  # type: ignore[arg-type]

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
