"""Traces: the events of a race as JSON lines, so that it can be replayed without a model or a tokenizer.

The first line is a header: `lanes` names the lanes and says how each was run (drafter, K, rule, engine), the other
fields say what was asked for and where it ran. Every other line is one event, with its lane and the text of its tokens.
Version 2 is written; version 1, which had two lanes and no optional fields, is still read. Anyone can write a trace, so
nothing in it is used before it is checked.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from ..decoding.acceptance import kind_after, parents_of, walk
from ..decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from ..errors import BadInput
from ..formats import clipped
from ..settings import MAX_NODES, MAX_SEED, REJECTION, Settings
from ..tokens import Ahead, DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from .request import AT_ONCE, PLAIN, SPECULATIVE, Request

TRACE_VERSION = 2
MAX_LANES = 32  # of 16 readers with and without a drafter
MAX_DRAFTED = 128  # tokens of a round: servers draft more than `MAX_K`
MAX_NAME = 60  # characters of a lane's name
MAX_EVENTS = 20_000
MAX_FILE = 100_000_000  # bytes, unpacked: several times what 20,000 events of a real race take
MAX_TEXT = 1_000  # characters of one token
MAX_CANDIDATES = 32  # of one position
MAX_REASON = 200  # characters of an error message, which may quote the trace
MOST = 10**9  # the largest count, and the longest time in seconds
PREFILL, ENDED = -1, -2  # the state of a lane before its round 0 and after its last
UNEVEN = "the text has one string for each token"

AnyToken = TypeVar("AnyToken", Token, DraftedToken)
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
TokenText = Annotated[str, Field(max_length=MAX_TEXT)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that was possible at a position: its probability for the target (p) and for the drafter (q).

    `e` is its exponential variable, see `decoding.noise`: under the match rule the target draws the token of the least
    e / p and the drafter that of the least e / q. None under rejection sampling.
    """

    id: Count
    text: TokenText
    p: Share
    q: Share
    e: Amount | None = None


