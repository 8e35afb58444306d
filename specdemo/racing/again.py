"""Runs a recorded race again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

from ..decoding import noise
from ..decoding.acceptance import branches
from ..decoding.batch import decode, decode_batch
from ..decoding.events import Event, Prefilled, Round, emitted_tokens
from ..decoding.loop import Decoding, Form, Given
from ..drafters.names import DRAFTERS
from ..errors import BadInput
from ..models.loaded import Loaded
from ..settings import AUTO, Settings
from .batch import entries_of
from .compare import first_difference, is_comparable
from .guesses import recorded_guesses
from .lanes import race_lanes
from .race import check_drafter, check_lanes, decoding_of, lanes_of, rule_for
from .request import PLAIN, DraftedLane, Request, lane_of
from .trace import Entry, environment_of, request_of


def again(loaded: Loaded, header: dict[str, Any], recorded: Sequence[Entry]) -> Iterator[Entry]:
    """Run the race of a trace again, each lane with its recorded seed and the recorded K of each round.

    A lane that was stopped goes as far as it went. Several readers are decoded at once again.
    """
    request = request_again(loaded, header)
    if request.others:
        yield from _readers_again(loaded, request, recorded)
        return
    prompt_ids = loaded.encode(request.prompt, request.raw)
    lanes = recorded_lanes(header)
    asks = any(DRAFTERS[lane.drafter].asks for lane in lanes.values())
    check_lanes(recorded_guesses(loaded, 0, ()) if asks else loaded, [*lanes.values()], [prompt_ids], request.settings)
    runs = {}
    for name, lane in lanes.items():
        events = [entry.event for entry in recorded if entry.lane == name]
        if events:
            settings, ks = recorded_settings(events, lane.drafter, lane.settings_in(request.settings))
            asked = recorded_guesses(loaded, len(prompt_ids), events) if DRAFTERS[lane.drafter].asks else loaded
            decoding = decoding_of(asked, lane.drafter, prompt_ids, rule_for(settings), None, Given(ks))
            decoding.distributions = name != PLAIN
            runs[name] = _first(len(events), decode(decoding))
    yield from race_lanes(lanes_of(loaded, prompt_ids, runs), request.isolated)


def _readers_again(loaded: Loaded, request: Request, recorded: Sequence[Entry]) -> Iterator[Entry]:
    prompts = [loaded.encode(prompt, request.raw) for prompt in request.prompts]
    lanes = [DraftedLane("none", 0), DraftedLane.of(request.drafter, request.settings)]
    check_lanes(loaded, lanes, prompts, request.settings, len(prompts))

    def decodings(lanes: Iterable[str]) -> Iterator[Decoding]:
        for name, prompt in zip(lanes, prompts, strict=True):
            events = [entry.event for entry in recorded if entry.lane == name]
            tokens = sum(len(emitted_tokens(event)) for event in events)
            drafter = request.lanes[name].drafter
            settings = replace(request.settings, max_new_tokens=max(tokens, 1))
            settings, ks = recorded_settings(events, drafter, settings)
            yield decoding_of(loaded, drafter, prompt, rule_for(settings), None, Given(ks))

    runs = [decode_batch(decodings(lanes), len(prompts)) for lanes in (request.pairs.values(), request.pairs)]
    yield from entries_of(loaded, request, prompts, runs)


def request_again(loaded: Loaded, header: dict[str, Any]) -> Request:
    """What the race of a trace was asked for, if it can be run again."""
    request = request_of(header)
    if header.get("weights") not in (None, json.loads(json.dumps(loaded.weights))):
        raise BadInput(f"The trace was recorded with other weights than the preset {request.preset} has now.")
    for lane in recorded_lanes(header).values():
        if not DRAFTERS[lane.drafter].asks:
            check_drafter(loaded, lane.drafter)
    versions = {lane.get("noise") for lane in header["lanes"]}
    if request.settings.temperature > 0 and versions != {noise.VERSION}:
        raise BadInput("This race cannot be run again: it was sampled with other random numbers than this version has.")
    if any(lane.get("remembered") for lane in header["lanes"]) and not is_comparable(request.settings):
        raise BadInput(
            "This race cannot be run again: its drafter began with earlier answers, which the trace does not hold."
        )
    return request


def recorded_lanes(header: dict[str, Any]) -> dict[str, DraftedLane]:
    """The lanes of a trace by name, with the drafter and the K of each; older traces have one for the whole race."""
    request = request_of(header)
    return {lane["name"]: lane_of(lane, request) for lane in header["lanes"]}


def recorded_settings(events: Sequence[Event], drafter: str, settings: Settings) -> tuple[Settings, Iterator[Form]]:
    """The settings that a lane ran with, and the K of each of its rounds and whether its draft was a tree.

    K is 0 after the recorded rounds, which matters if the texts differ.
    """
    auto = settings.k == AUTO and drafter != "none"
    # Of a draft that stopped early, as many tokens as it had are asked for. Not of a parallel draft or a tree: with a
    # smaller K these have other tokens.
    at_once = DRAFTERS[drafter].parallel_drafting
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
    recorded = (Form(usual if k is None else k, tree) for k, tree in zip(ks, trees, strict=True))
    return settings, chain(recorded, repeat(Form(0)))


def _first(count: int, events: Iterator[Event]) -> Iterator[Event]:
    """The first `count` events of a run, which is then closed."""
    with closing(events):  # type: ignore[type-var]
        yield from islice(events, count)


def differences(recorded: Sequence[Entry], entries: Sequence[Entry]) -> dict[str, int | None]:
    """For each lane, the place of the first token id that differs between a trace and its run `again`; None if none."""

    def ids(race: Sequence[Entry], lane: str) -> list[int]:
        return [token.id for entry in race if entry.lane == lane for token in emitted_tokens(entry.event)]

    lanes = dict.fromkeys(entry.lane for entry in recorded)
    return {lane: first_difference(ids(recorded, lane), ids(entries, lane)) for lane in lanes}


def other_environment(loaded: Loaded, header: dict[str, Any]) -> list[str]:
    """What was different when a trace was recorded and decides the last bits of logits, such as "dtype float32"."""
    then, now = environment_of(header), loaded.environment()
    names = ("engine", "exact_rows", "exact_tree_rows", "dtype", "weights_dtype", "device_name", "torch")
    return [f"{name} {then[name]}" for name in names if name in then and then[name] != now[name]]
