"""The named endpoints, for gradio_client and for anything that speaks HTTP: /race and /compare.

Gradio reads the types of an endpoint from its signature, so the annotations here are real objects: this
module cannot postpone them.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, signature
from typing import Any, TypeAlias

import gradio as gr

from ..racing.request import AT_ONCE, parameters, read_request
from .budgets import Budgets, starting
from .engine import Engine
from .jobs import RACE
from .line import MODEL, job
from .race.run import RaceRun
from .runs import Runs

# The order of the arguments, which a call over HTTP does not name; a new setting comes after them.
PLACES = (
    "request prompt preset drafter k temperature max_new_tokens seed top_k top_p stop raw isolated rule tree readers"
)
Player: TypeAlias = Callable[[str | None, Any, dict[str, Any]], Iterator[tuple[RaceRun, str]]]


def player(engine: Engine, runs: Runs, budgets: Budgets) -> Player:
    """What plays the race of a call, within the budgets: it yields the run with each of its messages. It gets the
    session and the address of the caller, and the values asked for. Every failure becomes an error in words."""

    def play(session: str | None, client: Any, values: dict[str, Any]) -> Iterator[tuple[RaceRun, str]]:
        try:
            engine.check(values["preset"])
            defaults = starting(engine.presets[values["preset"]].defaults, budgets)
            read = read_request(defaults=defaults, most_new_tokens=budgets.new_tokens, **values)
            run = runs.begin(RaceRun(read, budgets.race_seconds), session, client)
            for message in runs.play(run, engine):
                if session and not runs.line.is_heard(session):
                    run.stop.set()  # and nobody else waits for it
                yield run, message
        except Exception as error:
            raise gr.Error(engine.sentence(error), print_exception=False) from error

    return play


def add_endpoints(engine: Engine, runs: Runs, budgets: Budgets) -> None:
    """Add both endpoints to the page that is being built."""
    first, play = next(iter(engine.offered)), player(engine, runs, budgets)

    given = {"prompt": (str, Parameter.empty), "preset": (str, first), "drafter": (str | None, None), **parameters()}
    given |= {"request": (gr.Request, Parameter.empty), "raw": (bool | None, None), "isolated": (bool, False)}
    given["readers"] = int, int(AT_ONCE.value)
    request, *names = dict.fromkeys([*PLACES.split(), *given])

    def played(request: gr.Request, values: Sequence[Any]) -> Iterator[tuple[RaceRun, str]]:
        """Drafters may be lanes, separated by commas."""
        named = dict(zip(names, values, strict=True))
        if isinstance(named["drafter"], str) and ":" in named["drafter"]:
            named |= {"drafter": None, "lanes": named["drafter"].split(",")}
        return play(request.session_hash, request.client, named)

    taken = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=given[name][1], annotation=given[name][0])
        for name in (request, *names)
    ]

    @job(RACE)
    def race(request: gr.Request, *values: Any) -> Iterator[str]:
        """Race the target alone against the target with a drafter, or with up to three, each with its own k, as in
        drafter="eagle:4,ngram:auto,eagle:tree-8". With tree, k is the number of tokens of each tree. With 2, 4, 8 or 16
        readers this prompt and examples are decoded at once, in lanes like "alone 1" and "eagle 1". What is None is as
        the preset has it. Streams messages, each one JSON object as a text with run, seq, and status, start, lanes or
        end; see specdemo/ui/race/messages.py."""
        # Texts, because Gradio streams nested lists as differences and gets those that shrink wrong.
        for _, message in played(request, values):
            yield message

    @job(RACE)
    def compare(request: gr.Request, *values: Any) -> dict[str, Any]:
        """Race to the end, asked for as /race, and return the summary: per lane text, token_ids, kinds, finish_reason
        and stats; then speed_up, that of writing, speed_up_in_all, that with the time to read the prompt, busy,
        sentence and the comparison of the texts, which is None for rejection sampling above temperature 0; busy says
        how many times its best a pass takes, and is None unless that is too much for a verdict; in verdicts the same of
        each drafted lane; and in memory_shares how close the passes of each lane come to what the memory allows, None
        where that is not known."""
        summary: dict[str, Any] = {}
        for run, _ in played(request, values):
            summary = run.summary
        return summary

    for name, endpoint in (("race", race), ("compare", compare)):
        # What Gradio reads the types of the arguments from.
        endpoint.__signature__ = signature(endpoint).replace(parameters=taken)  # type: ignore[attr-defined]
        endpoint.__annotations__ |= {each.name: each.annotation for each in taken}
        gr.api(endpoint, api_name=name, **MODEL)
