"""The slow imports, done quickly."""

from __future__ import annotations

import gc
import importlib
import sys
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


@contextmanager
def without_scipy() -> Iterator[None]:
    """For importing transformers, which reads scipy.optimize, where there is one, for losses that we never compute."""
    from transformers import utils

    available = utils.is_scipy_available
    utils.is_scipy_available = lambda: False
    try:
        yield
    finally:
        utils.is_scipy_available = available


def import_quickly(name: str) -> ModuleType:
    """A module that brings in torch or transformers."""
    first = name not in sys.modules
    with without_garbage_collection(), without_scipy():
        module = importlib.import_module(name)
    if first:
        gc.freeze()  # what was imported stays: a collection that walks over it all stops a race for a tenth of a second
    return module
