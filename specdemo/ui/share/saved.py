"""A race as one HTML file, which plays it from a disk: scripts, styles and events stand in the file itself.

The scripts are modules as `data:` addresses, named by an import map: a relative import does not resolve in these.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath
from string import Template

from ..look import FONTS
from ..serving.head import sources

PAGE = Template((Path(__file__).parent / "saved.html").read_text(encoding="utf-8"))
STYLES = ("assets/page.css", "race/race.css", "replay/replay.css")
BEGIN = "replay/replay.js", "share/packing.js"  # with all that they import
IMPORT = re.compile(r'(?<= from ")\.\.?/[^"]+(?=";)')


def saved_page(replay: str) -> str:
    """The file for what the player of recordings plays, see `playable`. It is packed, so no text is read as HTML."""
    race = b64encode(gzip.compress(replay.encode(), mtime=0)).decode()
    return PAGE.substitute(styles=_styles(), imports=_imports(), race=race)


def _styles() -> str:
    return f"{FONTS}<style>{''.join(sources()[name].decode() for name in STYLES)}</style>"


@cache
def _imports() -> str:
    """The import map: `specdemo/<path>` for each module that the file needs, and its source."""
    found = dict[str, str]()
    due = list(BEGIN)
    while due:
        path = due.pop()
        if path in found:
            continue

        def named(match: re.Match[str], folder: str = dirname(path)) -> str:
            due.append(normpath(join(folder, match[0])))
            return f"specdemo/{due[-1]}"

        source = IMPORT.sub(named, sources()[path].decode())
        found[path] = f"data:text/javascript;base64,{b64encode(source.encode()).decode()}"
    return json.dumps({"imports": {f"specdemo/{path}": address for path, address in found.items()}})
