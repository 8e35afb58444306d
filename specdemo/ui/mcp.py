"""The tools that the page offers to language models by the Model Context Protocol, which Gradio's own server speaks.

A tool's answer is a small JSON object as a text: a model reads all of it. Gradio reads the types of a tool from its
signature and the words for the model from its docstring. So the annotations here are real objects, and the docstrings
are for a reader who has never seen this program.
"""

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import gradio as gr

from ..drafters.names import DRAFTERS
from ..errors import BadInput
from ..formats import significant
from ..models.presets import Preset
from ..racing.explained import explained
from ..racing.request import PLAIN, SPECULATIVE, parameters
from ..racing.trace import Entry, read_trace, request_of, trace_lines
from ..settings import read_k
from ..studies.check import Check
from ..studies.study import ABLE
from .api import player
from .budgets import Budgets
from .engine import Engine
from .jobs import RACE
from .lab.run import LabRun, work_of
from .line import MODEL, job
from .race.run import RaceRun
from .replay.routes import OPENING, RECORDINGS, SUFFIX
from .runs import Runs
from .values import to_json

PREFIX = "mcp_"  # of the names of the endpoints, which other programs see too
TOOLS = "race", "check", "explain_round", "list_models"
CALL = "x-specdemo-call"  # the header with the number of a call, by which a tool knows whether it is still open
PATH = "/gradio_api/mcp"  # that Gradio serves tools at
calls = set[str]()  # that are open
NO_LINE: dict[str, Any] = {"queue": False}  # for a tool that needs no model
FIRST_WORDS = 30
OF_A_LANE = "tokens", "rounds", "tokens_per_second", "tokens_per_round", "acceptance_rate"
OF_A_CHECK = "answer", "in_short", "k", "trials", "elsewhere", "advice"
MISSING = 'The tools for language models need the package mcp: pip install "gradio[mcp]"'


def check_available() -> None:
    if find_spec("mcp") is None:
        raise BadInput(f"{MISSING}.")


def add_tools(engine: Engine, runs: Runs, budgets: Budgets) -> None:
    """Add the endpoints of the tools to the page that is being built, before others of the same name: Gradio gives
    each endpoint the name of its function as a tool, and a later one of the same name a number."""
    for name, tool in tools(engine, runs, budgets).items():
        gr.api(tool, api_name=f"{PREFIX}{name}", **(MODEL if hasattr(tool, "job") else NO_LINE))


