"""Where figures come from."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..models.loaded import Loaded


def provenance(loaded: Loaded) -> dict[str, Any]:
    """The hardware and versions, the weights, and the commit of this program."""
    return {"environment": {**loaded.environment(), "commit": commit()}, "weights": loaded.weights}


def commit() -> str | None:
    """The commit of this program; None outside a repository."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
