"""The Lab tab: its page, its runs, and what it asks of the server in between."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

import gradio as gr

from ..types import BadInput
from .engine import Engine, EngineTrouble
from .form import one_of
from .lab_run import LabRun
from .lab_views import ABLE, VIEWS
from .lanes import to_json
from .runs import Job, Runs


def add_lab(
    engine: Engine, runs: Runs, preset: gr.Dropdown, model: Mapping[str, Any], quiet: Mapping[str, Any]
) -> None:
    """Put the Lab where it is called. It measures the chosen preset; `model` puts its runs into the line for it."""
    lab = gr.HTML(
        html_template="<div></div>",
        js_on_load="specdemo.mountLab(element, props, watch, trigger, server); // 'run', 'cancel'",
        apply_default_css=False,
        views=[view.as_dict() for view in VIEWS.values()],
        drafters=ABLE,
        own={name: preset.defaults.drafter for name, preset in engine.presets.items()},
        server_functions=_answers(engine, runs),
        elem_id="lab",
    )

    def run(request: gr.Request, asked: Any, preset: Any) -> Iterator[str]:
        """Tells the page which run to follow, see `stream`; Gradio's line is held until it ends."""
        try:
            job = runs.begin(_read(asked, preset, engine), request.session_hash, request.client)
        except BadInput as error:
            yield to_json({"refused": uuid4().hex, "error": str(error)})
            return
        yield to_json({"run": job.id})
        with suppress(EngineTrouble):  # the page was told by the run's last message
            for _ in job.play(engine):
                pass

    running = lab.run(run, [lab, preset], lab, preprocess=False, **model, **quiet)
    running.failure(None, js="() => specdemo.lab.finish('It could not be run.', 'failed')")

    def cancel(request: gr.Request) -> None:
        """A run that was still waiting when Stop was pressed, but may just have begun."""
        runs.stop(request.session_hash, LabRun)

    lab.cancel(cancel, cancels=[running], queue=False, **quiet)


def _read(asked: Any, preset: Any, engine: Engine) -> LabRun:
    """The run that the page asks for.

    Raises:
        BadInput: no such view or preset, or a value of the form that is wrong.
    """
    try:
        asked = json.loads(asked)
        name, values = asked["view"], asked["values"]
    except (TypeError, ValueError, KeyError) as error:
        raise BadInput("A run of the Lab needs a view and the values of its form.") from error
    one_of("view", name, list(VIEWS))
    one_of("preset", preset, list(engine.presets))
    return LabRun(preset, VIEWS[name], VIEWS[name].read(values))


def _answers(engine: Engine, runs: Runs) -> list[Any]:
    """What the script in the page may ask for; it knows the ids of the runs it was shown, and no others."""

    def theory(asked: Any) -> dict[str, Any]:
        from .lab_studies import theory_of

        asked = asked if isinstance(asked, dict) else {}
        try:
            return {"picture": theory_of(asked, runs.find(Job, str(asked.get("job"))))}
        except Exception as error:
            return {"error": engine.sentence(error)}

    def numbers(run_id: Any) -> dict[str, Any]:
        from .lab_studies import numbers_of

        try:
            return {"values": numbers_of(runs.find(Job, str(run_id)))}
        except Exception as error:
            return {"error": engine.sentence(error)}

    def halt(run_id: Any) -> None:
        if job := runs.find(LabRun, str(run_id)):
            job.stop.set()

    def file(asked: Any) -> dict[str, str]:
        run_id, kind = (str(asked.get(name)) for name in ("run", "kind")) if isinstance(asked, dict) else ("", "")
        job = runs.find(LabRun, run_id)
        if job is None or kind not in job.files:
            return {"error": "This run is no longer kept. Run it again to download it."}
        return {"text": job.files[kind]}

    return [theory, numbers, halt, file]
