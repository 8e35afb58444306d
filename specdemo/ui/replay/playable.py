"""Makes from a trace what the player of recordings plays.

The trace is a recording that ships, the race that a visitor has just run, or a visitor's file:

    request   what was asked for; `facts` says where it ran, `kind` whose trace it is
    lanes     {side: {"title": text or None, "prompt": tokens of the prompt, "events": [event, ...]}}; the side "plain",
              the first, has the target alone if it is among the lanes; a `note` says if there are more than four;
              the sides of several readers are the names of their lanes
    end       the summary, as at the end of a race

An event is that of a race (see `messages`), with the `figures` of its lane up to it. A round also has `places`
[[residual, [[text, p, q, mark], ...]], ...]. The mark is "g" for the drafted token that was tested there, "d" for the
token that was drawn instead, else empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...decoding.acceptance import parents_of, path_of
from ...decoding.events import Round
from ...errors import BadInput
from ...racing.figures import LaneFigures
from ...racing.outcome import Outcome
from ...racing.remembered import memory_note
from ...racing.request import MAX_PROMPT, PLAIN, SPECULATIVE, DraftedLane, Request, lane_of
from ...racing.trace import Entry, TokenProbabilities, environment_of, read_trace, request_of
from ..race.messages import BatchFigures, event_of, live_figures, shown_request
from ..values import to_json

SIDES = PLAIN, SPECULATIVE, "drafted-2", "drafted-3"  # what the page calls lanes, whatever their names in the trace are
MAX_WORDS = 200  # characters of a name in the header


def uploaded(text: str) -> str:
    """What the script plays for the text of a file, which may be anything."""
    return playable_json("file", lambda: text.split("\n"))


def playable_json(kind: str, lines: Callable[[], Iterable[str]]) -> str:
    """What the script plays, or `{"error": sentence}`."""
    try:
        text = to_json({"kind": kind, **playable(*read_trace(lines()))})
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        sentence = "The trace holds half of a character (a lone surrogate), which is not text."
    except BadInput as error:
        sentence = str(error).encode("utf-8", "replace").decode("utf-8")
    return to_json({"error": sentence})


def playable(header: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """What the script plays, see above."""
    if not entries:
        raise BadInput("The trace holds no events.")
    request, facts = playable_request(header), facts_of(header)
    held = {lane["name"]: lane for lane in header["lanes"]}
    running = {entry.lane for entry in entries}
    names = [name for name in held if name in running]
    if not {*request.pairs, *request.pairs.values()} <= {*held}:
        request = replace(request, others=())  # its lanes are not those of several readers
    shown = names[: len(request.lanes) if request.others else len(SIDES)]
    note = ""
    if len(names) > len(shown):
        note = f"The trace holds {len(names)} lanes; the first {len(shown)} are shown."
    note = " ".join(filter(None, [note, memory_note(header["lanes"])]))
    alone = [name for name in shown if _is_alone(held[name])][:1]
    drafting = [name for name in shown if name not in alone]
    sides = dict(zip([*alone, *drafting], SIDES if alone or len(drafting) > 1 else (SPECULATIVE,), strict=False))
    if request.others:
        sides = {name: name for name in request.lanes if name in running}
    return {
        "request": shown_request(request),
        "facts": facts,
        "note": note,
        "lanes": {
            sides[name]: {"title": None if request.others else _title(name, held), **lane}
            for name, lane in _lanes(entries, sides, request.pairs).items()
        },
        "end": _ending(header, request, entries, sides),
    }


def _title(name: str, held: Mapping[str, Any]) -> str | None:
    """The title of a lane on the page; None for the two lanes of a usual race, which the page knows."""
    if {*held} <= {PLAIN, SPECULATIVE}:
        return None
    if held[name].get("drafter") == "you":
        return "The room" if held[name].get("tree") else "You"
    return "Target alone" if name == PLAIN else name


def playable_request(header: dict[str, Any]) -> Request:
    """What the race of a trace was asked for."""
    request = request_of(header)
    names = len(request.preset), len(request.drafter)
    if max(map(len, request.prompts)) > MAX_PROMPT or max(names) > MAX_WORDS:
        raise BadInput("Line 1 of the trace cannot be read: prompt, preset or drafter is too long.")
    return request


def facts_of(header: dict[str, Any]) -> dict[str, str]:
    """What the header says about the machine: `dtype`, `weights_dtype`, `device_name` and `cores`, if it does."""
    known = environment_of(header)
    names = ("dtype", "weights_dtype", "device_name", "cores")
    return {name: str(known[name])[:MAX_WORDS] for name in names if isinstance(known.get(name), (str, int))}


def _lanes(entries: Sequence[Entry], names: Iterable[str], pairs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The prompts and events of lanes by name. `pairs` are those of the request."""
    stats, batch_figures = {name: LaneFigures() for name in names}, BatchFigures(pairs)
    events: dict[str, list[dict[str, Any]]] = {name: [] for name in stats}
    for entry in entries:
        if entry.lane not in stats:
            continue
        event, lane = entry.event, stats[entry.lane]
        lane.add(event)
        fields = {**event_of(entry, lane.seconds), "figures": live_figures(lane)}
        if isinstance(event, Round):
            fields["places"] = [_place(event, at, place) for at, place in enumerate(entry.probabilities)]
        batch_figures.add(entry, fields)
        events[entry.lane].append(fields)
    batch_figures.fill_in()
    return {name: {"prompt": stats[name].prompt_tokens, "events": shown} for name, shown in events.items()}


def _place(event: Round, at: int, place: TokenProbabilities) -> list[Any]:
    path = path_of(event.drafted)
    before = path[at] if at < len(path) else None
    followed = zip(event.drafted, parents_of(event.drafted), strict=True)
    tested = {token.id: "g" for token, parent in followed if parent == before}
    marks = {event.emitted[at].id: "d", **tested}
    return [place.residual, [[c.text, c.p, c.q, marks.get(c.id, ""), c.e] for c in place.candidates]]


def _ending(
    header: dict[str, Any], request: Request, entries: Sequence[Entry], sides: Mapping[str, str]
) -> dict[str, Any]:
    """How a race with these lanes ends; `sides` says what the page calls them."""
    held, drafted = {lane["name"]: lane for lane in header["lanes"]}, dict[str, DraftedLane | None]()
    for name in request.lanes if request.others else sides:
        drafted[name] = None
        with suppress(BadInput):
            drafted[name] = lane_of(held[name], request)
    alone = next((name for name, side in sides.items() if side == PLAIN and _is_alone(held[name])), None)
    found = Outcome.of(request.settings, entries, drafted, alone, environment_of(header), request.pairs)
    if not found.verdicts:
        one = len(sides) < 2
        sentence = "This trace holds one lane only." if one else "None of these lanes is the target alone."
        found = replace(
            found, sentence=sentence, badge={**found.badge, "words": "There is nothing to compare it with."}
        )
    ending = found.ending(header.get("disturbed") is True)
    for figures in ("speed_ups", "speed_ups_in_all", "stats"):
        ending[figures] = {sides.get(name, name): value for name, value in ending[figures].items()}
    for verdict in ending["verdicts"].values():
        del verdict["comparison"]  # the badge says it
    return ending


def _is_alone(lane: Mapping[str, Any]) -> bool:
    """Whether a lane of a trace is the target alone."""
    return lane["name"] == PLAIN or lane.get("drafter") == "none"
