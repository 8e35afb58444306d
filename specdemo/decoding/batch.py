"""Decodes several prompts at once. Each runs the one loop, and the passes that they wait for are one pass.

A pass of a few rows takes little longer than a pass of one, since the weights are read once for all of them. Drafted
tokens and further prompts are both such rows, so the more prompts there are, the less is left for drafts to gain.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..engines.passes import PendingPass
from ..engines.runner import Pass
from ..system.progress import Stopped, check_stopped
from .events import Event, Round
from .loop import Decoding

log = logging.getLogger(__name__)


def decode(decoding: Decoding) -> Iterator[Event]:
    """Generate from the target with drafts, and yield what happens as it happens.

    The emitted tokens follow the target's distribution under the settings of the rule, whatever the drafter proposes;
    under the match rule they do not depend on the drafter at all.
    When the generator ends, is closed or fails, the caches of runner and drafter are released.

    Raises:
        NotFinite: logits were not finite.
    """
    with closing(decode_batch([decoding])) as events:
        for _, event in events:
            if isinstance(event, Failed):
                raise event.error
            yield event


@dataclass(frozen=True, slots=True)
class Failed:
    """One of several prompts could not be decoded further. The others go on."""

    error: Exception


def decode_batch(decodings: Iterable[Decoding], at_once: int = 1) -> Generator[tuple[int, Event | Failed], None, None]:
    """Decode prompts, at most `at_once` at a time, and yield the events of each with its index.

    One that ends makes room for the next. Each text is the one that its prompt gets alone, to the bit where the logits
    of the engine do not depend on the other rows of a pass (`Runner.exact_rows`). Where an engine reads one sequence
    only (`Runner.together`), the passes follow each other. What ends a decoding alone ends that decoding here.

    The seconds of an event are those of its decoding's own work, and of each pass its share by rows.
    """
    coming, going, readers = enumerate(decodings), dict[int, _Running](), at_once
    try:
        while True:
            going = {index: one for index, one in going.items() if one.wanted}
            for index, decoding in islice(coming, at_once - len(going)):
                decoding.readers = readers
                going[index] = _Running(index, decoding)
                yield from going[index].go_on()
            if not going:
                return
            readers = len(going)
            for one in going.values():
                one.decoding.readers = readers
            for group in _groups(going.values()):
                yield from _read(group, readers)
    finally:
        for one in going.values():
            one.steps.close()


class _Running:
    """A decoding that has begun. It waits for the logits of `wanted`, unless it has ended."""

    wanted: PendingPass | None = None

    def __init__(self, index: int, decoding: Decoding) -> None:
        self.index, self.decoding, self.steps = index, decoding, decoding.steps()
        self.waits_since = time.perf_counter()

    @property
    def drafts(self) -> bool:
        """Whether it waits for a pass of its drafter."""
        return not (isinstance(self.wanted, Pass) and self.wanted.runner is self.decoding.runner)

    def go_on(self, outcome: Any = None) -> Iterator[tuple[int, Event | Failed]]:
        """Go on with the logits of the last pass, or with its error, to the next pass or to the end."""
        self.wanted = None
        try:
            step = self.steps.throw(outcome) if isinstance(outcome, Exception) else self.steps.send(outcome)
            while not isinstance(step, PendingPass):
                yield self.index, step
                step = next(self.steps)
            self.wanted = step
        except StopIteration:
            pass
        except Stopped:
            raise
        except Exception as error:
            yield self.index, Failed(error)
        self.waits_since = time.perf_counter()


def _groups(going: Iterable[_Running]) -> Iterator[list[_Running]]:
    """Those whose passes are next, in groups that read together. Drafts are finished before the target reads them."""
    waiting = [one for one in going if one.wanted]
    groups = defaultdict[int, list[_Running]](list)
    for one in [one for one in waiting if one.drafts] or waiting:
        assert one.wanted
        groups[id(one.wanted.together or one)].append(one)
    yield from groups.values()


def _read(group: Sequence[_Running], readers: int) -> Iterator[tuple[int, Event | Failed]]:
    """One pass of a group, and what follows until each needs another."""
    wanted = [one.wanted for one in group if one.wanted]
    began = time.perf_counter()
    outcomes = _outcomes(wanted)
    per_row = (time.perf_counter() - began) / sum(each.rows for each in wanted)
    rows, seconds = list[int](), 0.0  # of rounds
    for one, each, outcome in zip(group, wanted, outcomes, strict=True):
        if readers > 1:
            one.decoding.waited += time.perf_counter() - one.waits_since - per_row * each.rows
        for index, event in one.go_on(outcome):
            if isinstance(event, Round):
                rows.append(each.rows)
                seconds += event.seconds - event.draft_seconds
            yield index, event
    if len(rows) == len(group) and (costs := group[0].decoding.costs):
        costs.learn_pass(rows, seconds)


def _outcomes(wanted: Sequence[PendingPass]) -> list[Tensor | Exception]:
    """The logits of each, or its error, from one pass. If that pass fails, each is read by itself: it does not say
    whose rows it failed for.
    """
    places = [each.place for each in wanted] if len(wanted) > 1 else []
    check_stopped()
    try:
        return [*read_together(wanted)]
    except Stopped:
        raise
    except Exception as error:
        if len(wanted) == 1:
            return [error]
        log.warning("A pass of %d prompts failed. Each is read by itself.", len(wanted), exc_info=True)
    for each, place in zip(wanted, places, strict=True):
        each.go_back(place)
    return [outcome for each in wanted for outcome in _outcomes([each])]


@torch.inference_mode()
def read_together(passes: Sequence[PendingPass]) -> list[Tensor]:
    """The logits of one pass, or of several that have the same `together`."""
    together = passes[0].together
    return [each.read() for each in passes] if together is None or len(passes) == 1 else together.read(passes)
