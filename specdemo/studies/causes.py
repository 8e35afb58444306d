"""Why did acceptance drop: the causes that people report, each measured on its own, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..settings import Field, Settings
from ..system.imports import LazyModule
from .perplexity import loaded_as
from .plots import OVER_TEXTS, passing
from .prompts import Prompt
from .statistics import Spread, pooled_rate, rates_differ
from .study import DRAFTER, EXAMPLE, RULE, SEED, Study, k_field, lengthened, server_field, some_of_each
from .tables import Rows, grouped

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


@dataclass(frozen=True, slots=True)
class Condition:
    """Prompts written under one condition. The first of each cause is what the others are compared with."""

    cause: str
    name: str
    prompts: Sequence[tuple[Prompt, str]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""


class Causes(Study):
    """A drafter that guessed well guesses badly now. Why? This view changes one thing at a time: the kind of text, the
    language, the temperature, the length of the prompt, thinking, and the number type of the weights. It says which of
    them changes how many guesses pass, and by how much.
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
            "Compare with weights in",
            "choice",
            "none",
            choices={"none": "nothing else", "int8": "int8", "int4": "int4"},
            help="Load the same model with weights of this type, too: int8, int4 or none.",
        ),
        SEED,
        RULE,
        server_field("server", "Address of a server, instead of the preset", "address", SERVER, EXAMPLE),
        server_field("server_key", "Its API key", "key", SERVER),
    )
    heading = "What changes how many guesses pass"
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

    @classmethod
    def needs_models(cls, asked: Mapping[str, Any]) -> bool:
        return not asked.get("server")

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        super().__init__(loaded, asked)
        self.written: dict[tuple[str, str], dict[str, writers.Written]] = {}
        self.conditions = [*self._conditions()]
        self.steps = sum(len(condition.prompts) for condition in self.conditions)

    def _conditions(self) -> Iterator[Condition]:
        texts = some_of_each("causes", self.asked["each"])
        usual = [(prompt, prompt.prompt) for prompt in texts]
        few = [(prompt, prompt.prompt) for prompt in some_of_each("causes", 1)][::2]
        for category in dict.fromkeys(prompt.category for prompt in texts):
            yield Condition(TEXT, category, [pair for pair in usual if pair[0].category == category])
        spoken = some_of_each("languages", 3)
        for language in dict.fromkeys(prompt.category for prompt in spoken):
            yield Condition(LANGUAGE, language, [(p, p.prompt) for p in spoken if p.category == language])
        for temperature in TEMPERATURES:
            yield Condition(TEMPERATURE, f"{temperature:g}", few, {"temperature": temperature})
        yield Condition(CONTEXT, "the prompt alone", few)
        for tokens in CONTEXTS:
            longer = [(prompt, lengthened(text, tokens, at)) for at, (prompt, text) in enumerate(few)]
            yield Condition(CONTEXT, f"after {tokens:,} tokens", longer)
        if self._thinks():
            for name, on in (("off", False), ("on", True)):
                yield Condition(THINKING, name, few, template={"enable_thinking": on})
        if self.asked["other_weights"] != "none" and not self.asked.get("server"):
            yield Condition(WEIGHTS, AS_LOADED, few)
            yield Condition(WEIGHTS, self.asked["other_weights"], few, dtype=self.asked["other_weights"])

    def _thinks(self) -> bool:
        """Whether the chat template has a switch for thinking."""
        template = None if self.asked.get("server") else self.loaded.tokenizer.chat_template
        return "enable_thinking" in str(template or "")

    def run(self) -> Iterator[str]:
        with ExitStack() as opened:
            for condition in self.conditions:
                try:
                    writer = self._writer(condition, opened)
                    for prompt, text in condition.prompts:
                        self._write(writer, condition, prompt, text)
                        self.done += 1
                        yield f"{condition.cause.capitalize()}: {condition.name}"
                except BadInput as error:
                    if not self.written:
                        raise
                    self.steps -= len(condition.prompts)
                    self.left_out += f"{condition.cause.capitalize()}, {condition.name}: {error} "

    def _writer(self, condition: Condition, opened: ExitStack) -> writers.Writer:
        if address := self.asked.get("server"):
            return writers.server_writer(opened, address, self.asked.get("server_key"))
        loaded = self.loaded
        if condition.dtype:
            loaded = opened.enter_context(loaded_as(loaded.preset, condition.dtype, str(loaded.device)))
        if condition.template:
            kwargs = {**loaded.preset.chat_template_kwargs, **condition.template}
            loaded = replace(loaded, preset=replace(loaded.preset, chat_template_kwargs=kwargs))
        return writers.PresetWriter(loaded, *self.given("drafter k"))

    def _write(self, writer: writers.Writer, condition: Condition, prompt: Prompt, text: str) -> None:
        common = {name: self.asked[name] for name in ("max_new_tokens", "seed", "rule") if name in self.asked}
        found = writer.write(text, Settings(**{**common, **condition.settings}))
        self.written.setdefault((condition.cause, condition.name), {})[prompt.id] = found

    def drawn(self) -> Mapping[str, Rows]:
        return grouped(self.rows(), lambda row: row["cause"])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each condition. `change` is that of the acceptance rate against the first one of its cause, of a
        kind of text against all other kinds; `clear` says whether chance alone would rarely make it so large."""
        groups: Groups = {
            key: {name: Counted.of(of) for name, of in texts.items()} for key, texts in self.written.items()
        }
        halves = [
            {
                f"{cause}/{name}": Counted(*found.halves[half], 0, 0)
                for (cause, _), texts in self.written.items()
                if cause == TEXT
                for name, found in texts.items()
                if found.halves
            }
            for half in (0, 1)
        ]
        groups |= {(PLACE, name): found for name, found in zip(HALVES, halves, strict=True) if found}
        return [self._row(key, texts, groups) for key, texts in groups.items()]

    def _row(self, key: tuple[str, str], texts: Mapping[str, Counted], groups: Groups) -> dict[str, Any]:
        cause, name = key
        same = {other: found for (of, other), found in groups.items() if of == cause}
        others = [found for other, found in same.items() if other != name] if cause == TEXT else [*same.values()][:1]
        first = cause != TEXT and name == next(iter(same))
        against = {} if first else {text: counted for found in others for text, counted in found.items()}
        rate, other = _rate(texts), _rate(against)
        change = rate.mean - other.mean if rate and other else None
        one, two = ({text: (c.accepted, c.tested or 0) for text, c in group.items()} for group in (texts, against))
        clear = None if change is None else rates_differ(one, two, max(2, len(same)))
        return {
            "cause": cause,
            "condition": name,
            "texts": len(texts),
            "acceptance_rate": rate,
            "tokens_per_round": pooled_rate([(counted.tokens, counted.rounds) for counted in texts.values()]),
            "change": change,
            "clear": clear,
        }


@dataclass(frozen=True, slots=True)
class Counted:
    """Of one text: guesses tested, None if that is unknown, and accepted; tokens after the first, and rounds."""

    tested: int | None
    accepted: int
    tokens: int
    rounds: int

    @classmethod
    def of(cls, written: writers.Written) -> Counted:
        return cls(written.stats.tested, written.stats.accepted or 0, len(written.tokens) - 1, written.rounds)


Groups = dict[tuple[str, str], dict[str, Counted]]
"""The counts of each text, by cause and condition."""


def _rate(texts: Mapping[str, Counted]) -> Spread | None:
    return pooled_rate([(counted.accepted, counted.tested) for counted in texts.values() if counted.tested], 1.0)
