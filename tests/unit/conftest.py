"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from specdemo.models import loaded as models
from specdemo.models.loaded import Loaded, load
from specdemo.models.presets import Preset

from .checkpoints import full_preset


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A tiny preset that every drafter can be used with."""
    loaded = load(full_preset(tmp_path_factory.mktemp("full")), "float32", "cpu")
    yield loaded
    loaded.release()


@pytest.fixture(scope="module")
def loads_once() -> Iterator[None]:
    """Commands that ask for the same models share them, for as long as a module lasts: to open them takes longest.

    What a command finds out or lets go of is its own.
    """
    kept: dict[tuple[Any, ...], Loaded] = {}

    def load_once(preset: Preset, *asked: Any, **named: Any) -> Loaded:
        values = (*asked, *sorted(named.items()))
        key = preset.name, *(value for value in values if not callable(value))  # whoever is told of the progress
        if key not in kept:
            kept[key] = load(preset, *asked, **named)
        loaded = copy(kept[key])
        loaded.ready_heads, loaded.costs = dict(loaded.ready_heads), {}
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", load_once)
        yield
    for loaded in kept.values():
        loaded.release()
