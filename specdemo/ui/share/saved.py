"""A race as one HTML file, which plays it from a disk: script, styles and events stand in the file itself."""

from __future__ import annotations

import gzip
from base64 import b64encode
from pathlib import Path
from string import Template

from ..look import FONTS
from ..serving.joined import script, style

PAGE = Template((Path(__file__).parent / "saved.html").read_text(encoding="utf-8"))


def saved_page(replay: str) -> str:
    """The file for what the player of recordings plays, see `playable`. It is packed, so no text is read as HTML."""
    race = b64encode(gzip.compress(replay.encode(), mtime=0)).decode()
    main = b64encode(script("share/saved.js").encode()).decode()  # which holds pieces of HTML
    return PAGE.substitute(styles=f"{FONTS}<style>{style()}</style>", script=main, race=race)
