"""Which cases of a large table are tested every day."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """The cases, of which the first of every few is tested every day and the others by `-m slow`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow if place % every else ())
        for place, case in enumerate(cases)
    ]
