"""Runs the race of a trace again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

from ..decoding import noise
from ..decoding.events import Event, Prefilled, Round, branches, emitted_tokens
from ..decoding.loop import rule_for
from ..drafters.names import drafter_class
from ..models.loaded import Loaded
from ..types import AUTO, BadInput, Settings
from .asked import PLAIN, DraftedLane
from .compare import first_difference
from .lanes import race_lanes
from .race import check_drafter, check_fits, decode_loaded, lanes_of
from .trace import Entry, environment_of, request_of


def again(loaded: Loaded, header: dict[str, Any], recorded: Sequence[Entry]) -> Iterator[Entry]:
    """Run the race of a trace once more: each lane with the seed that it drew with and the K of each of its rounds.

    A lane that was stopped goes as far as it went.

    Raises:
        BadInput: the trace lacks what is needed, or the preset has other weights by now.
    """
    asked = request_of(header)
    if header.get("weights") not in (None, json.loads(json.dumps(loaded.weights))):
        raise BadInput(f"The trace was recorded with other weights than the preset {asked.preset} has now.")
    lanes = lanes_asked(header)
    for lane in lanes.values():
        check_drafter(loaded, lane.drafter)
    versions = {lane.get("noise") for lane in header["lanes"]}
    if asked.settings.temperature > 0 and versions != {noise.VERSION}:
        raise BadInput("This race cannot be run again: it was sampled with other random numbers than this version has.")
    prompt_ids = loaded.encode(asked.prompt, asked.raw)
    check_fits(loaded, len(prompt_ids), asked.settings, *(lane.drafter for lane in lanes.values()))
    runs, rules = {}, {}
    for name, lane in lanes.items():
        events = [entry.event for entry in recorded if entry.lane == name]
        if events:
            settings, ks = _recorded(events, lane.drafter, replace(asked.settings, k=lane.k, tree=lane.tree))
            rules[name] = rule_for(settings)
            runs[name] = _first(len(events), decode_loaded(loaded, lane.drafter, prompt_ids, rules[name], None, ks))
    rules.pop(PLAIN, None)  # of the target alone no probabilities are recorded
    yield from race_lanes(lanes_of(loaded, prompt_ids, runs, rules), asked.isolated)


def lanes_asked(header: dict[str, Any]) -> dict[str, DraftedLane]:
    """The lanes of a trace by name, with the drafter and the K of each; older traces tell them of the whole race.

    Raises:
        BadInput: what a lane tells is no drafter or no K.
    """
    asked, lanes = request_of(header), {}
    for lane in header["lanes"]:
        drafter = lane.get("drafter", "none" if lane["name"] == PLAIN else asked.drafter)
        if not isinstance(drafter, str):
            raise BadInput(f"The trace does not say who drafted in its lane {lane['name']}.")
        told = {name: lane.get(name, getattr(asked.settings, name)) for name in ("k", "tree")}
        settings = replace(asked.settings, **told)
        lanes[lane["name"]] = DraftedLane(drafter, settings.k, settings.tree)
    return lanes


def _recorded(events: Sequence[Event], drafter: str, settings: Settings) -> tuple[Settings, Iterator[tuple[int, bool]]]:
    """The settings that a lane ran with, and the K of each of its rounds and whether its draft was a tree.

    Behind those the K is 0, if the texts part.

    Raises:
        BadInput: the trace does not say.
    """
    auto = settings.k == AUTO and drafter != "none"
    # A draft that stopped early is asked for what it had; one that is made at once is another if it is shorter, and so
    # is a tree.
    at_once = drafter_class(drafter).parallel_drafting
    rounds = [event for event in events if isinstance(event, Round)]
    trees = [settings.tree and (branches(event.drafted) or not event.drafted) for event in rounds]
    ks = [
        event.k if tree or at_once else event.k and len(event.drafted)
        for event, tree in zip(rounds, trees, strict=True)
    ]
    seed = next((event.seed for event in events if isinstance(event, Prefilled)), None)
    if auto and None in ks:
        raise BadInput("This race cannot be run again: its trace does not say which K was chosen in each round.")
    usual = 0 if drafter == "none" or settings.k == AUTO else int(settings.k)
    settings = replace(settings, k=usual, seed=settings.seed if seed is None else seed)
    return settings, chain(zip((usual if k is None else k for k in ks), trees, strict=True), repeat((0, False)))


def _first(count: int, events: Iterator[Event]) -> Iterator[Event]:
    """So many events of a run, which is closed then."""
    with closing(events):  # type: ignore[type-var]
        yield from islice(events, count)


def differences(recorded: Sequence[Entry], entries: Sequence[Entry]) -> dict[str, int | None]:
    """Where each lane of a trace and of the race run `again` first have another token id; None where nowhere."""

    def ids(race: Sequence[Entry], lane: str) -> list[int]:
        return [token.id for entry in race if entry.lane == lane for token in emitted_tokens(entry.event)]

    lanes = dict.fromkeys(entry.lane for entry in recorded)
    return {lane: first_difference(ids(recorded, lane), ids(entries, lane)) for lane in lanes}


def other_environment(loaded: Loaded, header: dict[str, Any]) -> list[str]:
    """What decides the last bits of logits and was another when a trace was recorded, "dtype float32" say."""
    then, now = environment_of(header), loaded.environment()
    names = ("engine", "exact_rows", "exact_tree_rows", "dtype", "weights_dtype", "device_name", "torch")
    return [f"{name} {then[name]}" for name in names if name in then and then[name] != now[name]]
