"""A text that a server writes, as a lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from ..decoding.events import Event
from ..racing.lanes import Lane
from ..racing.trace import Entry, Spans
from ..types import Settings, Token
from .dialects import Dialect
from .steps import Prompt, Told, events_of


class ServerText:
    """The `TextReader` of a server's lane: the server sent the text of its tokens along with them."""

    def __init__(self) -> None:
        self.text = ""
        self.coming: deque[Spans] = deque()

    def read(self, event: Event) -> Spans:
        spans = self.coming.popleft()
        self.text += "".join(spans.emitted)
        return spans

    def name(self, token_id: int) -> str:
        return f"token {token_id}"


def server_lane(
    name: str, dialect: Dialect, prompt: str, raw: bool, settings: Settings, alone: bool = True
) -> tuple[Lane, Told]:
    """A lane that asks for one text as soon as its first event is wanted, and what the server tells of it.

    Args:
        alone: whether nobody else asks the server meanwhile, so that its counters are those of this text.
    """
    text, told = ServerText(), Told(alone)

    def events() -> Iterator[Event]:
        steps = dialect.steps(dialect.prompt_of(prompt, raw), settings, told)
        with closing(steps):  # type: ignore[type-var]
            for event, spans in events_of(steps, told):
                text.coming.append(spans)
                yield event

    return Lane(name, events(), text), told


def gap(dialect: Dialect, prompt: Prompt, before: Sequence[Token], pair: Sequence[Token]) -> float | None:
    """How far apart a server has the logits of two tokens behind a prompt and some tokens; None if it does not tell."""
    if not all(isinstance(token.id, int) for token in (*before, *pair)):
        return None
    found = dialect.logprobs(prompt, [token.id for token in before if token.id is not None])
    known = [found[token.id] for token in pair if token.id in found]
    return abs(known[0] - known[1]) if len(known) == 2 else None


def recorded_lane(name: str, entries: list[Entry]) -> Lane:
    """A lane of a trace, told again."""
    text = ServerText()
    text.coming.extend(entry.spans for entry in entries)
    return Lane(name, (entry.event for entry in entries), text)


def told_of(dialect: Dialect, told: Told) -> dict[str, Any]:
    """What is known of a server's lane besides its events, ready for JSON.

    `seconds` and `first_token_seconds` are by our clock, since the request was sent; `server_seconds` by the server's,
    where it tells, and `network_seconds` is what lies between: the network, and waiting in the server's queue.
    `totals` are the server's own, which hold what it drafted behind the end of the text as well.
    """
    network = None
    if told.seconds is not None and told.server_seconds is not None:
        network = max(0.0, told.seconds - told.server_seconds)
    return {
        **dialect.facts,
        "clock": "server" if dialect.facts["engine"] == "llama.cpp" else "client",
        "first_token_seconds": told.first_seconds,
        "seconds": told.seconds,
        "server_seconds": told.server_seconds,
        "network_seconds": network,
        "totals": {"rounds_with_draft": told.rounds, "drafted": told.drafted, "accepted": told.accepted},
        "counters_agree": told.counted,
        "notes": told.notes,
    }
