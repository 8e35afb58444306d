"""specdemo: race a language model against itself with speculative decoding."""

from typing import Any

from .system.cpu_level import set_libraries

__version__ = "0.1.0"

set_libraries()  # before torch is used


def __getattr__(name: str) -> Any:
    """`race` of `notebook`, imported when it is asked for: most of what imports specdemo does without it."""
    if name == "race":
        from .notebook import race

        return race
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
