"""The options of the commands. A set of options that several commands share is one class: a new option is one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, make_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from tqdm import tqdm
from typer import Argument, Option

from ..errors import BadInput
from ..formats import reason
from ..models.presets import Preset
from ..racing.remembered import MemoryFile
from ..racing.request import AT_ONCE, MOST_DRAFTED, Request, fitted, parameters, read_request
from ..settings import SETTINGS, Field, read_k
from ..studies.prompts import read_prompts
from ..studies.study import DRAFTER
from ..studies.tables import Table, aligned, write_csv, write_json

if TYPE_CHECKING:
    from ..models.loaded import Loaded

Item = TypeVar("Item")

PresetName = Annotated[str, Option("--preset", help="The models to use; `presets` lists the choices.")]
DType = Annotated[
    str,
    Option(
        "--dtype",
        "--weights",
        help="The number type: auto, float32, bfloat16 or float16 (on a CPU for the weights only); or of the weights, "
        "on a CPU: int8, int4, stored, a GGUF file's own, which auto takes, or stored16, which rounds less.",
    ),
]
Device = Annotated[
    str,
    Option(help="The device: auto, cpu, cuda or mps (Apple's GPU); a second one is the draft model's, as in cuda,cpu."),
]
AnyK = Annotated[Any, Option("-k", "--k", parser=read_k, metavar="K", help=SETTINGS["k"].help)]
Drafter = Annotated[str | None, Option(help=DRAFTER.help)]
LaneNames = Annotated[
    list[str] | None,
    Option(
        "--lane",
        metavar="DRAFTER:K",
        help="Instead of --drafter and -k: a lane, as eagle:4, ngram:auto or eagle:tree-8 for trees of 8 tokens. "
        f"Up to {MOST_DRAFTED}, one --lane each.",
    ),
]
ReaderCount = Annotated[int, Option("--readers", help=AT_ONCE.help)]
SERVER_KEY, BASELINE_KEY = "SPECDEMO_SERVER_KEY", "SPECDEMO_BASELINE_KEY"  # of the environment
MemoryPath = Annotated[
    Path | None,
    Option(
        "--memory",
        metavar="FILE",
        help="Remember the answers in this file: the drafter suffix copies from the earlier ones.",
    ),
]
TreeIfAsked = Annotated[
    bool | None, Option("--tree/--chain", help=f"{SETTINGS['tree'].help} By default as the preset has it.")
]
GrammarFile = Annotated[Path | None, Option(help="A file with a grammar in Lark's format that the text must satisfy.")]
SchemaFile = Annotated[Path | None, Option(help="A file with a JSON schema that the text must satisfy.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead.")]
JsonFile = Annotated[Path | None, Option("--json", help="Also write everything to this file.")]


TYPES: dict[str, Any] = {"whole": int, "number": float, "switch": bool, "drafter": str | None}  # by kind; else texts
FILES = {"prompts": Path, "traces": list[Path] | None}  # the types of options by name
SEVERAL = {"ks": int, "sizes": int, "fan_outs": int, "temperatures": float}  # numbers separated by commas, by name
SPELLINGS = {  # of options, where they are not those of their fields
    **{"k": ("-k",), "ks": ("-k", "--k"), "temperatures": ("--temperature",), "traces": ("--trace",)},
    **{"tree": ("--tree/--chain",), "trees": ("--tree",), "rules": ("--rule",)},
    **{"in_turn": ("--in-turn",), "remember": ("--remember",)},
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: where a parameter is a dataclass, each of its fields becomes an option of the command."""
    classes: dict[str, type] = {}
    options = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            options.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        classes[name] = hints[name]
        types = get_type_hints(classes[name], include_extras=True)
        for field in fields(classes[name]):
            default = Parameter.empty if field.default is MISSING else field.default
            options.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]))

    def run(**values: Any) -> None:
        for name, kind in classes.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = signature(command).replace(parameters=options)  # type: ignore[attr-defined]
    return run


def options_of(form: Iterable[Field]) -> type:
    """A dataclass of these fields, for a command `with_options`."""
    return make_dataclass("Options", map(_option, form), frozen=True, kw_only=True)


