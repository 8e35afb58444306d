"""Why did acceptance drop: the causes that people report, each measured on its own, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import BadInput
from ..settings import Field
from ..system.imports import LazyModule
from .grid import Grid
from .perplexity import loaded_as
from .plots import OVER_TEXTS, passing
from .prompts import Prompt
from .statistics import Parts, rates_differ
from .study import DRAFTER, EXAMPLE, RULE, SEED, k_field, server_field, some_of_each, with_notes
from .summaries import ACCEPTANCE_RATE, TOKENS_PER_ROUND, Figures, Row, parts, summarise
from .tables import Rows, group_by

if TYPE_CHECKING:
    from ..models.loaded import Loaded
    from . import writers
else:
    writers = LazyModule("specdemo.studies.writers")

TEXT, LANGUAGE, TEMPERATURE, CONTEXT = "kind of text", "language", "temperature", "context"
THINKING, WEIGHTS, PLACE = "thinking", "weights", "place in the text"
TEMPERATURES = 0.0, 0.5, 1.0
CONTEXTS = 256, 1024
SERVER = "Your own server"
AS_LOADED = "as loaded"
HALVES = "first half", "second half"


class Causes(Grid):
    """A drafter that guessed well guesses badly now. Why? This view changes one thing at a time: the kind of text, the
    language, the temperature, the length of the prompt, thinking, and the number type of the weights. It says which of
    them changes how many guesses are accepted, and by how much.
    """

    name = "causes"
    title = "Why it drops"
    summary = "Why did acceptance drop: by kind of text, language, temperature, context, thinking and weights."
    fields = (
        DRAFTER,
        k_field(4),
        Field("each", "Prompts of each kind", "whole", 2, 1, 2, help="Prompts of each kind of text."),
        Field("max_new_tokens", "Tokens per text", "whole", 64, 16, 512, help="The most tokens of each text."),
        Field(
            "other_weights",
            "Also try weights in",
            "choice",
            "none",
            choices={"none": "no other type", "int8": "int8", "int4": "int4"},
            help="Load the same model with weights of this type, too: int8, int4 or none.",
        ),
        SEED,
        RULE,
        server_field("server", "Address of a server, instead of the preset", "address", SERVER, EXAMPLE),
        server_field("server_key", "Its API key", "key", SERVER),
    )
    axes = ("cause", "condition")
    figures: ClassVar[Figures] = {
        "texts": lambda runs: len({run["text"] for run in runs}),
        "acceptance_rate": ACCEPTANCE_RATE,
        "tokens_per_round": TOKENS_PER_ROUND,
    }
    units = ("text",)
    timed = False
    heading = "What changes the acceptance rate"
    columns = (
        ("cause", "cause", ""),
        ("condition", "condition", ""),
        ("texts", "texts", "d"),
        ("acceptance_rate", "accepted of tested", ".0%"),
        ("tokens_per_round", "tokens a round", ".2f"),
        ("change", "change", "+.0%"),
        ("clear", "more than chance", "yes"),
    )
    plots = (
        [
            passing(f"By {cause}", OVER_TEXTS, at="condition", part=cause)
            for cause in (TEXT, LANGUAGE, TEMPERATURE, CONTEXT, THINKING, WEIGHTS, PLACE)
        ],
    )

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        super().__init__(loaded, chosen)
        self.writers: dict[Any, writers.Writer] = {}
        self.plan([*self._texts()])

    def check_run(self, names: Row) -> None:
        """What cannot be written is left out."""

    def _texts(self) -> Iterator[Row]:
        """Prompts under one condition after the other. The others of a cause are compared with its first."""
        usual, few = some_of_each("causes", self.chosen["each"]), some_of_each("causes", 1)[::2]
        for category, prompts in group_by(usual, lambda prompt: prompt.category).items():
            yield from _condition(TEXT, category, prompts)
        for language, prompts in group_by(some_of_each("languages", 3), lambda prompt: prompt.category).items():
            yield from _condition(LANGUAGE, language, prompts)
        for temperature in TEMPERATURES:
            yield from _condition(TEMPERATURE, f"{temperature:g}", few, temperature=temperature)
        yield from _condition(CONTEXT, "the prompt alone", few)
        for tokens in CONTEXTS:
            longer = [Prompt(p.id, p.category, with_notes(p.prompt, tokens, at)) for at, p in enumerate(few)]
            yield from _condition(CONTEXT, f"after {tokens:,} tokens", longer)
        if self.chosen.get("server"):
            return
        if "enable_thinking" in str(self.loaded.tokenizer.chat_template or ""):
            for name, on in (("off", False), ("on", True)):
                yield from _condition(THINKING, name, few, thinking=on)
        if (other := self.chosen["other_weights"]) != "none":
            yield from _condition(WEIGHTS, AS_LOADED, few)
            yield from _condition(WEIGHTS, other, few, dtype=other)

    def run(self) -> Iterator[str]:
        with ExitStack() as self.opened:
            yield from super().run()

    def write(self, names: Row) -> Iterator[Row]:
        """A condition that fails is left out, unless it is the first."""
        condition = f"{names['cause'].capitalize()}, {names['condition']}: "
        if condition in self.left_out:
            return
        try:
            found = self._writer(names).write(names["prompt"], self.settings_of(names))
        except BadInput as error:
            if not self.runs:
                raise
            self.left_out += f"{condition}{error} "
            return
        counts = {"tested": found.stats.tested, "accepted": found.stats.accepted or 0}
        yield {**counts, "tokens": len(found.tokens), "rounds": found.rounds}
        for half, (tested, accepted) in zip(HALVES, found.halves if names["cause"] == TEXT else (), strict=False):
            of_half = {"cause": PLACE, "condition": half, "tested": tested, "accepted": accepted}
            yield {**of_half, "tokens": 1, "rounds": 0}

    def _writer(self, names: Row) -> writers.Writer:
        """Each is made once."""
        made = names.get("dtype"), names.get("thinking")
        if made not in self.writers:
            self.writers[made] = self._make_writer(*made)
        return self.writers[made]

    def _make_writer(self, dtype: str | None, thinking: bool | None) -> writers.Writer:
        if address := self.chosen.get("server"):
            return writers.server_writer(self.opened, address, self.chosen.get("server_key"))
        loaded = self.loaded
        if dtype:
            loaded = self.opened.enter_context(loaded_as(loaded.preset, dtype, str(loaded.device)))
        if thinking is not None:
            kwargs = {**loaded.preset.chat_template_kwargs, "enable_thinking": thinking}
            loaded = replace(loaded, preset=replace(loaded.preset, chat_template_kwargs=kwargs))
        return writers.PresetWriter(loaded, self.chosen["drafter"], self.chosen["k"])

    def at(self, names: Row) -> str:
        return f"{names['cause'].capitalize()}: {names['condition']}"

    def drawn(self) -> Mapping[str, Rows]:
        return group_by(self.rows(), lambda row: row["cause"])

    def rows(self) -> list[Row]:
        """A row for each condition. `change` is that of the acceptance rate against the first one of its cause, of a
        kind of text against all other kinds; `clear` says whether chance alone would rarely make it so large."""
        runs = sorted(self.runs, key=lambda run: run["cause"] == PLACE)
        conditions = group_by(runs, lambda run: (run["cause"], run["condition"]))
        texts = {key: parts(mine, "accepted", "tested", "text") for key, mine in conditions.items()}
        rows = summarise(runs, self.axes, self.figures, self.units)
        return [{**row, **_change(row, texts)} for row in rows]


def _condition(cause: str, condition: str, prompts: Sequence[Prompt], **how: Any) -> Iterator[Row]:
    """The names of prompts under a condition."""
    for prompt in prompts:
        yield {"cause": cause, "condition": condition, "text": prompt.id, "prompt": prompt.prompt, **how}


def _change(row: Row, texts: Mapping[tuple[str, str], Parts]) -> Row:
    """See `rows`; `texts` are the accepted and the tested guesses of each text, by cause and condition."""
    cause, name = row["cause"], row["condition"]
    same = {other: found for (of, other), found in texts.items() if of == cause}
    first = next(iter(same))
    others = [found for other, found in same.items() if other != name and (cause == TEXT or other == first)]
    against = {text: found for group in others for text, found in group.items()}
    accepted, tested = (sum(counts) for counts in zip(*against.values(), strict=True)) if against else (0, 0)
    if row["acceptance_rate"] is None or not tested:
        return {"change": None, "clear": None}
    clear = rates_differ(same[name], against, max(2, len(same)))
    return {"change": row["acceptance_rate"].mean - accepted / tested, "clear": clear}
