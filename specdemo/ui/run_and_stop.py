"""How a part of the page asks for a job: from the press of a button until it waits in line, see job.js."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import gradio as gr

from ..errors import BadInput
from .engine import Engine, EngineTrouble
from .jobs import Job
from .line import MODEL, QUIET, job
from .runs import Runs
from .values import to_json


def wire_job(
    engine: Engine,
    runs: Runs,
    work: str,
    part: Any,
    script: str,
    button: gr.Button,
    fields: list[Any],
    read: Callable[[Sequence[Any]], Job],
) -> None:
    """
    Args:
        work: see `Job.work`.
        part: what shows the job.
        script: the name of the job in the page.
        button: asks for it.
        read: makes a job of the raw values of the `fields`.
    """

    def ask(request: gr.Request, *values: Any) -> str:
        """The id of the run, which the script follows while it waits in line, or why there is none."""
        run_id = secrets.token_hex(8)
        try:
            read(values)  # or it could wait for minutes only to fail
            if sentence := runs.line.refusal(True, request.session_hash, request.request):
                raise BadInput(sentence)
        except Exception as error:
            return to_json({"error": engine.sentence(error), "id": run_id})  # or the page could see no change
        return to_json({"run": run_id})

    @job(work)
    def run(request: gr.Request, run_id: Any, *values: Any) -> None:
        """Holds Gradio's line until it ends; the page hears of it by its stream, see `stream`."""
        try:
            begun = runs.begin(read(values), request.session_hash, request.client, str(run_id))
        except Exception as error:
            raise gr.Error(engine.sentence(error), print_exception=False) from error
        with suppress(EngineTrouble):  # the page knows from the run's last message
            for _ in runs.play(begun, engine):
                pass

    given = {"preprocess": False, **QUIET}
    unable = f"() => {script}.unable()"
    button.click(None, fields, None, js=f"(...values) => {script}.press(values)", **given)
    part.ask(ask, fields, part, js=f"(...values) => {script}.asked(values)", queue=False, **given).failure(
        None, js=unable
    )
    # Whatever was checked gets into the line, or the page would wait for a job that Gradio does not run.
    named = f"(_, ...values) => [{script}.run, ...{script}.asked(values)]"
    part.go(run, [part, *fields], None, js=named, trigger_mode="multiple", **given, **MODEL).failure(None, js=unable)


def halting(runs: Runs) -> Callable[[Any], Awaitable[None]]:
    """What a script may ask for: it knows the ids of the runs it was shown, and no others."""

    async def halt(run_id: Any) -> None:
        """The run leaves the line, or ends by itself at the next pass."""
        await runs.line.leave(run_id)
        if run := runs.find(Job, str(run_id)):
            run.stop.set()

    return halt
