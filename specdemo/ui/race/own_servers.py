"""The fields of the Race tab for servers that a person runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from ...servers.address import MAX_ADDRESS, Address
from ...system.allowed import allowed
from ...types import BadInput
from ..budgets import Budgets
from ..engine import Engine
from ..part import Part
from .form import FIELDS, read_form
from .server_run import Place, ServerRun


def add_own_servers() -> tuple[gr.Button, list[Any]]:
    """Add the fields to the page that is being built, and return the button and what is to be read when it is pressed.

    A Space has them only for the servers that its owner allows.
    """
    names = allowed(servers=True)
    with gr.Accordion("Your own server", open=False, visible=names != (), elem_id="servers"):
        gr.Markdown(
            "vLLM, llama.cpp's server or SGLang. It gets the prompt and the settings above, but it drafts with its own "
            "drafter and K."
        )
        info = "Such as http://127.0.0.1:8080" if names is None else f"This Space allows: {', '.join(names)}."
        server = gr.Textbox(label="Address", info=info, max_lines=1, elem_id="server-address")
        key = gr.Textbox(label="API key", type="password", max_lines=1, elem_id="server-key")
        baseline = gr.Textbox(
            label="The same server without speculation",
            info="Optional: the baseline of the comparison.",
            max_lines=1,
            elem_id="baseline-address",
        )
        other = gr.Textbox(label="Its API key", type="password", max_lines=1, elem_id="baseline-key")
        race = gr.Button("Race it", elem_id="server-run")
        Part("mountSaid", button="server-run", elem_id="server-said")
    return race, [server, key, baseline, other]


def read_servers(values: Sequence[Any], engine: Engine, budgets: Budgets) -> ServerRun:
    """The race that the values of the form and of these fields ask for.

    Raises:
        BadInput: the first value that is wrong.
    """
    asked = read_form(values[: len(FIELDS)], engine.presets, budgets.new_tokens)
    if asked.others:
        raise BadInput("A server is raced with 1 reader: choose 1 reader at once.")
    server, key, baseline, other = values[len(FIELDS) :]
    if (place := _place(server, key)) is None:
        raise BadInput("Type the address of your server, such as http://127.0.0.1:8080.")
    return ServerRun(asked, place, _place(baseline, other), budgets.race_seconds)


def _place(address: Any, key: Any) -> Place | None:
    for text in (address, key):
        if not isinstance(text, str) or len(text) > MAX_ADDRESS:  # not quoted: it may be a key
            raise BadInput(f"An address or a key must be a text of at most {MAX_ADDRESS} characters.")
    return Place(Address.read(address), key.strip()) if address.strip() else None
