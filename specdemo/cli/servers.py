"""Commands that ask servers which run already."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer

from ..formats import printable
from ..racing.compare import OWN_DRAFTER
from ..racing.request import Request
from ..racing.trace import read_trace, save_trace, trace_lines
from ..servers.address import Address
from ..servers.dialects import Dialect, connected
from ..servers.race import TURNS, outcome, race_servers, trace_header
from ..settings import REJECTION, Settings
from .options import (
    BASELINE_KEY,
    FIGURES,
    SERVER_KEY,
    DecodingOptions,
    check_writable,
    lanes_table,
    read_prompt,
)

NEW_TOKENS = 128  # where nothing is said
SHAPES = {name: shape for name, shape in FIGURES.items() if name not in ("draft_seconds", "verify_seconds")}
SHAPES |= {"first_token_seconds": "{:.3f}", "server_seconds": "{:.2f}", "network_seconds": "{:.3f}"}


def named(address: str, key: str) -> AbstractContextManager[Dialect]:
    """The server at an address, with the API key that stands in the environment variable `key`, if one does."""
    return connected(Address.read(address), os.environ.get(key))


@contextmanager
def pair_connected(server: str, baseline: str | None) -> Iterator[tuple[Dialect, Dialect | None]]:
    """A server and one to compare it with, if there is one; stderr says if their models have different names.

    A key never goes to the other server.
    """
    with ExitStack() as opened:
        mine = opened.enter_context(named(server, SERVER_KEY))
        theirs = opened.enter_context(named(baseline, BASELINE_KEY)) if baseline else None
        if theirs is not None and theirs.facts["model"] != mine.facts["model"]:
            names = f"{theirs.facts['model']} and {mine.facts['model']}"
            typer.echo(f"The servers call their models differently: {names}.", err=True)
        yield mine, theirs


def race_server(
    server: str, baseline: str | None, prompt: str, decoding: DecodingOptions, out: Path | None, json_: bool
) -> None:
    """Race a server with another one, or with a trace of one, and print what came out."""
    check_writable(out)
    most = NEW_TOKENS if decoding.max_new_tokens is None else decoding.max_new_tokens
    # Two servers share no random numbers, so above temperature 0 their texts are not to be compared.
    settings = Settings(
        k=0,
        temperature=decoding.temperature or 0.0,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        max_new_tokens=most,
        seed=decoding.seed,
        rule=REJECTION,
        stop=tuple(decoding.stop or ()),
    )
    request = Request(read_prompt(prompt), "", OWN_DRAFTER, settings, decoding.raw is True)
    address = baseline if baseline and "://" in baseline else None
    with pair_connected(server, address) as (dialect, plain):
        recorded = read_trace(trace_lines(Path(baseline))) if baseline and not address else None
        race = race_servers(request, dialect, plain or recorded)
    if out is not None:
        save_trace(out, trace_header(race), race.entries)
    ended = outcome(race)
    found = ended.as_dict()
    typer.echo(json.dumps(found, ensure_ascii=False) if json_ else _table(found, ended.badge["words"]))


def _table(found: dict[str, Any], badge: str) -> str:
    lanes = [found[name] for name in ("plain", "speculative") if name in found]
    names = ["baseline", "as it is"][-len(lanes) :]
    titles = [f"{lane['server']['engine']}, {name}" for lane, name in zip(lanes, names, strict=True)]
    lines = lanes_table(titles, [{**lane["server"], **lane["stats"]} for lane in lanes], SHAPES)
    lines.append("")
    lines += dict.fromkeys(printable(note) for lane in lanes for note in lane["server"]["notes"])
    comparison = found["comparison"]
    if comparison is not None:
        place = comparison["first_difference"]
        lines.append("The texts are the same." if place is None else f"The texts differ from token {place + 1} on.")
    elif len(lanes) > 1:
        lines.append(badge)
    if len(lanes) > 1:
        lines.append(TURNS)
    return "\n".join([*lines, found["sentence"]])
