"""Joins the scripts, and the style sheets, so that the page, a watcher's page and a saved race have one of each."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath

UI = Path(__file__).resolve().parents[1]
PARTS = "assets/page", "race/race", "replay/replay", "share/share", "watch/watch"
STYLES = (*PARTS, "lab/lab", "race/stage")
TEMPLATES = "templates.js"  # a module that exports the templates as `html`
IMPORT = re.compile(r'^import (?:\* as )?(.+?) from "(.+?)";', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|class|(?:async )?function) (\w+))", re.MULTILINE)


@cache
def script(main: str) -> str:
    """A script that runs the module of this path, and before it all that it imports.

    Each module is a block, so its names are its own. What it exports is bound once: it must not change.
    """
    blocks = dict[str, str]()

    def add(path: str) -> None:
        def bound(match: re.Match[str]) -> str:
            imported = normpath(join(dirname(path), match[2]))
            if imported not in blocks:
                add(imported)
            return f'const {match[1]} = modules["{imported}"];'

        source = IMPORT.sub(bound, _source(path))
        exports = ", ".join(EXPORT.findall(source))
        blocks[path] = f'{{\n{EXPORT.sub("", source)}\nmodules["{path}"] = {{ {exports} }};\n}}\n'

    add(main)
    return "".join(["const modules = {};\n", *blocks.values()])


@cache
def style() -> str:
    """All style sheets."""
    return "".join((UI / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)


def _source(path: str) -> str:
    if path != TEMPLATES:
        return (UI / path).read_text(encoding="utf-8")
    # Not as elements of the page: Gradio empties the `template` elements that it is given.
    html = "".join((UI / f"{name}.html").read_text(encoding="utf-8") for name in PARTS)
    return f"export const html = {json.dumps(html)};\n"
