"""One preset that stays loaded until another one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..system.imports import import_quickly
from .presets import Preset

if TYPE_CHECKING:
    from .loaded import Loaded

Kept = dict[tuple[str, str | None], "Loaded"]
"""The preset that stays loaded, by its name and the type of its weights; at first nothing."""


def load_kept(kept: Kept, preset: Preset, dtype: str | None) -> Loaded:
    """The preset, loaded anew if another one is kept, which is released first.

    Raises:
        BadInput, LoadError: see `loaded.load`.
    """
    if (preset.name, dtype) not in kept:
        for loaded in kept.values():
            loaded.release()
        kept.clear()
        kept[preset.name, dtype] = import_quickly("specdemo.models.loaded").load(preset, dtype)
    return kept[preset.name, dtype]
