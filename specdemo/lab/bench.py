"""Speed on this machine: the target alone, with each drafter, and what transformers makes of the same weights.

All methods write a prompt's text before the next prompt begins, and every run is compared with the plain run of the
same prompt, temperature and repeat, so that slow drifts of the machine cancel in the ratio. One run comes after the
other; or ours write `in_turn`, a round each, and what lasts a second cancels as well.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..decode import check_room
from ..events import Event, emitted_tokens
from ..race import PLAIN, SPECULATIVE, report, start, take_turns
from ..stats import Pace, counts_by_place
from ..types import AUTO, BadInput, Settings
from .bench_hf import HF, generate

if TYPE_CHECKING:
    from ..models import Loaded

ALL = "all"  # the category that holds every prompt
Run = dict[str, Any]
Rows = dict[tuple[Any, ...], list[Run]]  # runs by method, drafter, K, temperature and category
Bases = dict[tuple[str, tuple[Any, ...]], Run]  # what runs are compared with, by method and `_place`


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    category: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Case:
    """A way to write a text: a method, and its drafter and K as far as it has them."""

    method: str
    drafter: str | None = None
    k: int | str | None = None


ALONE = Case(PLAIN, "none", 0)
OURS = (PLAIN, SPECULATIVE)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines of `id`, `category` and `prompt`.

    Raises:
        BadInput: the file cannot be read, a line is not such an object, two have the same id, or a category has the
            name of all.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of a line
    except OSError as error:
        raise BadInput(f"The prompts cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name} is no text in UTF-8.") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise BadInput(f"{path.name} holds no prompts.")
    if twice := [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise BadInput(f"{path.name} has two prompts with the id {twice[0]!r}.")
    if any(prompt.category == ALL for prompt in prompts):
        raise BadInput(f"{path.name} has a category called {ALL!r}, which stands for all of them.")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        prompt = Prompt(**json.loads(line))
        if all(isinstance(text, str) for text in astuple(prompt)):
            "".join(astuple(prompt)).encode()  # half a character cannot be written to a file
            return prompt
    except (ValueError, TypeError, RecursionError):
        pass
    raise BadInput(f"{path.name}, line {number}: every line must be an object of id, category and prompt, all texts.")


def readable(loaded: Loaded, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Those that the model can read, and those that it cannot: a character model may know no digits."""
    can: list[Prompt] = []
    cannot: list[Prompt] = []
    for prompt in prompts:
        try:
            loaded.encode(prompt.prompt)
        except BadInput:
            cannot.append(prompt)
        else:
            can.append(prompt)
    return can, cannot


def some(prompts: Sequence[Prompt], each: int) -> list[Prompt]:
    """The first `each` prompts of every category; all if that is 0."""
    seen = Counter[str]()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        chosen += [prompt] if not each or seen[prompt.category] <= each else []
    return chosen


