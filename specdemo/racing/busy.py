"""How long passes of the target alone take beside the best seen on this machine: whether the machine is busy.

The best of a model is kept in a file of the cache, since a command ends with its race.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from ..system.folders import cache_folder
from ..tokens import FloatIfKnown
from .figures import LaneFigures

if TYPE_CHECKING:
    from ..models.loaded import Loaded

BUSY = 1.8  # times its best; the upper quartile of passes of one text on idle machines is up to 1.4 times the lower one
FEW_PASSES = 16  # fewer say nothing
SHORT = 1024  # tokens: only longer contexts make passes clearly longer
FORGET = 1.02  # what the best is multiplied by at each text: a machine that is slower for good is soon not called busy
BESTS = "passes.checked"  # a file of the cache
SAME = "device", "device_name", "engine", "dtype", "weights_dtype", "cpu", "cpu_model", "cores", "threads", "torch"


@dataclass(frozen=True)
class Pace:
    """The seconds of passes of one kind, and the best median of such passes on this machine; None if unknown.

    The median is compared, since a single pass can be lucky, and a mean shows a single hiccup. A kind is a number of
    readers, and a context that at most doubles: a pass reads the keys and values of all earlier tokens.
    """

    times: Sequence[float] = field(default=(), repr=False)
    best: FloatIfKnown = None
    kind: str = ""

    @classmethod
    def of(cls, plain: Sequence[LaneFigures], environment: Mapping[str, Any]) -> Pace:
        """Of lanes of the target alone; the `environment` has the `best_passes` by kind."""
        context = max((lane.context for lane in plain), default=0)
        kind = f"{max((lane.readers for lane in plain), default=1)} at {1 << (max(context, SHORT) - 1).bit_length()}"
        bests = environment.get("best_passes")  # anyone can write a trace
        best = bests.get(kind) if isinstance(bests, dict) else None
        known = isinstance(best, float) and 0 < best < inf
        return cls([*chain.from_iterable(lane.verify_times for lane in plain)], best if known else None, kind)

    @property
    def usual(self) -> float:
        """The median; 0 if there are too few passes."""
        return median(self.times) if len(self.times) >= FEW_PASSES else 0.0

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one, in milliseconds."""
        low, _, high = quantiles(self.times, n=4)
        return 1000 * low, 1000 * high

    @property
    def is_slow(self) -> bool:
        """Whether the best is known, and passes take much longer."""
        return self.best is not None and self.usual >= BUSY * self.best

    @property
    def busy(self) -> FloatIfKnown:
        """How many times its best a pass takes; if that is not slow, but passes are far apart, how far the quartiles
        are. None if the machine is not busy."""
        if not self.usual:
            return None
        if self.is_slow and self.best:
            return self.usual / self.best
        low, high = self.quartiles
        return high / low if low and high >= BUSY * low else None


NO_PACE = Pace()


def best_passes(loaded: Loaded) -> dict[str, float]:
    """The best median pass of this model on this machine, by kind."""
    return _read().get(_key(loaded), {})


def remember(loaded: Loaded, pace: Pace) -> None:
    """Save the pace if it is the best. If two commands end at the same time, one or both may be lost."""
    if not pace.usual:
        return
    key, bests = _key(loaded), _read()
    known = bests.get(key, {})
    bests[key] = {**known, pace.kind: min(pace.usual, FORGET * known.get(pace.kind, inf))}
    with suppress(OSError):  # then only passes that are far apart tell
        cache_folder().mkdir(parents=True, exist_ok=True)
        (cache_folder() / BESTS).write_text(json.dumps(bests), encoding="utf-8")


def _key(loaded: Loaded) -> str:
    """Stands for the weights of the target, and for what computes with them."""
    environment = loaded.environment()
    facts = [loaded.weights.get("target"), *map(environment.get, SAME)]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _read() -> dict[str, dict[str, float]]:
    """All that is known; nothing if the file is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((cache_folder() / BESTS).read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(one, dict) for one in found.values()):
            return {
                key: {kind: best for kind, best in bests.items() if isinstance(best, float) and 0 < best < inf}
                for key, bests in found.items()
            }
    return {}
