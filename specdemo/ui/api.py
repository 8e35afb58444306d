"""The named endpoints, for gradio_client and for anything that speaks HTTP: /race and /compare.

Gradio reads the types of an endpoint from its signature, so the annotations here are real objects: this
module cannot postpone them.
"""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from .engine import Engine
from .form import one_of, read_request
from .runs import Run, Runs


def add_endpoints(engine: Engine, runs: Runs, model: dict[str, Any]) -> None:
    """Add both endpoints to the page that is being built; `model` puts them into the line for the model."""
    first = next(iter(engine.presets))

    def play(request: gr.Request, asked: dict[str, Any]) -> Iterator[tuple[Run, str]]:
        """A run and its messages one by one; every failure becomes an error in words."""
        try:
            one_of("preset", asked["preset"], list(engine.presets))
            asked = engine.presets[asked["preset"]].defaults.filled_in(asked)
            read = read_request(presets=list(engine.presets), **asked)
            run = runs.begin(Run(read), request.session_hash, request.client)
            for message in run.play(engine):
                yield run, message
        except Exception as error:
            raise gr.Error(engine.sentence(error), print_exception=False) from error

    def race(
        request: gr.Request,
        prompt: str,
        preset: str = first,
        drafter: str | None = None,
        k: int | str | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: list[str] | None = None,
        raw: bool | None = None,
        isolated: bool = False,
    ) -> Iterator[str]:
        """Race the target alone against the target with a drafter. What is None is as the preset has it. Streams
        messages, each one JSON object as a text with run, seq, and status, start, lanes or end; see
        specdemo/ui/lanes.py."""
        # Texts, because Gradio streams nested lists as differences and gets those that shrink wrong.
        asked = {name: value for name, value in locals().items() if name in ARGUMENTS}
        for _, message in play(request, asked):
            yield message

    def compare(
        request: gr.Request,
        prompt: str,
        preset: str = first,
        drafter: str | None = None,
        k: int | str | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: list[str] | None = None,
        raw: bool | None = None,
        isolated: bool = False,
    ) -> dict[str, Any]:
        """Race to the end, with what is None as the preset has it, and return the summary: per lane text, token_ids,
        kinds, finish_reason and stats; then speed_up, sentence and, at temperature 0, the comparison of the two
        texts."""
        asked = {name: value for name, value in locals().items() if name in ARGUMENTS}
        summary: dict[str, Any] = {}
        for run, _ in play(request, asked):
            summary = run.summary
        return summary

    gr.api(race, api_name="race", **model)
    gr.api(compare, api_name="compare", **model)


ARGUMENTS = {
    *("prompt", "preset", "drafter", "k", "temperature", "max_new_tokens"),
    *("seed", "top_k", "top_p", "stop", "raw", "isolated"),
}
