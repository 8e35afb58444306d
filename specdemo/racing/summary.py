"""What a finished race showed, ready for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..decoding import noise
from ..decoding.events import Event, emitted_tokens
from ..engines.memory_rate import memory_rate
from ..models.loaded import Loaded
from ..types import Settings
from .asked import PLAIN, SPECULATIVE, DraftedLane, lanes_by_name
from .compare import compare, exact_rows, first_to_part, is_comparable
from .figures import memory_rate_of, memory_shares, weight_bytes
from .stats import Stats, outcome_of
from .text import LaneText
from .trace import Entry
from .verdict import judge_lane, lanes_verdict
from .wiring import head_doubt


def summary(
    loaded: Loaded,
    prompt_ids: Sequence[int],
    settings: Settings,
    entries: Sequence[Entry],
    drafted: Mapping[str, DraftedLane | None] | None = None,
) -> dict[str, Any]:
    """What a finished race showed, ready for JSON.

    For each lane by its name `text`, `token_ids`, `kinds`, `finish_reason` and `stats`. In `verdicts`, for each of the
    `drafted` lanes (usually one, of an unknown K): its `speed_up`, a `sentence`, `notes`, `numbers` (see `LaneVerdict`)
    and the `comparison` of its text with that of the target alone, which is None for rejection sampling above
    temperature 0: there the texts differ by chance, their distribution does not. For the whole race the largest
    `speed_up`, a `sentence`, and the `comparison` of the lane that parts first. Where known, `memory_shares` say how
    close the passes of each lane come to what the memory allows, and `memory_rate` what that is in bytes per second.
    """
    drafted = {SPECULATIVE: None} if drafted is None else drafted
    lanes = {lane: [entry.event for entry in entries if entry.lane == lane] for lane in (PLAIN, *drafted)}
    stats = {lane: Stats.of(events) for lane, events in lanes.items()}
    tokens = {lane: [token for event in events for token in emitted_tokens(event)] for lane, events in lanes.items()}
    comparisons = {lane: compare(tokens[PLAIN], tokens[lane]) for lane in drafted if is_comparable(settings)}
    environment = measured(loaded.environment())
    verdicts = {
        lane: judge_lane(stats[PLAIN], stats[lane], asked, comparisons.get(lane), environment)
        for lane, asked in drafted.items()
    }
    sentence, doubts = lanes_verdict(verdicts), dict[str, str]()
    for lane, asked in drafted.items():
        if asked and (doubt := _doubt(loaded, asked.drafter, stats[lane])):
            verdicts[lane] = replace(verdicts[lane], sentence=f"{verdicts[lane].sentence} {doubt}")
            doubts.setdefault(asked.drafter, doubt)
    compared = {lane: asdict(comparisons[lane]) if comparisons else None for lane in drafted}
    return {
        **{lane: report(loaded, prompt_ids, events) for lane, events in lanes.items()},
        "verdicts": {lane: {**verdict.as_dict(), "comparison": compared[lane]} for lane, verdict in verdicts.items()},
        "speed_up": max((found.speed_up for found in verdicts.values() if found.speed_up is not None), default=None),
        "sentence": " ".join([sentence, *doubts.values()]),
        "comparison": asdict(first_to_part(comparisons.values())) if comparisons else None,
        "memory_shares": memory_shares(stats, environment),
        "memory_rate": memory_rate_of(environment),
    }


def measured(environment: dict[str, Any]) -> dict[str, Any]:
    """An environment of a loaded preset with what its memory streams now, `memory_rate`, where that is known."""
    read = weight_bytes(environment)
    rate = memory_rate(environment["device"], read) if read else None
    return {**environment, "memory_rate": rate} if rate else environment


def _doubt(loaded: Loaded, drafter: str, stats: Stats) -> str | None:
    """Whether a lane's drafter seems to be wired wrongly, by that lane or by all runs and trials: with K = auto a head
    that is always wrong is not asked again."""
    name = loaded.head_formats.get(drafter)
    if name is None:
        return None
    firsts = sum((model.first_guesses for model in loaded.costs.values()), Counter[tuple[str, bool]]())
    passed = firsts[drafter, True]
    here = head_doubt(drafter, name, stats.drafts, stats.first_passed)
    return here or head_doubt(drafter, name, passed + firsts[drafter, False], passed)


def report(loaded: Loaded, prompt_ids: Sequence[int], events: Sequence[Event]) -> dict[str, Any]:
    """One lane's outcome, ready for JSON: `text, token_ids, kinds, finish_reason, stats`."""
    text = LaneText(loaded.tokenizer, prompt_ids, loaded.eos_ids)
    for event in events:
        text.read(event)
    return outcome_of(text.text, events)


def trace_header(
    loaded: Loaded, drafter: str, prompt: str, raw: bool, settings: Settings, more: Sequence[DraftedLane] = ()
) -> dict[str, Any]:
    """What a race was asked for, and what it ran on: with its entries, everything needed to run it `again`.

    The seed is the one that was asked for; the one that a lane drew with stands in its first event.
    """
    environment = loaded.environment()

    def lane(name: str, asked: DraftedLane) -> dict[str, Any]:
        exact = {"engine": loaded.engine, "exact_rows": exact_rows(environment)}
        return {"name": name, **asdict(asked), "rule": settings.rule, "noise": noise.VERSION, **exact}

    drafted = {PLAIN: DraftedLane("none", 0), **lanes_by_name([DraftedLane(drafter, settings.k, settings.tree), *more])}
    return {
        "lanes": [lane(name, asked) for name, asked in drafted.items()],
        "preset": loaded.preset.name,
        "weights": loaded.weights,
        "drafter": drafter,
        "prompt": prompt,
        "raw": raw,
        "settings": asdict(settings),
        "environment": environment,
    }
