"""The Lab tab: its forms, its runs, and what they have found. What is measured, `studies` says; how a run is followed,
study.js."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import getdoc
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import gradio as gr
from gradio.processing_utils import save_bytes_to_cache

from ...errors import BadInput
from ...settings import OF_SERVERS, Field
from ...studies.causes import Causes
from ...studies.check import SERVERS, Check
from ...studies.domains import Domains
from ...studies.explain import Theory, of_race, tried
from ...studies.lab import STUDIES
from ...studies.lossless import Lossless
from ...studies.profile import Profile
from ...studies.study import ABLE, EXAMPLE, Study
from ...studies.sweep import Sweep
from ...system.allowed import allowed
from ..budgets import Budgets
from ..engine import Engine
from ..line import QUIET
from ..part import Part
from ..race.form import OF_PRESET, OF_SERVER
from ..race.own_models import add_own_models
from ..race.own_servers import read_addresses
from ..race.run import RaceRun
from ..run_and_stop import halting, wire_job
from ..runs import Runs
from ..values import to_json
from .draw import drawn
from .results import REDRAW, Results, Updates, plain
from .run import LabRun, work_of

FRONT: tuple[type[Study], ...] = Check, Theory  # the studies of the tab Check
LAB: dict[str, tuple[type[Study], ...]] = {  # its tabs; all other studies are in one more
    "Cost and K": (Profile, Sweep),
    "Acceptance": (Domains, Causes),
    Lossless.title: (Lossless,),
}


def add_check(engine: Engine, runs: Runs, form: dict[str, Any], top: gr.HTML, budgets: Budgets) -> list[Any]:
    """Put the tab Check where it is called: whether speculation pays for a model or a server that is named, and what to
    expect of other numbers. Returns its fields for servers, if there are any.

    Args:
        form: the controls of the Race tab, of which a loaded model is chosen.
        top: as of `add_lab`.
    """

    def named() -> None:
        title = gr.Markdown(_checked(engine, next(iter(engine.presets))), elem_id="check-model")
        at_once = {"preprocess": False, "queue": False, **QUIET}
        form["preset"].change(lambda preset: _checked(engine, preset), form["preset"], title, **at_once)
        if budgets.own_models:
            add_own_models(engine, form, budgets)

    with gr.Tabs(elem_id="check"):
        check, _ = _add_tabs(FRONT, engine, runs, form["preset"], top, budgets, {Check: named})
    return check.wire_racing(form["raced"])


def lab_tabs() -> dict[str, tuple[type[Study], ...]]:
    """The studies of the Lab by the tabs that they are in."""
    named = {*FRONT, *chain.from_iterable(LAB.values())}
    return {**LAB, "More": tuple(study for study in STUDIES.values() if study not in named)}


def add_lab(engine: Engine, runs: Runs, preset: gr.Dropdown, top: gr.HTML, budgets: Budgets) -> None:
    """Put the Lab where it is called. It measures the chosen preset.

    Args:
        top: triggers `able` when it is known what the preset can use.
    """
    with gr.Tabs(elem_id="lab"):
        for title, studies in lab_tabs().items():
            if len(studies) == 1:
                _add_tabs(studies, engine, runs, preset, top, budgets)
                continue
            with gr.Tab(title) as tab, gr.Tabs():
                _add_tabs(studies, engine, runs, preset, top, budgets)
            tab.select(None, js=REDRAW)


def _add_tabs(
    studies: Sequence[type[Study]],
    engine: Engine,
    runs: Runs,
    preset: gr.Dropdown,
    top: gr.HTML,
    budgets: Budgets,
    above: Mapping[type[Study], Callable[[], None]] = {},  # never changed
) -> list[StudyTab]:
    """`above` adds to the top of a study's form."""
    servers = budgets.own_models and allowed(servers=True) != ()
    tabs = [StudyTab(study, study.form(servers), engine, runs, above.get(study)) for study in studies]
    for tab in tabs:
        tab.wire_run(preset, budgets.lab_seconds)
        tab.wire_drafters(preset, top)
        if tab.study is Theory:
            tab.wire_theory()
    return tabs


def _checked(engine: Engine, preset: Any) -> str:
    return f"Model: **{engine.presets[preset].title}**" if preset in engine.presets else ""


def _wait(seconds: Any) -> str:
    """How long a check takes, before there is a result."""
    return f"Takes about {plain(str(seconds))} seconds once the model is loaded."


