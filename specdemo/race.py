"""Two decodes of one prompt on one device, each on its own clock, and what comes of comparing them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .costs import Costs
from .decode import Rule, check_room, decode
from .drafters import DRAFTERS
from .events import PLAIN, SPECULATIVE, Entry, Event, emitted_tokens, engine_seconds
from .places import Watch
from .runners.fused import MOST_ROWS
from .stats import Stats, in_words, speed_up
from .text import LaneText, StopStrings
from .types import AUTO, MAX_K, BadInput, Settings

if TYPE_CHECKING:
    from .models import Loaded

Lane = TypeVar("Lane", bound=Hashable)
PROPOSING = 0x5DEECE66D  # xored into the seed, so that proposing and accepting never share noise
TRIED_KS, TRIED_TOKENS = (1, 4), 32  # the drafts that show what a drafter costs, and the text they are made in
TRYING_SECONDS, SLOW_PASS = 0.3, 0.1  # how long that takes, and from what seconds a pass on it is left out
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""How close two logits must be for rounding to decide between them, with passes of other shapes or other sums."""


def check_drafter(loaded: Loaded, drafter: str) -> None:
    """Refuse a drafter that does not exist or that this preset has nothing for."""
    if drafter not in DRAFTERS:
        raise BadInput(f"There is no drafter called {drafter!r}. Choose one of: {', '.join(DRAFTERS)}.")
    if reason := DRAFTERS[drafter].missing(loaded):
        raise BadInput(f"The drafter {drafter} cannot be used here: {reason}.")


def drafters_of(loaded: Loaded, names: str) -> list[str]:
    """The drafters named, separated by commas; without names, all that this preset can use.

    Raises:
        BadInput: one of those named does not exist, or this preset has nothing for it.
    """
    if not names:
        return [name for name, kind in DRAFTERS.items() if name != "none" and not kind.missing(loaded)]
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        check_drafter(loaded, name)
    return chosen


def start(
    loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings, rule: Rule | None = None
) -> Iterator[Event]:
    """A decode of `prompt_ids` by the loaded target with a drafter by name; drafts are tested by `rule` (`verify`).

    Raises:
        BadInput: no such drafter, or prompt and new tokens exceed the context.
    """
    check_drafter(loaded, drafter)
    check_room(len(prompt_ids), settings, loaded.context)
    if drafter == "none":
        settings = replace(settings, k=0)  # it guesses nothing at any K
    costs = costs_of(loaded, settings)
    if costs and settings.k == AUTO:
        if drafter not in costs.tried:
            _try_out(loaded, drafter, prompt_ids, settings, costs)
            costs.tried.add(drafter)
        settings = replace(settings, seed=costs.fresh_seed(settings.seed))
    return _decode(loaded, drafter, prompt_ids, settings, costs, rule)


def _decode(
    loaded: Loaded,
    drafter: str,
    prompt_ids: Sequence[int],
    settings: Settings,
    costs: Costs | None,
    rule: Rule | None = None,
) -> Iterator[Event]:
    runner = loaded.target_runner(len(prompt_ids) + settings.max_new_tokens)
    noise = torch.Generator(runner.device).manual_seed(settings.seed ^ PROPOSING)
    proposing = DRAFTERS[drafter].build(loaded, runner, settings, noise)
    stop = StopStrings(loaded.tokenizer, prompt_ids, settings.stop)
    return decode(runner, proposing, prompt_ids, settings, loaded.eos_ids, stop, rule, costs)


def _try_out(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings, costs: Costs) -> None:
    """Let `costs` learn what short and longer drafts cost, before K = auto goes by it: a short run with either.

    Not where passes are slow: there the reading of the prompts alone would keep people waiting.
    """
    if costs.pace > SLOW_PASS:
        return
    prompt_ids = prompt_ids[-TRIED_TOKENS:]
    new_tokens = min(TRIED_TOKENS, loaded.context - len(prompt_ids))
    for k in TRIED_KS:
        short = replace(settings, k=k, max_new_tokens=new_tokens, stop=(), seed=costs.fresh_seed(settings.seed))
        trial = costs.on_trial()
        with closing(_decode(loaded, drafter, prompt_ids, short, trial)) as events:  # type: ignore[type-var]
            next(events)  # the prefill; the first draft reads the prompt as well
            end = time.perf_counter() + TRYING_SECONDS / len(TRIED_KS)
            for _ in events:
                if time.perf_counter() > end:
                    break
        costs.pace = trial.pace


def costs_of(loaded: Loaded, settings: Settings) -> Costs | None:
    """What rounds cost here with this kind of sampling; measured the first time that K = auto is to go by it."""
    kind = (settings.temperature > 0, settings.top_k > 0, settings.top_p < 1)
    if settings.k == AUTO and kind not in loaded.costs:
        most_k = MOST_ROWS - 1 if loaded.engine == "fused" else MAX_K  # no further is that one bit-exact, see `fused`
        loaded.costs[kind] = Costs.measured(loaded.target_runner(MAX_K + 2), settings, most_k)
    return loaded.costs.get(kind)