def _option(field: Field) -> tuple[str, Any, Any]:
    """The name of a field, its type and what it begins with."""
    kind = FILES.get(field.name) or TYPES.get(field.kind, str)
    least = int(field.low) if kind is int and field.name not in SETTINGS else None  # the settings have bounds
    option = Option(*SPELLINGS.get(field.name, ()), help=field.help, min=least)
    typed: Any = AnyK if kind is int and field.choices else Annotated[kind, option]
    return field.name, typed, "" if field.kind == "drafters" else field.value


def read_options(form: Iterable[Field], options: Any) -> dict[str, Any]:
    """The values of an instance of `options_of`, by the names of the fields."""
    return {field.name: _read(field, getattr(options, field.name)) for field in form}


def _read(field: Field, typed: Any) -> Any:
    if field.name in SEVERAL:
        return numbers(typed, read_k if field.choices else SEVERAL[field.name], field.label)
    return read_prompts(typed) if field.name == "prompts" else typed


def moved(app: typer.Typer, name: str, sentence: str) -> None:
    """A command that is somewhere else now, and says so whatever it is given."""

    @app.command(name, hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True})
    def command(words: Annotated[list[str] | None, Argument()] = None) -> None:
        raise BadInput(sentence)


SPECIAL = {"k": AnyK, "tree": TreeIfAsked, "grammar": GrammarFile}
OPTIONS: list[tuple[str, Any, Any]] = [  # of the settings: names, types and defaults
    (name, SPECIAL.get(name, Annotated[kind, Option(help=SETTINGS[name].help)]), None if name == "grammar" else default)
    for name, (kind, default) in parameters().items()
]
Decoded = make_dataclass("Decoded", [("drafter", Drafter, None), *OPTIONS], frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(Decoded):  # type: ignore[misc,valid-type]
    """How to write one text: a drafter and the settings. What is None is the preset's own."""

    raw: Annotated[
        bool | None, Option("--raw/--chat", help="Continue the prompt as it is, or put it into the chat template.")
    ] = None
    schema: SchemaFile = None

    def request(
        self, prompt: str, preset: Preset, lane_names: Sequence[str] | None = None, readers: int = 1
    ) -> Request:
        """What is asked for, complete."""
        if lane_names and (self.drafter is not None or self.k is not None or self.tree):
            raise BadInput("With --lane each lane says its drafter and its K: leave out --drafter, -k and --tree.")
        given = asdict(self)
        given["grammar"] = read_grammar(given.pop("schema"), given["grammar"])
        given |= {"prompt": read_prompt(prompt), "lanes": lane_names or None, "readers": readers}
        request = read_request(preset=preset.name, defaults=preset.defaults, **given)
        if prompt == "-" and request.asks:
            raise BadInput("Guesses come from stdin, so the prompt cannot: give --prompt a text.")
        return request

    def fitted(self, request: Request, loaded: Loaded, lane_names: Sequence[str] | None = None) -> Request:
        """`request.fitted`, with its note on stderr; what was asked for by an option stays as it is."""
        if self.tree or lane_names:
            return request
        request, note = fitted(request, loaded)
        if note:
            typer.echo(note, err=True)
        return request


def memory_file(path: Path | None) -> MemoryFile | None:
    """The memory in a file, if one is named."""
    check_writable(path)
    return None if path is None else MemoryFile(path)


def read_prompt(prompt: str) -> str:
    """The prompt, or for - what stands on stdin."""
    try:
        return sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise BadInput(f"The prompt on stdin is not text in {error.encoding}.") from error


def guessed_on_stdin(loaded: Loaded, request: Request, streamed: bool = False) -> Loaded:
    """The models with guesses from stdin, a line a round, if people guess in the request. A terminal is asked for each,
    with the end of the text so far unless it is `streamed` there."""
    if not request.asks:
        return loaded
    from ..racing.guesses import guessed_in_lines

    def ask(text: str) -> str | None:
        terminal = sys.stdin.isatty()
        if terminal:
            typer.echo(("\n" if streamed else text) + "> ", err=True, nl=False)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise BadInput(f"The guesses on stdin are not text in {error.encoding}.") from error
        if terminal and not line:
            typer.echo(err=True)
        return line.removesuffix("\n") if line else None

    return guessed_in_lines(loaded, ask)


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # PowerShell begins files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {reason(error)}.") from error
    if not text.strip():
        raise BadInput(f"{path} is empty.")
    return text


def read_grammar(schema: Path | None, grammar: Path | None) -> str:
    """The text of the file that constrains the text; "" if there is none."""
    if schema is not None and grammar is not None:
        raise BadInput("A text has one constraint: give --schema or --grammar.")
    path = schema or grammar
    if path is None:
        return ""
    text = read_text(path)
    if schema is not None:
        try:
            good = isinstance(json.loads(text), dict)
        except RecursionError as error:
            raise BadInput(f"{path} is nested too deeply.") from error
        except ValueError as error:
            raise BadInput(f"{path} is not JSON: {reason(error)}.") from error
        if not good:
            raise BadInput(f"{path} is not a JSON schema, which is an object.")
    elif text.lstrip().startswith("{"):
        raise BadInput(f"{path} holds a JSON object: give a JSON schema with --schema.")
    return text


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where to write what was found."""

    json_: JsonFile = None
    csv: Annotated[Path | None, Option(help="Also write the table to this file.")] = None

    def __post_init__(self) -> None:
        check_writable(self.json_, self.csv)

    def write(self, found: Any, rows: Sequence[Any]) -> None:
        """Write `found` as JSON and `rows` as CSV, each if a file was named."""
        save_json(self.json_, found)
        if self.csv:
            write_csv(self.csv, rows)


def save_json(path: Path | None, found: Any) -> None:
    """Write what was found to a file, if one was asked for."""
    if path:
        write_json(path, found)


def show(table: Table) -> None:
    """Print a table, with the names of its columns that the files have."""
    typer.echo(aligned([table.names, *table.rows]) + "\n")


FIGURES = {  # of a lane, and their formats
    "tokens": "{}",
    "seconds": "{:.2f}",
    "tokens_per_second": "{:.1f}",
    "ttft_seconds": "{:.3f}",
    "draft_seconds": "{:.2f}",
    "verify_seconds": "{:.2f}",
    "tokens_per_round": "{:.2f}",
    "acceptance_rate": "{:.0%}",
    "draft_efficiency": "{:.0%}",
}


def lanes_table(
    titles: Sequence[str], lanes: Sequence[Mapping[str, Any]], shapes: Mapping[str, str] = FIGURES
) -> list[str]:
    """A column for each lane and a line for each of its figures; what is not known is a dash."""
    rows = [("", *titles)]
    for name, shape in shapes.items():
        cells = ("-" if lane[name] is None else shape.format(lane[name]) for lane in lanes)
        rows.append((name.replace("_", " "), *cells))
    width = max(22, *(len(title) + 2 for title in titles))
    return [f"{name:<22}" + "".join(f"{cell:>{width}}" for cell in cells) for name, *cells in rows]


def say(lines: Iterable[str]) -> None:
    """Print sentences, one on each line."""
    for line in lines:
        typer.echo(line)


def with_progress(steps: Iterable[Item], total: int) -> Iterator[Item]:
    """The steps, with a bar on stderr."""
    yield from tqdm(steps, total=total, disable=not total)


def numbers(text: str, kind: Callable[[str], Item], what: str) -> list[Item]:
    """The numbers of an option that takes several, separated by commas."""
    try:
        return list(dict.fromkeys(kind(word.strip()) for word in text.split(",")))
    except ValueError as error:
        raise BadInput(f"{what} are numbers, separated by commas, not {text!r}.") from error


def check_writable(*files: Path | None) -> None:
    """Refuse, before any work is done, files that could not be written."""
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise BadInput(f"There is no folder {folder} to write {file.name} into.")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise BadInput(f"{file} cannot be written. Choose another file.")
