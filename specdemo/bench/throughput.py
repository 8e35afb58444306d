"""Speed on this machine: the target alone, with each drafter, and what other programs make of the same weights.

All methods write the text of a prompt before the next prompt begins, in an order that rotates from text to text. Every
run is compared with the target alone on the same prompt, temperature and repeat. Runs follow each other; or ours take
turns (`in_turn`), a round each, so that a slow second of the machine slows all of them equally.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from ..decoding.events import Event, emitted_tokens
from ..models.loaded import Loaded
from ..racing.lanes import take_turns
from ..racing.race import PLAIN, SPECULATIVE, check_fits, start
from ..racing.stats import Stats, counts_by_place
from ..studies.prompts import ALL, Prompt
from ..studies.statistics import Spread, geometric_mean, log_means
from ..studies.tables import text_table
from ..types import AUTO, MATCH, BadInput, Settings
from .cases import OURS, TREE, Case
from .hf import ASSISTED, HF, TUNED, generate, models
from .llamacpp import LLAMA, Server

BASES = (PLAIN, HF, LLAMA)  # what everything is compared with
Run = dict[str, Any]
KEY = "method", "drafter", "k", "rule", "temperature", "category"  # of a row of the summary
Rows = dict[tuple[Any, ...], list[Run]]  # runs by `KEY`


def bench(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    cases: Sequence[Case],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    in_turn: bool = False,
    progress: Callable[[int], object] = lambda runs: None,
    servers: Mapping[Case, Server] | None = None,
) -> dict[str, Any]:
    """Run every case on every prompt: `runs` and their `summary`, ready for JSON. One of the cases is `ALONE`.

    Args:
        in_turn: our cases write a text together, a round each in turn.
        progress: called with the number of runs that have just been done.
        servers: write the texts of their cases.

    When it is interrupted, it returns the texts that every case has written, if there are any.

    Raises:
        BadInput: a prompt that the model cannot read, or without room.
    """
    named = {"draft-model" if case.method in (ASSISTED, TUNED) else case.drafter for case in cases}
    drafters = [name for name in named if name]
    prompt_ids = {prompt.id: read(loaded, prompt, max_new_tokens, *drafters) for prompt in prompts}
    runs: list[Run] = []
    turns = 0

    def write(prompt: Prompt, settings: Settings, repeat: int) -> list[Run]:
        nonlocal turns
        turn, done = turns % len(cases), dict[Case, Run]()
        turns += 1
        for group in _groups([*cases[turn:], *cases[:turn]], in_turn):
            measured = _measured(loaded, prompt_ids[prompt.id], group, settings, servers or {})
            of = {"temperature": settings.temperature, "prompt_id": prompt.id, "category": prompt.category}
            done |= {case: {**asdict(case), **of, "repeat": repeat, **run} for case, run in measured.items()}
            progress(len(measured))
        return [done[case] for case in cases]

    interrupted = False
    held = models(loaded, cases)  # until the last text  # noqa: F841
    try:
        for repeat in range(-1, repeats):  # the first time round only warms up
            for prompt in prompts if repeat >= 0 else prompts[:1]:
                for temperature in temperatures:
                    settings = Settings(temperature=temperature, max_new_tokens=max_new_tokens, seed=max(repeat, 0))
                    done = write(prompt, settings, repeat)
                    runs += done if repeat >= 0 else []
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    return {"in_turn": in_turn, "interrupted": interrupted, "runs": runs, "summary": list(summarise(runs))}


def read(loaded: Loaded, prompt: Prompt, max_new_tokens: int, *drafters: str) -> list[int]:
    """The ids of a prompt, with room for the new tokens."""
    try:
        ids = loaded.encode(prompt.prompt)
        check_fits(loaded, len(ids), Settings(max_new_tokens=max_new_tokens), *drafters)
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
    loaded: Loaded, prompt_ids: Sequence[int], cases: Sequence[Case], settings: Settings, servers: Mapping[Case, Server]
) -> dict[Case, Run]:
    if cases[0].method in OURS:
        texts = _write(loaded, cases, prompt_ids, settings)
        found = {case: _outcome(events) for case, events in texts.items()}
    elif cases[0] in servers:
        found = {case: servers[case].generate(prompt_ids, settings) for case in cases}
    else:
        found = {case: generate(loaded, case, prompt_ids, settings) for case in cases}
    for run in found.values():
        run["digest"] = digest(run.pop("token_ids"))
    return found


def digest(token_ids: Sequence[int]) -> str:
    """The first 64 bits of the SHA-256 of a text's token ids, to compare texts for equality."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


