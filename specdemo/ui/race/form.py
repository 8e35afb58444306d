"""The form of the Race tab: its controls, what they begin with, and what their values ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import gradio as gr

from ...drafters.names import DRAFTERS
from ...drafters.names import menu as drafters
from ...models.presets import Defaults, Preset
from ...models.results import describe_results
from ...racing.request import AT_ONCE, DraftedLane, Request, read_request
from ...settings import AUTO, MATCH, MAX_K, MAX_NODES, REJECTION, SETTINGS, Field, one_of, whole_if_it_is
from ..budgets import Budgets, starting
from ..line import QUIET

MORE_LANES = ("lane2", "k2"), ("lane3", "k3")
# A box stands for K = auto, and another one for the rule.
ASKED = [name for name in SETTINGS if name != "rule"]
FIELDS = "prompt", "preset", "drafter", "auto", "match", *ASKED, "mode", "order", *chain(*MORE_LANES), AT_ONCE.name
NUMBERS = "whole", "number"  # kinds of fields
IN_SHORT = "drafter", "k", "auto", "tree", "temperature"  # settings that a race is called by
KINDS = 4  # of examples on the page
NO_LANE = ""
LANE_CHOICES = [("No lane", NO_LANE), *(choice for choice in drafters() if choice[1] != "none")]  # of one more lane
CHAT, RAW = "chat", "raw"
NODES = AUTO, 4, 8, 16, 32, MAX_NODES  # of the trees of one more lane
OF_LANES = [DraftedLane("", k) for k in (AUTO, *range(1, MAX_K + 1))], [DraftedLane("", k, tree=True) for k in NODES]
K_CHOICES = [(f"{'tree, ' * lane.tree}{lane.k}", lane.draft) for lane in chain(*OF_LANES)]
HIDE_MATCH = (
    "(t) => { document.getElementById('match').classList.toggle('sd-off', t === 0) }"  # it changes nothing then
)
OF_A_TREE, OF_A_CHAIN = "Tokens in each tree.", "Guesses per round."
SIZE_K = (  # of a tree K counts the tokens on all branches
    f"(tree, k) => ({{ maximum: tree ? {MAX_NODES} : {MAX_K}, value: tree ? k : Math.min(k, {MAX_K}), "
    f'info: tree ? "{OF_A_TREE}" : "{OF_A_CHAIN}", __type__: "update" }})'
)
INTERLEAVED, ISOLATED = "interleaved", "isolated"
OF_PRESET, OF_SERVER = "preset", "server"


def add_form(presets: Mapping[str, Preset], prompts: Mapping[str, Sequence[str]], budgets: Budgets) -> dict[str, Any]:
    """Add the controls to the page that is being built. Returns them by name; the first preset is chosen."""
    first = next(iter(presets.values()))
    chosen = starting_values(starting(first.defaults, budgets))
    form: dict[str, Any] = {}
    form["prompt"] = gr.Textbox(
        next((prompt for group in prompts.values() for prompt in group), ""),
        label="Prompt",
        lines=4,
        max_lines=4,
        placeholder="Ask something, or pick an example.",
        elem_id="prompt",
    )
    with gr.Row(elem_id="examples"):
        for kind, texts in [*prompts.items()][:KINDS]:
            example = gr.Button(kind.capitalize(), size="sm", variant="secondary", min_width=60)
            example.click(
                None, None, form["prompt"], js=f"() => specdemo.example({json.dumps([kind, texts])})", **QUIET
            )
    form["raced"] = gr.Radio(
        [("The preset", OF_PRESET), ("Your server", OF_SERVER)],
        value=OF_PRESET,
        label="What races",
        info="Your server uses its own drafter and K.",
        visible=False,  # until a server is named in Check
        elem_id="raced",
    )
    with gr.Row(elem_id="go"):
        form["run"] = gr.Button("Run", variant="primary", scale=2, min_width=80, elem_id="run")
        form["halt"] = gr.Button("Stop", scale=1, min_width=80, elem_id="stop")
    form["guesses"] = gr.Textbox("", visible=False)  # of a game: the script fills them in, see game.js
    gr.HTML('<p class="sd-message" role="alert" data-failed></p>', elem_id="problem")
    with gr.Accordion("Settings", open=False, elem_id="settings") as settings:
        _add_settings(form, presets, chosen, budgets)
    shown = [form[name] for name in IN_SHORT]
    # When the page is opened, and after every change of these.
    gr.on(None, None, shown, settings, js="(...values) => specdemo.inShort(values)", **QUIET)
    return form


def _add_settings(
    form: dict[str, Any], presets: Mapping[str, Preset], chosen: Mapping[str, Any], budgets: Budgets
) -> None:
    """What most visitors leave as it is."""
    first = next(iter(presets.values()))
    drafter, tree, temperature = chosen["drafter"], chosen["tree"], chosen["temperature"]
    form["drafter"] = gr.Dropdown(
        drafters(), value=drafter, label="Drafter", info=describe(first, drafter), elem_id="drafter"
    )
    form["all"] = gr.Checkbox(False, label="All drafters", container=False, elem_id="all-drafters")
    with gr.Row(elem_id="k-row"):
        form["k"] = gr.Slider(
            0,
            MAX_NODES if tree else MAX_K,
            chosen["k"],
            step=1,
            label="Draft length K",
            info=OF_A_TREE if tree else OF_A_CHAIN,
            buttons=[],
            min_width=100,
            elem_id="k",
        )
        form["auto"] = gr.Checkbox(chosen["auto"], label="auto", scale=0, min_width=80, elem_id="auto")
    form["k"].input(None, None, form["auto"], js="() => false")
    with gr.Row(elem_id="temperature-row"):
        bounds = {"minimum": SETTINGS["temperature"].low, "maximum": SETTINGS["temperature"].high}
        form["temperature"] = _number("temperature", temperature, gr.Slider, buttons=[], **bounds)
        form["match"] = gr.Checkbox(
            True,
            label="Same draws in both lanes",
            scale=0,
            min_width=120,
            elem_id="match",
            elem_classes=[] if temperature else ["sd-off"],
        )
    form["temperature"].change(None, form["temperature"], None, js=HIDE_MATCH)
    tokens = chosen["max_new_tokens"]
    form["max_new_tokens"] = _number("max_new_tokens", tokens, info=f"1 to {budgets.new_tokens:,}.")
    form["preset"] = gr.Dropdown(
        menu(presets),
        value=first.name,
        label="Preset",
        info=first.description,
        elem_id="preset",
    )
    with gr.Accordion("More settings", open=False, elem_id="more"):
        form["tree"] = gr.Checkbox(
            tree,
            label="Draft trees",
            info="Guess several tokens for one position. Experimental on a GPU.",
            elem_id="tree",
        )
        for (lane, lane_k), label in zip(MORE_LANES, ("Second drafter", "Third drafter"), strict=True):
            with gr.Row():
                form[lane] = gr.Dropdown(LANE_CHOICES, value=NO_LANE, label=label, min_width=140, scale=3, elem_id=lane)
                form[lane_k] = gr.Dropdown(K_CHOICES, value=AUTO, label="K", min_width=96, scale=2, elem_id=lane_k)
        form["readers"] = gr.Radio(
            list(AT_ONCE.choices), value=AT_ONCE.value, label=AT_ONCE.label, info=AT_ONCE.info, elem_id="readers"
        )
        form["seed"] = _number("seed", info="The same seed gives the same text.", min_width=80)
        form["mode"] = gr.Radio(
            [("Chat template", CHAT), ("Raw text", RAW)],
            value=chosen["mode"],
            label="Prompt format",
            info="A model without a chat template always continues raw text.",
            elem_id="mode",
        )
        form["order"] = gr.Radio(
            [("Alternating", INTERLEAVED), ("One after the other", ISOLATED)],
            value=INTERLEAVED,
            label="Schedule",
            elem_id="order",
        )
        with gr.Row():
            form |= {name: _number(name) for name in ASKED if name not in form and SETTINGS[name].kind in NUMBERS}
        form["stop"] = gr.Textbox("", label="Stop strings, one per line", lines=2, max_lines=4, elem_id="stop-strings")
        form["grammar"] = gr.Textbox("", label=SETTINGS["grammar"].label, lines=2, max_lines=8, elem_id="grammar")
    form["tree"].change(None, [form["tree"], form["k"]], form["k"], js=SIZE_K)


def _number(name: str, value: float | None = None, control: Callable[..., Any] = gr.Number, **more: Any) -> Any:
    """The control of a setting that is a number, which begins with its default if no `value` is named."""
    one = SETTINGS[name]
    step = 0.05 if one.kind == "number" else 1
    more = {"min_width": 100, "elem_id": name.replace("_", "-"), **more}
    return control(value=one.value if value is None else value, label=one.label, step=step, **more)


def starting_values(defaults: Defaults) -> dict[str, Any]:
    """What the fields that begin anew with a preset begin with, by name; the first is the drafter."""
    values, auto = asdict(defaults), defaults.k == AUTO
    mode = RAW if values.pop("raw") else CHAT
    return {**values, "k": SETTINGS["k"].value if auto else defaults.k, "auto": auto, "mode": mode}


STARTING = tuple(starting_values(Defaults()))


def of_link(presets: Mapping[str, Preset], budgets: Budgets) -> dict[str, Any]:
    """What a link may say: the fields, the choices of those that have some, and what each preset begins with."""
    choices = {
        "preset": list(presets),
        "drafter": list(DRAFTERS),
        "mode": [CHAT, RAW],
        "order": [INTERLEAVED, ISOLATED],
        AT_ONCE.name: list(AT_ONCE.choices),
        **{lane: [value for _, value in LANE_CHOICES] for lane, _ in MORE_LANES},
        **{k: [value for _, value in K_CHOICES] for _, k in MORE_LANES},
    }
    begins = {name: starting_values(starting(preset.defaults, budgets)) for name, preset in presets.items()}
    return {"fields": FIELDS, "choices": choices, "starting": begins}


def begin_with(preset: Preset, budgets: Budgets) -> list[Any]:
    """Updates of the field of presets and of those of `STARTING` for a preset that was chosen."""
    drafter, *others = starting_values(starting(preset.defaults, budgets)).values()
    return [gr.update(info=preset.description), gr.update(value=drafter, info=describe(preset, drafter)), *others]


def menu(presets: Mapping[str, Preset]) -> list[tuple[str, str]]:
    """The choices of the field of presets."""
    return [(preset.title, name) for name, preset in presets.items()]


def describe(preset: Preset, drafter: str) -> str:
    """What the form says of a drafter: what it is, and what was measured with this preset."""
    measured = describe_results(preset.results, drafter) if preset.results else ""
    return f"{DRAFTERS[drafter].description} {measured}".rstrip()


def read_form(values: Sequence[Any], most_new_tokens: int | None = None) -> Request:
    """The request that the raw values of the form, in the order of `FIELDS`, stand for."""
    named = dict(zip(FIELDS, values, strict=True))
    mode, order, auto, match = (named.pop(name) for name in ("mode", "order", "auto", "match"))
    one_of("prompt mode", mode, (CHAT, RAW))
    one_of("order of lanes", order, (INTERLEAVED, ISOLATED))
    Field("match", "", "switch", in_sentences="match").check(match)
    named |= {"raw": mode == RAW, "isolated": order == ISOLATED, "rule": MATCH if match else REJECTION}
    if auto is True:
        named["k"] = AUTO
    more = [(named.pop(lane), named.pop(draft)) for lane, draft in MORE_LANES]
    if lanes := [f"{drafter}:{draft}" for drafter, draft in more if drafter not in (NO_LANE, None)]:
        first = DraftedLane(named.pop("drafter"), whole_if_it_is(named.pop("k")), named.pop("tree") is True)
        named["lanes"] = [first.name, *lanes]
    return read_request(most_new_tokens=most_new_tokens, **named)
