"""Lanes: runs that race, each on its own clock."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TypeVar

from ..decoding.events import Event, Round, emitted_tokens, engine_seconds
from ..system.progress import check_stopped
from .probabilities import probabilities_of
from .text import TextReader
from .trace import Entry

Name = TypeVar("Name", bound=Hashable)
Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class Lane:
    """One run of a race: its name, its events, and the reader of their text."""

    name: str
    events: Iterator[Event]
    text: TextReader


def race_lanes(lanes: Sequence[Lane], isolated: bool = False) -> Iterator[Entry]:
    """Run any number of lanes, and yield every event with its lane and its text.

    The lane whose engine clock is behind goes next, so that all run under the same load, but never at the same time.
    With `isolated` they run one after the other.
    """
    by_name = {lane.name: lane for lane in lanes}
    step = (lambda event: 0.0) if isolated else engine_seconds
    runs = {lane.name: lane.events for lane in lanes}
    with closing(take_turns(runs, step)) as events:  # type: ignore[type-var]
        for name, event in events:
            text = by_name[name].text
            read, probabilities = text.read(event), probabilities_of(event, text.name)
            yield Entry(name, replace(read, distributions=None) if isinstance(read, Round) else read, probabilities)


def write_in_turn(runs: Mapping[Name, Iterator[Event]]) -> dict[Name, list[Event]]:
    """The events of several runs, a round each in turn, of which the one that has written least goes next: whatever
    slows down the machine for a while slows all of them, at the same place of the text.

    Raises:
        Stopped: whoever waits for it has stopped it.
    """
    found: dict[Name, list[Event]] = {name: [] for name in runs}
    with closing(take_turns(runs, lambda event: len(emitted_tokens(event)))) as turns:  # type: ignore[type-var]
        for name, event in turns:
            check_stopped()
            found[name].append(event)
    return found


def take_turns(runs: Mapping[Name, Iterator[Step]], step: Callable[[Step], float]) -> Iterator[tuple[Name, Step]]:
    """What several runs yield, of which the one whose clock is behind goes next.

    Args:
        step: the time that what a run yields adds to its run's clock. If always 0, one run follows the other.
    """
    far = dict.fromkeys(runs, 0.0)
    with ExitStack() as running:
        for events in runs.values():
            running.enter_context(closing(events))  # type: ignore[type-var]
        while far:
            name = min(far, key=far.__getitem__)
            event = next(runs[name], None)
            if event is None:
                del far[name]
            else:
                far[name] += step(event)
                yield name, event
