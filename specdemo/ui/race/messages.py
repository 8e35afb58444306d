"""From the events of a race to what the page shows: small JSON messages.

A message holds the run's id, a sequence number and, as far as there is news, one of these:

    start    the request and the names of its lanes; it clears what an earlier run left
    lanes    {lane: [event, ...]}: what is new in each lane
    end      the summary: the final figures, the sentence, how exact it was; the last `lanes` come with it
    status   what the model is doing before a run can begin
    error    a sentence for the person; `stopped` comes with it and says whether Stop was pressed

An event holds `at`, the time of its lane's clock after it. What the pane shows of it is the `row` [round, k, tokens];
`seconds` are the [draft, verify, all] of a round, the first two null where they are unknown, and `merged` is how many
rounds it stands for, if more than one. `figures` are those of the lane so far; only the last event of a lane in a
message has them, and of many every tenth. `of_all` are those of all readers of a race together that have a drafter, or
of all that have none; an event has them now and then, see `BatchFigures`.

A token is [text, code, p] or, if it was drafted, [text, code, p, q, draw, place]; p, q and draw are null where they are
unknown. The tokens of a tree come in the order of the draft. Each has, after its own place, that of the token it
follows, 0 for the text. The text of a token may hold anything: the page puts it into text nodes, never through a
template.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ...decoding.events import Round
from ...racing.compare import OWN_DRAFTER
from ...racing.figures import LaneFigures, ReaderFigures
from ...racing.request import Request
from ...racing.trace import Entry
from .colours import row_of

FIGURES_EVERY = 10  # events
LIVE = (  # figures that are sent while a race runs
    "tokens",
    "tokens_per_second",
    "ttft_seconds",
    "prompt_seconds",
    "draft_seconds",
    "verify_seconds",
    "other_seconds",
    "acceptance_rate",
    "draft_efficiency",
    "tokens_per_round",
    "seconds",
    "accepted_lengths",
    "finish_reason",
)
OF_ALL = "acceptance_rate", "draft_efficiency", "tokens_per_round", "accepted_lengths"


class Lanes:
    """The lanes of one race: takes events in, hands news out."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        """`pairs` are those of the request."""
        self._stats = defaultdict[str, LaneFigures](LaneFigures)
        self._batch_figures = BatchFigures(pairs)
        self._news: dict[str, list[dict[str, Any]]] = {}

    def add(self, entry: Entry) -> None:
        """Take in one event of the race."""
        stats, news = self._stats[entry.lane], self._news.setdefault(entry.lane, [])
        stats.add(entry.event)
        news.append(event_of(entry, stats.seconds))
        self._batch_figures.add(entry, news[-1])
        if len(news) % FIGURES_EVERY == 0:
            news[-1]["figures"] = live_figures(stats)

    def news(self) -> dict[str, Any]:
        """What is new in each lane since this was last asked."""
        news, self._news = self._news, {}
        for lane, events in news.items():
            events[-1]["figures"] = live_figures(self._stats[lane])
        self._batch_figures.fill_in()
        return news


class BatchFigures:
    """Several readers without a drafter, and as many with it, while all of either are decoded (`ReaderFigures`).

    Their figures stand in an event that counts: after every `FIGURES_EVERY` rounds of each, and in the last event
    before `fill_in`.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        groups = [ReaderFigures.of_lanes({*lanes}) for lanes in (pairs.values(), pairs)]
        self._groups = {lane: group for group in groups for lane in group.lanes}
        self._without: dict[str, tuple[ReaderFigures, dict[str, Any]]] = {}  # the last event, if it lacks them

    def add(self, entry: Entry, event: dict[str, Any]) -> None:
        """Take in one event of the race, and what the page gets of it."""
        group = self._groups.get(entry.lane)
        if group is None or not group.add_of(entry.lane, entry.event):
            return
        name = next(iter(group.lanes))
        self._without[name] = group, event
        if group.rounds % (FIGURES_EVERY * group.readers) == 0:
            self._fill_in(name)

    def fill_in(self) -> None:
        """Put in the figures that no event holds yet."""
        for name in [*self._without]:
            self._fill_in(name)

    def _fill_in(self, name: str) -> None:
        group, event = self._without.pop(name)
        event["of_all"] = group.some(OF_ALL)


def shown_request(request: Request) -> dict[str, Any]:
    """What the page shows of a request. Of a server, which drafts as it likes, K is None."""
    fields = request.as_dict()
    return {**fields, "settings": {**fields["settings"], "k": None}} if request.drafter == OWN_DRAFTER else fields


def event_of(entry: Entry, at: float) -> dict[str, Any]:
    """An event as the page shows it, without figures; `at` is the time of its lane's clock after it."""
    event = entry.event
    fields: dict[str, Any] = {"at": round(at, 6), "row": row_of(entry)}
    if isinstance(event, Round):
        parts = event.draft_seconds, event.verify_seconds, event.seconds
        fields["seconds"] = [None if part is None else round(part, 6) for part in parts]
        if event.merged:
            fields["merged"] = event.merged
    return fields


def live_figures(lane: LaneFigures) -> dict[str, Any]:
    """The figures that are worth showing while a race runs, and cheap enough to send with every flush."""
    return {**lane.some(LIVE), "seconds": round(lane.seconds, 6)}