def _write(
    loaded: Loaded, cases: Sequence[Case], prompt_ids: Sequence[int], settings: Settings
) -> dict[Case, list[Event]]:
    """A text by each of our cases: the one that has written least goes next."""
    lanes = {}
    for case in cases:
        chosen = replace(settings, k=case.k or 0, rule=case.rule or MATCH, tree=case.method == TREE)
        lanes[case] = start(loaded, case.drafter or "none", prompt_ids, chosen)
    texts: dict[Case, list[Event]] = {case: [] for case in cases}
    for case, event in take_turns(lanes, lambda event: len(emitted_tokens(event))):
        texts[case].append(event)
    return texts


def _outcome(events: Sequence[Event]) -> Run:
    stats = Stats.of(events)
    copied = ("seconds", "prompt_seconds", "tokens_per_second", "accepted", "tested", "drafted", "rounds", "draft_cost")
    return {
        "new_tokens": stats.tokens,
        **{name: getattr(stats, name) for name in copied},
        "by_position": counts_by_place(events),
        "token_ids": [token.id for event in events for token in emitted_tokens(event)],
    }


def summarise(runs: Sequence[Run]) -> Iterator[Run]:
    """A row for each method, drafter, K, rule, temperature and category.

    Speeds are those after the prompt (`stats.Pace`): geometric means over prompts, with intervals. `ratio_to` is the
    speed divided by that of each of `BASES` on the same prompt, temperature and repeat. `ratio_to_best_k` is the speed
    of K = auto divided by that of the fastest fixed K on the same texts, a choice that favours that K. Rates are over
    all runs of a row together; `rows` are those of a pass. `identical` counts the texts that equal the target's, where
    they should.
    """
    bases = {base: by_text(run for run in runs if run["method"] == base) for base in BASES}
    rows: Rows = {}
    for run in runs:
        for category in (ALL, run["category"]):
            rows.setdefault((*(run[name] for name in KEY[:-1]), category), []).append(run)
    for key, group in rows.items():
        method, _, k, rule, temperature, _ = key
        plain = [bases[PLAIN][text_key(run)] for run in group]
        guessed = sum(run["drafted"] or 0 for run in group)
        yield {
            **dict(zip(KEY, key, strict=True)),
            "tokens_per_second": mean(group, _speed),
            "ratio_to": {base: geometric_mean(ratios(group, of_base)) for base, of_base in bases.items()},
            "ratio_to_best_k": _to_best_k(rows, key, bases[PLAIN])
            if method in (SPECULATIVE, TREE) and k == AUTO
            else None,
            "tokens_per_round": rate(group, lambda run: run["new_tokens"] - 1, "rounds"),
            "rows": rate(group, lambda run: run["rounds"] + (run["drafted"] or 0), "rounds"),
            "acceptance_rate": rate(group, lambda run: run["accepted"], "tested"),
            "draft_efficiency": rate(group, lambda run: run["accepted"], "drafted"),
            "draft_cost": median(run["draft_cost"] or 0.0 for run in group) if guessed and method in OURS else None,
            "acceptance_by_place": _by_position(group),
            "identical": sum(run["digest"] == alone["digest"] for run, alone in zip(group, plain, strict=True))
            if not temperature or rule == MATCH
            else None,
            "runs": len(group),
        }


text_key = itemgetter("prompt_id", "temperature", "repeat")  # of a run; those with the same key are compared
drafting = itemgetter("drafter", "rule", "temperature")  # of a run
_speed = itemgetter("tokens_per_second")


def by_text(runs: Iterable[Run]) -> dict[Any, Run]:
    """The runs of one case by `text_key`, to compare others with."""
    return {text_key(run): run for run in runs}


