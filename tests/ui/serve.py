"""Serve the page on the scripted engine, to look at it: `python -m tests.ui.serve [seconds per token]`."""

from __future__ import annotations

import sys

from specdemo.ui.look import launch_options
from specdemo.ui.page import build_page

from .scripted import PROMPTS, Script


def main() -> None:
    script = Script()
    script.pace = float(sys.argv[1]) if len(sys.argv) > 1 else 0.02
    engine = script.engine()
    page = build_page(engine, PROMPTS)
    engine.begin_loading("scripted")
    page.launch(server_name="127.0.0.1", **launch_options())


if __name__ == "__main__":
    main()
