"""Why drafting ahead makes a lane slower, from the times that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MUCH_LONGER = 1.1  # what takes less than this many times as long is not worth a sentence


def shared_by_both(environment: Mapping[str, Any]) -> str:
    """What drafter and target share, in words; "" if each has a device, or that is unknown.

    Args:
        environment: of the loaded preset, or from a trace.
    """
    device, devices = str(environment.get("device", "")), environment.get("devices")
    if device == "cpu":  # then all models are in main memory
        cores = environment.get("threads")
        return "one core does both" if cores == 1 else f"{cores or 'the'} cores read one memory for both"
    if device.startswith("cuda") and isinstance(devices, list) and len(devices) == 1:
        return "the drafter's passes wait in the same queue"
    return ""


def why_slower(longer: float, preparing: float, prepared: float, shared: str) -> str:
    """Why it does not pay to prepare drafts while the target verifies; "" if these figures do not say.

    Args:
        longer: how many times as long a pass takes while the drafter prepares.
        preparing: for `prepared` outcomes, in passes that nothing is prepared beside.
        shared: see `shared_by_both`.
    """
    words = []
    if shared and longer >= MUCH_LONGER:
        words.append(f"a pass takes {longer:.2f} times as long while the drafter prepares ({shared})")
    if preparing >= MUCH_LONGER:
        words.append(f"preparing for {prepared:.1f} outcomes takes {preparing:.1f} times as long as a pass")
    return " and ".join(words)