def _by_prompt(runs: Sequence[Run], figure: Callable[[Run], float | None]) -> dict[str, list[float]]:
    """A figure of each run by prompt. Texts of a single token have no speed and are left out."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if value := figure(run):
            found.setdefault(run["prompt_id"], []).append(value)
    return found


def mean(runs: Sequence[Run], figure: Callable[[Run], float | None]) -> Spread | None:
    return geometric_mean(_by_prompt(runs, figure))


def ratios(
    runs: Sequence[Run], bases: Mapping[Any, Run], figure: Callable[[Run], float | None] = _speed
) -> dict[str, list[float]]:
    """A figure of each run, by default its speed, over that of the base on the same text, by prompt."""

    def ratio(run: Run) -> float | None:
        base = bases.get(text_key(run))
        own, other = figure(run), figure(base) if base else None
        return own / other if own and other else None

    return _by_prompt(runs, ratio)


def _to_best_k(rows: Rows, key: tuple[Any, ...], alone: Mapping[Any, Run]) -> Run | None:
    """The speed of K = `auto` over that of the fastest chains of a fixed `k`, run by run; None without a fixed K."""
    same = (SPECULATIVE, key[1]), key[3:]
    by_k = {other[2]: runs for other, runs in rows.items() if (other[:2], other[3:]) == same and other[2] != AUTO}
    logs = {k: found for k, runs in by_k.items() if (found := log_means(ratios(runs, alone)))}
    if not logs:
        return None
    best = max(logs, key=lambda k: fmean(logs[k].values()))
    ratio = geometric_mean(ratios(rows[key], by_text(by_k[best])))
    return {"k": best, **asdict(ratio)} if ratio else None


def rate(runs: Sequence[Run], part: Callable[[Run], int], whole: str) -> float | None:
    """Over all runs that know `whole`. Those of transformers and of servers know only some figures."""
    known = [run for run in runs if run[whole]]
    return sum(map(part, known)) / sum(run[whole] for run in known) if known else None


def _by_position(runs: Sequence[Run]) -> list[float]:
    """Accepted / tested at each position of a draft where any was tested."""
    of_each = zip_longest(*(run.get("by_position", ()) for run in runs), fillvalue=(0, 0))
    counts = (map(sum, zip(*position, strict=True)) for position in of_each)
    return [round(accepted / tested, 4) for tested, accepted in counts if tested]


def drafter_rows(summary: Sequence[Run]) -> list[Run]:
    """A row for each drafter, K and temperature over all prompts, as `results` keeps them."""
    rates = ("tokens_per_round", "acceptance_rate", "draft_efficiency", "draft_cost")
    names = ("drafter", "k", "rule", "temperature", *rates, "identical", "runs")
    rows = []
    for row in summary:
        if row["category"] == ALL and row["method"] == SPECULATIVE and (gain := row["ratio_to"][PLAIN]):
            interval = {"speed_up": gain.mean, "speed_up_from": gain.low, "speed_up_to": gain.high}
            rows.append(
                {**{name: row[name] for name in names}, **interval, "acceptance_by_place": row["acceptance_by_place"]}
            )
    return rows


SHAPES = {
    **{"category": "", "temperature": "g", "method": "", "drafter": "", "k": "", "rule": "", "tokens/s": ".1f"},
    **{"to alone": ".2f", "to hf": ".2f", "to llama.cpp": ".2f", "to best K": ".2f", "tokens_per_round": ".2f"},
    **{"rows": ".1f", "acceptance_rate": ".0%", "draft_efficiency": ".0%", "draft_cost": ".0%", "same": ""},
}


def table(summary: Sequence[Run]) -> str:
    """The summary for people: geometric means with 95% intervals over prompts; empty columns are left out."""
    rows = []
    for row in sorted(summary, key=lambda row: (row["category"] == ALL, row["category"], row["temperature"])):
        to = {f"to {'alone' if base == PLAIN else base}": row["ratio_to"][base] for base in BASES}
        same = None if row["identical"] is None else f"{row['identical']}/{row['runs']}"
        best = row["ratio_to_best_k"]
        shown = {"tokens/s": row["tokens_per_second"], "same": same, "to best K": best and best["mean"]}
        rows.append({**row, **to, **shown})
    columns = {name: shape for name, shape in SHAPES.items() if any(row[name] is not None for row in rows)}
    return text_table(rows, columns)


def cell(ratio: Spread | None) -> str:
    """A mean with its interval, for a table in Markdown."""
    if ratio is None:
        return "-"
    return f"{ratio.mean:.2f}" + (f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.low is not None else "")
