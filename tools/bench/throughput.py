"""Speed on this machine: the target alone, with each drafter, and what other programs make of the same weights.

All methods write the text of a prompt before the next prompt begins, in an order that rotates from text to text. Every
run is compared with the target alone on the same prompt, temperature and repeat. Runs follow each other; or ours take
turns (`in_turn`), a round each, so that a slow second of the machine slows all of them equally.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any

from specdemo.decoding.events import Event, emitted_tokens
from specdemo.drafters.names import DRAFTERS
from specdemo.errors import BadInput
from specdemo.models.loaded import Loaded
from specdemo.racing.figures import LaneFigures, counts_by_place
from specdemo.racing.lanes import write_in_turn
from specdemo.racing.race import check_run, start
from specdemo.racing.remembered import Memory, remembering
from specdemo.settings import MATCH, Settings
from specdemo.studies.grid import rotation
from specdemo.studies.prompts import Prompt

from .cases import ALONE, OURS, TREE, Case
from .hf import generate, models
from .llamacpp import Writer
from .rows import COUNTS, Row, run_of, summary


def bench(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    cases: Sequence[Case],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    in_turn: bool = False,
    progress: Callable[[int], object] = lambda runs: None,
    servers: Mapping[Case, Writer] | None = None,
    remember: bool = False,
) -> dict[str, Any]:
    """Run every case on every prompt: `runs` and their `summary`, ready for JSON. One of the cases is `ALONE`.

    Args:
        in_turn: our cases write a text together, a round each in turn.
        progress: called with the number of runs that have just been done.
        servers: write the texts of their cases.
        remember: drafters that can copy from the answers to the prompts before, of the same temperature and repeat.

    When it is interrupted, it returns the texts that every case has written, if there are any.
    """
    drafters = {case.drafter for case in cases if case.drafter in DRAFTERS}  # llama.cpp's have names of their own
    prompt_ids = {prompt.id: read(loaded, prompt, max_new_tokens, *drafters) for prompt in prompts}
    turns = count()
    memories = defaultdict[tuple[float, int], Memory](Memory)
    runs: list[Row] = []

    def write(prompt: Prompt, settings: Settings, repeat: int, turn: int) -> list[Row]:
        done, texts = dict[Case, Row](), dict[Case, list[int]]()
        memory = memories[settings.temperature, repeat]
        of = {"temperature": settings.temperature, "prompt_id": prompt.id, "category": prompt.category}
        for group in _groups(rotation(cases, turn), in_turn):
            ready = remembering(loaded, memory) if remember else loaded
            measured = _measured(ready, prompt_ids[prompt.id], group, settings, servers or {}, texts)
            done |= {case: {**asdict(case), **of, "repeat": repeat, **run} for case, run in measured.items()}
            progress(len(measured))
        memory.add(texts[ALONE])
        return [done[case] for case in cases]

    interrupted = False
    held = models(loaded, cases)  # until the last text  # noqa: F841
    try:
        for repeat in range(-1, repeats):  # the first time round only warms up
            for prompt in prompts if repeat >= 0 else prompts[:1]:
                turn = next(turns)  # the same at every temperature, or one case may always come first at one of them
                for temperature in temperatures:
                    settings = Settings(temperature=temperature, max_new_tokens=max_new_tokens, seed=max(repeat, 0))
                    done = write(prompt, settings, repeat, turn)
                    runs += done if repeat >= 0 else []
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    return {"in_turn": in_turn, "interrupted": interrupted, "runs": runs, "summary": summary(runs)}


def read(loaded: Loaded, prompt: Prompt, max_new_tokens: int, *drafters: str) -> list[int]:
    """The ids of a prompt, with room for the new tokens."""
    try:
        ids = loaded.encode(prompt.prompt)
        for drafter in ("none", *drafters):
            check_run(loaded, drafter, [ids], Settings(max_new_tokens=max_new_tokens))
    except BadInput as error:
        raise BadInput(f"Prompt {prompt.id!r}: {error}") from error
    return ids


def _groups(cases: Sequence[Case], together: bool) -> list[list[Case]]:
    """Those that write in turn: ours `together`, or each case by itself."""
    if not together:
        return [[case] for case in cases]
    ours = [case for case in cases if case.method in OURS]
    return [ours if case == ours[0] else [case] for case in cases if case not in ours[1:]]


def _measured(
    loaded: Loaded,
    prompt_ids: Sequence[int],
    cases: Sequence[Case],
    settings: Settings,
    servers: Mapping[Case, Writer],
    texts: dict[Case, list[int]],
) -> dict[Case, Row]:
    """A text by a case of others, or by each of ours in turn.

    The tokens of ours are added to `texts`.
    """
    case = cases[0]
    if case.method not in OURS:
        theirs = servers[case].generate if case in servers else partial(generate, loaded, case)
        return {case: theirs(prompt_ids, settings)}
    lanes = {}
    for case in cases:
        chosen = replace(settings, k=case.k or 0, rule=case.rule or MATCH, tree=case.method == TREE)
        lanes[case] = start(loaded, case.drafter or "none", prompt_ids, chosen)
    written = write_in_turn(lanes)
    for case, events in written.items():
        texts[case] = [token.id for event in events for token in emitted_tokens(event)]
    return {case: _outcome(events, texts[case]) for case, events in written.items()}


def _outcome(events: Sequence[Event], token_ids: list[int]) -> Row:
    stats = LaneFigures.of(events)
    counts = {name: getattr(stats, name) for name in COUNTS}
    return run_of(token_ids, stats.seconds, stats.prompt_seconds, **counts, by_position=counts_by_place(events))
