"""Pages that are one file and play from a disk: script, styles and events stand in the file itself."""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from string import Template

from ...racing.trace import trace_lines
from ..look import FONTS
from ..replay.playable import playable_json
from ..replay.routes import RECORDINGS, SUFFIX
from ..serving.joined import script, style

FOLDER = Path(__file__).parent
PAGE = Template((FOLDER / "page.html").read_text(encoding="utf-8"))


def saved_page(replay: str) -> str:
    """The file for what the player of recordings plays, see `playable`."""
    return _page("saved", "A race, saved from specdemo", {"race": replay})


def demo_page() -> str:
    """The file `docs/demo.html`, with the recordings that ship and that `demo.html` here names."""
    names = re.findall(r'data-recording="([^"]+)"', _content("demo"))
    texts = {name: playable_json("recording", partial(trace_lines, RECORDINGS / f"{name}{SUFFIX}")) for name in names}
    return _page("demo", "Speculative decoding: the same text in less time", texts)


def _page(name: str, title: str, texts: Mapping[str, str]) -> str:
    """A page of the content and the script of this name, and of texts by their ids.

    These and the script, which holds pieces of HTML, are packed: none is read as HTML.
    """
    packed = (
        f'<script type="text/plain" id="{id}">{_base64(gzip.compress(text.encode(), mtime=0))}</script>\n'
        for id, text in texts.items()
    )
    return PAGE.substitute(
        title=title,
        styles=f"{FONTS}<style>{style()}</style>",
        content=_content(name),
        texts="".join(packed),
        script=_base64(script(f"share/{name}.js").encode()),
    )


def _content(name: str) -> str:
    return (FOLDER / f"{name}.html").read_text(encoding="utf-8")


def _base64(content: bytes) -> str:
    return b64encode(content).decode()
