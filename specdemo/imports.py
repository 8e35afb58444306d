"""The slow imports, done quickly."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For importing and loading, which make a million objects and no garbage: to look for some takes up to a second."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def import_models() -> ModuleType:
    """`specdemo.models`, which brings in torch and transformers."""
    with without_garbage_collection():
        return importlib.import_module("specdemo.models")
