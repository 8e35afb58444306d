"""What the page says of a loaded preset."""

from __future__ import annotations

from typing import Any

from ..formats import byte_size


def facts(loaded: Any) -> tuple[str, ...]:
    """Short notes on a loaded preset: number types, hardware, and whether it runs in a slow way."""
    environment = loaded.environment()
    dtype, weights = environment.get("dtype"), environment.get("weights_dtype")
    stored = f"{weights} weights" if weights and weights != dtype else None
    if weights in ("stored", "stored16"):
        stored = "weights as the file stores them" + ", inputs in 16 bits" * (weights == "stored16")
        stored += ", of 4 bits in the draft model" * (environment.get("draft_weights_dtype") == "int4")
    own = "transformers' own passes" if environment.get("engine") == "eager" else None
    placed = environment.get("placement", {})
    away = placed.get("cpu", 0) if str(environment.get("device")).startswith("cuda") else 0
    offloaded = f"{byte_size(away)} of the weights in main memory, which is slow" if away else None
    disk = placed.get("disk", 0)
    on_disk = f"{byte_size(disk)} of the weights on the disk, read for every pass" if disk else None
    by_text = "the draft model has another tokenizer and drafts by text" if environment.get("drafts_by_text") else None
    missing, replaced = loaded.missing_heads.values(), (environment.get("self_test") or {}).get("replaced", ())
    notes = dtype, stored, environment.get("device_name"), own, offloaded, on_disk, by_text, *missing, *replaced
    return tuple(str(note) for note in notes if note)
