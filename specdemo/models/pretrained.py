"""Opens a model by transformers. What its files lack is refused: transformers would fill it with random numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .store import LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMED = 3  # weights that a sentence names, at most
REPORTS = logging.getLogger("transformers.modeling_utils")  # of what is missing; a sentence replaces them


def open_whole(name: str, place: str, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(place, **options)`, if the files hold every weight of the model.

    What transformers ties or computes need not be there, and what it does not use may be.

    Args:
        name: of the model, for the message.
    Raises:
        LoadError: naming the weights that are missing or have another shape.
    """
    from transformers import AutoModelForCausalLM

    REPORTS.addFilter(_is_no_report)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    finally:
        REPORTS.removeFilter(_is_no_report)
    if missing := sorted(found["missing_keys"]):
        raise LoadError(f"{name} lacks weights that its configuration asks for: {_named(missing)}.")
    if unlike := sorted(found["mismatched_keys"]):
        described = (f"{weight} is {list(there)}, not {list(wanted)}" for weight, there, wanted in unlike)
        raise LoadError(f"{name} has weights of another shape than its configuration says: {_named(described)}.")
    opened: PreTrainedModel = model
    return opened


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _named(weights: Iterable[str]) -> str:
    names = list(weights)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
