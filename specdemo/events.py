"""What a decode tells the world, and the trace: the same events as JSON lines.

The page, the command line, the statistics, the recorder and the tests all read these events and
nothing else. A trace is one header line, then one line an event, each with its lane and the text of
its tokens, so that it can be replayed without a model or a tokenizer. Anyone can write one: nothing in it
is believed before it is checked.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from .types import MAX_K, BadInput, DraftedToken, Fate, FinishReason, Token, TokenKind

W = TypeVar("W", bound=Enum)
TRACE_VERSION = 1
PLAIN, SPECULATIVE = "plain", "speculative"
MAX_EVENTS = 20_000
MAX_FILE = 100_000_000  # bytes, unpacked: several times what so many events of a real race take
MAX_TEXT = 1_000  # characters of one token
MAX_CANDIDATES = 32  # of one place
MAX_REASON = 200  # characters of a sentence on what is wrong, which may quote the trace
MOST = 1e9  # of anything that is counted or timed
PREFILL, ENDED = -1, -2  # where a lane is before its round 0 and after its last


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
class Candidate:
    """A token that could have come at a place: its probability for the target (p) and for the drafter (q)."""

    id: int
    text: str
    p: float
    q: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token was tested or drawn: the likeliest tokens, those that a person could be shown.

    `residual` is the sum of max(0, p - q) over the whole vocabulary: the chance that a guess fails here,
    and what the residual distribution is divided by.
    """

    residual: float
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace behind its header. `places` has one entry for each token a round emitted, or is empty."""

    lane: str
    event: Event
    spans: Spans
    places: tuple[Place, ...] = ()


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
        if entry.places:
            line["places"] = [asdict(place) for place in entry.places]
        yield json.dumps(line) + "\n"


def trace_lines(path: Path) -> list[str]:
    """The lines of a trace file, for `read_trace`; it is packed if its name ends in .gz.

    Raises:
        BadInput: it cannot be read or unpacked, is too large, or is no text.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            trace = file.read(MAX_FILE + 1)
        if len(trace) > MAX_FILE:
            raise BadInput(f"The trace {path.name} is too large: at most {MAX_FILE // 1_000_000} MB are read.")
        return trace.decode("utf-8").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInput(f"The trace {path.name} cannot be read: {error}.") from error


def read_trace(lines: Iterable[str]) -> tuple[dict[str, Any], list[Entry]]:
    """A trace's header, of which only the version is checked, and its entries, in the order in which they happened.

    Raises:
        BadInput: naming the line that is not what a trace holds.
    """
    header: dict[str, Any] | None = None
    entries: list[Entry] = []
    due: dict[str, int] = {}  # what comes next in each lane
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = _fields(line)
            kind = fields.pop("type")
            if header is None:
                if kind != "header" or fields.pop("version") != TRACE_VERSION:
                    raise BadInput(f"This is not a trace of specdemo: it has no header of version {TRACE_VERSION}.")
                header = fields
            else:
                if len(entries) == MAX_EVENTS:
                    raise ValueError(f"a trace has at most {MAX_EVENTS} events")
                entries.append(_entry(kind, fields))
                _check_order(entries[-1], due)
        except BadInput:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            if header is None:
                raise BadInput("This is not a trace of specdemo.") from error
            raise BadInput(f"Line {number} of the trace cannot be read: {_reason(error)}.") from error
    if header is None:
        raise BadInput("The trace is empty.")
    return header, entries


def _fields(line: str) -> Any:
    try:
        return json.loads(line.removeprefix("\ufeff"))  # with which some programs begin a file
    except (ValueError, RecursionError) as error:  # no JSON, a number without end, brackets without end
        raise ValueError("it is cut off, or is no JSON") from error


def _reason(error: Exception) -> str:
    """In words that are not Python's."""
    if isinstance(error, KeyError):
        return f"it has no field {error}"
    return f"{error!s:.{MAX_REASON}}" if isinstance(error, ValueError) else "a value is of the wrong kind"


def _entry(kind: Any, fields: dict[str, Any]) -> Entry:
    lane, event, text = fields["lane"], _event(kind, fields), fields["text"]
    if lane not in (PLAIN, SPECULATIVE):
        raise ValueError(f"the lane is {PLAIN} or {SPECULATIVE}, not {_brief(lane)}")
    drafted = len(event.drafted) if isinstance(event, Round) else 0
    emitted = len(emitted_tokens(event))
    spans = Spans(tuple(map(_text, text["emitted"])), tuple(map(_text, text["drafted"])))
    rest = isinstance(event, Finished) and len(spans.emitted) == 1  # bytes that never became a character
    if len(spans.drafted) != drafted or not (rest or len(spans.emitted) == emitted):
        raise ValueError("the text has one string for each token")
    places = tuple(map(_place, fields.get("places", ())))
    if places and not (isinstance(event, Round) and len(places) == emitted):
        raise ValueError("there is one place for each emitted token of a round")
    return Entry(lane, event, spans, places)


