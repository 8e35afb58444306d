"""What a decode tells the world, and the trace: the same events as JSON lines.

The page, the command line, the statistics, the recorder and the tests all read these events and
nothing else. A trace is one header line, then one line an event, each with its lane and the text of
its tokens, so that it can be replayed without a model or a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from .types import BadInput, DraftedToken, Fate, FinishReason, Token, TokenKind

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been read and the first token emitted. `seconds` is the time to first token."""

    prompt_tokens: int
    token: Token
    seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """One draft, one verification, its emitted tokens.

    `k` is how many tokens the drafter was asked for; `drafted` holds fewer where it had no more to say.
    `seconds` is the whole round as the engine saw it; what drafting and verifying leave of it is
    bookkeeping. Time spent showing earlier events is in none of them.
    """

    index: int
    drafted: tuple[DraftedToken, ...]
    emitted: tuple[Token, ...]
    draft_seconds: float
    verify_seconds: float
    seconds: float
    k: int | None = None  # None in a trace that does not say


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more is emitted."""

    reason: FinishReason


Event: TypeAlias = Prefilled | Round | Finished


@dataclass(frozen=True, slots=True)
class Spans:
    """The text of an event's tokens, one string a token; joined, the emitted ones are the text."""

    emitted: Sequence[str] = ()
    drafted: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace behind its header."""

    lane: str
    event: Event
    spans: Spans


def emitted_tokens(event: Event) -> tuple[Token, ...]:
    """The tokens an event adds to the text."""
    if isinstance(event, Prefilled):
        return (event.token,)
    return event.emitted if isinstance(event, Round) else ()


def engine_seconds(event: Event) -> float:
    """How far an event moves its lane's clock."""
    return 0.0 if isinstance(event, Finished) else event.seconds


def write_trace(header: dict[str, Any], entries: Iterable[Entry]) -> Iterator[str]:
    """The lines of a trace, each ending in a newline and holding no other line break, in plain ASCII."""
    yield json.dumps({"type": "header", "version": TRACE_VERSION, **header}) + "\n"
    for entry in entries:
        kind = type(entry.event).__name__.lower()
        line = {"type": kind, "lane": entry.lane, **asdict(entry.event), "text": asdict(entry.spans)}
        yield json.dumps(line) + "\n"


def read_trace(lines: Iterable[str]) -> tuple[dict[str, Any], list[Entry]]:
    """A trace's header and entries.

    Raises:
        BadInput: naming the line that is not what a trace holds.
    """
    header: dict[str, Any] | None = None
    entries: list[Entry] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            kind = fields.pop("type")
            if header is None:
                if kind != "header" or fields.pop("version") != TRACE_VERSION:
                    raise ValueError(f"a trace begins with a header of version {TRACE_VERSION}")
                header = fields
            else:
                lane, text = str(fields.pop("lane")), fields.pop("text")
                spans = Spans(_strings(text["emitted"]), _strings(text["drafted"]))
                entries.append(Entry(lane, _event(kind, fields), spans))
        except KeyError as error:
            raise BadInput(f"Line {number} of the trace cannot be read: it has no field {error}.") from error
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise BadInput(f"Line {number} of the trace cannot be read: {error}.") from error
    if header is None:
        raise BadInput("The trace is empty.")
    return header, entries


def _event(kind: str, fields: dict[str, Any]) -> Event:
    if kind == "prefilled":
        return Prefilled(int(fields["prompt_tokens"]), _token(fields["token"]), float(fields["seconds"]))
    if kind == "round":
        drafted = tuple(
            DraftedToken(int(d["id"]), Fate(d["fate"]), float(d["p"]), float(d["q"]), float(d["draw"]))
            for d in fields["drafted"]
        )
        seconds = float(fields["draft_seconds"]), float(fields["verify_seconds"]), float(fields["seconds"])
        k = None if fields.get("k") is None else int(fields["k"])
        return Round(int(fields["index"]), drafted, tuple(map(_token, fields["emitted"])), *seconds, k)
    if kind == "finished":
        return Finished(FinishReason(fields["reason"]))
    raise ValueError(f"unknown event {kind!r}")


def _token(fields: dict[str, Any]) -> Token:
    return Token(int(fields["id"]), TokenKind(fields["kind"]), float(fields["p"]))


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("the text of an event is a list of strings")
    return tuple(values)
