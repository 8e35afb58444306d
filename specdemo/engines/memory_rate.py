"""How fast the memory streams: the limit of a pass over few tokens, which reads all weights for little arithmetic."""

from __future__ import annotations

import torch

from ..system.hardware import seconds_of
from .cpu.huge_pages import HugePages

BUFFER = 2**27  # bytes, more than the caches hold
READS = 5
LEAST_BYTES = 10**8  # of weights; fewer may stay in the caches from pass to pass


def memory_rate(device: torch.device | str, pass_bytes: int) -> float | None:
    """Bytes per second that the memory of `device` streams now; it takes about a tenth of a second.

    The memory of a virtual machine may stream twice as much in one minute as in the next, so ask when it matters.

    Args:
        pass_bytes: how many bytes of weights a pass reads. The answer is None if they may stay in the caches, or if
            there is no room to measure: that must not cost a race its result.
    """
    if pass_bytes < LEAST_BYTES:
        return None
    device = torch.device(device)
    try:
        buffer = torch.ones(BUFFER // 4, device=device)
        if device.type == "cpu":
            buffer = HugePages().copy(buffer)  # like the weights
    except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
        return None
    return BUFFER / min(seconds_of(device, read) for _ in range(READS) for read in (buffer.sum, buffer.amax))