class ToolCalls:
    """Middleware that numbers the calls of tools, and notes which are open. Gradio would make a tool of every endpoint,
    but chooses those that an address names: here it names those of `TOOLS`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or PATH not in scope["path"]:
            await self._app(scope, receive, send)
            return
        call = secrets.token_hex(8)
        calls.add(call)
        others = [header for header in scope["headers"] if header[0] != CALL.encode()]
        prefix = scope["app"].get_blocks().mcp_server_obj.tool_prefix  # the name of a Space
        only = "tools=" + ",".join(f"{prefix}{name}" for name in TOOLS)
        named = {"headers": [*others, (CALL.encode(), call.encode())], "query_string": only.encode()}
        try:
            await self._app({**scope, **named}, receive, send)
        finally:  # also when the connection is closed
            calls.remove(call)


def is_given_up(request: gr.Request) -> bool:
    """Whether the language model that called a tool has closed the connection. Gradio goes on with the call."""
    call = request.headers.get(CALL)
    return call is not None and call not in calls


def tools(engine: Engine, runs: Runs, budgets: Budgets) -> dict[str, Callable[..., Any]]:
    """The functions of `TOOLS` by name."""
    first, play = next(iter(engine.offered)), player(engine, runs, budgets)
    rest = {name: default for name, (_, default) in parameters().items()} | {"raw": None, "isolated": False}

    @job(RACE)
    def race(
        request: gr.Request,
        prompt: str,
        preset: str = first,
        drafter: str | None = None,
        k: int | str | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> str:
        """Measure speculative decoding on a real language model. The model (the target) writes an answer to the prompt
        twice: alone, and with a drafter that guesses the next tokens, which the target checks in one pass. Tells how
        many times as fast the drafter made it, writing (speed_up) and in all, with the time to read the prompt
        (speed_up_in_all), whether both texts are the same, and the first words of each. tokens_per_round must be above
        break_even for the drafter to pay. Takes seconds to a minute; others may wait before you. Use
        list_models for what can be chosen, and explain_round with the id that this returns to look into the race.

        Args:
            prompt: What to say to the model, as a person would.
            preset: The name of the target with its drafters, as list_models tells it.
            drafter: What guesses tokens, for example prompt-lookup, ngram or eagle. By default the preset's own.
            k: How many tokens are guessed for each pass, 1 to 16, or "auto". By default the preset's value.
            temperature: 0 takes the likeliest token each time, up to 2 samples. By default the preset's value.
            max_new_tokens: The most tokens to write. By default the preset's value.
            seed: The same seed, settings and machine give the same text.

        Returns:
            A summary with the race's id.
        """
        if isinstance(k, str):  # so the schema has its type
            with suppress(ValueError):  # refused below
                k = read_k(k)
        named = {"prompt": prompt, "preset": preset, "drafter": drafter, "k": k, "temperature": temperature}
        chosen = {**rest, **named, "max_new_tokens": max_new_tokens, "seed": seed, "readers": 1}
        # A session of its own: Gradio's server of tools calls for all models in one and the same session.
        for run, _ in play(None, request.client, chosen):
            if is_given_up(request):
                run.stop.set()
        return to_json(result_of(run))

    @job(work_of(Check))
    def check(request: gr.Request, preset: str = first, drafter: str | None = None, seconds: int = 60) -> str:
        """Find out whether speculative decoding is worth it for a model on this machine. Tries the drafters of the
        preset on a few prompts, examines the fastest on eight kinds of prompts in turns with the model alone, and
        answers yes (the whole 95% interval of the speed-up lies above 1.05), no (it lies below) or unclear. Tells the
        break-even, a fixed draft length k, and the arguments that make transformers, vLLM, llama.cpp and SGLang do the
        same. Others may wait before you.

        Args:
            preset: The name of the target with its drafters, as list_models tells it.
            drafter: The only drafter to examine. Left out, the fastest of all is found first.
            seconds: The most time to take, 10 to 600. Little time often gives the answer unclear.

        Returns:
            The answer with its figures, the drafters that were tried, and what to change.
        """
        try:
            engine.check(preset)
            usual = {field.name: field.value for field in Check.form()}
            chosen = Check.read({**usual, "drafters": [drafter] if drafter else [*ABLE], "seconds": seconds})
            run = runs.begin(LabRun(preset, Check, chosen, budgets.lab_seconds), None, request.client)
            for _ in runs.play(run, engine):
                if is_given_up(request):
                    run.stop.set()
        except Exception as error:
            raise gr.Error(engine.sentence(error), print_exception=False) from error
        found = json.loads(run.files["json"]) if run.files else {}
        return to_json({"preset": preset, "outcome": run.outcome, **{key: found.get(key) for key in OF_A_CHECK}})

    def explain_round(round: int, race: str | None = None, preset: str = first) -> str:
        """Look into one round of a race: which tokens the drafter guessed and with what probabilities, which of them
        the target accepted, which token it wrote itself (corrected after a wrong guess, bonus after right ones), and
        why. Probabilities are those after the temperature: at temperature 0 the likeliest token has 1 and the others 0,
        and the margin of a written token is how far its logit is ahead of the next. Give the id of a race that you ran;
        without it you get a recorded race of the preset. Needs no model.

        Args:
            round: Which round of the race, counted from 0. Each is one draft and one pass of the target.
            race: The id that the tool race returned. Left out, a recorded race of the preset is explained.
            preset: Whose recorded race is explained if there is no id, as list_models tells it.

        Returns:
            The guesses with their outcomes, the tokens written, and a reason for each.
        """
        try:
            if race is None:
                header, entries = recorded(preset)
            elif (run := runs.find(RaceRun, race)) and run.ended.is_set() and run.entries:
                header, entries = run.header, run.entries
            else:
                raise BadInput(
                    "There is no finished race of this id; the oldest ones are forgotten. Run one with race."
                )
            return to_json(explained(request_of(header), entries, round))
        except BadInput as error:
            raise gr.Error(str(error), print_exception=False) from error

    def list_models() -> str:
        """List the language models (presets: a target with its drafters) and the drafters that the tool race can use,
        which preset is loaded now, and which presets have a recorded race for explain_round. A race with another preset
        loads that one first, which can take minutes and a download. Needs no model."""
        status = engine.status_for(None)
        listed = {
            "loaded": status.loaded or None,
            "cannot_be_used_with_it": {**(status.unavailable or {})},
            "presets": [model(preset) for preset in engine.offered.values()],
            "drafters": {name: entry.does for name, entry in DRAFTERS.items() if not entry.asks},
            "most_new_tokens": budgets.new_tokens,
        }
        return to_json(listed)

    found: dict[str, Any] = {"race": race, "check": check, "explain_round": explain_round, "list_models": list_models}
    return {name: found[name] for name in TOOLS}


def model(preset: Preset) -> dict[str, Any]:
    """What `list_models` says of a preset."""
    own = preset.defaults
    return {
        "name": preset.name,
        "title": preset.title,
        "description": preset.description,
        "drafter": own.drafter,
        "k": own.k,
        "has_recording": preset.name in recorded_presets(),
    }


def result_of(run: RaceRun) -> dict[str, Any]:
    """What `race` answers when its run has ended: the JSON of a race without what fills a model's context."""
    assert run.outcome is not None
    found, verdict = run.outcome.as_dict(), run.outcome.verdicts[SPECULATIVE]
    return {
        "race": run.id,
        "preset": run.request.preset,
        "drafter": run.request.drafter,
        "k": run.request.settings.k,
        "speed_up": significant(found["speed_up"]),
        "speed_up_in_all": significant(found["speed_up_in_all"]),
        "busy": significant(found["busy"]),
        "break_even": significant(verdict.needed if verdict.is_long else None),
        "stopped": run.outcome.stopped,
        **{name: found[name] for name in ("comparison", "sentence")},
        **{name: in_short(found[name]) for name in (PLAIN, SPECULATIVE)},
    }


