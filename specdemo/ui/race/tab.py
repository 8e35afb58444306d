"""The Race tab: the form, the arena, and what happens when someone uses them.

The handlers take the raw values of the form (`preprocess=False`), which `read_request` checks as those of an API call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gradio as gr

from ...drafters.names import DRAFTERS
from ...errors import BadInput
from ...racing.game import game, read_guesses
from ...settings import one_of
from ..budgets import Budgets
from ..engine import Engine
from ..jobs import RACE
from ..line import MODEL, QUIET
from ..part import Part
from ..run_and_stop import halting, wire_job
from ..runs import Runs
from .form import FIELDS, MORE_LANES, OF_PRESET, OF_SERVER, STARTING, add_form, begin_with, describe, of_link, read_form
from .own_servers import read_servers
from .run import RaceRun


def add_race(
    engine: Engine,
    runs: Runs,
    prompts: Mapping[str, Sequence[str]],
    budgets: Budgets,
    recording: str,
    attract: Sequence[str],
) -> dict[str, Any]:
    """Add the contents of the tab to the page that is being built. Returns the controls of its form and the `arena` by
    name.

    Args:
        prompts: example prompts by category.
        recording: what a page opens with that no link fills in, see `replay.routes`; empty for nothing.
        attract: the recordings that play in stage mode when nobody is there.
    """
    with gr.Row(elem_id="stage"):
        with gr.Column(scale=0, min_width=330, elem_id="controls"):
            form = add_form(engine.presets, prompts, budgets)
        with gr.Column(scale=1, min_width=320, elem_id="arena") as form["column"]:
            form["arena"] = Part(
                "mountRace",
                ("ask", "go"),
                server_functions=_answers(runs),
                recording=recording,
                attract=list(attract),
                elem_id="race",
            )
    form["halt"].click(None, js="() => specdemo.race.stop()")
    form["preset"].change(None, None, form["raced"], js=f"() => '{OF_PRESET}'")
    return form


def wire_run(engine: Engine, runs: Runs, form: dict[str, Any], servers: Sequence[Any], budgets: Budgets) -> None:
    """Run what is chosen when Run is pressed.

    Args:
        servers: the fields for servers, see `own_servers.read_addresses`; none where no server may be named.
    """

    def read(values: Sequence[Any]) -> RaceRun:
        given, (raced, guesses, *addresses) = values[: len(FIELDS)], values[len(FIELDS) :]
        one_of("choice of what races", raced, [OF_PRESET, *[OF_SERVER] * bool(servers)])
        engine.check(given[FIELDS.index("preset")])
        request = read_form(given, budgets.new_tokens)
        if guesses:
            defaults = engine.presets[request.preset].defaults
            return RaceRun(game(request, read_guesses(guesses), defaults), budgets.race_seconds)
        if raced == OF_SERVER:
            return read_servers(request, addresses, budgets.race_seconds)
        return RaceRun(request, budgets.race_seconds)

    fields = [*(form[name] for name in FIELDS), form["raced"], form["guesses"], *servers]
    wire_job(engine, runs, RACE, form["arena"], "specdemo.race", form["run"], fields, read)


def _answers(runs: Runs) -> list[Any]:
    """What the script in the page may ask for; it knows the ids of the runs it was shown, and no others."""

    async def trace(run_id: Any) -> str | None:
        run = runs.find(RaceRun, str(run_id))
        return await runs.large(run.trace) if run else None

    return [trace, halting(runs)]


def wire_presets(engine: Engine, form: dict[str, Any], top: gr.HTML, budgets: Budgets) -> None:
    """Load the preset that is chosen, and say what it begins with."""

    def check(preset: Any) -> None:
        try:
            engine.check(preset)
        except BadInput as error:
            raise gr.Error(str(error), print_exception=False) from error

    def begin(preset: Any) -> list[Any]:
        """At once, though others may have the model: what the visitor changes from here on stays."""
        if preset is None:
            return [gr.skip()] * len(begins)
        check(preset)
        return begin_with(engine.presets[preset], budgets)

    def load(preset: Any) -> Iterator[None]:
        """Holds the line until it is loaded or cannot be. `status` tells the page."""
        if preset is not None:
            check(preset)
            for _ in engine.follow(preset):
                yield

    def chose_drafter(preset: Any, drafter: Any) -> Any:
        if preset not in engine.presets or drafter not in DRAFTERS:
            return gr.skip(), gr.skip()
        branches = {"interactive": True} if DRAFTERS[drafter].branches else {"interactive": False, "value": False}
        return gr.update(info=describe(engine.presets[preset], drafter)), gr.update(**branches)

    chosen, drafter = form["preset"], form["drafter"]
    begins = [chosen, *(form[name] for name in STARTING)]
    # Gradio reports a choice also when the list is only left: the script passes on what is new. Whatever is gets into
    # the line, so that the last choice counts, also while another is being loaded.
    each = {"preprocess": False, "trigger_mode": "multiple", **QUIET}
    begun = chosen.input(begin, chosen, begins, queue=False, js="(preset) => specdemo.chose(preset)", **each)
    begun.success(load, chosen, None, js="(preset) => specdemo.wanted(preset)", **MODEL, **each)
    top.retry(load, chosen, None, preprocess=False, **MODEL, **QUIET)
    listed = [form["all"], drafter, *(form[lane] for lane, _ in MORE_LANES)]
    for event in (top.able, *(part.change for part in listed)):
        event(None, listed, listed[1:], js="(...values) => specdemo.offer(...values)", **QUIET)
    fields = [drafter, form["tree"]]
    drafter.change(chose_drafter, [chosen, drafter], fields, preprocess=False, queue=False, **QUIET)


def fill_from_link(
    page: gr.Blocks, engine: Engine, form: dict[str, Any], notes: Sequence[str], budgets: Budgets
) -> Any:
    """Fill in the form of a page that is opened, from its link where that says something. Returns that event.

    Args:
        notes: sentences that the page shows once.
    """
    known = {**of_link(engine.presets, budgets), "notes": list(notes)}
    fields = [form[name] for name in FIELDS]
    return page.load(None, fields, fields, js=f"(...values) => specdemo.opened({json.dumps(known)}, values)")