class StudyTab:
    """One study: its form on the left, on the right what there is to show."""

    def __init__(
        self,
        study: type[Study],
        form: Sequence[Field],
        engine: Engine,
        runs: Runs,
        above: Callable[[], None] | None = None,
    ) -> None:
        """With something `above` its form, that is folded: fields for servers above the button, others below."""
        self.study, self.form, self.engine, self.runs = study, form, engine, runs
        with gr.Tab(study.title, id=study.name, elem_id=f"lab-{study.name}") as self.tab:
            self.measured = gr.State()  # `explain.Measurement`
            gr.Markdown(getdoc(study), elem_classes="lab-words")
            with gr.Row(elem_classes="lab-view"):
                with gr.Column(scale=0, min_width=330, elem_classes="lab-form"):
                    if above:
                        above()
                    first = [field for field in form if not above or field.group == SERVERS]
                    self.fields = dict(_controls(study.name, first, engine, folded=above is not None))
                    with gr.Column(elem_classes="lab-go"):
                        with gr.Row():
                            self.run = gr.Button(
                                study.button, variant="primary", scale=2, min_width=80, elem_classes="lab-run"
                            )
                            self.stop = gr.Button("Stop", min_width=80, elem_classes="lab-stop")
                        if study is Check:
                            self.race_it = gr.Button("Race it", visible=False)
                        if study is Theory:
                            self.from_race = gr.Button("Use my last race")
                        script = {"server_functions": [halting(runs)], "study": study.name, "title": study.title}
                        self.says = Part("mountStudy", ("ask", "go", "show"), elem_classes="lab-says", **script)
                    others = [field for field in form if field not in first]
                    self.fields |= _controls(study.name, others, engine, folded=True)
                with gr.Column(elem_classes="lab-results"):
                    if study is Check:
                        self.wait = gr.Markdown(_wait(self.fields["seconds"].value), elem_classes="lab-wait")
                        at_once = {"preprocess": False, "queue": False, **QUIET}
                        self.fields["seconds"].input(_wait, self.fields["seconds"], self.wait, **at_once)
                    self.results = Results(study)
                    with gr.Row(visible=False, elem_classes="lab-files") as self.files:
                        self.downloads = {
                            kind: gr.DownloadButton(f"Download {kind.upper()}", size="md", scale=0, min_width=170)
                            for kind in ("json", "csv", *["html"] * study.has_page)
                        }
        self.tab.select(None, js=REDRAW)

    def wire_run(self, preset: gr.Dropdown, seconds: float) -> None:
        """`seconds` are the most that a run may take."""
        fields, script = [preset, *self.fields.values()], f"specdemo.lab.{self.study.name}"
        read = partial(self.read, seconds=seconds)
        wire_job(self.engine, self.runs, work_of(self.study), self.says, script, self.run, fields, read)
        self.stop.click(None, js=f"() => {script}.stop()")
        shown = [*self.results.parts, self.measured, *self.numbers, self.files, *self.downloads.values()]
        shown += [self.race_it, self.wait] if self.study is Check else []
        self.says.show(self.show, None, shown, queue=False, trigger_mode="always_last", **QUIET)

    @property
    def numbers(self) -> list[Any]:
        """The three fields of the theory, which a measurement fills in."""
        return list(self.fields.values())[:3] if self.study is Theory else []

    def read(self, values: Any, seconds: float) -> LabRun:
        """The run that the raw values of the preset and of the form ask for."""
        preset, *given = values
        self.engine.check(preset)
        return LabRun(preset, self.study, self.study.read(dict(zip(self.fields, given, strict=True))), seconds)

    def show(self, request: gr.Request) -> Updates:
        """What there is of the visitor's run."""
        run = self.runs.latest(request.session_hash, LabRun, work_of(self.study))
        if run is None:
            return {self.measured: gr.skip()}
        with self.engine.other_work():  # the last picture is shown when the next in line may race already
            updates = self.results.update(run.picture) if run.picture else {}
            for kind, text in run.files.items():
                part, name = self.downloads[kind], f"specdemo-{self.study.name}.{kind}"
                updates[part] = save_bytes_to_cache(text.encode(), name, part.GRADIO_CACHE)
        if run.measured:
            updates[self.measured] = run.measured
        updates |= {self.fields[name]: value for name, value in run.values.items()}
        if self.study is Check:
            updates |= {self.race_it: gr.update(visible=True)} if run.files else {}
            updates[self.wait] = gr.update(visible=not run.picture)
        return updates | {self.files: gr.update(visible=bool(run.files))}

    # --- drafters: what the preset can use, as far as that is known by now

    def wire_drafters(self, preset: gr.Dropdown, top: gr.HTML) -> None:
        fields = [field for field in self.form if field.kind.startswith("drafter")]
        controls = [self.fields[field.name] for field in fields]

        def missing(name: Any) -> Mapping[str, str]:
            status = self.engine.status
            return (status.preset == name and status.unavailable) or {}

        def keep(name: Any, *chosen: Any) -> Updates:
            """It is known what the preset can use: what was chosen stays where it can be used."""
            shown = zip(controls, fields, chosen, strict=True)
            return {part: offer(field, self.engine, name, missing(name), value) for part, field, value in shown}

        def begin(name: Any) -> Updates:
            """A preset was chosen: each begins as that has it."""
            return keep(name, *[None] * len(controls))

        if not controls:
            return
        preset.change(begin, preset, controls, preprocess=False, queue=False, **QUIET)
        top.able(keep, [preset, *controls], controls, preprocess=False, queue=False, **QUIET)

    # --- what is checked can be raced

    def wire_racing(self, raced: gr.Radio) -> list[Any]:
        """Let what is checked be `raced`: a server that is named, else the chosen preset. Returns the fields for
        servers."""
        servers = [self.fields[field.name] for field in self.form if field.kind in OF_SERVERS]

        def choose(*addresses: Any) -> Updates:
            chosen: dict[str, Any] = {"value": OF_PRESET}
            try:
                if any(addresses):
                    read_addresses(addresses)
                    chosen = {"value": OF_SERVER, "visible": True}
            except BadInput as error:
                return {self.says: message(str(error), failed=True)}
            return {self.says: message(""), raced: gr.update(**chosen)}

        at_once = {"preprocess": False, "queue": False, **QUIET}
        gr.on(  # a server that is named can be raced before it is checked
            [part.change for part in servers], lambda: gr.update(visible=True), None, self.race_it, **at_once
        )
        chose = self.race_it.click(choose, servers, [self.says, raced], **at_once)
        chose.success(None, self.says, None, js="(news) => JSON.parse(news).failed || specdemo.showRace()")
        return servers

    # --- the theory answers at once, and takes numbers from a race

    def wire_theory(self) -> None:
        outputs = [self.says, self.measured, *self.numbers, *self.results.parts]

        def attempt(event: gr.EventData, measured: Any, *numbers: Any) -> Updates:
            cleared: Updates = {} if isinstance(event.target, gr.Tab) else {self.says: ""}
            return cleared | answer(measured, numbers)

        def answer(measured: Any, numbers: Sequence[Any]) -> Updates:
            try:
                with self.engine.other_work():
                    sections = drawn(tried(dict(zip(self.fields, numbers, strict=False)), measured))
            except Exception as error:
                return {self.says: message(self.engine.sentence(error), failed=True)}
            return self.results.update(sections)

        def take(request: gr.Request) -> Updates:
            try:
                with self.engine.other_work():
                    race = self.runs.latest(request.session_hash, RaceRun)
                    measured = of_race(race.entries if race else [], race.request.drafter if race else "")
            except Exception as error:
                return {self.says: message(self.engine.sentence(error), failed=True)}
            found = {self.fields[name]: value for name, value in measured.numbers.items()}
            words = message("The numbers and the measured point are those of your last race.")
            return {
                **answer(measured, [*measured.numbers.values()]),
                **found,
                self.measured: measured,
                self.says: words,
            }

        # One event for all of them: the answer to an earlier number cannot come after that to a later one.
        changes, inputs = [self.tab.select, *(number.input for number in self.numbers)], [self.measured, *self.numbers]
        gr.on(changes, attempt, inputs, outputs, queue=False, trigger_mode="always_last", **QUIET)
        self.from_race.click(take, None, outputs, queue=False, **QUIET)