def in_short(lane: dict[str, Any]) -> dict[str, Any]:
    """A lane with the first words of its text, and some of its figures."""
    words = lane["text"].split()
    text = " ".join(words[:FIRST_WORDS]) + (" …" if len(words) > FIRST_WORDS else "")
    stats = ((name, lane["stats"][name]) for name in OF_A_LANE)
    return {"text": text, "stats": {name: significant(one) if isinstance(one, float) else one for name, one in stats}}


@cache
def recorded_presets() -> dict[str, str]:
    """The presets that have a recording, each with the name of one; of the one that the page opens with, that one."""
    names = sorted((path.name.removesuffix(SUFFIX) for path in RECORDINGS.glob(f"*{SUFFIX}")), key=OPENING.__ne__)
    found: dict[str, str] = {}
    for name in names:
        header, _ = read_trace(trace_lines(RECORDINGS / f"{name}{SUFFIX}")[:1])
        found.setdefault(header["preset"], name)
    return found


@cache
def recorded(preset: str) -> tuple[dict[str, Any], list[Entry]]:
    """The recording of a preset."""
    if preset not in recorded_presets():
        raise BadInput(f"There is no recorded race of {preset!r}. There is one of: {', '.join(recorded_presets())}.")
    return read_trace(trace_lines(RECORDINGS / f"{recorded_presets()[preset]}{SUFFIX}"))
