"""Traces of scripted races, those that ship, and texts that a page must not take for more."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from specdemo.racing.trace import PLAIN, SPECULATIVE, Entry, Request, read_trace, write_trace
from specdemo.settings import Settings
from specdemo.ui.replay.routes import RECORDINGS, SUFFIX

from ..fakes.engine import PRESETS, Script, ScriptedLoaded

CORPUS = [
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "${window.pwned=1}",
    "{{window.pwned=1}}",
    "`${(()=>{window.pwned=1})()}`",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc\N{POP DIRECTIONAL FORMATTING}",
    "שלום",
    "👨\N{ZERO WIDTH JOINER}👩\N{ZERO WIDTH JOINER}👧",
    "<|im_end|>",
    "&lt;b&gt;",
    "line\nbreak",
]


SHIPPED = sorted(path.name.removesuffix(SUFFIX) for path in RECORDINGS.glob(f"*{SUFFIX}"))


def traced(
    prompt: str = "one two three four five six", only: str = "", others: tuple[str, ...] = (), **settings: Any
) -> tuple[str, list[Entry]]:
    """The trace of a scripted race, and its entries."""
    script, loaded = Script(), ScriptedLoaded(PRESETS["scripted"])
    asked = Request(
        prompt, "scripted", "prompt-lookup", Settings(**{"k": 4, "max_new_tokens": 24, **settings}), others=others
    )
    entries = list(script.race(loaded, asked))
    entries = [entry for entry in entries if only in ("", entry.lane)]
    header = script.header(loaded, asked)
    return "".join(write_trace(header, entries)), entries


NAMES = ["eagle <b>K = 4</b>", "target", "eagle K = 8"]


def three_lanes(alone: int | None = 1, **settings: Any) -> str:
    """The trace of lanes with any names, none of which tells a p, a q or a draw; lane `alone` is the target alone."""
    text, entries = traced(**settings)
    header, *_ = text.split("\n")
    lanes = [{"name": name, "drafter": "none" if at == alone else "eagle"} for at, name in enumerate(NAMES)]
    lines = [json.dumps(json.loads(header) | {"lanes": lanes})]
    for at, name in enumerate(NAMES):
        lane = PLAIN if at == alone else SPECULATIVE
        unknown = write_trace({}, [replace(entry, lane=name) for entry in entries if entry.lane == lane])
        lines += [json.dumps(without(json.loads(line), ("p", "q", "draw"))) for line in [*unknown][1:]]
    return "\n".join(lines)


def without(value: Any, fields: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {name: without(field, fields) for name, field in value.items() if name not in fields}
    return [without(item, fields) for item in value] if isinstance(value, list) else value


def lines_of(name: str) -> list[str]:
    return gzip.decompress((RECORDINGS / f"{name}{SUFFIX}").read_bytes()).decode("ascii").splitlines()


@cache
def header_of(name: str) -> dict[str, Any]:
    with gzip.open(RECORDINGS / f"{name}{SUFFIX}", "rt", encoding="ascii") as lines:
        return read_trace([lines.readline()])[0]


GREEDY = [name for name in SHIPPED if header_of(name)["settings"]["temperature"] == 0]


ON_A_GPU = [name for name in SHIPPED if header_of(name)["environment"]["device"].startswith("cuda")]


# A recording of the first format, which names no rule: above temperature 0 that was rejection sampling.
REAL = gzip.decompress(Path(__file__).with_name("before_rules.jsonl.gz").read_bytes()).decode("ascii").splitlines()
