"""How a part of the page asks for a job: from the press of a button until its script can follow the run, see job.js."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import gradio as gr

from .engine import Engine, EngineTrouble
from .jobs import Job
from .runs import Runs
from .serving.line import MODEL, QUIET, job
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
        work: see `durations.Timed`.
        part: what shows the job.
        script: the name of the job in the page.
        button: asks for it.
        read: makes a job of the raw values of the `fields`.
    """

    def check(*values: Any) -> str:
        """Before the job joins the line, where it could wait for minutes only to fail. The script then triggers `go`,
        or says why not."""
        try:
            read(values)
        except Exception as error:
            return _refusal(engine.sentence(error))
        return to_json({"go": True, "id": uuid4().hex})

    @job(work)
    def run(request: gr.Request, *values: Any) -> Iterator[str]:
        """Tells the page which run to follow, see `stream`; Gradio's line is held until it ends."""
        try:
            begun = runs.begin(read(values), request.session_hash, request.client, on_page=True)
        except Exception as error:
            yield _refusal(engine.sentence(error))
            return
        yield to_json({"run": begun.id})
        with suppress(EngineTrouble):  # the page knows from the run's last message
            for _ in runs.play(begun, engine):
                pass

    def refused(request: gr.Request) -> Any:
        """Why it was not let into the line."""
        sentence = runs.refusal(request.session_hash, work)
        return _refusal(sentence) if sentence else gr.skip()

    given = {"inputs": fields, "outputs": part, "preprocess": False, **QUIET}
    pressed, unable = f"(...values) => {script}.wait(values)", f"() => {script}.unable()"
    button.click(check, queue=False, js=pressed, **given).failure(None, js=unable)
    # Whatever was checked gets into the line, or the page would wait for a job that Gradio does not run.
    running = part.go(run, trigger_mode="multiple", **given, **MODEL)
    unheard = running.failure(refused, None, part, queue=False, **QUIET)
    unheard.then(None, js=unable)  # if there was nothing to say
    part.cancel(None, cancels=[running])


def _refusal(sentence: str) -> str:
    """Why a job is not run, for the script of a part."""
    return to_json({"error": sentence, "id": uuid4().hex})  # new, or the page would see no change


def halting(runs: Runs) -> Callable[[Any], None]:
    """What a script may ask for: it knows the ids of the runs it was shown, and no others."""

    def halt(run_id: Any) -> None:
        """The run ends by itself, at the next pass."""
        if run := runs.find(Job, str(run_id)):
            run.stop.set()

    return halt
