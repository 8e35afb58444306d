"""Checks values that come from a page, and writes values for a page as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..types import BadInput, brief


def one_of(what: str, value: Any, known: Sequence[str]) -> None:
    """Check that a value is one of the known ones.

    Raises:
        BadInput: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise BadInput(f"There is no {what} called {brief(value)}. Choose one of: {', '.join(known)}.")


def to_json(message: dict[str, Any]) -> str:
    """JSON without "<", so that it cannot begin a tag in HTML."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
