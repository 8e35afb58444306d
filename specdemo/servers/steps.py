"""Rounds from what a server reports: how many tokens, how many of them drafted and accepted, and when.

The last token of a round is the target's own: the bonus if all drafted tokens were accepted, else resampled. What a
server does not report stays unknown: the ids and probabilities of rejected tokens, and, if it does not say how many
tokens a round drafted and accepted, the kinds of all its tokens.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..decoding.acceptance import kind_after, walk
from ..decoding.events import Event, Finished, Prefilled, Round
from ..errors import BadInput
from ..tokens import DraftedToken, FinishReason, Token, TokenKind
from .client import Client

LIKELIEST = 10  # how many next tokens a probability is asked for
UNFINISHED = "The server ended its answer before the text was finished."
COUNTING_SECONDS = 1.0  # how long after its last token a server may take to count an answer
Prompt = str | list[int]
Lists = tuple[Sequence[int], Sequence[int]] | None
"""Accepted and drafted tokens of each round that had a draft."""


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens that a server sent together: those of one round, or of several that it merged.

    `texts` has one string for each of `ids`. `seconds` is the time since the step before, or since the request was
    sent. `drafted` and `accepted` are None if the server does not report them for these tokens. `accepted` may be more
    than was emitted if the text ended inside the round.
    """

    ids: tuple[int | None, ...]
    texts: tuple[str, ...]
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
    rounds: int = 1


@dataclass(slots=True)
class ServerReport:
    """What a server says of one answer besides its tokens. What it does not say is None.

    `rounds`, `drafted` and `accepted` are its own totals: rounds with a draft, drafted tokens, accepted tokens.
    `counted` says whether its counters agree, which can only be known if nobody else uses it (`alone`). `by_position`
    is then how many tokens they counted as accepted at each position of a draft.
    `server_seconds` is by the server's clock, `seconds` and `first_seconds` (to the first token) by ours. `rest` is
    text that belongs to no single token. `notes` are sentences on what could not be recovered.
    """

    alone: bool = True
    prompt_tokens: int | None = None
    reason: FinishReason | None = None
    rest: str = ""
    counted: bool | None = None
    by_position: tuple[int, ...] | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    lists: Lists = None
    server_seconds: float | None = None
    first_seconds: float | None = None
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    def check(self, before: Counters | None, read: Callable[[], Counters | None], tokens: int) -> None:
        """Compare with the server's counters, if it shows them and answered nobody else, and fill in what they know."""
        if before is None:
            return
        until = time.perf_counter() + COUNTING_SECONDS
        while True:
            now = read()
            counted = None if now is None else now.since(before)
            if counted is None or counted.tokens >= tokens or time.perf_counter() > until:
                break
            time.sleep(0.02)
        if counted is None or counted.tokens != tokens:
            self.notes.append(
                "The server's counters include other requests, so the rounds were not checked against them."
            )
            return
        self.by_position = counted.by_position
        theirs = counted.rounds, counted.drafted, counted.accepted
        ours = self.rounds, self.drafted, self.accepted
        self.counted = all(mine in (None, count) for mine, count in zip(ours, theirs, strict=True))
        if self.counted:
            self.rounds, self.drafted, self.accepted = theirs
        else:
            self.notes.append("The server's stream and its counters disagree.")


def steps_of(pieces: Iterable[tuple[float, Sequence[int], str]], most: int, report: ServerReport) -> list[Step]:
    """The pieces of a stream as steps: when each came, its tokens and their text. Text without a token is the rest."""
    steps: list[Step] = []
    tokens, before = 0, 0.0
    for seconds, ids, text in pieces:
        if not ids:
            report.rest += text
            continue
        if report.first_seconds is None:
            report.first_seconds = seconds
        tokens += len(ids)
        check_limit(tokens, most)
        steps.append(Step(tuple(ids), ("",) * (len(ids) - 1) + (text,), seconds - before))
        before = seconds
    if report.reason is None:
        raise BadInput(UNFINISHED)
    return steps


def reason_in(reason: str, matched: object) -> FinishReason:
    """Why a text ended, as vLLM and SGLang report it: `matched` is the stop string or the id that ended it."""
    if reason == "length":
        return FinishReason.LENGTH
    if reason == "stop":
        return FinishReason.STOP if isinstance(matched, str) else FinishReason.EOS
    raise BadInput("The server gave up the text before it was finished.")


def check_limit(tokens: int, most: int) -> None:
    """Refuse an endless answer."""
    if tokens > most:
        raise BadInput(f"The server sends more than the {most} tokens that it was asked for.")


def events_of(steps: Iterable[Step], report: ServerReport) -> Iterator[Event]:
    """The events of a lane. The first token comes with the prompt. `report` is read after the last step."""
    index = -1
    for step in steps:
        rest = step
        if index < 0:
            token = Token(step.ids[0], TokenKind.TARGET, text=step.texts[0])
            yield Prefilled(report.prompt_tokens or 0, token, step.seconds)
            index, rest = 0, replace(step, ids=step.ids[1:], texts=step.texts[1:], seconds=0.0)
        if rest.ids:
            for event in _rounds(rest, index):
                yield event
                index += 1
    if index < 0:
        raise BadInput("The server ended its answer without a single token.")
    yield Finished(report.reason or FinishReason.LENGTH, report.rest)


