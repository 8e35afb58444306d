"""How fast the memory streams. This limits a pass over few tokens, which reads all weights for little arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from ..system.device import seconds_of
from .cpu.huge_pages import HugePages

BUFFER = 2**27  # bytes, more than the caches hold
READS = 5
LEAST_BYTES = 5 * 10**7  # of weights; fewer may stay in the caches from pass to pass


class Stream:
    """The bandwidth of the memory: a buffer larger than any cache, read in the fastest of three ways.

    The memory of a virtual machine may be twice as fast in one minute as in the next, so measure when it matters.
    """

    def __init__(self, device: torch.device, size: int = BUFFER, tries: int = READS) -> None:
        """`size` is in bytes; each way is tried `tries` times."""
        buffer = torch.ones(size // 4, device=device)
        if device.type == "cpu":
            buffer = HugePages().copy(buffer)  # like the weights: a CPU streams a fifth more from huge pages
        other = torch.empty_like(buffer)
        ways: list[tuple[Callable[[], Tensor], int]] = [
            (buffer.sum, size),
            (buffer.amax, size),
            (lambda: other.copy_(buffer), 2 * size),
        ]
        self._device = device
        rates = [[self._rate(*way) for way in ways] for _ in range(tries)]  # in turn
        medians = [median(rates_of_way) for rates_of_way in zip(*rates, strict=True)]
        self._way, self._moved = ways[medians.index(max(medians))]
        self.rates: list[float] = []

    def rate(self) -> float:
        """Bytes per second that the device streams now."""
        self.rates.append(self._rate(self._way, self._moved))
        return self.rates[-1]

    def _rate(self, way: Callable[[], Tensor], moved: int) -> float:
        # Timed by the device: launching and waiting would add a tenth on a GPU.
        return moved / seconds_of(self._device, way)

    @property
    def bandwidth(self) -> dict[str, float]:
        """Bytes per second: the `least`, `median` and `best` of all measurements."""
        return {"least": min(self.rates), "median": median(self.rates), "best": max(self.rates)}


def memory_rate(device: torch.device | str, pass_bytes: int) -> float | None:
    """Bytes per second that the memory of `device` streams now, measured in about a tenth of a second.

    None if a pass is too small to be limited by the memory, or if there is no room to measure.

    Args:
        pass_bytes: how many bytes of weights a pass reads. If they are few, they may stay in the caches.
    """
    if pass_bytes < LEAST_BYTES:
        return None
    try:
        stream = Stream(torch.device(device))
    except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
        return None
    return max(stream.rate() for _ in range(READS))
