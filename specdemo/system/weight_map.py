"""The list of the files that a checkpoint's weights are in, if there are several."""

from __future__ import annotations

import json
from pathlib import Path, PureWindowsPath

from ..errors import BadInput
from ..formats import brief


def files_in(index: Path) -> list[str]:
    """The names of the files. A name that leads out of the folder is refused: the list may come from anyone."""
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or PureWindowsPath(name).name != name:
            raise BadInput(f"{index.name} names {brief(name)}, which is no safetensors file of its own folder.")
    return sorted({*names})
