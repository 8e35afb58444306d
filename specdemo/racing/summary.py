"""What a finished race showed, ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..decoding import noise
from ..decoding.events import Event, emitted_tokens
from ..types import Settings
from .compare import compare, exact_rows, is_comparable
from .stats import Stats, speed_up
from .text import LaneText
from .trace import PLAIN, SPECULATIVE, Entry
from .verdict import race_verdict

if TYPE_CHECKING:
    from ..models.loaded import Loaded


def summary(loaded: Loaded, prompt_ids: Sequence[int], settings: Settings, entries: Sequence[Entry]) -> dict[str, Any]:
    """What a finished race showed, ready for JSON.

    For each lane `text`, `token_ids`, `kinds`, `finish_reason` and `stats`; for both `speed_up`, a `sentence` and the
    `comparison` of the texts. That is None for rejection sampling above temperature 0: there the texts differ by
    chance, their distribution does not.
    """
    lanes = {lane: [entry.event for entry in entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)}
    reports = {lane: report(loaded, prompt_ids, events) for lane, events in lanes.items()}
    plain, speculative = (Stats.of(lanes[lane]) for lane in (PLAIN, SPECULATIVE))
    comparison = None
    if is_comparable(settings):
        tokens = {
            name: [token for event in events for token in emitted_tokens(event)] for name, events in lanes.items()
        }
        comparison = asdict(compare(tokens[PLAIN], tokens[SPECULATIVE]))
    return {
        **reports,
        "speed_up": speed_up(plain, speculative),
        "sentence": race_verdict(plain, speculative),
        "comparison": comparison,
    }


def report(loaded: Loaded, prompt_ids: Sequence[int], events: Sequence[Event]) -> dict[str, Any]:
    """One lane's outcome, ready for JSON: `text, token_ids, kinds, finish_reason, stats`."""
    text = LaneText(loaded.tokenizer, prompt_ids, loaded.eos_ids)
    for event in events:
        text.read(event)
    tokens = [token for event in events for token in emitted_tokens(event)]
    stats = Stats.of(events)
    return {
        "text": text.text,
        "token_ids": [token.id for token in tokens],
        "kinds": [token.kind.value for token in tokens],
        "finish_reason": stats.finish_reason.value if stats.finish_reason else None,
        "stats": stats.as_dict(),
    }


def trace_header(loaded: Loaded, drafter: str, prompt: str, raw: bool, settings: Settings) -> dict[str, Any]:
    """What a race was asked for, and what it ran on: with its entries, everything needed to run it `again`.

    The seed is the one that was asked for; the one that a lane drew with stands in its first event.
    """
    environment = loaded.environment()

    def lane(name: str, drafter: str, k: int | str) -> dict[str, Any]:
        exact = {"engine": loaded.engine, "exact_rows": exact_rows(environment, drafter)}
        return {"name": name, "drafter": drafter, "k": k, "rule": settings.rule, "noise": noise.VERSION, **exact}

    return {
        "lanes": [lane(PLAIN, "none", 0), lane(SPECULATIVE, drafter, settings.k)],
        "preset": loaded.preset.name,
        "weights": loaded.weights,
        "drafter": drafter,
        "prompt": prompt,
        "raw": raw,
        "settings": asdict(settings),
        "environment": environment,
    }
