"""Makes from a trace what the script of the Replay tab plays.

The trace is a recording that ships, the race that a visitor has just run, or a visitor's file:

    request   what was asked for; `facts` says where it ran, `weight_bytes` what a pass reads, `kind` whose trace it is
    lanes     {side: {"title": text or None, "prompt": tokens of the prompt, "events": [event, ...]}}; the side "plain",
              the first, has the target alone if it is among the lanes; a `note` says if there are more than four
    end       the summary, as at the end of a race

An event is that of a race (see `messages`), with the `figures` of its lane up to it. A round also has `places`
[[residual, [[text, p, q, mark], ...]], ...]. The mark is "g" for the drafted token that was tested there, "d" for the
token that was drawn instead, else empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ...decoding.events import Event, Round, parents_of, path_of
from ...racing.asked import DraftedLane
from ...racing.compare import compare, is_comparable, tokens_of
from ...racing.figures import memory_rate_of, memory_shares, weight_bytes
from ...racing.stats import Stats
from ...racing.trace import (
    PLAIN,
    SPECULATIVE,
    Entry,
    Request,
    TokenProbabilities,
    environment_of,
    read_trace,
    request_of,
)
from ...racing.verdict import judge_lane, lanes_verdict
from ...types import BadInput
from ..race.exactness import exactness, is_whole, worst
from ..race.messages import event_of, live_figures
from ..race.request import MAX_PROMPT, shown_request
from ..values import to_json

SIDES = PLAIN, SPECULATIVE, "drafted-2", "drafted-3"  # what the page calls lanes, whatever their names in the trace are
MAX_WORDS = 200  # characters of a name in the header


def uploaded(text: str) -> str:
    """What the script plays for the text of a file, which may be anything."""
    return playable_json("file", lambda: text.split("\n"))


def playable_json(kind: str, lines: Callable[[], Iterable[str]]) -> str:
    """What the script plays, or `{"error": sentence}`."""
    try:
        told = to_json({"kind": kind, **playable(*read_trace(lines()))})
        told.encode("utf-8")
        return told
    except UnicodeEncodeError:
        sentence = "The trace holds half of a character (a lone surrogate), which is not text."
    except BadInput as error:
        sentence = str(error).encode("utf-8", "replace").decode("utf-8")
    return to_json({"error": sentence})


def playable(header: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """What the script plays, see above.

    Raises:
        BadInput: the header lacks what is needed, or there is nothing to play.
    """
    if not entries:
        raise BadInput("The trace holds no events.")
    request, facts = playable_request(header), facts_of(header)
    held = {lane["name"]: lane for lane in header["lanes"]}
    running = {entry.lane for entry in entries}
    names = [name for name in held if name in running]
    shown = names[: len(SIDES)]
    note = ""
    if len(names) > len(shown):
        note = f"The trace holds {len(names)} lanes; the first {len(shown)} are shown."
    alone = [name for name in shown if name == PLAIN or held[name].get("drafter") == "none"][:1]
    drafting = [name for name in shown if name not in alone]
    sides = dict(zip(SIDES if alone or len(drafting) > 1 else (SPECULATIVE,), [*alone, *drafting], strict=False))
    events = {side: [entry for entry in entries if entry.lane == name] for side, name in sides.items()}
    drafted = [held[name] for name in drafting] if alone else []
    disturbed = header.get("disturbed") is True
    return {
        "request": shown_request(request),
        "facts": facts,
        "weight_bytes": weight_bytes(environment_of(header)),
        "note": note,
        "lanes": {side: {"title": _title(sides[side], held), **_lane(found)} for side, found in events.items()},
        "end": _ending(request, environment_of(header), events, drafted, disturbed),
    }


def _title(name: str, held: Collection[str]) -> str | None:
    """The title of a lane on the page; None for the two lanes of a usual race, which the page knows."""
    if {*held} <= {PLAIN, SPECULATIVE}:
        return None
    return "Target alone" if name == PLAIN else name


def playable_request(header: dict[str, Any]) -> Request:
    """What the race of a trace was asked for.

    Raises:
        BadInput: the header does not say it.
    """
    asked = request_of(header)
    if len(asked.prompt) > MAX_PROMPT or len(asked.preset) > MAX_WORDS or len(asked.drafter) > MAX_WORDS:
        raise BadInput("Line 1 of the trace cannot be read: prompt, preset or drafter is too long.")
    return asked


def facts_of(header: dict[str, Any]) -> dict[str, str]:
    """What the header says about the machine: `dtype`, `weights_dtype`, `device_name` and `cores`, if it does."""
    known = environment_of(header)
    names = ("dtype", "weights_dtype", "device_name", "cores")
    return {name: str(known[name])[:MAX_WORDS] for name in names if isinstance(known.get(name), (str, int))}


def _lane(entries: Sequence[Entry]) -> dict[str, Any]:
    stats, events = Stats(), []
    for entry in entries:
        event = entry.event
        stats.add(event)
        told = {**event_of(entry, stats.seconds), "figures": live_figures(stats)}
        if isinstance(event, Round):
            told["places"] = [_place(event, at, place) for at, place in enumerate(entry.probabilities)]
        events.append(told)
    return {"prompt": stats.prompt_tokens, "events": events}


def _place(event: Round, at: int, place: TokenProbabilities) -> list[Any]:
    path = path_of(event.drafted)
    before = path[at] if at < len(path) else None
    followed = zip(event.drafted, parents_of(event.drafted), strict=True)
    tested = {token.id: "g" for token, parent in followed if parent == before}
    marks = {event.emitted[at].id: "d", **tested}
    return [place.residual, [[c.text, c.p, c.q, marks.get(c.id, ""), c.e] for c in place.candidates]]


def _ending(
    request: Request,
    environment: dict[str, Any],
    entries: dict[str, list[Entry]],
    drafted: Sequence[Mapping[str, Any]],
    disturbed: bool,
) -> dict[str, Any]:
    """How a race with these lanes ends. `drafted` says what was asked of those with a drafter.

    It is empty if the target alone is not among them.
    """
    sides = dict.fromkeys([*SIDES[:2], *entries])  # the page shows figures of two in any case
    events: dict[str, list[Event]] = {side: [entry.event for entry in entries.get(side, ())] for side in sides}
    stats = {side: Stats.of(found) for side, found in events.items()}
    stopped = not is_whole((entry for found in entries.values() for entry in found), len(entries))
    told: dict[str, Any] = {
        "stopped": stopped,
        "speed_up": None,
        "speed_ups": {},
        "stats": {side: found.as_dict() for side, found in stats.items()},
        "memory_shares": memory_shares(stats, environment),
        "memory_rate": memory_rate_of(environment),
        "disturbed": disturbed,
    }
    if not drafted:
        one = len(entries) < 2
        sentence = "This trace holds one lane only." if one else "None of these lanes is the target alone."
        exact = {"mark": "", "title": "", "words": "There is nothing to compare it with."}
        return {**told, "sentence": sentence, "exactness": exact}
    tokens = {side: tokens_of(found) for side, found in entries.items()}
    badges, verdicts, ratios = {}, {}, {}
    for side, lane in zip([*entries][1:], drafted, strict=True):
        found = compare(tokens[PLAIN], tokens[side]) if is_comparable(request.settings) else None
        alone, other = ({"token_ids": [token.id for token in tokens[at]]} for at in (PLAIN, side))
        asked = _asked(request, lane)
        summary = {PLAIN: alone, SPECULATIVE: other, "comparison": asdict(found) if found else None}
        badges[lane["name"]] = exactness(summary, asked, environment, stopped)
        verdict = judge_lane(stats[PLAIN], stats[side], _drafted(lane, asked), found, environment)
        verdicts[lane["name"]], ratios[side] = verdict, verdict.speed_up
    return {
        **told,
        "speed_up": max((ratio for ratio in ratios.values() if ratio is not None), default=None),
        "speed_ups": ratios,
        "sentence": lanes_verdict(verdicts),
        "verdicts": {name: verdict.as_dict() for name, verdict in verdicts.items()},
        "exactness": worst(badges),
    }


def _drafted(lane: Mapping[str, Any], asked: Request) -> DraftedLane | None:
    """The drafter and the K of a lane, as far as its trace tells them."""
    k = asked.settings.k
    return DraftedLane(asked.drafter, k, asked.settings.tree) if k and lane.get("k", k) == k else None


def _asked(request: Request, lane: Mapping[str, Any]) -> Request:
    """What was asked of one lane, as far as its trace tells it."""
    drafter = lane.get("drafter")
    with suppress(BadInput):
        told = {name: lane.get(name, getattr(request.settings, name)) for name in ("k", "tree")}
        request = replace(request, settings=replace(request.settings, **told))
    return replace(request, drafter=drafter) if isinstance(drafter, str) else request