@dataclass(frozen=True, slots=True)
class TokenProbabilities:
    """The likeliest tokens at a position where a token was tested or drawn.

    `residual` is the sum of max(0, p - q) over the whole vocabulary: under rejection sampling the probability that a
    draft is rejected here, and the normaliser of the residual distribution. None under the match rule.
    """

    residual: Annotated[Share | None, Field(default=None)]
    candidates: Annotated[tuple[Candidate, ...], Field(max_length=MAX_CANDIDATES)]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace after its header. `probabilities` has one entry for each token a round emitted, or none."""

    lane: str
    event: Event
    probabilities: tuple[TokenProbabilities, ...] = ()


def write_trace(header: dict[str, Any], entries: Iterable[Entry]) -> Iterator[str]:
    """The lines of a trace, each ending in a newline and holding no other line break, in plain ASCII.

    Fields that are None are left out.

    Args:
        header: `lanes`, a list of objects with at least a `name`, and whatever else describes the race.
    """
    yield json.dumps({"type": "header", "version": TRACE_VERSION, **header}) + "\n"
    for entry in entries:
        kind, event = type(entry.event).__name__.lower(), entry.event
        emitted = [event.text] * bool(event.text) if isinstance(event, Finished) else texts_of(emitted_tokens(event))
        text = {"emitted": emitted, "drafted": texts_of(event.drafted) if isinstance(event, Round) else []}
        line = {"type": kind, "lane": entry.lane, **_known(asdict(event), but="text"), "text": text}
        if entry.probabilities:
            line["probabilities"] = [_known(asdict(position)) for position in entry.probabilities]
        yield json.dumps(line) + "\n"


def texts_of(tokens: Iterable[Token | DraftedToken]) -> list[str]:
    return [token.text for token in tokens]


def save_trace(path: Path, header: dict[str, Any], entries: Iterable[Entry]) -> None:
    """`write_trace` to a file, packed if its name ends in .gz."""
    trace = "".join(write_trace(header, entries)).encode("ascii")
    path.write_bytes(gzip.compress(trace, mtime=0) if path.suffix == ".gz" else trace)


def _known(value: Any, but: str = "") -> Any:
    """The fields of an event that are not None, without those of a name."""
    if isinstance(value, dict):
        return {name: _known(field, but) for name, field in value.items() if field is not None and name != but}
    return [_known(field, but) for field in value] if isinstance(value, (list, tuple)) else value


def trace_lines(path: Path) -> list[str]:
    """The lines of a trace file, for `read_trace`; it is packed if its name ends in .gz."""
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

    Of the header only the version and the names of the lanes are checked. The header of a version 1 trace gets the
    `lanes` of version 2.
    """
    header: dict[str, Any] | None = None
    entries: list[Entry] = []
    due: dict[str, int] = {}  # the number of the next round in each lane
    for number, given in enumerate(lines, start=1):
        line = given.removeprefix("\ufeff")  # some programs begin a file with a byte order mark
        if not line.strip():
            continue
        try:
            if header is None:
                fields = json.loads(line)
                if fields.pop("type") != "header" or (version := fields.pop("version")) not in (1, TRACE_VERSION):
                    raise BadInput(
                        f"This is not a trace of specdemo: it has no header of version 1 to {TRACE_VERSION}."
                    )
                header = fields
                if version == 1:  # it had the target alone and the target with a drafter
                    drafters = {PLAIN: "none", SPECULATIVE: fields.get("drafter")}
                    lanes = [{"name": name, "drafter": drafter} for name, drafter in drafters.items()]
                    header = {"lanes": lanes, **fields}
                due = dict.fromkeys(_lane_names(header), PREFILL)
            else:
                if len(entries) == MAX_EVENTS:
                    raise ValueError(f"a trace has at most {MAX_EVENTS} events")
                entries.append(_entry(line))
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
    """What the race of a trace was asked for."""
    try:
        prompt, preset, drafter = (header[name] for name in ("prompt", "preset", "drafter"))
        if not all(isinstance(text, str) for text in (prompt, preset, drafter)):
            raise ValueError("prompt, preset and drafter are texts")
        stated = {"rule": REJECTION, **header["settings"]}  # older ones name none
        settings = Settings(**{**stated, "stop": tuple(stated.get("stop", ()))})
        raw, isolated = header.get("raw") is True, header.get("isolated") is True
        return Request(prompt, preset, drafter, settings, raw, isolated, others=_others(header))
    except KeyError as error:
        raise BadInput(f"Line 1 of the trace cannot be read: it has no field {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error)[:MAX_REASON].rstrip(".")
        raise BadInput(f"Line 1 of the trace cannot be read: {reason}.") from error


def _others(header: dict[str, Any]) -> tuple[str, ...]:
    """The prompts of the second reader and of those that follow it, if there are several."""
    readers, others = header.get("readers", 1), header.get("others", [])
    if str(readers) not in AT_ONCE.choices or not isinstance(others, (list, tuple)) or len(others) != int(readers) - 1:
        raise ValueError("there are 1, 2, 4, 8 or 16 readers, with a prompt for each")
    if not all(isinstance(text, str) for text in others):
        raise ValueError("the prompts of others are texts")
    return tuple(others)


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


def _reason(error: Exception) -> str:
    """The reason in plain words."""
    if not isinstance(error, ValidationError):
        return f"{error!s:.{MAX_REASON}}"
    first = error.errors(include_url=False)[0]
    name = next((part for part in reversed(first["loc"]) if isinstance(part, str)), "the line")
    words = {
        "json_invalid": "it is cut off, or is no JSON",
        "missing": f"it has no field {name!r}",
        "union_tag_invalid": f"unknown event {_brief(first.get('ctx', {}).get('tag'))}",
        "union_tag_not_found": "it has no field 'type'",
    }
    text = first["msg"][:1].lower() + first["msg"][1:]
    return words.get(first["type"], f"{name}: {text}, not {_brief(first['input'])}")


def _entry(text: str) -> Entry:
    line = _reader().validate_json(text, strict=True)
    kind, lane, texts = line.pop("type"), line.pop("lane"), line.pop("text")
    emitted, drafted, probabilities = texts["emitted"], texts["drafted"], line.pop("probabilities", ())
    event: Event
    if kind == "round":
        guesses = _tokens(DraftedToken, line.pop("drafted"), drafted)
        tokens, ahead = _tokens(Token, line.pop("emitted"), emitted), line.pop("ahead", None)
        times = dict.fromkeys(("draft_seconds", "verify_seconds"))
        event = Round(drafted=guesses, emitted=tokens, ahead=ahead and Ahead(**ahead), **{**times, **line})
        _check_outcomes(guesses, tokens, event.merged)
    elif kind == "prefilled":
        (token,) = _tokens(Token, [line.pop("token")], emitted)
        event = Prefilled(token=token, **line)
    else:
        event = Finished(line["reason"], "".join(emitted))
        if len(emitted) > 1:
            raise ValueError(UNEVEN)
    if drafted and kind != "round":
        raise ValueError(UNEVEN)
    if probabilities and not (isinstance(event, Round) and len(probabilities) == len(event.emitted)):
        raise ValueError("the probabilities have one entry for each emitted token of a round")
    return Entry(lane, event, probabilities)


def _tokens(kind: type[AnyToken], tokens: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> tuple[AnyToken, ...]:
    if len(tokens) != len(texts):
        raise ValueError(UNEVEN)
    return tuple(kind(**{"id": None, **token}, text=text) for token, text in zip(tokens, texts, strict=True))


def _check_outcomes(drafted: Sequence[DraftedToken], emitted: Sequence[Token], merged: int | None) -> None:
    """Refuse a round that the loop cannot have made: the outcomes of a draft determine the kinds of the emitted tokens.

    A draft is a chain, or a tree whose tokens name their parents; then the accepted tokens are one path from its root.
    If a server did not say what it drafted, all kinds are unknown and `drafted` is empty. Older traces guess that all
    tokens but the last were drafted then.
    """
    kinds = [token.kind for token in emitted]
    parents, passed = parents_of(drafted), [token.outcome is DraftOutcome.ACCEPTED for token in drafted]
    unknown = not drafted and {*kinds} == {TokenKind.UNKNOWN}
    if merged and not (unknown and 2 <= merged <= len(emitted)):
        raise ValueError("merged rounds have at least a token each, all of an unknown kind, and no draft")
    if unknown:
        return
    path, outcomes = walk(parents, passed, len(emitted))
    accepted, last = [drafted[node].id for node in path], kind_after(path, parents)
    if kinds[-1:] == [TokenKind.UNKNOWN] and len(path) == len(drafted):
        last = TokenKind.UNKNOWN
    expected = [TokenKind.ACCEPTED] * len(path) + [last]
    if (
        not emitted
        or kinds != expected[: len(emitted)]  # without the last where the text ended with an accepted token
        or accepted != [token.id for token in emitted[: len(accepted)]]
        or outcomes != [token.outcome for token in drafted]
        or not all(parent < node for node, parent in enumerate(parents))
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


def _brief(value: Any) -> str:
    return clipped(json.dumps(value))  # as it stands in the trace


# The lines of a trace, as pydantic reads them ----------------------------------------------------------------


class _Token(TypedDict):
    id: NotRequired[Count | None]
    kind: TokenKind
    p: NotRequired[Share | None]
    margin: NotRequired[Amount | None]


class _Guess(TypedDict):
    id: NotRequired[Count | None]
    outcome: Annotated[DraftOutcome, Field(validation_alias=AliasChoices("outcome", "fate"))]  # fate in version 1
    p: NotRequired[Share | None]
    q: NotRequired[Annotated[Share, Field(gt=0)] | None]  # or it could not have been drawn
    draw: NotRequired[Share | None]
    parent: NotRequired[Annotated[int, Field(ge=-1, le=MAX_DRAFTED)] | None]


class _Ahead(TypedDict):
    hit: bool
    prepared: Count
    seconds: Amount


class _Texts(TypedDict):
    """One string for each token; the emitted ones, joined, are the text."""

    emitted: tuple[TokenText, ...]
    drafted: tuple[TokenText, ...]


class _Line(TypedDict):
    lane: str
    text: _Texts
    probabilities: NotRequired[
        Annotated[tuple[TokenProbabilities, ...], Field(validation_alias=AliasChoices("probabilities", "places"))]
    ]


class _Prefilled(_Line):
    type: Literal["prefilled"]
    prompt_tokens: Count
    token: _Token
    seconds: Amount
    seed: NotRequired[Annotated[int, Field(ge=0, le=MAX_SEED)] | None]


class _Round(_Line):
    type: Literal["round"]
    index: Count
    drafted: Annotated[tuple[_Guess, ...], Field(max_length=MAX_DRAFTED)]
    emitted: tuple[_Token, ...]
    draft_seconds: NotRequired[Amount | None]
    verify_seconds: NotRequired[Amount | None]
    seconds: Amount
    k: NotRequired[Annotated[int, Field(ge=0, le=MAX_NODES)] | None]
    merged: NotRequired[Count | None]
    ahead: NotRequired[_Ahead | None]


class _Finished(_Line):
    type: Literal["finished"]
    reason: FinishReason


@cache
def _reader() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[_Prefilled | _Round | _Finished, Field(discriminator="type")])
