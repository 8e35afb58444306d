"""The slow import, done quickly."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def import_models() -> ModuleType:
    """`specdemo.models`, which brings in torch and transformers.

    Importing them makes a great many objects and no garbage; looking for some takes the collector half a second.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module("specdemo.models")
    finally:
        if collecting:
            gc.enable()
