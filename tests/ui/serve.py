"""Serve the page on the scripted engine, to look at it: `python -m tests.ui.serve [seconds per token]`."""

from __future__ import annotations

import sys

from specdemo.ui.look import launch_options
from specdemo.ui.page import build_page
from tests.harness.ui_classes import Runs

from ..fakes.engine import PROMPTS, Script


def main() -> None:
    script = Script()
    script.pace = float(sys.argv[1]) if len(sys.argv) > 1 else 0.02
    engine, runs = script.engine(), Runs()
    page = build_page(engine, runs, PROMPTS)
    engine.begin_loading("scripted")
    page.launch(server_name="127.0.0.1", **launch_options(runs))


if __name__ == "__main__":
    main()
