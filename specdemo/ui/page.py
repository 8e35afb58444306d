"""The page: what it is made of, and what happens when someone uses it.

The handlers take the raw values of the form (`preprocess=False`) and check them in `form`, so that the
page, a link and an API call are refused in the same words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import gradio as gr

from ..drafters import DRAFTERS
from ..presets import Defaults, Preset
from ..results import in_words
from ..types import AUTO, MAX_K, BadInput, Settings
from . import api
from .engine import NOTHING_LOADED, Engine, EngineTrouble, Status
from .form import one_of, read_request
from .lab_tab import add_lab
from .lanes import to_json
from .replay import add_replay
from .runs import Job, Run, Runs

MODEL = {"concurrency_id": "model", "concurrency_limit": 1}  # whatever uses the model waits in one line
QUIET = {"show_progress": "hidden", "api_visibility": "private"}
MAX_QUEUE = 16
STOP_SECONDS = 2.0
QUEUE_SECONDS = 0.05  # between two looks into the line; by itself Gradio looks a thousand times a second
REPORT_SECONDS = 1.0  # and between two for reports of Gradio's own kind, of which there are none here
WATCH_SECONDS = 0.2
FIELDS = (
    *("prompt", "preset", "drafter", "k", "auto", "temperature", "max_new_tokens"),
    *("seed", "top_k", "top_p", "stop", "mode", "order"),
)
STARTING = "drafter", "k", "auto", "temperature", "max_new_tokens", "mode"  # the fields that a preset has its own for
CHAT, RAW = "chat", "raw"
INTERLEAVED, ISOLATED = "interleaved", "isolated"


def build_page(
    engine: Engine, runs: Runs, prompts: Mapping[str, Sequence[str]], notes: Sequence[str] = ()
) -> gr.Blocks:
    """The whole page on an engine.

    Args:
        runs: where its races are kept; `launch_options` needs the same.
        prompts: example prompts by category.
        notes: sentences on presets that could not be read, shown once when the page opens.
    """
    first = next(iter(engine.presets.values()))
    with gr.Blocks(title="specdemo", analytics_enabled=False, fill_width=True) as page:
        top = gr.HTML(
            to_json(asdict(engine.status)),
            html_template="<div></div>",
            js_on_load="specdemo.mountTop(element, props, watch, trigger); // 'retry'",
            apply_default_css=False,
            elem_id="top",
        )
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Race", id="race-tab"), gr.Row(elem_id="stage"):
                with gr.Column(scale=0, min_width=330, elem_id="controls"):
                    form = _form(engine.presets, first, prompts)
                with gr.Column(scale=1, min_width=320, elem_id="arena"):
                    race = gr.HTML(
                        html_template="<div></div>",
                        js_on_load="specdemo.mountRace(element, props, watch, trigger, server); // 'link', 'cancel'",
                        apply_default_css=False,
                        server_functions=[_trace(runs)],
                        elem_id="race",
                    )
            with gr.Tab("Lab", id="lab-tab"):
                add_lab(engine, runs, form["preset"], MODEL, QUIET)
            with gr.Tab("Replay", id="replay-tab"):
                add_replay(runs)
        fields = [form[name] for name in FIELDS]
        _wire_runs(engine, runs, form, fields, race)
        _wire_presets(engine, form, top)
        _wire_opening(engine, form, top, _wire_links(engine, form, fields, race, page, notes))
        page.unload(_leaver(runs))
        api.add_endpoints(engine, runs, MODEL)
    page.queue(max_size=MAX_QUEUE)
    page._queue.sleep_when_free = QUEUE_SECONDS
    page._queue.progress_update_sleep_when_free = REPORT_SECONDS
    return page


def _form(presets: Mapping[str, Preset], first: Preset, prompts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Every control by name."""
    usual, chosen = Settings(), first.defaults
    form: dict[str, Any] = {}
    form["prompt"] = gr.Textbox(
        label="Prompt", lines=4, max_lines=4, placeholder="Ask something, or pick an example.", elem_id="prompt"
    )
    form["examples"] = gr.HTML(
        html_template="<div></div>",
        js_on_load="specdemo.mountExamples(element, props, trigger); // 'pick'",
        apply_default_css=False,
        prompts=dict(prompts),
        elem_id="examples",
    )
    with gr.Row(elem_id="go"):
        form["run"] = gr.Button("Run", variant="primary", scale=2, min_width=80, elem_id="run")
        form["halt"] = gr.Button("Stop", scale=1, min_width=80, elem_id="stop")
    form["drafter"] = gr.Dropdown(
        list(DRAFTERS), value=chosen.drafter, label="Drafter", info=_describe(first, chosen.drafter), elem_id="drafter"
    )
    k, auto = _k(chosen)
    with gr.Row(elem_id="k-row"):
        form["k"] = gr.Slider(0, MAX_K, k, step=1, label="K, guesses", buttons=[], min_width=100, elem_id="k")
        form["auto"] = gr.Checkbox(auto, label="auto", scale=0, min_width=80, elem_id="auto")
    form["k"].input(None, None, form["auto"], js="() => false")
    form["temperature"] = gr.Slider(
        0, 2, chosen.temperature, step=0.05, label="Temperature", buttons=[], elem_id="temperature"
    )
    with gr.Row():
        form["max_new_tokens"] = gr.Number(
            chosen.max_new_tokens, label="Max new tokens", min_width=100, elem_id="max-new-tokens"
        )
        form["seed"] = gr.Number(usual.seed, label="Seed", min_width=80, elem_id="seed")
    form["preset"] = gr.Dropdown(
        [(preset.title, name) for name, preset in presets.items()],
        value=first.name,
        label="Preset",
        info=first.description,
        elem_id="preset",
    )
    with gr.Accordion("More settings", open=False, elem_id="more"):
        form["mode"] = gr.Radio(
            [("Chat template", CHAT), ("Raw text", RAW)],
            value=_mode(chosen),
            label="The prompt goes in as",
            info="A model that has no chat template continues raw text either way.",
            elem_id="mode",
        )
        form["order"] = gr.Radio(
            [("Interleaved", INTERLEAVED), ("One by one", ISOLATED)],
            value=INTERLEAVED,
            label="Lanes run",
            elem_id="order",
        )
        with gr.Row():
            form["top_k"] = gr.Number(usual.top_k, label="Top-k (0 is off)", min_width=100, elem_id="top-k")
            form["top_p"] = gr.Number(usual.top_p, label="Top-p (1 is off)", step=0.05, min_width=100, elem_id="top-p")
        form["stop"] = gr.Textbox("", label="Stop strings, one a line", lines=2, max_lines=4, elem_id="stop-strings")
    return form


