"""What a server counts, against what its stream told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..types import BadInput
from .client import Client
from .steps import Told

COUNTING_SECONDS = 1.0  # how long after its last token a server may take to count an answer


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server counts over all its requests, or what it counted between two readings."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def since(self, before: Counters) -> Counters:
        earlier = before.by_position + (0,) * (len(self.by_position) - len(before.by_position))
        positions = tuple(now - then for now, then in zip(self.by_position, earlier, strict=False))
        counts = self.rounds - before.rounds, self.drafted - before.drafted, self.accepted - before.accepted
        return Counters(self.tokens - before.tokens, *counts, positions)


def read_counters(client: Client, prefix: str, tokens: str) -> Counters | None:
    """The counters of `/metrics`, in the format of Prometheus; several engines of one server are added up."""
    try:
        page = client.text("/metrics")
    except BadInput:  # the server may not show them
        return None
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in re.findall(rf"^{prefix}:(\w+)(\{{[^}}]*\}})? ([0-9.e+]+)$", page, re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
        if name == "spec_decode_num_accepted_tokens_per_pos_total" and (
            found := re.search(r'position="(\d+)"', labels)
        ):
            positions[int(found[1])] = positions.get(int(found[1]), 0.0) + float(value)
    if tokens not in sums:
        return None
    counts = (
        int(sums.get(f"spec_decode_num_{name}_total", 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position = tuple(int(positions[place]) for place in sorted(positions))
    return Counters(int(sums[tokens]), next(counts), next(counts), next(counts), by_position)


def check(told: Told, before: Counters | None, read: Callable[[], Counters | None], tokens: int) -> Counters | None:
    """What the server counted for this answer; None if it does not say, or answered others at the same time."""
    if before is None:
        return None
    until = time.perf_counter() + COUNTING_SECONDS
    while True:
        now = read()
        counted = None if now is None else now.since(before)
        if counted is None or counted.tokens >= tokens or time.perf_counter() > until:
            break
        time.sleep(0.02)
    if counted is None or counted.tokens != tokens:
        told.notes.append("The server's counters include other requests, so the rounds were not checked against them.")
        return None
    pairs = zip(
        (told.rounds, told.drafted, told.accepted), (counted.rounds, counted.drafted, counted.accepted), strict=True
    )
    told.by_position = counted.by_position
    told.counted = all(mine in (None, theirs) for mine, theirs in pairs)
    if not told.counted:
        told.notes.append("The server's stream and its counters disagree.")
    return counted