def provenance(loaded: Loaded) -> dict[str, Any]:
    """Where figures come from: the hardware and versions, the weights, and the commit of this program."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # not a repository
        commit = None
    return {"environment": {**loaded.environment(), "commit": commit}, "weights": loaded.weights}


def bench(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    cases: Sequence[Case],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    in_turn: bool = False,
    tick: Callable[[int], object] = lambda runs: None,
) -> dict[str, Any]:
    """Run every case on every prompt: `runs` and their `summary`, ready for JSON. One of the cases is `ALONE`.

    Args:
        in_turn: our cases write a text together, a round each in turn.
        tick: is told of how many more runs are done.

    When it is interrupted, the texts that every case has written are what it returns, if there are any.

    Raises:
        BadInput: a prompt that the model cannot read, or without room.
    """
    prompt_ids = {prompt.id: _read(loaded, prompt, max_new_tokens) for prompt in prompts}
    runs: list[Run] = []

    def write(prompt: Prompt, settings: Settings, repeat: int) -> list[Run]:
        """A text by every case: they are compared."""
        turn, done = max(repeat, 0) % len(cases), list[Run]()
        for group in _groups([*cases[turn:], *cases[:turn]], in_turn):
            measured = _measured(loaded, prompt_ids[prompt.id], group, settings)
            done += [_run(case, settings, prompt, repeat) | outcome for case, outcome in measured.items()]
            tick(len(measured))
        return done

    interrupted = False
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
    return {"in_turn": in_turn, "interrupted": interrupted, "runs": runs, "summary": list(summarise(prompts, runs))}


def _read(loaded: Loaded, prompt: Prompt, max_new_tokens: int) -> list[int]:
    """The ids of a prompt, with room for the new tokens."""
    try:
        ids = loaded.encode(prompt.prompt)
        check_room(len(ids), Settings(max_new_tokens=max_new_tokens), loaded.context)
    except BadInput as error:
        raise BadInput(f"Prompt {prompt.id!r}: {error}") from error
    return ids


def _groups(cases: Sequence[Case], together: bool) -> list[list[Case]]:
    """Those that write in turn: ours `together`, or each case by itself."""
    if not together:
        return [[case] for case in cases]
    ours = [case for case in cases if case.method in OURS]
    return [ours if case == ours[0] else [case] for case in cases if case not in ours[1:]]


def _measured(loaded: Loaded, prompt_ids: Sequence[int], cases: Sequence[Case], settings: Settings) -> dict[Case, Run]:
    if cases[0].method in OURS:
        texts = _write(loaded, cases, prompt_ids, settings)
        return {case: _outcome(loaded, prompt_ids, events) for case, events in texts.items()}
    return {case: generate(loaded, case, prompt_ids, settings) for case in cases}


def _run(case: Case, settings: Settings, prompt: Prompt, repeat: int) -> Run:
    return {
        "method": case.method,
        "drafter": case.drafter,
        "k": case.k,
        "temperature": settings.temperature,
        "prompt_id": prompt.id,
        "repeat": repeat,
    }


def _write(
    loaded: Loaded, cases: Sequence[Case], prompt_ids: Sequence[int], settings: Settings
) -> dict[Case, list[Event]]:
    """A text by each of our cases: the one that has written least goes next."""
    lanes = {
        case: start(loaded, case.drafter or "none", prompt_ids, replace(settings, k=case.k or 0)) for case in cases
    }
    texts: dict[Case, list[Event]] = {case: [] for case in cases}
    for case, event in take_turns(lanes, lambda event: len(emitted_tokens(event))):
        texts[case].append(event)
    return texts


def _outcome(loaded: Loaded, prompt_ids: Sequence[int], events: Sequence[Event]) -> Run:
    outcome = report(loaded, prompt_ids, events)
    stats = outcome["stats"]
    copied = ("seconds", "ttft_seconds", "tokens_per_second", "accepted", "tested", "drafted", "rounds", "draft_cost")
    return {
        "new_tokens": stats["tokens"],
        **{name: stats[name] for name in copied},
        "by_place": counts_by_place(events),
        "token_ids": outcome["token_ids"],
    }


def summarise(prompts: Sequence[Prompt], runs: Sequence[Run]) -> Iterator[Run]:
    """A row for each method, drafter, K, temperature and category.

    The ratios are of speed at equal length (`stats.Pace`), run by run, to the plain run (`ratio_to_plain`) and to that
    of transformers (`ratio_to_hf`) of the same prompt, temperature and repeat; those of K = auto also to the fixed K
    that had the best `ratio_to_plain` in the row (`ratio_to_best_k`). Rates are over all runs of a row together.
    `identical` counts the greedy texts that are the plain run's.
    """
    category_of = {prompt.id: prompt.category for prompt in prompts}
    bases: Bases = {(run["method"], _place(run)): run for run in runs if run["method"] in (PLAIN, HF)}
    rows: Rows = {}
    for run in runs:
        for category in (ALL, category_of[run["prompt_id"]]):
            rows.setdefault((run["method"], run["drafter"], run["k"], run["temperature"], category), []).append(run)
    for (method, drafter, k, temperature, category), group in rows.items():
        plain = [bases[PLAIN, _place(run)] for run in group]
        total = {name: _total(group, name) for name in ("accepted", "tested", "drafted", "rounds")}
        after_first = sum(run["new_tokens"] - 1 for run in group)
        yield {
            "method": method,
            "drafter": drafter,
            "k": k,
            "temperature": temperature,
            "category": category,
            "tokens_per_second": median(run["tokens_per_second"] for run in group),
            "ratio_to_plain": _ratios(group, plain),
            "ratio_to_hf": _ratios(group, [bases.get((HF, _place(run))) for run in group]),
            "ratio_to_best_k": _to_best_k(rows, bases, drafter, temperature, category) if k == AUTO else None,
            "tokens_per_round": after_first / total["rounds"] if total["rounds"] else None,
            "acceptance_rate": total["accepted"] / total["tested"] if total["tested"] else None,
            "draft_efficiency": total["accepted"] / total["drafted"] if total["drafted"] else None,
            "draft_cost": median(run["draft_cost"] or 0.0 for run in group) if total["drafted"] else None,
            "acceptance_by_place": _by_place(group),
            "identical": sum(run["token_ids"] == alone["token_ids"] for run, alone in zip(group, plain, strict=True))
            if not temperature
            else None,
            "runs": len(group),
        }


def _place(run: Run) -> tuple[Any, ...]:
    """What two runs share that are compared."""
    return run["prompt_id"], run["temperature"], run["repeat"]


def _to_best_k(
    rows: Rows, bases: Bases, drafter: str | None, temperature: float, category: str
) -> dict[str, float] | None:
    """The speed of K = auto over that of the fixed `k` that is fastest by its ratio to the target alone, run by run;
    None without a fixed K."""
    by_k = {key[2]: runs for key, runs in rows.items() if key == (SPECULATIVE, drafter, key[2], temperature, category)}
    auto = by_k.pop(AUTO)
    if not by_k:
        return None

    def to_plain(k: int | str) -> float:
        return median(_each_ratio(by_k[k], [bases[PLAIN, _place(run)] for run in by_k[k]]))

    best = max(by_k, key=to_plain)
    there = {_place(run): run for run in by_k[best]}
    return {"k": best, **spread(_each_ratio(auto, [there[_place(run)] for run in auto]))}


def _by_place(runs: Sequence[Run]) -> list[float]:
    """Accepted / tested at each place of a draft, as far as any was tested there."""
    tested, accepted = Counter[int](), Counter[int]()
    for run in runs:
        for place, (tests, passes) in enumerate(run.get("by_place", ())):
            tested[place] += tests
            accepted[place] += passes
    return [round(accepted[place] / tested[place], 4) for place in sorted(tested) if tested[place]]


def _total(runs: Sequence[Run], name: str) -> int:
    return sum(run[name] or 0 for run in runs)


def _ratios(runs: Sequence[Run], bases: Sequence[Run | None]) -> dict[str, float] | None:
    """How far `_each_ratio` lie apart; None without bases."""
    ratios = _each_ratio(runs, bases)
    return spread(ratios) if ratios else None


def _each_ratio(runs: Sequence[Run], bases: Sequence[Run | None]) -> list[float]:
    """The speed over that of the base, run by run, where there is one."""
    return [_ratio(run, base) for run, base in zip(runs, bases, strict=True) if base]


def _ratio(run: Run, base: Run) -> float:
    """At equal length; a single token has no pace, and then it is that of tokens per second."""
    own, others = (Pace(each["new_tokens"], each["seconds"], each["ttft_seconds"]) for each in (run, base))
    return own.to(others) or run["tokens_per_second"] / base["tokens_per_second"]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """How far the ratios of single runs lie apart."""
    return {"min": min(ratios), "median": median(ratios), "max": max(ratios)}


def drafter_rows(summary: Sequence[Run]) -> list[Run]:
    """A row for each drafter, K and temperature over all prompts, as `results` keeps them."""
    rates = ("tokens_per_round", "acceptance_rate", "draft_efficiency", "draft_cost")
    told = ("drafter", "k", "temperature", *rates, "identical", "runs")
    return [
        {
            **{name: row[name] for name in told},
            "speed_up": row["ratio_to_plain"]["median"],
            "speed_up_from": row["ratio_to_plain"]["min"],
            "speed_up_to": row["ratio_to_plain"]["max"],
            "acceptance_by_place": row["acceptance_by_place"],
        }
        for row in summary
        if row["category"] == ALL and row["method"] == SPECULATIVE
    ]


def table(summary: Sequence[Run]) -> str:
    """The summary for people."""
    lines = [
        f"{'category':<10}{'T':>4}  {'method':<18}{'drafter':<15}{'K':>5}{'tokens/s':>10}{'to plain (min to max)':>24}"
        f"{'to hf':>8}{'to best':>8}{'tau':>7}{'accept':>8}{'effic.':>8}{'draft':>7}{'same':>8}"
    ]
    ordered = sorted(summary, key=lambda row: (row["category"] == ALL, row["category"], row["temperature"]))
    for row in ordered:
        ratio = row["ratio_to_plain"]
        span = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        shown = [
            (row["ratio_to_hf"] and row["ratio_to_hf"]["median"], ">8.2f"),
            (row["ratio_to_best_k"] and row["ratio_to_best_k"]["median"], ">8.2f"),
            (row["tokens_per_round"], ">7.2f"),
            (row["acceptance_rate"], ">8.0%"),
            (row["draft_efficiency"], ">8.0%"),
            (row["draft_cost"], ">7.0%"),
        ]
        cells = "".join(f"{'-':>{form[1]}}" if value is None else f"{value:{form}}" for value, form in shown)
        same = f"{row['identical']}/{row['runs']}" if row["identical"] is not None else "-"
        lines.append(
            f"{row['category']:<10}{row['temperature']:>4g}  {row['method']:<18}{row['drafter'] or '-':<15}"
            f"{'-' if row['k'] is None else row['k']:>5}{row['tokens_per_second']:>10.1f}{span:>24}{cells}{same:>8}"
        )
    return "\n".join(lines)
