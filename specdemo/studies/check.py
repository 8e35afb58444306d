"""Does it pay: yes, no or unclear, within a time that is given.

Of a preset, drafters are tried on a few prompts first. The fastest is then examined on other prompts, so that its
figures are not those that it was chosen by; if it does not pay, the next one is. A server is examined as it is.
`examination` measures, `diagnosis` says what it means.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from math import inf
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..racing.bandwidth import NOWHERE
from ..racing.busy import best_passes, remember
from ..servers.flags import FLAGS, elsewhere
from ..settings import AUTO, Field, Settings
from ..system.imports import LazyModule
from .diagnosis import NO, PAYS, UNCLEAR, YES, Diagnosis
from .plots import ALONE, TIMES, Plot, Section
from .report import PLOTS, SPEED_UP, TABLES, html_page, tables_of
from .study import DRAFTERS, EXAMPLE, Study, server_field, some_of_each
from .summaries import Figures, Row, average, share, summarise
from .tables import Rows, Table, table

if TYPE_CHECKING:
    from ..models import store
    from ..models.loaded import Loaded
    from . import examination, perplexity, writers
else:
    examination = LazyModule("specdemo.studies.examination")
    writers = LazyModule("specdemo.studies.writers")
    perplexity = LazyModule("specdemo.studies.perplexity")
    store = LazyModule("specdemo.models.store")

LOOKS = 3  # at most, at the interval: after each prompt of all kinds
TRIAL_SHARE = 0.4  # of the time
TRIAL_TOKENS = 32
TRIAL_EACH = 2  # prompts that are easy to guess for, and as many that are hard
IN_REACH = 0.8  # of the fastest: slower drafters are not tried further
MOST_KEPT = 4  # drafters after each prompt
TOKENS = 16, 96  # of an examined text: the fewest, and the most
SIDES = 2.5  # how often a text is written: by the target alone, with the drafter, and some time for prompts
SERVERS, BOUNDS = "Your own server", "Drafters and time"
BASELINE, NONE = "Without it, no speed-up can be computed.", "0 leaves this out."
INSTEAD = "Instead of models, a running vLLM, llama.cpp server or SGLang."
MOST_TIME = "The most time that it takes once the models are loaded."
MOST_AT_ONCE, LONGEST = "The most requests that a server gets at once.", "The longest prompt of a server, in tokens."
OWN_TABLES = 2  # at most, besides those of a diagnosis
AT_ONCE = 1, 2, 4, 8, 16
CONTEXTS = 256, 1024, 4096  # tokens of a prompt, about
FIGURES: Figures = {  # of a drafter on a few prompts, before one is chosen; `needed` tokens a round are its break-even
    "texts": len,
    "tokens_per_round": share(lambda run: run["tokens"] - 1, "rounds"),
    "needed": average("cost", geometric_mean),
    "speed_up": average("speed_up", geometric_mean),
}
ANSWERS = {YES: "Yes, it pays", NO: "No, it does not pay", UNCLEAR: "Unclear"}


class Check(Study):
    """Is speculation worth it for a model, or on a server that you run (vLLM, llama.cpp's server or SGLang)? Drafters
    are tried on the model, and the fastest is examined on eight kinds of prompts, in turns with the target alone.
    """

    name = "check"
    title = "Does it pay?"
    button = "Check"
    fields = (
        replace(DRAFTERS, value="all", label="Drafters to try", group=BOUNDS),
        Field("seconds", "Seconds, at most", "whole", 120, 10, 600, group=BOUNDS, help=MOST_TIME),
        replace(server_field("server", "Address of the server", "address", SERVERS, EXAMPLE), help=INSTEAD),
        server_field("server_key", "Its API key", "key", SERVERS),
        server_field("baseline", "The same server without speculation", "address", SERVERS, BASELINE),
        server_field("baseline_key", "Its API key", "key", SERVERS),
        Field("at_once", "Requests at once, at most", "whole", 4, 0, 16, info=NONE, group=SERVERS, help=MOST_AT_ONCE),
        Field("context", "Longest prompt, tokens", "whole", 0, 0, 4096, info=NONE, group=SERVERS, help=LONGEST),
    )
    has_page = True
    heading = "Drafters tried"
    columns = (
        ("drafter", "drafter", ""),
        ("texts", "texts", "d"),
        ("tokens_per_round", "tokens a round", ".2f"),
        ("needed", "needed to break even", ".2f"),
        ("speed_up", "speed-up", ".2f"),
    )
    tried = Plot(
        "Speed-up of the drafters tried",
        "On a few prompts, to choose the one that is examined. An outlined bar is slower than the target alone.",
        {"speed_up": ""},
        TIMES,
        "drafter",
        rule=ALONE,
    )
    plots = (SPEED_UP,), (tried, *PLOTS)
    has_details = True
    most_tables = OWN_TABLES + len(TABLES)

    def __init__(self, loaded: Loaded | None, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)  # type: ignore[arg-type]  # a server is checked without one
        self.trials: dict[str, list[examination.Sample]] = {}
        self.examined: list[str] = []  # drafters; the figures are those of the last
        self.perplexities: list[Row] = []  # where the weights are quantized
        self.not_compared: list[str] = []  # why some are missing then
        self.found: Diagnosis | None = None  # what there is so far
        self._environment: Mapping[str, Any] = NOWHERE
        self._began = time.monotonic()
        self._over = False  # until then an answer would change before the eyes of who reads it

    def run(self) -> Iterator[str]:
        try:
            yield from self._run()
        finally:
            self._over = True

    def _run(self) -> Iterator[str]:
        self.steps, self._began = self.chosen["seconds"], time.monotonic()
        if self.chosen.get("baseline") and not self.chosen.get("server"):
            raise BadInput("Give the address of the server, too: a preset is compared with its own target alone.")
        if self.chosen.get("text") and (self.chosen.get("server") or not perplexity.is_quantized(self.loaded)):
            raise BadInput("A text is for comparing quantized weights: choose the weights int8, int4 or stored.")
        with ExitStack() as opened:
            parts = self._of_server(opened) if self.chosen.get("server") else self._of_preset()
            for words in opened.enter_context(closing(parts)):
                self.done = min(self.steps, int(time.monotonic() - self._began))
                yield words

    # --- a preset

    def _of_preset(self) -> Generator[str]:
        """Try the drafters, then examine the fastest until it is clear whether it pays.

        Quantized weights are compared with float32 ones first. That loads the model again, so it has time of its own.
        """
        if perplexity.is_quantized(self.loaded):
            yield from self._compare_weights()
            self._began = time.monotonic()
        self._environment = {"best_passes": best_passes(self.loaded)}
        alone = writers.PresetWriter(self.loaded, "none", 0)
        yield from self._try(alone, self._began + TRIAL_SHARE * self.steps)
        texts = [sample.alone for samples in self.trials.values() for sample in samples]
        rate = median(text.stats.tokens_per_second or 0.0 for text in texts if text)
        kinds = len(some_of_each("domains", 1))
        fewest, most = TOKENS
        name: str | None = self.best
        while name and (seconds := self._began + self.steps - time.monotonic()) > 0:
            self.examined.append(name)
            tokens = min(most, max(fewest, int(seconds * rate / (SIDES * kinds))))
            plan = examination.Plan(LOOKS, Settings(max_new_tokens=tokens), seconds=seconds)
            with closing(self._examine(writers.PresetWriter(self.loaded, name, AUTO), alone, plan)) as steps:
                for words in steps:
                    yield words
                    if self.found and len(self.found.samples) % kinds == 0 and self._answer != UNCLEAR:
                        break
            if self.found:
                remember(self.loaded, self.found.pace)
            name = self._next if self._answer == NO else None

    def _compare_weights(self) -> Iterator[str]:
        try:
            text = self.chosen.get("text", "")
            yield from perplexity.compare_weights(self.loaded, self.perplexities, self.not_compared, text)
        except (BadInput, store.LoadError, MemoryError) as error:
            self.not_compared.append(f"The perplexity was not compared with float32 weights: {error}")

    def _try(self, alone: writers.Writer, end: float) -> Iterator[str]:
        """Each drafter on the same prompts in turns; those that are out of reach of the fastest stop after two."""
        own = self.loaded.preset.defaults.drafter  # first, in case that there is no time for others
        names = sorted(self.chosen["drafters"], key=lambda name: name != own)
        tried = {name: writers.PresetWriter(self.loaded, name, AUTO) for name in names}
        settings = Settings(max_new_tokens=TRIAL_TOKENS)
        for number, prompt in enumerate(some_of_each("easy-hard", TRIAL_EACH), start=1):
            for name, writer in tried.items():
                try:
                    found = examination.sample(writer, alone, prompt, settings, end if self.trials else inf)
                except examination.OutOfTime:
                    return
                self.trials.setdefault(name, []).append(found)
                yield f"Trying drafters: {name}"
            ranked = sorted(tried, key=self._speed, reverse=True)  # the time may end before the last of them
            if number > 1:  # one short text says little
                ranked = [name for name in ranked if self._speed(name) > IN_REACH * self._speed(ranked[0])][:MOST_KEPT]
            tried = {name: tried[name] for name in ranked}
            if len(tried) == 1:
                return

    @property
    def best(self) -> str:
        """The fastest of the drafters that were tried on most prompts."""
        most = max(map(len, self.trials.values()))
        return max((name for name, found in self.trials.items() if len(found) == most), key=self._speed)

    @property
    def _next(self) -> str | None:
        """The fastest drafter that was tried but not examined, if its trials say that it may pay."""
        others = [name for name in self.trials if name not in self.examined and self._speed(name) > PAYS]
        return max(others, key=self._speed, default=None)

    def _speed(self, name: str) -> float:
        """1 where nothing was drafted."""
        known = [found for sample in self.trials[name] if (found := sample.speed_up)]
        return geometric_mean(known) if known else 1.0

    # --- a server

    def _of_server(self, opened: ExitStack) -> Generator[str]:
        """At temperature 0: two servers share no random numbers."""
        mine, alone = writers.server_writer(opened, self.chosen["server"], self.chosen.get("server_key")), None
        if address := self.chosen.get("baseline"):
            alone = writers.server_writer(opened, address, self.chosen.get("baseline_key"))
        at_once = [count for count in AT_ONCE if count <= self.chosen["at_once"]]
        contexts = [tokens for tokens in CONTEXTS if tokens <= self.chosen["context"]]
        settings = Settings(0, max_new_tokens=TOKENS[1])
        yield from self._examine(mine, alone, examination.Plan(2, settings, at_once, contexts, self.steps))

    # --- what was found

    def _examine(self, mine: writers.Writer, alone: writers.Writer | None, plan: examination.Plan) -> Generator[str]:
        study, self.found = examination.Examination(mine, alone, plan), None
        looks = LOOKS * max(1, len(self.examined))
        for words in study.run():
            self.found = Diagnosis(study, looks, self._environment)
            yield words
        if study.samples:
            self.found = Diagnosis(study, looks, self._environment)  # with what was left out

    @property
    def answer(self) -> str:
        """It is no only if it is no with each drafter that may pay by its trials."""
        return UNCLEAR if self._answer == NO and self._next else self._answer

    @property
    def _answer(self) -> str:
        """The answer for the drafter that was examined last."""
        return self.found.answer if self.found else UNCLEAR

    def in_short(self) -> str:
        return self.found.verdict if self.found else "Nothing was measured."

    @property
    def k(self) -> int | None:
        """The draft length that should be fastest where K is fixed, by what was measured; 0 is none."""
        return self.found.best_k if self.found else None

    @property
    def verdict(self) -> str:
        """The answer and its figure in one sentence."""
        found = self.found
        if self.answer == UNCLEAR and found is not None and found.pace.busy:
            return f"{ANSWERS[UNCLEAR]}. {found.basis()[0]}"
        if found is None or found.often == 0:
            reason = "nothing was measured" if found is None else "nothing was drafted"
        else:
            reason = "the target alone was not timed" if found.speed_up is None else f"with {found.gain}"
        return f"{ANSWERS[self.answer]}: {reason}."

    @property
    def to_do(self) -> str:
        """The one thing to do about it, with its flag."""
        found, seconds = self.found, int(self.chosen.get("seconds", 0))
        if found and found.pace.busy:
            return "Check again while nothing else runs on this machine."
        if found and (found.baseline is None or found.often == 0):
            return found.advice()[-1 if found.often else 0]
        if found and found.speed_up and (fewer := self._fewer_bytes) > found.speed_up.mean:
            return (
                f"Check again with the weights as the file stores them, --weights stored: a pass reads {fewer:.1f} "
                "times fewer bytes, which can be worth more than a drafter."
            )
        if self.answer == UNCLEAR or found is None:
            return f"Check again with more than {seconds} seconds."
        flags, served = FLAGS[str(found.engine["engine"])], not self.trials
        if self.answer == NO:
            return f"{flags.off.capitalize()}." if served else f"Leave drafting off: {flags.off}."
        if served:
            return next(iter(found.on_k()), "Keep speculation as it is.")
        fixed = f", and K = {self.k} where the draft length is fixed" * bool(self.k and found.adapts)
        return f"Draft with {self.examined[-1]}{fixed}."

    @property
    def _fewer_bytes(self) -> float:
        """How many times fewer bytes a pass on a CPU reads if the weights stay as a GGUF file has them; else 0."""
        facts = self.loaded.environment() if self.trials else {}
        if facts.get("device") != "cpu" or perplexity.is_quantized(self.loaded):
            return 0
        size = getattr(getattr(self.loaded.preset, "target", None), "size", 0)  # of other sources it is not known
        return facts["bytes_per_pass"] / size if size else 0

    def paste(self) -> str:
        """The result for another place: the answer, the model and the machine, then what to do and the flags."""
        if self.found is None:
            return ""
        model, machine = str(self.found.engine.get("model", "")), ""
        if self.trials:
            facts = self.loaded.environment()
            cores = f", {facts['threads']} threads" * (facts["device"] == "cpu")
            model, machine = f"{model} in {facts['weights_dtype']}", f"{facts['device_name']}{cores}"
        else:
            machine = f"{self.found.engine['engine']} {self.found.engine.get('version') or ''}".strip()
        first = " ".join(["Does speculative decoding pay?", self.verdict, *(f"{part}." for part in (model, machine))])
        flags = [f"{row['program']}: {row['argument']}" for row in self.elsewhere()]
        return "\n".join([first, self.to_do, *flags])

    def words(self) -> list[str]:
        """The verdict, what to do, and the rest."""
        found, lines = self.found, [self.verdict, self.to_do]
        if found is None:
            return lines + self.not_compared
        untried = [name for name in self.chosen["drafters"] if name not in self.trials] if self.trials else []
        lines += [f"There was no time to try {', '.join(untried)}."] * bool(untried)
        if self._answer == NO and self._next:
            lines.append(f"{self._next} was faster when the drafters were tried, and there was no time to examine it.")
        rest = [*found.basis(), *self.not_compared, *found.advice(), *found.facts(), *found.left_out]
        return [*lines, *(line for line in rest if line != self.to_do)]

    def elsewhere(self) -> list[dict[str, str]]:
        """The arguments with which other programs do the same, where it pays and they can."""
        if self.answer != YES or not self.k or not self.trials:
            return []
        drafter, draft = self.examined[-1], str(self.loaded.preset.draft_model or "")
        return [{"program": name, "argument": flag} for name, flag in elsewhere(drafter, self.k, draft)]

    def tables(self) -> list[Table]:
        """At most `OWN_TABLES`, then those of the diagnosis."""
        shown = super().tables() if self.trials else []
        if self.perplexities:
            shown.append(table("What the weights cost in quality", perplexity.COLUMNS, self.perplexities))
        return shown + (tables_of(self.found) if self.found else [])

    def drawn(self) -> Mapping[str, Rows]:
        return {"": self.rows(), **{name: getattr(self.found, name) for name in TABLES if self.found}}

    def sections(self) -> list[Section | None]:
        """While it runs, the chart alone: of the drafters that were tried, then of the one that is examined."""
        rows, found = self.drawn(), self.found
        charts = [(plot, rows.get(plot.part, ())) for plot in (SPEED_UP, *self.plots[1])]
        if not (found and found.speed_up):
            charts = charts[1:]
        first = next((chart for chart in charts if chart[1]), None)
        if found and found.pace.busy:
            first = None  # its figures are those of the other programs, too
        if not self._over:
            return [Section(plots=[first])] if first else []
        verdict, to_do, *rest = self.words()
        shown = Section(verdict, [to_do], [first] if first else [], paste=self.paste())
        others = [chart for chart in charts if chart != first]
        return [shown, Section("", [*rest], others, self.tables())] if found else [shown]

    def rows(self) -> list[dict[str, Any]]:
        """The drafters that were tried, the fastest first."""
        trials = sorted(self.trials, key=self._speed, reverse=True)
        runs = [{"drafter": name, **sample.run} for name in trials for sample in self.trials[name]]
        return summarise(runs, ("drafter",), FIGURES, ("prompt",))

    def result(self) -> dict[str, Any]:
        found = self.found.as_dict() if self.found else {}
        own = {"answer": self.answer, "in_short": self.in_short(), "paste": self.paste(), "pays": PAYS, "k": self.k}
        quality = {"perplexity": self.perplexities} if self.perplexities else {}
        return {**own, "trials": self.rows(), "elsewhere": self.elsewhere(), **quality, **found}

    def page(self) -> str:
        return html_page(self.words(), self.paste(), self.found.measured(), self.tables()) if self.found else ""