def _k(defaults: Defaults) -> tuple[int | str, bool]:
    """What the slider and its box begin with."""
    auto = defaults.k == AUTO
    return Settings().k if auto else defaults.k, auto


def _starting(defaults: Defaults) -> dict[str, Any]:
    """What a preset begins with, by the names of `STARTING`."""
    values = *_k(defaults), defaults.temperature, defaults.max_new_tokens, _mode(defaults)
    return dict(zip(STARTING, (defaults.drafter, *values), strict=True))


def _mode(defaults: Defaults) -> str:
    return RAW if defaults.raw else CHAT


def _describe(preset: Preset, drafter: str) -> str:
    measured = in_words(preset.results, drafter) if preset.results else ""
    return f"{DRAFTERS[drafter].description} {measured}".rstrip()


def _trace(runs: Runs) -> Any:
    """What the script in the page may ask for; it knows the ids of the runs it was shown, and no others."""

    def trace(run_id: Any) -> str | None:
        run = runs.find(Run, str(run_id))
        return run.trace() if run else None

    return trace


def _wire_runs(engine: Engine, runs: Runs, form: dict[str, Any], fields: list[Any], race: gr.HTML) -> None:
    def run(request: gr.Request, *values: Any) -> Iterator[str]:
        """Tells the page which run to follow, see `stream`; Gradio's line is held until it ends."""
        try:
            begun = runs.begin(Run(read_form(values, engine.presets)), request.session_hash, request.client)
        except BadInput as error:
            yield to_json({"refused": uuid4().hex, "error": str(error)})  # new, or the page would see no change
            return
        yield to_json({"run": begun.id})
        with suppress(EngineTrouble):  # the page was told by the run's last message
            for _ in begun.play(engine):
                pass

    def stop(request: gr.Request) -> None:
        stopping = runs.stop(request.session_hash, Run)
        if stopping is not None:
            stopping.ended.wait(STOP_SECONDS)

    def cancel(request: gr.Request) -> None:
        """A race that was still waiting when Stop was pressed, but may just have begun."""
        runs.stop(request.session_hash, Run)

    running = form["run"].click(
        run, fields, race, preprocess=False, js="(...values) => specdemo.pressed(values)", **MODEL, **QUIET
    )
    running.failure(None, js="() => specdemo.race.halted('The race could not be run.')")
    # A race may have loaded its preset, of which nothing was known before.
    running.success(
        lambda preset: _able(engine.status, preset),
        form["preset"],
        form["drafter"],
        preprocess=False,
        queue=False,
        **QUIET,
    )
    # Asked to stop, a race ends by itself, after the step that it is at, and is summed up. One that still waits in line
    # is cancelled. (`cancels` does nothing in a `.then`, hence the script's event.)
    form["halt"].click(stop, queue=False, **QUIET).then(None, js="() => specdemo.race.stop()")
    race.cancel(cancel, cancels=[running], queue=False, **QUIET)


def read_form(values: Sequence[Any], presets: Mapping[str, Preset]) -> Any:
    """The request that the raw values of the form, in the order of `FIELDS`, stand for."""
    named = dict(zip(FIELDS, values, strict=True))
    mode, order, auto = named.pop("mode"), named.pop("order"), named.pop("auto")
    one_of("prompt mode", mode, (CHAT, RAW))
    one_of("order of lanes", order, (INTERLEAVED, ISOLATED))
    if auto is True:
        named["k"] = AUTO
    return read_request(presets=list(presets), raw=mode == RAW, isolated=order == ISOLATED, **named)


