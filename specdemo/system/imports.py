"""Imports slow libraries late, and with the garbage collector off. No other module turns it off or freezes anything."""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import Any


def import_quickly(name: str) -> ModuleType:
    """Import a module that needs Gradio, torch or transformers.

    The import makes hundreds of thousands of objects and no garbage, so the collector is off meanwhile. The objects of
    torch live until the program ends. They are frozen, because a collection that visits them all would take a quarter
    of a second in the middle of a race.
    """
    first = "torch" not in sys.modules
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    if first and "torch" in sys.modules:
        gc.freeze()
    return module


class LazyModule:
    """A module that is imported at the first use of a name in it.

    Type checkers see the import that stands beside it under `TYPE_CHECKING`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