def _rounds(step: Step, index: int) -> Iterator[Round]:
    """The rounds of a step. Where nothing was drafted each token is a round, and they share its time equally."""
    count = len(step.ids)
    if step.rounds == count > 1 and step.drafted == 0:
        for place in range(count):
            part = replace(step, ids=step.ids[place : place + 1], texts=step.texts[place : place + 1], rounds=1)
            yield _round(replace(part, seconds=step.seconds / count), index + place)
    else:
        yield _round(step, index)


def _round(step: Step, index: int) -> Round:
    """A round of one step: its chain of guesses passed up to the last token, which is the target's own."""
    count = len(step.ids)
    if step.drafted is None or step.accepted is None or step.rounds > 1:
        kinds, guesses = [TokenKind.UNKNOWN] * count, list[DraftedToken]()
    else:
        parents = range(-1, step.drafted - 1)
        path, outcomes = walk(parents, [place < step.accepted for place in range(step.drafted)], count)
        kinds = [*[TokenKind.ACCEPTED] * len(path), kind_after(path, parents)][:count]
        known = [*zip(step.ids, step.texts, strict=True)][: len(path)] + [(None, "")] * (step.drafted - len(path))
        guesses = [DraftedToken(id, outcome, text=text) for (id, text), outcome in zip(known, outcomes, strict=True)]
    tokens = [Token(id, kind, text=text) for id, kind, text in zip(step.ids, kinds, step.texts, strict=True)]
    merged = step.rounds if step.rounds > 1 else None
    return Round(index, tuple(guesses), tuple(tokens), None, None, step.seconds, merged=merged)


def with_drafts(steps: Sequence[Step], report: ServerReport) -> list[Step]:
    """The pieces of a stream with their drafts, where the server reports the draft of each.

    Its lists leave out the rounds without a draft, and a piece may hold several rounds. So they are those of the pieces
    only if both are as many and as long. The text may have ended inside the last round.
    """
    first, rest = [*steps[:1]], [*steps[1:]]
    if report.drafted == 0:
        return first + [replace(step, drafted=0, accepted=0, rounds=len(step.ids)) for step in rest]
    accepted, drafted = report.lists or ((), ())
    sizes, ends = [len(step.ids) for step in rest], [passed + 1 for passed in accepted]
    if sizes and len(sizes) == len(ends) and sizes[:-1] == ends[:-1] and sizes[-1] <= ends[-1]:
        fitting = zip(rest, drafted, accepted, strict=True)
        return first + [replace(step, drafted=guessed, accepted=passed) for step, guessed, passed in fitting]
    if rest:
        report.notes.append("The server does not say what was drafted in which round.")
    return first + rest


def texts_split(text_of: Callable[[Sequence[int]], str], steps: Sequence[Step]) -> Iterator[Step]:
    """The steps with the text of each token, if the server's texts of single tokens add up to the whole."""
    known: dict[int, str] = {}
    for step in steps:
        whole, ids = "".join(step.texts), [id for id in step.ids if id is not None]
        if len(step.ids) > 1 and whole:
            for id in ids:
                if id not in known:
                    known[id] = text_of([id])
            texts = tuple(known[id] for id in ids)
            yield replace(step, texts=texts) if "".join(texts) == whole else step
        else:
            yield step


# What a server counts, compared with its stream -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's counters over all its requests, or between two readings."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def since(self, before: Counters) -> Counters:
        """What was counted after another reading."""
        earlier = before.by_position + (0,) * (len(self.by_position) - len(before.by_position))
        positions = tuple(now - then for now, then in zip(self.by_position, earlier, strict=False))
        return Counters(
            self.tokens - before.tokens,
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            positions,
        )


def read_counters(client: Client, prefix: str, tokens: str) -> Counters | None:
    """The counters of `/metrics`, in the format of Prometheus, added up over the engines of one server."""
    try:
        page = client.text("/metrics")
    except BadInput:  # the server may not show them
        return None
    sums, positions = defaultdict[str, float](float), defaultdict[int, float](float)
    for name, labels, value in re.findall(rf"^{prefix}:(\w+)(\{{[^}}]*\}})? ([0-9.e+]+)$", page, re.MULTILINE):
        sums[name] += float(value)
        if name == "spec_decode_num_accepted_tokens_per_pos_total" and (
            found := re.search(r'position="(\d+)"', labels)
        ):
            positions[int(found[1])] += float(value)
    if tokens not in sums:
        return None
    names = ("drafts", "draft_tokens", "accepted_tokens")
    rounds, drafted, accepted = (int(sums[f"spec_decode_num_{name}_total"]) for name in names)
    by_position = tuple(int(positions[place]) for place in sorted(positions))
    return Counters(int(sums[tokens]), rounds, drafted, accepted, by_position)
