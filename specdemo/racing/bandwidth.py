"""The bytes of weights that passes read, and the share of the memory's speed that they reach."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from .figures import LaneFigures

ENOUGH = 5  # the fewest passes to take a mean of
MEASURED = "memory_rate", "experts", "best_passes"  # of an environment: what a race adds to it
NOWHERE: Mapping[str, Any] = {}  # an unknown environment


def weight_bytes(environment: Mapping[str, Any]) -> int | None:
    """How many bytes of weights a pass of the target over one row reads; None if the environment does not say.

    Older traces have only the bytes of all weights, which are more if embeddings are not tied, or if there are experts.
    """
    placement = environment.get("placement")
    sizes = [environment["bytes_per_pass"]] if "bytes_per_pass" in environment else []
    sizes = sizes or ([*placement.values()] if isinstance(placement, dict) else [])
    known = bool(sizes) and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    return sum(sizes) if known else None


def bytes_of(lane: LaneFigures, environment: Mapping[str, Any]) -> int | None:
    """How many bytes of weights a mean pass of a lane reads; None if unknown.

    In a model with experts a pass over more rows reads more of them. How many was counted, see `experts_counted`, or is
    estimated, see `experts_read`.
    """
    one_row, experts = weight_bytes(environment), environment.get("experts")
    facts = [experts.get(name) for name in ("count", "used", "bytes")] if isinstance(experts, dict) else []
    count, used, size = (fact if type(fact) is int and fact > 0 else 0 for fact in facts or [0] * 3)
    if one_row is None or not (count >= used > 0 < size) or not lane.rounds or lane.drafted is None:
        return one_row
    read = experts_counted(lane, environment) or experts_read(count, used, 1 + lane.drafted / lane.rounds)
    return round(one_row + size / count * (read - used))


def experts_counted(lane: LaneFigures, environment: Mapping[str, Any]) -> float | None:
    """How many experts of a layer a mean pass of a lane reads, as passes of so many rows did where it ran; None if that
    was not counted for all of them."""
    experts = environment.get("experts")
    read = experts.get("read") if isinstance(experts, dict) else None
    drafts = lane.known_drafts
    if not isinstance(read, dict) or not drafts:
        return None
    rows = [1 + len(each.drafted) for each in drafts] + [1] * (lane.rounds - len(drafts))
    counts = [read.get(str(number)) for number in rows]
    known = [count for count in counts if isinstance(count, float) and 0 < count < float("inf")]
    return fmean(known) if len(known) == len(rows) else None


def experts_read(count: int, used: int, rows: float) -> float:
    """How many of `count` experts some row of a pass is expected to use, if each row uses `used` of them at random.

    Rows of one text prefer the same experts, so there are fewer of them.
    """
    return count * (1 - (1 - used / count) ** rows)


def memory_rate_of(environment: Mapping[str, Any]) -> float | None:
    """Bytes per second that the memory streamed after a race; None if the environment does not say, or if some
    weights lie elsewhere."""
    rate, placement = environment.get("memory_rate"), environment.get("placement")
    known = isinstance(rate, float) and 0 < rate < float("inf")
    return rate if known and isinstance(placement, dict) and len(placement) == 1 else None


def memory_share(lane: LaneFigures, environment: Mapping[str, Any]) -> float | None:
    """How close a mean pass of a lane comes to what the memory allows, at most 1; None if unknown."""
    size, rate, times = bytes_of(lane, environment), memory_rate_of(environment), lane.verify_times
    if not size or not rate or len(times) < ENOUGH or not fmean(times):
        return None
    return min(size / fmean(times) / rate, 1.0)
