"""The Replay tab: recorded races, played in the lanes of a race with no model loaded.

Everything comes from a trace: one of those that ship, the race a visitor has just run, or a file of theirs. It is
turned once into what the page's script plays:

    request   what was asked for; `facts` says where it ran, `kind` whose it is
    lanes     {lane: {"prompt": tokens of the prompt, "events": [event, ...]}} of the lanes that the trace has
    end       the summary, as a race ends with it

An event holds `at`, where it moves its lane's clock to, the `row` and `figures` of a race (see `lanes`), and if it is
a round its `seconds` [draft, verify, all] and `places` [[residual, [[text, p, q, mark], ...]], ...]. The mark is "g"
for the guess that was tested there, "d" for the token that was drawn instead, else empty.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..events import (
    MAX_REASON,
    PLAIN,
    SPECULATIVE,
    Entry,
    Event,
    Place,
    Round,
    emitted_tokens,
    read_trace,
    trace_lines,
)
from ..race import first_difference
from ..stats import Stats, in_words, speed_up
from ..types import BadInput, Settings
from .form import MAX_PROMPT, Request
from .lanes import live_figures, row_of, to_json
from .runs import Run, Runs, exactness, is_whole

RECORDINGS = Path(__file__).resolve().parents[2] / "presets" / "recordings"
SUFFIX = ".jsonl.gz"
MAX_TRACE = 8_000_000  # characters
MAX_WORDS = 200  # characters of a name in the header


def add_replay(runs: Runs) -> None:
    """Add the contents of the tab to the page that is being built."""
    gr.HTML(
        html_template="<div></div>",
        js_on_load="specdemo.mountReplay(element, props, server);",
        apply_default_css=False,
        server_functions=[recording, _run_of(runs), uploaded],
        recordings=recordings(),
        limit=MAX_TRACE,
        elem_id="replay",
    )


def recordings(folder: Path = RECORDINGS) -> list[dict[str, Any]]:
    """The recordings that ship: `name`, `category`, `prompt` and the `settings` in a few words."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            asked = request_of(read_trace([next(lines)])[0])
        name = path.name.removesuffix(SUFFIX)
        words = f"{asked.drafter}, temperature {asked.settings.temperature:g}"
        found.append({"name": name, "category": name.partition("-")[0], "prompt": asked.prompt, "settings": words})
    return found


def recording(name: Any) -> str:
    """What the script plays for a recording that ships, by its name in `recordings`."""
    return _told("recording", lambda: _lines_of(str(name)))


def _lines_of(name: str) -> Sequence[str]:
    paths = {path.name: path for path in RECORDINGS.glob(f"*{SUFFIX}")}
    path = paths.get(name + SUFFIX)
    if path is None:
        raise BadInput("There is no such recording.")
    return trace_lines(path)


def _run_of(runs: Runs) -> Callable[[Any], str]:
    def race(run_id: Any) -> str:
        """The same for a race that the page has just shown."""

        def lines() -> Sequence[str]:
            run = runs.find(Run, str(run_id))
            if run is None:
                raise BadInput("This race is no longer kept. Run it again to replay it.")
            return run.trace().split("\n")

        return _told("race", lines)

    return race


def uploaded(text: Any) -> str:
    """The same for the text of a file, which may hold anything."""

    def lines() -> Sequence[str]:
        if not isinstance(text, str) or len(text) > MAX_TRACE:
            raise BadInput(f"A trace is a text of at most {MAX_TRACE // 1_000_000} MB.")
        return text.split("\n")

    return _told("file", lines)


def _told(kind: str, lines: Callable[[], Iterable[str]]) -> str:
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
    request, facts = request_of(header), facts_of(header)
    events = {lane: [entry for entry in entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)}
    if not entries:
        raise BadInput("The trace holds no events.")
    return {
        "request": request.as_dict(),
        "facts": facts,
        "lanes": {lane: _lane(found) for lane, found in events.items() if found},
        "end": _ending(request, str(facts.get("dtype", "")), events),
    }


def request_of(header: dict[str, Any]) -> Request:
    """What the race of a trace was asked for.

    Raises:
        BadInput: the header does not say it.
    """
    try:
        prompt, preset, drafter = (header[name] for name in ("prompt", "preset", "drafter"))
        if not all(isinstance(text, str) for text in (prompt, preset, drafter)):
            raise ValueError("prompt, preset and drafter are texts")
        if len(prompt) > MAX_PROMPT or len(preset) > MAX_WORDS or len(drafter) > MAX_WORDS:
            raise ValueError("prompt, preset or drafter is too long")
        asked = header["settings"]
        settings = Settings(**{**asked, "stop": tuple(asked.get("stop", ()))})
        return Request(prompt, preset, drafter, settings, header.get("raw") is True, header.get("isolated") is True)
    except KeyError as error:
        raise BadInput(f"Line 1 of the trace cannot be read: it has no field {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error)[:MAX_REASON].rstrip(".")
        raise BadInput(f"Line 1 of the trace cannot be read: {reason}.") from error


def facts_of(header: dict[str, Any]) -> dict[str, str]:
    """What the header says of where it ran: `dtype`, `weights_dtype`, `device_name`, `cores`, as far as it does."""
    environment = header.get("environment")
    known = environment if isinstance(environment, dict) else {}
    names = ("dtype", "weights_dtype", "device_name", "cores")
    return {name: str(known[name])[:MAX_WORDS] for name in names if isinstance(known.get(name), (str, int))}


def _lane(entries: Sequence[Entry]) -> dict[str, Any]:
    stats, events = Stats(), []
    for entry in entries:
        event = entry.event
        stats.add(event)
        told: dict[str, Any] = {"at": round(stats.seconds, 6), "row": row_of(entry), "figures": live_figures(stats)}
        if isinstance(event, Round):
            told["seconds"] = [event.draft_seconds, event.verify_seconds, event.seconds]
            told["places"] = [_place(event, at, place) for at, place in enumerate(entry.places)]
        events.append(told)
    return {"prompt": stats.prompt_tokens, "events": events}


def _place(event: Round, at: int, place: Place) -> list[Any]:
    guess = event.drafted[at].id if at < len(event.drafted) else None
    marks = {event.emitted[at].id: "d", guess: "g"}
    return [place.residual, [[c.text, c.p, c.q, marks.get(c.id, "")] for c in place.candidates]]


def _ending(request: Request, dtype: str, entries: dict[str, list[Entry]]) -> dict[str, Any]:
    events: dict[str, list[Event]] = {lane: [entry.event for entry in found] for lane, found in entries.items()}
    stats = {lane: Stats.of(found) for lane, found in events.items()}
    told = {"stopped": False, "speed_up": None, "stats": {lane: found.as_dict() for lane, found in stats.items()}}
    if not all(events.values()):
        exact = {"mark": "", "title": "", "words": "There is nothing to compare it with."}
        return {**told, "sentence": "This trace holds one lane only.", "exactness": exact}
    ids = {lane: [token.id for event in found for token in emitted_tokens(event)] for lane, found in events.items()}
    place = first_difference(ids[PLAIN], ids[SPECULATIVE])
    summary = {lane: {"token_ids": found} for lane, found in ids.items()}
    comparison = {"identical": place is None, "first_difference": place, "logit_gap": None}
    stopped = not is_whole(event for found in events.values() for event in found)
    return {
        **told,
        "stopped": stopped,
        "speed_up": speed_up(stats[PLAIN], stats[SPECULATIVE]),
        "sentence": in_words(stats[PLAIN], stats[SPECULATIVE]),
        "exactness": exactness({**summary, "comparison": comparison}, request.settings.temperature, dtype, stopped),
    }
