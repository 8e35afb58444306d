"""Does everything still say what it said? `python -m tests.gate` tells in a minute, before and after a change.

It ends with status 1 if anything differs. The sums are of all token ids: on one machine they are the same before and
after. `--all` runs all recordings and all texts, not a fixed part of them; `--write` writes the golden files anew.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are two processes; torch asks when it is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from specdemo.decoding.batch import decode_batch, read_together
from specdemo.decoding.events import Round, emitted_tokens
from specdemo.engines.runner import Pass
from specdemo.models.cached import list_cached
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, find_preset, load_prompts
from specdemo.racing import again, race
from specdemo.racing.compare import compare, is_near_tie, tokens_of
from specdemo.racing.race import rule_for
from specdemo.racing.trace import PLAIN, environment_of, read_trace, request_of, trace_lines, write_trace
from specdemo.settings import AUTO, Settings
from tests.harness.classes import Loaded

from . import golden
from .unit import test_help

RECORDINGS = Path(__file__).parents[1] / "presets/recordings"
SHARE = 3  # one recording in so many is run again
TEXTS, TOKENS = 40, 24
FORMS: dict[str, tuple[int | str, bool]] = {
    "chain": (4, False),
    "tree": (8, True),
    "auto": (AUTO, False),
}  # K, and whether drafts are trees
TEMPERATURES = 0.0, 0.8, 1.3
ROUNDS, ROUND_TOKENS = 2000, 200
MOST_SHOWN = 40  # lines of what differs in a part

Found = tuple[str, list[str]]
"""The figures of a part, and what differs."""


def sum_of(texts: Iterable[Sequence[Any]]) -> str:
    return sha256(repr([*texts]).encode()).hexdigest()[:8]


def recordings(every: bool) -> Found:
    """Traces that ship are read, written and read again, and run again as `race --again` does."""
    versions, outcomes, wrong, texts = Counter[str](), Counter[str](), list[str](), list[list[int]]()
    cached = " ".join(entry.name for entry in list_cached())
    opened: dict[tuple[str, str], Loaded] = {}
    for place, path in enumerate(sorted(RECORDINGS.glob("*.gz"))):
        lines = trace_lines(path)
        header, recorded = read_trace(lines)
        versions["version 1" if '"version": 1' in lines[0] else "version 2"] += 1
        if read_trace(write_trace(header, recorded)) != (header, recorded):
            wrong.append(f"{path.name} is not the same when it is written and read again")
        if place % SHARE and not every:
            continue
        asked, there = request_of(header), environment_of(header)
        preset = find_preset(asked.preset)
        if preset.draft_model and not (every and Path(str(preset.target)).name in cached):
            outcomes["left out: large models"] += 1
            continue
        if asked.settings.temperature and not all("noise" in lane for lane in header["lanes"]):
            outcomes["left out: older random numbers"] += 1
            continue
        key = asked.preset, str(there.get("weights_dtype", "auto"))
        loaded = opened[key] = opened.get(key) or load(preset, key[1], "cpu")
        entries = list(again.again(loaded, header, recorded))
        elsewhere = again.other_environment(loaded, header)
        said = "the same"
        for lane in again.differences(recorded, entries):
            then, now = (tokens_of(one.event for one in group if one.lane == lane) for group in (recorded, entries))
            texts.append([int(token.id or 0) for token in now])
            found = compare(then, now)
            if found.first_difference is None:
                continue
            near = found.margin is not None and is_near_tie(found.margin, loaded.environment()["dtype"])
            if lane != PLAIN and found.first_difference == min(len(then), len(now)):
                said = "other drafts, the same text"
            elif near or elsewhere:
                said = "parts at a near-tie" if near else "parts: " + elsewhere[0]
            else:
                wrong.append(f"{path.name}: {lane} parts at token {found.first_difference + 1}, by {found.margin}")
        outcomes[said] += 1
    return f"{counts_in_words(versions)} read; again: {counts_in_words(outcomes)}; sum {sum_of(texts)}", wrong


def texts(every: bool) -> Found:
    """Texts of the default preset with drafters by name are those of the target alone."""
    loaded = load(find_preset(DEFAULT_PRESET), None, "cpu")
    prompts = [loaded.encode(examples[0]) for examples in load_prompts().values()]
    drafters = race.drafters_of(loaded, "")
    cases = [
        (drafter, form, temperature)
        for temperature, drafter, form in product(TEMPERATURES, drafters, FORMS)
        if form != "tree" or loaded.cannot_branch(drafter) is None
    ]
    chosen = cases if every else [cases[place * len(cases) // TEXTS] for place in range(TEXTS)]
    alone: dict[tuple[int, float], list[int]] = {}
    wrong, rounds, tokens = list[str](), 0, 0
    for number, (drafter, form, temperature) in enumerate(chosen):
        k, tree = FORMS[form]
        settings = Settings(k=k, tree=tree, temperature=temperature, max_new_tokens=TOKENS)
        place = number % len(prompts)
        for name in ("none", drafter):
            if name == "none" and (place, temperature) in alone:
                continue
            events = [*race.start(loaded, name, prompts[place], settings)]
            ids = [int(token.id or 0) for event in events for token in emitted_tokens(event)]
            if alone.setdefault((place, temperature), ids) != ids:
                wrong.append(f"{drafter}, {form}, T = {temperature}, prompt {place}: not the text of the target alone")
        if form != "auto":  # whose K depends on the time
            rounds += sum(isinstance(event, Round) for event in events)
            tokens += len(ids) - 1
    figures = f"{len(chosen)} of {len(cases)} texts, {len(drafters)} drafters, T = {numbers_in_words(TEMPERATURES)}"
    return f"{figures}: {tokens / rounds:.3f} tokens a round in chains and trees; sum {sum_of(alone.values())}", wrong


def helps(every: bool) -> Found:
    """What `--help` says of every command."""
    now, then = test_help.every_help().splitlines(), test_help.KEPT.read_text(encoding="utf-8").splitlines()
    wrong = [f"--help: {line!r}" for line in now if line not in then]
    wrong += [f"--help no longer says {line!r}" for line in then if line not in now]
    wrong = wrong or ["--help: the lines are in another order"] * (now != then)
    return f"{sum(line.startswith('$') for line in now)} commands, {len(now)} lines", wrong


def answers(every: bool) -> Found:
    """The JSON of commands and of the API."""
    return f"{len(golden.NAMES)} files", [
        line for name in golden.NAMES for line in golden.differences(name, golden.outcome(name))
    ]


def python_time(every: bool) -> Found:
    """What a round of the tiny model takes, and the pass in it: time of this thread, which others do not add to."""
    loaded = load(find_preset(golden.TINY), None, "cpu")
    prompt, k = loaded.encode("ROMEO:", raw=True), 4
    settings = Settings(k=k, temperature=0.0, max_new_tokens=ROUND_TOKENS)
    figures = []
    for readers in (1, 16):

        def decodings() -> Iterator[Any]:
            while True:
                yield race.decoding_of(loaded, "ngram", prompt, rule_for(settings), None)

        rounds, events = 0, decode_batch(decodings(), readers)
        began = time.thread_time()
        while rounds < ROUNDS:
            rounds += isinstance(next(events)[1], Round)
        whole = (time.thread_time() - began) / rounds
        events.close()
        runners = [loaded.target_runner(len(prompt) + ROUND_TOKENS) for _ in range(readers)]
        for runner in runners:
            runner.prefill(prompt)
        began = time.thread_time()
        for _ in range(ROUNDS // readers):
            read_together([Pass(runner, prompt[: k + 1]) for runner in runners])
            for runner in runners:
                runner.keep([0])
                runner.rollback(len(prompt))
        passing = (time.thread_time() - began) / (ROUNDS // readers * readers)
        name = f"{readers} reader{'s' * (readers > 1)}"
        figures.append(f"{name}: {1e6 * whole:.0f} µs a round, of which {1e6 * passing:.0f} µs its pass")
    return f"{'; '.join(figures)} (mean of {ROUNDS:,})", []


def counts_in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def numbers_in_words(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


PARTS: dict[str, Callable[[bool], Found]] = {
    "recordings": recordings,
    "texts": texts,
    "help": helps,
    "golden": answers,
    "python": python_time,
}


def run(name: str, every: bool) -> tuple[float, str, list[str]]:
    """The seconds of a part, and what it found."""
    began = time.perf_counter()
    try:
        figures, wrong = PARTS[name](every)
    except Exception:
        figures, wrong = "failed", traceback.format_exc().splitlines()
    return time.perf_counter() - began, figures, wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all recordings and all texts")
    parser.add_argument("--write", action="store_true", help="write the golden files anew, and nothing else")
    given = parser.parse_args()
    if given.write:
        test_help.KEPT.write_text(test_help.every_help(), encoding="utf-8")
        for name in golden.NAMES:
            golden.write(name, golden.outcome(name))
        return
    began, differs = time.perf_counter(), False
    *beside, last = PARTS
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        running = [pool.submit(run, name, given.all) for name in beside]
        for name in PARTS:
            found = run(last, given.all) if name == last else running.pop(0).result()  # the last one has the machine
            differs |= say(name, *found)
    say("all", time.perf_counter() - began, "", ["see above"] * differs)
    sys.exit(differs)


def say(name: str, seconds: float, figures: str, wrong: Sequence[str]) -> bool:
    """Print a line of the table, and what differs. Returns whether anything does."""
    print(f"{name:<12}{'DIFFERS' if wrong else 'same':<9}{seconds:>4.0f} s  {figures}".rstrip())
    print("".join(f"    {line}\n" for line in wrong[:MOST_SHOWN]), end="", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    main()
