"""One preset that stays loaded until another one is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.imports import import_quickly
from .presets import Preset
from .store import version_of

if TYPE_CHECKING:
    from .loaded import Loaded

MadeOf = tuple[str, tuple[str, ...]]
Kept = dict[tuple[MadeOf, str | None], "Loaded"]
"""The preset that stays loaded, by what it is made of and the type of its weights; at first nothing."""


def made_of(preset: Preset) -> MadeOf:
    """The name of a preset and the versions of its local files, which differ if a model was saved again."""
    heads = (head if isinstance(head, Path) else head.local for head in preset.heads.values())
    places = preset.target.local, preset.draft_model and preset.draft_model.local, preset.ngram_table, *heads
    return preset.name, tuple(version_of(file) for place in places if place for file in _files_in(place))


def _files_in(place: Path) -> list[Path]:
    _, _, names = next(os.walk(place), (None, None, [""]))  # of a file, or what cannot be read, nothing comes
    return [place / name for name in sorted(names)]


def load_kept(kept: Kept, preset: Preset, dtype: str | None) -> Loaded:
    """The preset, loaded anew if another one is kept, which is released first.

    Raises:
        LoadError: see `loaded.load`.
    """
    key = made_of(preset), dtype
    if key not in kept:
        for loaded in kept.values():
            loaded.release()
        kept.clear()
        kept[key] = import_quickly("specdemo.models.loaded").load(preset, dtype)
    return kept[key]
