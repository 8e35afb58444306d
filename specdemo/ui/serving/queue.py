"""Gradio's queue. Gradio makes nothing of it public, so only this module looks into it.

If a version keeps it elsewhere, all events may join the line, and only Gradio's own limit holds. The tests then fail
and name `SEEN_IN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradio import Blocks
from gradio.queueing import Queue

SEEN_IN = "6.31.0"  # the version of Gradio whose queue this is
LOOK_SECONDS = 0.05  # between two looks into the line; by itself Gradio looks a thousand times a second
REPORT_SECONDS = 1.0  # and between two looks for reports of progress, of which nothing here makes any


def events_of(blocks: Any, line: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """The events of a concurrency_id that wait, in order, and those that run."""
    try:
        queue = blocks._queue
        held = queue.event_queue_per_concurrency_id.get(line)
        waiting = list(held.queue) if held else []
        running = [event for events in queue.active_jobs for event in events or ()]
        return waiting, [event for event in running if event.concurrency_id == line]
    except AttributeError:
        return [], []


def ids_of(event: Any) -> tuple[str, int]:
    """What a page names to cancel an event: its id, and that of its function."""
    return event._id, event.fn._id


class PatientQueue(Queue):
    """Polls the line less often: this takes 0.4% of a core instead of 3%."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sleep_when_free, self.progress_update_sleep_when_free = LOOK_SECONDS, REPORT_SECONDS


class Page(Blocks):
    """Blocks with a `PatientQueue`."""

    def queue(self, **options: Any) -> Page:
        plain = super().queue(**options)._queue
        self._queue = PatientQueue(
            live_updates=plain.live_updates,
            concurrency_count=plain.max_thread_count,
            update_intervals=plain.update_intervals,
            max_size=plain.max_size,
            blocks=self,
            default_concurrency_limit=plain.default_concurrency_limit,
        )
        return self
