"""Builds the page: the tabs, and the status line at the top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from ..drafters.names import DRAFTERS, FRONT
from ..drafters.names import menu as drafters
from ..models.results import greedy_speed_ups
from . import api, hub_login, mcp
from .budgets import Budgets
from .engine import OF_OTHERS, OWN, Engine
from .lab.tab import add_check, add_lab
from .line import QUIET, Line
from .part import Part
from .race.form import describe, menu
from .race.tab import add_race, fill_from_link, wire_presets, wire_run
from .replay.routes import attracting_files, opening_file
from .replay.tab import add_replay
from .runs import Runs
from .share.tab import add_share
from .values import to_json

MOST_NAMED = 8  # models of a visitor that the page remembers, see form.js
KEPT_FILES = 600, 3600  # seconds: how often files for download are looked through, and how old they become


def build_page(
    engine: Engine,
    runs: Runs,
    prompts: Mapping[str, Sequence[str]],
    notes: Sequence[str] = (),
    budgets: Budgets = Budgets(),  # noqa: B008  # frozen
    tools: bool = False,
    login: bool = False,
) -> gr.Blocks:
    """The whole page.

    Args:
        runs: where its races are kept. `launch_options` needs the same.
        prompts: example prompts by category.
        notes: sentences on presets that could not be read, shown once when the page opens.
        budgets: how much a visitor may ask for.
        tools: whether language models may use the page, see `mcp`.
        login: whether visitors may log in, see `hub_login`.
    """
    with gr.Blocks(title="specdemo", analytics_enabled=False, fill_width=True, delete_cache=KEPT_FILES) as page:
        top = Part(
            "mountTop",
            ("retry", "able"),
            titles={name: preset.title for name, preset in engine.offered.items()} | {OWN: OF_OTHERS},
            drafters=drafters(),
            front=FRONT,
            speed_ups={name: greedy_speed_ups(each.results) for name, each in engine.offered.items() if each.results},
            elem_id="top",
        )
        if login:
            hub_login.add_login()
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Race", id="race-tab"):
                form = add_race(engine, runs, prompts, budgets, "" if notes else opening_file(), attracting_files())
                with form["column"]:
                    add_replay(runs)
                filled_again = add_share(runs, form)
            with gr.Tab("Check", id="check-tab"):
                servers = add_check(engine, runs, form, top, budgets)
            with gr.Tab("Lab", id="lab-tab"):
                add_lab(engine, runs, form["preset"], top, budgets)
        wire_run(engine, runs, form, servers, budgets)
        wire_presets(engine, form, top, budgets)
        for filled in (fill_from_link(page, engine, form, notes, budgets), filled_again):
            _wire_opening(engine, form, top, filled)
        if tools:
            mcp.add_tools(engine, runs, budgets)
        api.add_endpoints(engine, runs, budgets)
    page.api_open = False  # or a direct call would pass the line by
    page._queue = line = Line(engine, page)
    runs.engine, runs.line, runs.most_watchers = engine, line, budgets.watchers
    return page


def _wire_opening(engine: Engine, form: dict[str, Any], top: gr.HTML, filled: Any) -> None:
    """Tell a page its session and describe what is chosen, after its form is `filled` in."""

    def opened(preset: Any, drafter: Any, named: Any, request: gr.Request) -> list[Any]:
        """The session, with which it asks for the status, descriptions of what is chosen, and the menu, which
        has the models that were `named` in this browser before."""
        for name in named[:MOST_NAMED] if isinstance(named, list) else ():
            if isinstance(name, str) and name in engine.presets and name not in engine.offered:
                engine.add(engine.presets[name], request.session_hash)
        session = to_json({"session": request.session_hash})
        if preset not in engine.presets or drafter not in DRAFTERS:
            return [session, gr.skip(), gr.skip()]
        chosen = engine.presets[preset]
        return [
            session,
            gr.update(info=describe(chosen, drafter)),
            gr.update(info=chosen.description, choices=menu(engine.shown(request.session_hash))),
        ]

    chosen, drafter = form["preset"], form["drafter"]
    named = "(preset, drafter) => [preset, drafter, specdemo.namedModels()]"
    filled.then(
        opened, [chosen, drafter, top], [top, drafter, chosen], preprocess=False, queue=False, js=named, **QUIET
    )
