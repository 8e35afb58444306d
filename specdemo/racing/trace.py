"""Traces: the events of a race as JSON lines, so that it can be replayed without a model or a tokenizer.

The first line is a header: `lanes` names the lanes and says how each was run (drafter, K, rule, seed, engine), the
other fields are what was asked for and where it ran. Every other line is one event, with its lane and the text of its
tokens. Version 2 is written; version 1, which knew two lanes and no optional fields, is still read. Anyone can write a
trace, so nothing in it is used before it is checked.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ..decoding.events import Event, Finished, Prefilled, Round, emitted_tokens, parents_of, path_of
from ..types import (
    MAX_NODES,
    MAX_SEED,
    REJECTION,
    BadInput,
    DraftedToken,
    DraftOutcome,
    FinishReason,
    Settings,
    Token,
    TokenKind,
)
from .asked import PLAIN, SPECULATIVE, Request

W = TypeVar("W", bound=Enum)
TRACE_VERSION = 2
RENAMED = {"fate": "outcome", "places": "probabilities"}  # fields of version 1
MAX_LANES = 8
MAX_DRAFTED = 128  # tokens of a round: servers draft more than `MAX_K`
MAX_NAME = 60  # characters of a lane's name
MAX_EVENTS = 20_000
MAX_FILE = 100_000_000  # bytes, unpacked: several times what 20,000 events of a real race take
MAX_TEXT = 1_000  # characters of one token
MAX_CANDIDATES = 32  # of one position
MAX_REASON = 200  # characters of an error message, which may quote the trace
MOST = 1e9  # of anything that is counted or timed
PREFILL, ENDED = -1, -2  # the state of a lane before its round 0 and after its last


@dataclass(frozen=True, slots=True)
class Spans:
    """The text of an event's tokens, one string a token; joined, the emitted ones are the text."""

    emitted: Sequence[str] = ()
    drafted: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that was possible at a position: its probability for the target (p) and for the drafter (q).

    `e` is its exponential variable, see `decoding.noise`: under the match rule the target draws the token of the least
    e / p and the drafter that of the least e / q. None under rejection sampling.
    """

    id: int
    text: str
    p: float
    q: float
    e: float | None = None


@dataclass(frozen=True, slots=True)
class TokenProbabilities:
    """The likeliest tokens at a position where a token was tested or drawn.

    `residual` is the sum of max(0, p - q) over the whole vocabulary: under rejection sampling the probability that a
    draft is rejected here, and the normaliser of the residual distribution. None under the match rule.
    """

    residual: float | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace after its header. `probabilities` has one entry for each token a round emitted, or none."""

    lane: str
    event: Event
    spans: Spans
    probabilities: tuple[TokenProbabilities, ...] = ()


def write_trace(header: dict[str, Any], entries: Iterable[Entry]) -> Iterator[str]:
    """The lines of a trace, each ending in a newline and holding no other line break, in plain ASCII.

    Fields that are None are left out.

    Args:
        header: `lanes`, a list of objects with at least a `name`, and whatever else describes the race.
    """
    yield json.dumps({"type": "header", "version": TRACE_VERSION, **header}) + "\n"
    for entry in entries:
        kind = type(entry.event).__name__.lower()
        line = {"type": kind, "lane": entry.lane, **_known(asdict(entry.event)), "text": asdict(entry.spans)}
        if entry.probabilities:
            line["probabilities"] = [_known(asdict(position)) for position in entry.probabilities]
        yield json.dumps(line) + "\n"


def save_trace(path: Path, header: dict[str, Any], entries: Iterable[Entry]) -> None:
    """`write_trace` to a file, packed if its name ends in .gz."""
    trace = "".join(write_trace(header, entries)).encode("ascii")
    path.write_bytes(gzip.compress(trace, mtime=0) if path.suffix == ".gz" else trace)


def _known(value: Any) -> Any:
    """An event's fields without those that are None."""
    if isinstance(value, dict):
        return {name: _known(field) for name, field in value.items() if field is not None}
    return [_known(field) for field in value] if isinstance(value, (list, tuple)) else value


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
    """A trace's header and its entries, in the order in which they happened.

    Of the header only the version and the names of the lanes are checked. The header of a version 1 trace comes with
    the `lanes` of version 2.

    Raises:
        BadInput: naming the line that is not what a trace holds.
    """
    header: dict[str, Any] | None = None
    entries: list[Entry] = []
    due: dict[str, int] = {}  # what comes next in each lane
    version = TRACE_VERSION
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = _fields(line, version)
            kind = fields.pop("type")
            if header is None:
                if kind != "header" or (version := fields.pop("version")) not in (1, TRACE_VERSION):
                    raise BadInput(
                        f"This is not a trace of specdemo: it has no header of version 1 to {TRACE_VERSION}."
                    )
                header = fields
                if version == 1:  # it knew the target alone and the target with a drafter
                    drafters = {PLAIN: "none", SPECULATIVE: fields.get("drafter")}
                    lanes = [{"name": name, "drafter": drafter} for name, drafter in drafters.items()]
                    header = {"lanes": lanes, **fields}
                due = dict.fromkeys(_lane_names(header), PREFILL)
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


