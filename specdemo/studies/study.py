"""What a study of the Lab is: everything that the page and the command line need to ask it, run it and tell of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, ClassVar

from ..drafters import names
from ..models.presets import PRESETS
from ..servers.address import MAX_ADDRESS
from ..settings import AUTO, COMMAND, FORM, MAX_K, OF_SERVERS, SETTINGS, Field, Settings
from .plots import Plot, Section
from .prompts import Prompt, read_prompts, readable, some
from .tables import Rows, Table, table

if TYPE_CHECKING:
    from ..models.loaded import Loaded

LONG_PROMPTS = 4  # with different notes, see `with_notes`
TOKEN_LETTERS = 4.2  # of a token of English, about
MAX_LAB_PROMPT = 20_000  # characters; a race takes more
PROMPT_FILES = PRESETS / "prompts"
ABLE = {name: drafter.description for name, drafter in names.DRAFTERS.items() if name != "none" and not drafter.asks}

ONE_DRAFTER = "The drafter; by default the preset's own. `none` is the target alone."
DRAFTER = Field("drafter", "Drafter", "drafter", choices=ABLE, help=ONE_DRAFTER)
SEVERAL_DRAFTERS = "Drafters, separated by commas; by default all that can run."
DRAFTERS = Field("drafters", "Drafters", "drafters", choices=ABLE, help=SEVERAL_DRAFTERS)
EXAMPLE = "Such as http://127.0.0.1:8080"
SEA = "Tell me about the sea."
PROMPT = Field("prompt", "Prompt", "text", SEA, 1, MAX_LAB_PROMPT, help="What to say to the model.")
MOST = "The most tokens of each text."
NEW_TOKENS = Field("max_new_tokens", "Tokens per text", "whole", 64, 8, 512, help=MOST)
SEED, RULE = (replace(SETTINGS[name], shown_in=COMMAND) for name in ("seed", "rule"))
KS = Field(
    "ks",
    "Values of K",
    "text",
    choices={AUTO: AUTO},
    help=f"Values of K from 1 to {MAX_K}, or {AUTO}, separated by commas.",
    shown_in=COMMAND,
)
TEMPERATURES = Field(
    "temperatures", "Temperatures", "text", "0", help="Temperatures, separated by commas.", shown_in=COMMAND
)
PROMPT_FILE = Field(
    "prompts", "Prompts", "text", help="A file of prompts: JSON lines of id, category and prompt.", shown_in=COMMAND
)


def form_and_command(field: Field, of_form: Any, of_command: Any) -> tuple[Field, Field]:
    """A field that begins with another value on the form than on the command line."""
    return replace(field, value=of_form, shown_in=FORM), replace(field, value=of_command, shown_in=COMMAND)


def server_field(name: str, label: str, kind: str, group: str, info: str = "") -> Field:
    """The address of a server, or its API key."""
    return Field(name, label, kind, "", 0, MAX_ADDRESS, info=info, group=group, help=f"{label}.")


def k_field(value: int, group: str = "") -> Field:
    """The field of K, in guesses per round, which begins with `value`."""
    label, words = "Draft length K (guesses per round)", "Tokens drafted in one round."
    return Field("k", label, "whole", value, 1, MAX_K, group=group, help=words)


def temperature_field(value: float, low: float = 0) -> Field:
    """The field of the temperature, from `low` to 2."""
    return Field("temperature", "Temperature", "number", value, low, 2, help=SETTINGS["temperature"].help)


def prompt_fields(file: str, value: int, high: int) -> tuple[Field, Field]:
    """The prompts of a study: how many of a file that ships on the form, any file on the command line."""
    of_form = Field("prompts", "Prompts per category", "whole", value, 1, high, shown_in=FORM)
    return of_form, replace(PROMPT_FILE, value=PROMPT_FILES / f"{file}.jsonl")


class Study:
    """One question of the Lab: its words and fields, how it is measured, and what is said of it.

    An instance is one measurement, of a loaded preset. `done` of its `steps` steps are over.

    Attributes:
        name: of its tab, its command, its files and its work in the line.
        title: the question in a few words. The docstring of the class says more on the page, for someone who has not
            read a paper.
        summary: what the command does, in a sentence; without one there is no command.
        fields: of the form and of the command.
        button: what the button says.
        by_eager: whether the command can run the models by transformers' own forward.
        has_page: whether there is a report in HTML.
        heading, columns: of its table, see `tables.table`.
        plots: those of each section that the page shows.
        most_tables: of a section.
        concludes: whether the first of its words is the conclusion; else all are alike.
        has_details: whether the sections after the first are folded; the first has text to paste, and no tables.
        left_out: what is not measured, in a sentence.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str] = ""
    fields: ClassVar[tuple[Field, ...]] = ()
    button: ClassVar[str] = "Run"
    by_eager: ClassVar[bool] = False
    has_page: ClassVar[bool] = False
    heading: ClassVar[str] = ""
    columns: ClassVar[Sequence[tuple[str, str, str]]] = ()
    plots: Sequence[Sequence[Plot]] = ((),)
    most_tables: ClassVar[int] = 1
    concludes: ClassVar[bool] = True
    has_details: ClassVar[bool] = False

    @classmethod
    def form(cls, servers: bool = True) -> list[Field]:
        """The fields of the form; without `servers` those for a page whose visitors may not name any."""
        hidden = set() if servers else cls._of_servers()
        return [field for field in cls.fields if field.shown_in != COMMAND and field.name not in hidden]

    @classmethod
    def _of_servers(cls) -> set[str]:
        """The fields of the form in groups with addresses."""
        shown = [field for field in cls.fields if field.shown_in != COMMAND]
        groups = {field.group for field in shown if field.kind in OF_SERVERS}
        return {field.name for field in shown if field.group in groups}

    @classmethod
    def options(cls) -> list[Field]:
        """The fields of the command."""
        return [field for field in cls.fields if field.shown_in != FORM]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the form by name. Fields of servers may be missing."""
        optional = cls._of_servers() - values.keys()
        return {field.name: field.read(values.get(field.name)) for field in cls.form() if field.name not in optional}

    @classmethod
    def without_secrets(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """What may be kept of what was asked: neither addresses nor keys."""
        secret = {field.name for field in cls.fields if field.kind in OF_SERVERS}
        return {name: value for name, value in chosen.items() if name not in secret}

    @classmethod
    def needs_models(cls, chosen: Mapping[str, Any]) -> bool:
        """Not where a server writes the texts, or traces hold them."""
        return not (chosen.get("server") or chosen.get("traces"))

    @classmethod
    def check_options(cls, chosen: Mapping[str, Any]) -> None:
        """Refuse what the command was asked for, as far as no model is needed to see it."""
        settings_in(chosen)

    def __init__(self, loaded: Loaded, chosen: Mapping[str, Any]) -> None:
        self.loaded, self.chosen = loaded, chosen
        self.done, self.steps = 0, 1
        self.left_out = ""

    def run(self) -> Iterator[str]:
        """Measure; yields what it is at. What there is when it is closed can be shown."""
        raise NotImplementedError

    @property
    def failed(self) -> bool:
        """Whether the command ends with status 1."""
        return False

    def words(self) -> list[str]:
        """What was found, in sentences."""
        return []

    def tables(self) -> list[Table]:
        """What a person reads besides: the rows by the `columns`, if there are any."""
        return [table(self.heading, self.columns, self.rows())] if self.columns else []

    def drawn(self) -> Mapping[str, Rows]:
        """The rows of the plots by `Plot.part`."""
        return {"": self.rows()}

    def sections(self) -> list[Section | None]:
        """What the page shows, one below the other; None for what there is not, or not yet."""
        (plots,), drawn, words = self.plots, self.drawn(), self.words()
        if not (words or any(drawn.values())):
            return []
        verdict = words.pop(0) if words and self.concludes else ""
        words += [self.left_out] * bool(self.left_out)
        return [Section(verdict, words, [(plot, drawn.get(plot.part, ())) for plot in plots], self.tables())]

    def rows(self) -> list[dict[str, Any]]:
        """The table of the CSV file."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {"rows": self.rows()}

    def values(self) -> dict[str, Any]:
        """What was measured for fields of the form."""
        return {}

    def measured(self) -> Any:
        """What was measured beside them, if anything."""
        return None

    def page(self) -> str:
        """Everything as a page of HTML; empty where there is none."""
        return ""

    def prompts(self, file: str) -> list[Prompt]:
        """The prompts of the command line; on the form, that many (by default 3) of each category of a shipped file."""
        prompts = self.chosen.get("prompts", 3)
        return some_of_each(file, prompts) if isinstance(prompts, int) else prompts

    def readable(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those that the model can read; notes which are left out."""
        can, self.left_out = readable(self.loaded, prompts)
        return can


def settings_in(chosen: Mapping[str, Any]) -> Settings:
    """The settings among what is asked for."""
    return Settings(**{name: chosen[name] for name in SETTINGS if name in chosen})


def some_of_each(file: str, count: int) -> list[Prompt]:
    """`some` prompts of a file that ships."""
    return some(read_prompts(PROMPT_FILES / f"{file}.jsonl"), count)


def with_notes(question: str, tokens: int, number: int) -> str:
    """A question after notes that make it about as long as `tokens`; other notes for each `number`.

    The notes do not repeat themselves within 5,000 tokens, or a look-up of n-grams would find too much.
    """
    notes = [prompt.prompt for prompt in read_prompts(PROMPT_FILES / "written.jsonl")]
    begin = number * len(notes) // LONG_PROMPTS
    wanted, text = int(tokens * TOKEN_LETTERS) - len(question), ""
    for note in islice(cycle(notes), begin, None):
        if len(text) >= wanted:
            break
        text += f"- {note}\n"
    return f"Here are some notes:\n{text[: max(0, wanted)]}\n\nLeave them aside. {question}"
