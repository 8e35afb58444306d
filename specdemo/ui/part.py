"""A part of the page that a script of ours fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr


class Part(gr.HTML):
    """An element that a function of `main.js` fills. Its script and style stand beside the Python that adds it.

    Gradio writes a `.pyi` file beside this module, which Git ignores.
    """

    def __init__(self, mount: str, events: Sequence[str] = (), **props: Any) -> None:
        """`mount` is the function's name. The script may trigger the `events`: Gradio looks for their names in it."""
        script = f"specdemo.{mount}(element, props, watch, trigger, server); // {', '.join(map(repr, events))}"
        super().__init__(html_template="<div></div>", js_on_load=script, apply_default_css=False, **props)
