"""Builds the page and launches it: nothing else."""

from __future__ import annotations

import os

from specdemo.imports import without_garbage_collection

with without_garbage_collection():
    from specdemo.presets import load_presets, load_prompts
    from specdemo.types import BadInput
    from specdemo.ui.engine import Engine, real_backend
    from specdemo.ui.look import launch_options
    from specdemo.ui.page import build_page
    from specdemo.ui.runs import Runs


def main() -> None:
    presets, notes = load_presets()
    if not presets:
        raise SystemExit("\n".join(notes) or "There are no presets.")
    try:
        prompts = load_prompts()
    except BadInput as error:
        prompts, notes = {}, [*notes, str(error)]
    engine, runs = Engine(presets, real_backend()), Runs()
    page = build_page(engine, runs, prompts, notes)
    engine.begin_loading(next(iter(presets)))
    # A Space sets its own address; elsewhere only this machine can see the page, unless told otherwise.
    address = None if os.environ.get("SPACE_ID") else os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    page.launch(server_name=address, **launch_options(runs))


if __name__ == "__main__":
    main()
