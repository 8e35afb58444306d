"""Decodes several prompts of a loaded preset at once, and races them with a drafter against the target alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from ..decoding.batch import Failed, decode_batch
from ..decoding.events import Event, Finished, Round
from ..decoding.loop import Decoding
from ..models.loaded import Loaded
from ..settings import MAX_SEED, Settings
from . import race
from .guesses import play
from .lanes import LaneText, take_turns
from .race import check_lanes, costs_of, decoding_of, rule_for
from .request import DraftedLane, Request
from .trace import Entry

Events = Iterator[tuple[int, Event | Failed]]


def batch(loaded: Loaded, drafter: str, prompts: Sequence[Sequence[int]], settings: Settings, at_once: int) -> Events:
    """Decode prompts, at most `at_once` at a time: the events of each with its index, see `decode_batch`.

    Prompt i has the seed + i. The text of each is the one that it gets alone.
    """
    check_lanes(loaded, [DraftedLane.of(drafter, settings)], prompts, settings, min(at_once, len(prompts)))
    yield from _decoded(loaded, drafter, prompts, settings, at_once)


def _decoded(
    loaded: Loaded, drafter: str, prompts: Sequence[Sequence[int]], settings: Settings, at_once: int
) -> Events:
    """`batch` of what is checked."""
    settings = replace(settings, k=0) if drafter == "none" else settings
    costs = costs_of(loaded, settings, at_once)

    def decodings() -> Iterator[Decoding]:
        for index, prompt in enumerate(prompts):
            seeded = replace(settings, seed=(settings.seed + index) % (MAX_SEED + 1))
            yield decoding_of(loaded, drafter, prompt, rule_for(seeded), costs)

    yield from decode_batch(decodings(), at_once)


def race_request(loaded: Loaded, request: Request) -> Iterator[Entry]:
    """The race that is asked for, see `race.race`, or the game, see `guesses.play`. The prompts of several readers are
    decoded at once without a drafter, and at once with it, see `entries_of`.
    """
    if request.guesses is not None:
        yield from play(loaded, request)
        return
    prompts = [loaded.encode(prompt, request.raw) for prompt in request.prompts]
    if not request.others:
        yield from race.race(loaded, request.drafter, prompts[0], request.settings, request.isolated, request.more)
        return
    lanes = [DraftedLane("none", 0), DraftedLane.of(request.drafter, request.settings)]
    check_lanes(loaded, lanes, prompts, request.settings, len(prompts))
    if request.drafter != "none":
        costs_of(loaded, request.settings, len(prompts))  # measured before the first of them runs
    runs = [_decoded(loaded, lane.drafter, prompts, request.settings, len(prompts)) for lane in lanes]
    yield from entries_of(loaded, request, prompts, runs)


def entries_of(
    loaded: Loaded, request: Request, prompts: Sequence[Sequence[int]], runs: Sequence[Events]
) -> Iterator[Entry]:
    """The entries of readers that are decoded at once, in a run without a drafter and in one with it.

    The run whose engine clock is behind goes next, by a pass; with `asked.isolated` they follow each other. The seconds
    of an event are those that its reader waits for it, of the clock that all readers of its run share: those in which
    all of them draft, those of the whole pass, and those of the whole round.

    Raises:
        NotFinite: one of the readers could not go on. Those that could are read to their ends before.
    """
    names = list(request.pairs.values()), list(request.pairs)
    texts = {
        name: LaneText(loaded.tokenizer, ids, loaded.eos_ids)
        for group in names
        for name, ids in zip(group, prompts, strict=True)
    }
    clocks, seen, failures = [0.0, 0.0], dict.fromkeys(texts, 0.0), list[Exception]()
    step = (lambda read: 0.0) if request.isolated else seconds_of
    passes = {index: by_passes(run, failures) for index, run in enumerate(runs)}
    with closing(take_turns(passes, step)) as turns:  # type: ignore[type-var]
        for run, read in turns:
            clocks[run] += seconds_of(read)
            rounds = [event for _, event in read if isinstance(event, Round)]
            parts = {
                "draft_seconds": sum(event.draft_seconds for event in rounds),
                "verify_seconds": sum(event.verify_seconds for event in rounds),
            }
            for reader, event in read:
                name = names[run][reader]
                waited, seen[name] = clocks[run] - seen[name], clocks[run]
                timed = event if isinstance(event, Finished) else replace(event, seconds=waited)
                timed = replace(timed, **parts) if isinstance(timed, Round) else timed
                yield Entry(name, texts[name].read(timed))
    if failures:
        raise failures[0]


def by_passes(events: Events, failures: list[Exception]) -> Iterator[list[tuple[int, Event]]]:
    """The events that follow the same pass, or the same turn of all readers if each has passes of its own.

    They are in the order of the readers. A reader that fails adds to the `failures`, and the others go on.
    """
    read: list[tuple[int, Event]] = []
    with closing(events):  # type: ignore[type-var]
        for reader, event in events:
            if isinstance(event, Failed):
                failures.append(event.error)
                continue
            if read and reader <= read[-1][0] and not isinstance(event, Finished):
                yield read
                read = []
            read.append((reader, event))
    if read:
        yield read


def seconds_of(read: Sequence[tuple[int, Event]]) -> float:
    """The time that the events of a pass add to the clock of their run."""
    return sum(event.seconds for _, event in read)