def race(
    loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings, isolated: bool = False
) -> Iterator[Entry]:
    """The target alone and the target with a drafter, interleaved; every event with its lane and text.

    The lane whose engine clock is behind goes next, so both advance through the same machine weather, and
    neither runs while the other does. `isolated` runs one after the other instead. Above temperature 0, where p and q
    are more than one token, the speculative rounds come with their `places`.
    """
    texts = {lane: LaneText(loaded.tokenizer, prompt_ids, loaded.eos_ids) for lane in (PLAIN, SPECULATIVE)}
    watch = Watch(texts[SPECULATIVE])
    lanes = {
        PLAIN: start(loaded, "none", prompt_ids, settings),
        SPECULATIVE: start(loaded, drafter, prompt_ids, settings, watch),
    }
    with closing(take_turns(lanes, (lambda event: 0.0) if isolated else engine_seconds)) as events:  # type: ignore[type-var]
        for lane, event in events:
            watched = lane == SPECULATIVE and settings.temperature > 0
            yield Entry(lane, event, texts[lane].read(event), watch.places(event) if watched else ())


def take_turns(lanes: Mapping[Lane, Iterator[Event]], step: Callable[[Event], float]) -> Iterator[tuple[Lane, Event]]:
    """The events of several decodes, whoever is least far going next; none runs while another does.

    Args:
        step: how far an event brings its decode; while all are as far, the first runs until it ends.
    """
    far = dict.fromkeys(lanes, 0.0)
    with ExitStack() as running:
        for events in lanes.values():
            running.enter_context(closing(events))  # type: ignore[type-var]
        while far:
            lane = min(far, key=far.__getitem__)
            event = next(lanes[lane], None)
            if event is None:
                del far[lane]
            else:
                far[lane] += step(event)
                yield lane, event


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two greedy texts are the same, token for token.

    `first_difference` is the place of the first token that differs, None if there is none; `logit_gap` is
    then how far apart the target's logits of the two tokens are there. A tiny gap is a near-tie, which
    passes of different lengths may round differently, above all in bf16.
    """

    identical: bool
    first_difference: int | None = None
    logit_gap: float | None = None


def compare(loaded: Loaded, prompt_ids: Sequence[int], plain: Sequence[int], speculative: Sequence[int]) -> Comparison:
    """Compare the emitted tokens of both lanes of a race at temperature 0."""
    place = first_difference(plain, speculative)
    if place is None:
        return Comparison(identical=True)
    if place >= min(len(plain), len(speculative)):  # one was stopped: there is no other token to compare with
        return Comparison(identical=False, first_difference=place)
    runner = loaded.target_runner(len(prompt_ids) + max(len(plain), len(speculative)))  # as the lanes had
    try:
        logits = runner.prefill([*prompt_ids, *plain[:place]])[0]
    finally:
        runner.release()
    gap = abs(float(logits[plain[place]]) - float(logits[speculative[place]]))
    return Comparison(identical=False, first_difference=place, logit_gap=gap)


def is_near_tie(logit_gap: float, dtype: str) -> bool:
    """Whether rounding explains a difference; a dtype that is not known, as in a trace of whoever, is the coarsest."""
    return logit_gap <= NEAR_TIE.get(dtype, NEAR_TIE["bfloat16"])


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """The place of the first token that differs or that only one of them has; None if there is none."""
    longest = max(len(plain), len(speculative))
    return next((i for i in range(longest) if plain[i : i + 1] != speculative[i : i + 1]), None)


def summary(loaded: Loaded, prompt_ids: Sequence[int], settings: Settings, entries: Sequence[Entry]) -> dict[str, Any]:
    """What a finished race showed, ready for JSON.

    For each lane `text`, `token_ids`, `kinds`, `finish_reason` and `stats`; for both `speed_up`, a `sentence`
    and, at temperature 0, the `comparison` of the texts (None above: they differ by chance, their law does not).
    """
    lanes = {lane: [entry.event for entry in entries if entry.lane == lane] for lane in (PLAIN, SPECULATIVE)}
    reports = {lane: report(loaded, prompt_ids, events) for lane, events in lanes.items()}
    plain, speculative = (Stats.of(lanes[lane]) for lane in (PLAIN, SPECULATIVE))
    comparison = None
    if settings.temperature == 0:
        comparison = asdict(compare(loaded, prompt_ids, reports[PLAIN]["token_ids"], reports[SPECULATIVE]["token_ids"]))
    return {
        **reports,
        "speed_up": speed_up(plain, speculative),
        "sentence": in_words(plain, speculative),
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
    """Everything needed to run the same race again, and what it ran on.

    The seed is the one that was asked for: with K = auto a run draws its own from it (`Costs.fresh_seed`).
    """
    return {
        "preset": loaded.preset.name,
        "weights": loaded.weights,
        "drafter": drafter,
        "prompt": prompt,
        "raw": raw,
        "settings": asdict(settings),
        "environment": loaded.environment(),
    }