def _wire_presets(engine: Engine, form: dict[str, Any], top: gr.HTML) -> None:
    def check(preset: Any) -> None:
        try:
            one_of("preset", preset, list(engine.presets))
        except BadInput as error:
            raise gr.Error(str(error), print_exception=False) from error

    def begin(preset: Any) -> list[Any]:
        """At once, though others may have the model: what the visitor changes from here on stays."""
        if preset is None:
            return [gr.skip()] * len(starting)
        check(preset)
        begun = engine.presets[preset]
        drafter, *others = _starting(begun.defaults).values()
        update = {**_drafter_update({}), "value": drafter, "info": _describe(begun, drafter)}
        return [gr.update(info=begun.description), update, *others]

    def load(preset: Any) -> Iterator[list[Any]]:
        if preset is None:
            yield [gr.skip(), gr.skip()]
            return
        check(preset)
        for status in engine.follow(preset):
            yield [to_json(asdict(status)), _able(status, preset)]

    def describe(preset: Any, drafter: Any) -> Any:
        known = preset in engine.presets and drafter in DRAFTERS
        return gr.update(info=_describe(engine.presets[preset], drafter)) if known else gr.skip()

    chosen, told = form["preset"], [top, form["drafter"]]
    starting = [chosen, *(form[name] for name in STARTING)]
    # Gradio tells of a choice also when the list is only left: the script passes on what is new. Whatever is gets into
    # the line, so that the last choice counts, also while another is being loaded.
    each = {"preprocess": False, "trigger_mode": "multiple", **QUIET}
    begun = chosen.input(begin, chosen, starting, queue=False, js="(preset) => specdemo.chose(preset)", **each)
    begun.success(load, chosen, told, js="(preset) => specdemo.wanted(preset)", **MODEL, **each)
    top.retry(load, chosen, told, preprocess=False, **MODEL, **QUIET)
    drafter = form["drafter"]
    drafter.change(describe, [chosen, drafter], drafter, preprocess=False, queue=False, **QUIET)


def _wire_opening(engine: Engine, form: dict[str, Any], top: gr.HTML, filled: Any) -> None:
    """What a page that was just opened is told, its form `filled` in: at once, and then from the line."""

    def tell(status: Status, preset: Any) -> list[Any]:
        """That another preset than the form's could not be loaded is nothing to this visitor."""
        others = status.stage == "failed" and status.preset != preset
        shown = Status("idle", preset, NOTHING_LOADED) if others else status
        return [to_json(asdict(shown)), _able(status, preset)]

    def opened(preset: Any, drafter: Any) -> list[Any]:
        status, update = tell(engine.status, preset)
        if preset not in engine.presets or drafter not in DRAFTERS:
            return [status, update, gr.skip()]
        chosen = engine.presets[preset]
        return [status, {**update, "info": _describe(chosen, drafter)}, gr.update(info=chosen.description)]

    async def watch(preset: Any) -> AsyncIterator[list[Any]]:
        """Until the model is ready. Waits without a thread."""
        seen = None
        while seen is None or seen.stage in ("idle", "loading"):
            if engine.status != seen:
                seen = engine.status
                yield tell(seen, preset)
            await asyncio.sleep(WATCH_SECONDS)

    chosen, drafter = form["preset"], form["drafter"]
    now = filled.then(opened, [chosen, drafter], [top, drafter, chosen], preprocess=False, queue=False, **QUIET)
    now.then(watch, chosen, [top, drafter], preprocess=False, concurrency_limit=None, **QUIET)


def _leaver(runs: Runs) -> Any:
    def leave(request: gr.Request) -> None:
        """A tab was closed: its race ends now, not when Gradio next looks."""
        runs.stop(request.session_hash, Job)

    return leave


def _able(status: Status, preset: Any) -> dict[str, Any]:
    """What the form's drafters are told: another preset than the form's says nothing of what this one can use."""
    return _drafter_update(status.missing or {}) if status.preset == preset else gr.skip()


def _drafter_update(missing: Mapping[str, str]) -> dict[str, Any]:
    """Drafters that the preset cannot use stay in the list, with the reason, as far as that is known by now."""
    choices = [(f"{name} ({missing[name]})" if name in missing else name, name) for name in DRAFTERS]
    return gr.update(choices=choices)


def _wire_links(
    engine: Engine, form: dict[str, Any], fields: list[Any], race: gr.HTML, page: gr.Blocks, notes: Sequence[str]
) -> Any:
    """Returns the event of a page that was opened, its form filled in from the link."""
    choices = {
        "preset": list(engine.presets),
        "drafter": list(DRAFTERS),
        "mode": [CHAT, RAW],
        "order": [INTERLEAVED, ISOLATED],
    }
    starting = {name: _starting(preset.defaults) for name, preset in engine.presets.items()}
    known = json.dumps({"choices": choices, "starting": starting, "notes": list(notes)})
    form["examples"].pick(None, form["examples"], form["prompt"], js="(prompt) => prompt")
    race.link(None, fields, None, js="(...values) => { specdemo.copyLink(values); }")
    return page.load(None, fields, fields, js=f"(...values) => specdemo.opened({known}, values)")