def _event(kind: Any, fields: dict[str, Any]) -> Event:
    if kind == "prefilled":
        return Prefilled(_whole(fields, "prompt_tokens"), _token(fields["token"]), _number(fields, "seconds", MOST))
    if kind == "round":
        drafted, emitted = tuple(map(_drafted, fields["drafted"])), tuple(map(_token, fields["emitted"]))
        if len(drafted) > MAX_K:
            raise ValueError(f"a round drafts at most {MAX_K} tokens")
        _check_fates(drafted, emitted)
        drafting, checking, whole = (_number(fields, f"{part}seconds", MOST) for part in ("draft_", "verify_", ""))
        k = None if fields.get("k") is None else _whole(fields, "k", MAX_K)
        return Round(_whole(fields, "index"), drafted, emitted, drafting, checking, whole, k)
    if kind == "finished":
        return Finished(_one_of(FinishReason, fields, "reason"))
    raise ValueError(f"unknown event {_brief(kind)}")


def _check_fates(drafted: Sequence[DraftedToken], emitted: Sequence[Token]) -> None:
    """Refuse a round that `decode` cannot have made: what became of a draft says what kinds of tokens came of it."""
    kinds = [token.kind for token in emitted]
    accepted = kinds.count(TokenKind.ACCEPTED)
    passed = [TokenKind.ACCEPTED] * accepted
    last = TokenKind.TARGET if not drafted else TokenKind.BONUS if accepted == len(drafted) else TokenKind.RESAMPLED
    fates = [Fate.ACCEPTED] * accepted + [Fate.REJECTED] * kinds.count(TokenKind.RESAMPLED)
    fates += [Fate.UNTESTED] * (len(drafted) - len(fates))
    if (
        not emitted
        or kinds not in (passed, [*passed, last])  # without the last where the text ended with an accepted token
        or fates != [token.fate for token in drafted]
        or [token.id for token in emitted[:accepted]] != [token.id for token in drafted[:accepted]]
    ):
        raise ValueError("the drafted and the emitted tokens do not fit each other")


def _check_order(entry: Entry, due: dict[str, int]) -> None:
    """A lane is prefilled once, its rounds count up from 0, and nothing follows its end."""
    event, expected = entry.event, due.get(entry.lane, PREFILL)
    if isinstance(event, Finished):
        fits, following = expected >= 0, ENDED
    else:
        index = event.index if isinstance(event, Round) else PREFILL
        fits, following = index == expected, expected + 1
    if not fits:
        raise ValueError("the events of its lane are not in order")
    due[entry.lane] = following


def _place(fields: dict[str, Any]) -> Place:
    candidates = tuple(
        Candidate(_whole(c, "id"), _text(c["text"]), _number(c, "p"), _number(c, "q")) for c in fields["candidates"]
    )
    if len(candidates) > MAX_CANDIDATES:
        raise ValueError(f"a place has at most {MAX_CANDIDATES} candidates")
    return Place(_number(fields, "residual"), candidates)


def _drafted(fields: dict[str, Any]) -> DraftedToken:
    p, q, draw = (_number(fields, name) for name in ("p", "q", "draw"))
    if q == 0:
        raise ValueError("a drafted token has a q above 0, or it could not have been drawn")
    return DraftedToken(_whole(fields, "id"), _one_of(Fate, fields, "fate"), p, q, draw)


def _token(fields: dict[str, Any]) -> Token:
    return Token(_whole(fields, "id"), _one_of(TokenKind, fields, "kind"), _number(fields, "p"))


def _one_of(words: type[W], fields: dict[str, Any], name: str) -> W:
    value = fields[name]
    try:
        return words(value)
    except ValueError as error:
        raise ValueError(f"unknown {name} {_brief(value)}") from error


def _whole(fields: dict[str, Any], name: str, most: float = MOST) -> int:
    number = _number(fields, name, most)
    if not isinstance(number, int):
        raise ValueError(f"{name} is a whole number, not {number}")
    return number


def _number(fields: dict[str, Any], name: str, most: float = 1.0) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:  # NaN fails
        raise ValueError(f"{name} is a number from 0 to {most:g}, not {_brief(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"the text of a token is a string of at most {MAX_TEXT} characters")
    return value


def _brief(value: Any) -> str:
    return f"{json.dumps(value):.60}"  # as it stands in the trace
