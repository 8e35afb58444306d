"""Folders of this program."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache: `SPECDEMO_CACHE`, else `specdemo` in the user's cache folder."""
    if chosen := os.environ.get("SPECDEMO_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "specdemo"
