"""What visitors of a public Space may name: the models and servers that its owner allows by `SPECDEMO_ALLOW`."""

from __future__ import annotations

import os
import re


def allowed(servers: bool) -> tuple[str, ...] | None:
    """The names in `SPECDEMO_ALLOW`, separated by commas or spaces: the addresses among them if `servers`, else the
    models. None where this is no Space, and all is allowed."""
    if not os.environ.get("SPACE_ID"):
        return None
    names = re.findall(r"[^,\s]+", os.environ.get("SPECDEMO_ALLOW", ""))
    return tuple(name for name in names if ("://" in name) == servers)
