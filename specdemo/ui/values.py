"""Writes values for a page as JSON."""

from __future__ import annotations

import json
from typing import Any


def to_json(message: dict[str, Any]) -> str:
    """JSON without "<", so that it cannot begin a tag in HTML."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
