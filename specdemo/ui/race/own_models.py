"""The fields for models that a person names: looked at first, then loaded, then kept as a preset."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import gradio as gr

from ...errors import BadInput
from ...models.presets import Preset, preset_of, read_preset, with_head
from ...system.allowed import allowed
from ...system.imports import import_quickly
from ..budgets import Budgets
from ..engine import Engine
from ..line import MODEL, QUIET
from .form import STARTING, begin_with, menu

OFF = "() => ({ interactive: false, __type__: 'update' })"
LOADS = "(preset) => { specdemo.nameModel(preset); specdemo.chose(preset); specdemo.loads = preset; return preset; }"
CHOSEN = "(preset) => { specdemo.chose(preset); specdemo.loads = preset; return preset; }"


def add_own_models(engine: Engine, form: dict[str, Any], budgets: Budgets) -> None:
    """Add the fields to the page that is being built. A Space has them only for the names that its owner allows.

    Args:
        form: the controls of the Race tab, of which a loaded model is chosen.
    """
    names = allowed(servers=False)
    with gr.Accordion("Your own model", open=False, visible=names != (), elem_id="own"):
        own = SimpleNamespace(before=gr.State(""))  # the preset to go back to
        own.target = gr.Textbox(
            label="Target",
            info="A hub id (owner/name), a folder, a .gguf file, owner/name:file.gguf, or a preset's name."
            if names is None
            else f"This Space allows: {', '.join(names)}.",
            max_lines=1,
            elem_id="own-target",
        )
        own.draft = gr.Textbox(
            label="Draft model", info="Optional, named in the same way.", max_lines=1, elem_id="own-draft"
        )
        own.head = gr.Textbox(
            label="Head",
            info="Optional, experimental: EAGLE-3, DFlash, DSpark or Medusa, a hub id or a folder.",
            max_lines=1,
            elem_id="own-head",
        )
        own.look = gr.Button("What it needs", elem_id="own-check")
        own.message = gr.Textbox(label="What it needs", visible=False, lines=2, max_lines=14, elem_id="own-message")
        with gr.Row():
            own.load = gr.Button("Load", variant="primary", interactive=False, min_width=80, elem_id="own-load")
            own.cancel = gr.Button("Cancel", interactive=False, min_width=80, elem_id="own-cancel")
        with gr.Row(visible=names is None):
            own.name = gr.Textbox(
                label="Name", info="Of the new preset.", max_lines=1, min_width=100, elem_id="own-name"
            )
            own.save = gr.Button("Save as preset", min_width=80, elem_id="own-save")
    _wire(engine, form, budgets, own)


def _wire(engine: Engine, form: dict[str, Any], budgets: Budgets, own: SimpleNamespace) -> None:
    named, chosen = [own.target, own.draft, own.head], form["preset"]
    begins = [chosen, *(form[field] for field in STARTING)]

    def choose(preset: str, session: str | None) -> list[Any]:
        first, *others = begin_with(engine.presets[preset], budgets)
        return [gr.update(**{**first, "value": preset, "choices": menu(engine.shown(session))}), *others]

    def look(*given: Any) -> list[Any]:
        lines: list[str] = []
        try:
            with engine.other_work():
                for line in engine.report(_named(engine.presets, *given)):
                    lines.append(line)
        except Exception as error:
            return [_say(*lines, engine.sentence(error)), gr.update(interactive=False)]
        return [_say(*lines), gr.update(interactive=True)]

    def begin(request: gr.Request, *given: Any) -> list[Any]:
        try:
            preset = _named(engine.presets, *given)
        except Exception as error:
            raise gr.Error(engine.sentence(error), print_exception=False) from error
        session, loaded = request.session_hash, engine.status.loaded
        going_back = loaded if loaded in engine.shown(session) else next(iter(engine.offered))
        engine.add(preset, session)
        return [going_back, gr.update(interactive=False), gr.update(interactive=True), *choose(preset.name, session)]

    def load(preset: Any) -> Iterator[None]:
        """Holds the line until it is loaded, cannot be, or is cancelled; the top of the page says how far it is."""
        if preset not in engine.presets:
            return
        for _ in engine.follow(preset):
            yield

    def ended(preset: Any, before: str, request: gr.Request) -> list[Any]:
        """After a load that failed, the preset that was loaded before is chosen again."""
        status = engine.status
        if preset not in engine.presets or status.loaded == preset:
            return [gr.skip(), gr.update(interactive=False), *[gr.skip()] * len(begins)]
        failed = status.stage == "failed" and status.preset == preset
        return [
            _say(status.words) if failed else gr.skip(),
            gr.update(interactive=False),
            *choose(before, request.session_hash),
        ]

    def give_up(before: str, request: gr.Request) -> list[Any]:
        """Go back to the preset that was loaded before: to choose another one ends a load."""
        engine.begin_loading(before)
        words = _say("Cancelled. What was already downloaded is kept.")
        return [words, gr.update(interactive=True), gr.update(interactive=False), *choose(before, request.session_hash)]

    def save(request: gr.Request, *values: Any) -> list[Any]:
        if os.environ.get("SPACE_ID"):
            return [_say("A Space keeps no presets of its visitors."), gr.skip()]
        try:
            *given, name = values
            reporting = import_quickly("specdemo.models.report")
            saved = read_preset(reporting.save_preset(_named(engine.presets, *given), _text(name).strip()))
        except Exception as error:
            return [_say(engine.sentence(error)), gr.skip()]
        session = request.session_hash
        engine.add(saved, session)
        return [_say(f"Saved. In the menu it is {saved.title}."), gr.update(choices=menu(engine.shown(session)))]

    here = {"preprocess": False, "queue": False}
    for field in named:
        field.input(None, None, own.load, js=OFF)
    own.look.click(look, named, [own.message, own.load], **here, show_progress="minimal", api_visibility="private")
    begun = own.load.click(begin, named, [own.before, own.load, own.cancel, *begins], **here, **QUIET)
    loading = begun.success(load, chosen, None, preprocess=False, js=LOADS, **MODEL, **QUIET)
    shown = loading.then(ended, [chosen, own.before], [own.message, own.cancel, *begins], **here, **QUIET)
    shown.then(None, chosen, None, js=CHOSEN)
    outputs = [own.message, own.load, own.cancel, *begins]
    cancelled = own.cancel.click(give_up, own.before, outputs, cancels=[loading], queue=False, **QUIET)
    cancelled.then(None, chosen, None, js=CHOSEN)
    own.save.click(save, [*named, own.name], [own.message, chosen], **here, **QUIET)


def _named(presets: Mapping[str, Preset], target: Any, draft: Any, head: Any) -> Preset:
    """The preset of what was named. A head may say which target it is for."""
    target, draft, head = map(_text, (target, draft, head))
    found = import_quickly("specdemo.models.published_heads").head_format(head) if head.strip() else None
    named = target if target.strip() or found is None else found.target or ""
    alone = None if draft.strip() else presets.get(named.strip())
    preset = alone or preset_of(named, draft if draft.strip() else None)
    return with_head(preset, found.kind, head) if found else preset


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadInput("A name must be a text.")
    return value


def _say(*lines: str) -> Any:
    return gr.update(value="\n".join(lines), visible=True)