def request_of(header: dict[str, Any]) -> Request:
    """What the race of a trace was asked for.

    Raises:
        BadInput: the header does not say it.
    """
    try:
        prompt, preset, drafter = (header[name] for name in ("prompt", "preset", "drafter"))
        if not all(isinstance(text, str) for text in (prompt, preset, drafter)):
            raise ValueError("prompt, preset and drafter are texts")
        asked = header["settings"]
        settings = Settings(
            **{"rule": REJECTION, **asked, "stop": tuple(asked.get("stop", ()))}
        )  # older ones name none
        return Request(prompt, preset, drafter, settings, header.get("raw") is True, header.get("isolated") is True)
    except KeyError as error:
        raise BadInput(f"Line 1 of the trace cannot be read: it has no field {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error)[:MAX_REASON].rstrip(".")
        raise BadInput(f"Line 1 of the trace cannot be read: {reason}.") from error


def environment_of(header: dict[str, Any]) -> dict[str, Any]:
    """What the header says of where the race ran, which may be nothing."""
    environment = header.get("environment")
    return environment if isinstance(environment, dict) else {}


def _lane_names(header: dict[str, Any]) -> list[str]:
    names = [lane["name"] for lane in header["lanes"]]
    if not 1 <= len(names) <= MAX_LANES or len(set(names)) < len(names):
        raise BadInput(f"Line 1 of the trace cannot be read: it names 1 to {MAX_LANES} different lanes.")
    if not all(isinstance(name, str) and name and len(name) <= MAX_NAME for name in names):
        raise BadInput(f"Line 1 of the trace cannot be read: a lane's name has 1 to {MAX_NAME} characters.")
    return names


def _fields(line: str, version: int) -> Any:
    """A line of a trace, with the field names of the newest version."""

    def renamed(fields: dict[str, Any]) -> dict[str, Any]:
        return {RENAMED.get(name, name): value for name, value in fields.items()}

    try:  # some programs begin a file with a byte order mark
        return json.loads(line.removeprefix("\ufeff"), object_hook=renamed if version == 1 else None)
    except (ValueError, RecursionError) as error:  # no JSON, a number without end, brackets without end
        raise ValueError("it is cut off, or is no JSON") from error


def _reason(error: Exception) -> str:
    """In words that are not Python's."""
    if isinstance(error, KeyError):
        return f"it has no field {error}"
    return f"{error!s:.{MAX_REASON}}" if isinstance(error, ValueError) else "a value is of the wrong kind"


def _entry(kind: Any, fields: dict[str, Any]) -> Entry:
    lane, event, text = fields["lane"], _event(kind, fields), fields["text"]
    drafted = len(event.drafted) if isinstance(event, Round) else 0
    emitted = len(emitted_tokens(event))
    spans = Spans(tuple(map(_text, text["emitted"])), tuple(map(_text, text["drafted"])))
    rest = isinstance(event, Finished) and len(spans.emitted) == 1  # bytes that never became a character
    if len(spans.drafted) != drafted or not (rest or len(spans.emitted) == emitted):
        raise ValueError("the text has one string for each token")
    probabilities = tuple(map(_probabilities, fields.get("probabilities", ())))
    if probabilities and not (isinstance(event, Round) and len(probabilities) == emitted):
        raise ValueError("the probabilities have one entry for each emitted token of a round")
    return Entry(lane, event, spans, probabilities)


def _event(kind: Any, fields: dict[str, Any]) -> Event:
    if kind == "prefilled":
        token, seed = _token(fields["token"]), _optional(fields, "seed", MAX_SEED, _whole)
        return Prefilled(_whole(fields, "prompt_tokens"), token, _number(fields, "seconds", MOST), seed)
    if kind == "round":
        drafted, emitted = tuple(map(_drafted, fields["drafted"])), tuple(map(_token, fields["emitted"]))
        if len(drafted) > MAX_DRAFTED:
            raise ValueError(f"a round drafts at most {MAX_DRAFTED} tokens")
        merged = _optional(fields, "merged", MOST, _whole)
        _check_outcomes(drafted, emitted, merged)
        drafting, checking = (_optional(fields, f"{part}_seconds", MOST) for part in ("draft", "verify"))
        whole = _number(fields, "seconds", MOST)
        k = _optional(fields, "k", MAX_NODES, _whole)
        return Round(_whole(fields, "index"), drafted, emitted, drafting, checking, whole, k, merged)
    if kind == "finished":
        return Finished(_one_of(FinishReason, fields, "reason"))
    raise ValueError(f"unknown event {_brief(kind)}")


def _check_outcomes(drafted: Sequence[DraftedToken], emitted: Sequence[Token], merged: int | None) -> None:
    """Refuse a round that the loop cannot have made: the outcomes of a draft determine the kinds of the emitted tokens.

    A draft is a chain, or a tree whose tokens name their parents; the accepted tokens are then one path from its root.
    Where a server did not say how large its draft was, it holds the accepted tokens only; `merged` rounds hold none.
    """
    kinds = [token.kind for token in emitted]
    parents, path = parents_of(drafted), path_of(drafted)
    accepted = [drafted[index].id for index in path[1:]]
    passed, last = [TokenKind.ACCEPTED] * len(accepted), TokenKind.TARGET
    if merged:
        if drafted or merged < 2 or len(emitted) < merged or {*kinds} != {TokenKind.UNKNOWN}:
            raise ValueError("merged rounds have at least a token each, all of an unknown kind, and no draft")
        return
    if kinds[-1:] == [TokenKind.UNKNOWN] and len(accepted) == len(drafted):
        last = TokenKind.UNKNOWN
    elif drafted:
        last = TokenKind.RESAMPLED if path[-1] in parents else TokenKind.BONUS
    failed = DraftOutcome.REJECTED if kinds[-1:] == [TokenKind.RESAMPLED] else DraftOutcome.UNTESTED

    def fits(index: int, token: DraftedToken) -> bool:
        if index in path or parents[index] in path[:-1]:  # the siblings of an accepted token may be either
            return index not in path or parents[index] == path[path.index(index) - 1]
        return token.outcome is (failed if parents[index] == path[-1] else DraftOutcome.UNTESTED)

    if (
        not emitted
        or kinds not in (passed, [*passed, last])  # without the last where the text ended with an accepted token
        or accepted != [token.id for token in emitted[: len(accepted)]]
        or not all(parents[index] < index and fits(index, token) for index, token in enumerate(drafted))
    ):
        raise ValueError("the drafted and the emitted tokens do not fit each other")


def _check_order(entry: Entry, due: dict[str, int]) -> None:
    """A lane is prefilled once, its rounds count up from 0, and nothing follows its end."""
    if entry.lane not in due:
        raise ValueError(f"the lane is one of {', '.join(due)}, not {_brief(entry.lane)}")
    event, expected = entry.event, due[entry.lane]
    if isinstance(event, Finished):
        fits, following = expected >= 0, ENDED
    else:
        index = event.index if isinstance(event, Round) else PREFILL
        fits, following = index == expected, expected + 1
    if not fits:
        raise ValueError("the events of its lane are not in order")
    due[entry.lane] = following


def _probabilities(fields: dict[str, Any]) -> TokenProbabilities:
    candidates = tuple(
        Candidate(_whole(c, "id"), _text(c["text"]), _number(c, "p"), _number(c, "q"), _optional(c, "e", MOST))
        for c in fields["candidates"]
    )
    if len(candidates) > MAX_CANDIDATES:
        raise ValueError(f"a position has at most {MAX_CANDIDATES} candidates")
    return TokenProbabilities(_optional(fields, "residual"), candidates)


def _drafted(fields: dict[str, Any]) -> DraftedToken:
    p, q, draw = (_optional(fields, name) for name in ("p", "q", "draw"))
    if q == 0:
        raise ValueError("a drafted token has a q above 0, or it could not have been drawn")
    parent = None if fields.get("parent") is None else _whole({"parent": fields["parent"] + 1}, "parent") - 1
    return DraftedToken(
        _optional(fields, "id", MOST, _whole), _one_of(DraftOutcome, fields, "outcome"), p, q, draw, parent
    )


def _token(fields: dict[str, Any]) -> Token:
    margin = _optional(fields, "margin", MOST)
    return Token(
        _optional(fields, "id", MOST, _whole), _one_of(TokenKind, fields, "kind"), _optional(fields, "p"), margin
    )


def _optional(fields: dict[str, Any], name: str, most: float = 1.0, read: Callable[..., float] | None = None) -> Any:
    return None if fields.get(name) is None else (read or _number)(fields, name, most)


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