def message(words: str, failed: bool = False) -> str:
    """Words for the page that are not of a run, see study.js."""
    return to_json({"words": words, "failed": failed})


def _controls(study: str, form: Sequence[Field], engine: Engine, folded: bool = False) -> Iterator[tuple[str, Any]]:
    """The controls of the form by name, where they are called, each group below a heading or `folded`."""
    for group, fields in groupby(form, attrgetter("group")):
        with gr.Accordion(group, open=False) if folded else nullcontext():
            if group and not folded:
                gr.Markdown(f"### {group}")
            for field in fields:
                yield field.name, _control(field, f"lab-{study}-{field.name}", engine)


def _control(field: Field, elem_id: str, engine: Engine) -> Any:
    named = {"label": field.label, "elem_id": elem_id}
    choices = [(words, value) for value, words in field.choices.items()]
    match field.kind:
        case "whole" | "number":
            step = 1 if field.kind == "whole" else 0.05
            return gr.Number(field.value, info=f"{field.bounds()}. {field.info}".strip(), step=step, **named)
        case "address" | "key":
            hidden = "password" if field.kind == "key" else "text"
            names = allowed(servers=True) if field.info == EXAMPLE else None
            info = f"This Space allows: {', '.join(names)}." if names else field.info
            return gr.Textbox(field.value, info=info or None, type=hidden, max_lines=1, **named)
        case "text":
            return gr.Textbox(field.value, lines=2, max_lines=6, **named)
        case "choice":
            return gr.Radio(choices, value=field.value, **named)
    part = gr.Dropdown if field.kind == "drafter" else gr.CheckboxGroup
    begins = offer(field, engine, next(iter(engine.presets)), {})
    return part(**{name: begins[name] for name in ("choices", "value")}, **named)


def offer(field: Field, engine: Engine, preset: Any, missing: Mapping[str, str], chosen: Any = None) -> dict[str, Any]:
    """An update of a control for drafters: those that the preset can use."""
    if preset not in engine.presets:
        return gr.skip()
    able = [name for name in ABLE if name not in missing]
    own = engine.presets[preset].defaults.drafter
    usual = own if own in able else next(iter(able), None)
    if field.kind == "drafter":
        value: Any = chosen if chosen in able else usual
    else:
        kept = [name for name in able if name in chosen] if isinstance(chosen, list) else []
        value = kept or (able if field.value == "all" else [usual])
    return gr.update(choices=able, value=value)
