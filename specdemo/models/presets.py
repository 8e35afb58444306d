"""The presets: targets, parts of drafters and defaults, one TOML file each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainValidator, ValidationInfo

from ..drafters.names import DRAFTERS
from ..errors import BadInput
from ..settings import AUTO, DTYPES, Settings
from .results import read_results, results_path
from .source import GGUF, Source
from .sources import SourceTable, head_source, source_named, source_of
from .tables import (
    NO_OTHERS,
    UNKNOWN,
    ExistingFile,
    Text,
    Texts,
    Truth,
    Unchecked,
    Whole,
    existing_file,
    file_as,
    one_of,
    problem,
    refuse,
)

PRESETS = Path(__file__).resolve().parents[2] / "presets"
DEFAULT_PRESET = "smollm2-135m"
FIRST = (DEFAULT_PRESET, "qwen2.5-coder")  # of the menu, in this order; the others follow by name
AND = " + "  # between the names of a target and a draft model that were given by name
WITH = " with the head "  # between the name of a preset and a head that was given by name, which follows its kind
HEADS = ("eagle", "p-eagle", "block", "dspark", "dflash2", "medusa")  # the drafters with a trained head
NAME = r'("(?:[^"\\]|\\.)*"|[^"]+?)'  # of a model or a head; in quotes if it contains a separator
PAIR = re.compile(f"{NAME}(?:{re.escape(AND)}{NAME})?", re.DOTALL)
HEADED = re.compile(f"(.+){WITH}({'|'.join(HEADS)}) {NAME}", re.DOTALL)
CATEGORIES = ("facts", "code", "quoting", "plays", "lists", "poem", "dialogue", "story")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The settings that the form and the command line start with."""

    __pydantic_config__ = NO_OTHERS
    drafter: Annotated[Text, one_of(DRAFTERS)] = "prompt-lookup"
    k: Annotated[int | str, Unchecked] = AUTO
    temperature: Annotated[float, Unchecked] = 0.0
    max_new_tokens: Annotated[int, Unchecked] = 128
    raw: Truth = False  # continue the prompt as it is, without a chat template
    tree: Truth = False  # draft trees; with auto, where they pay

    def filled_in(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values that were asked for, with these defaults instead of None."""
        return {name: getattr(self, name, None) if value is None else value for name, value in given.items()}


def _usable(defaults: Defaults) -> Defaults:
    if defaults.tree and not DRAFTERS[defaults.drafter].branches:
        refuse("tree", f"cannot be true: the drafter {defaults.drafter} drafts chains only")
    for name in ("k", "temperature", "max_new_tokens"):
        try:  # `Settings` knows what is allowed
            Settings(**{"tree": defaults.tree, name: getattr(defaults, name)})
        except BadInput as error:
            refuse(name, f"cannot be used: {str(error).rstrip('.')}")
    return defaults


def _head(head: Any, info: ValidationInfo) -> Path | Source:
    if not isinstance(head, dict):
        return existing_file(head, info)
    source = source_of(head, info)
    if not source.holds_heads:
        raise problem("must have a hub id or the path of a folder")
    return source


def _by_kind(heads: Any) -> Any:
    if not isinstance(heads, dict):
        return heads
    for kind in heads:
        if kind not in HEADS:
            refuse(kind, UNKNOWN)
    return {kind: heads[kind] for kind in HEADS if kind in heads}


Heads = Annotated[dict[str, Annotated[Path | Source, PlainValidator(_head)]], BeforeValidator(_by_kind)]


@dataclass(frozen=True, slots=True)
class Preset:
    """A target, what its drafters need, and defaults. `name` is the file's name without `.toml`."""

    __pydantic_config__ = NO_OTHERS
    name: str
    title: Text
    description: Text
    target: SourceTable
    draft_model: SourceTable | None = None
    ngram_table: ExistingFile | None = None
    dtype: Annotated[Text, one_of(DTYPES)] | None = None  # what "auto" means; None is whatever the device is good at
    memory: Whole | None = None  # GB that it takes with 16-bit weights, the program included; None is hardly any
    skip_layers: Whole | None = None  # how many of the target's first layers draft in layer-skip
    heads: Heads = field(default_factory=dict)  # by drafter; a path is a file of `train head`
    asked_heads: tuple[str, ...] = ()  # drafters whose heads a person named; it is not loaded without these
    defaults: Annotated[Defaults, AfterValidator(_usable)] = Defaults()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # passed on to the chat template
    results: Mapping[str, Any] | None = None  # the measured results of its drafters, see results.py


def load_presets(folder: Path = PRESETS) -> tuple[dict[str, Preset], list[str]]:
    """The valid presets, the default one first, and a sentence on every file that is not valid."""
    presets, broken = _read_all(folder)
    return presets, list(broken.values())


def fitting_first(presets: Mapping[str, Preset], memory: float) -> dict[str, Preset]:
    """Presets in the order of a menu: those that fit in `memory` bytes, then the others, whose titles say what they
    need."""
    fits = {name: preset for name, preset in presets.items() if (preset.memory or 0) * 1e9 <= memory}
    others = {
        name: replace(preset, title=f"{preset.title} (needs more: {preset.memory} GB of memory)")
        for name, preset in presets.items()
        if name not in fits
    }
    return {**fits, **others}


def find_preset(name: str, folder: Path = PRESETS) -> Preset:
    """The preset of that name. Names of `preset_of` and `with_head` work too."""
    presets, broken = _read_all(folder)
    if name in broken:
        raise BadInput(broken[name])
    if name in presets:
        return presets[name]
    if os.path.exists(name):
        return preset_of(name)
    if headed := HEADED.fullmatch(name):
        return with_head(find_preset(headed[1], folder), headed[2], _unquoted(headed[3]))
    if _is_models(name) or name.endswith('"'):
        pair = PAIR.fullmatch(name)
        return preset_of(*(_unquoted(text) for text in pair.groups() if text) if pair else [name])
    raise BadInput(f"There is no preset called {name!r}. Choose one of: {', '.join(presets)}.")


def preset_of(target: str, draft: str | None = None) -> Preset:
    """A preset of models that a person names: each a hub id (also `id@revision`), a folder, a `.gguf` file, or a GGUF
    file of the hub as `id:file.gguf`. Only local files are looked up.
    """
    given = [target] if draft is None else [target, draft]
    texts = [text if os.path.exists(text) else text.strip() for text in given]
    sources = [source_named(text) for text in texts]
    drafter = "prompt-lookup" if draft is None else "draft-model"
    return Preset(
        name=AND.join(map(_quoted, texts)),
        title=" + ".join(Path(str(source)).name for source in sources),
        description=f"{' drafted by '.join(texts)}.",
        target=sources[0],
        draft_model=None if draft is None else sources[1],
        defaults=Defaults(drafter=drafter),
    )


def with_head(preset: Preset, kind: str, head: str) -> Preset:
    """A preset with a published head of that kind as its default drafter; see `head_source`."""
    source, usual = head_source(head), preset.defaults
    usual = replace(usual, drafter=kind, tree=kind == "eagle" and usual.k == AUTO)
    name, title = f"{preset.name}{WITH}{kind} {_quoted(head)}", f"{preset.title} + {Path(str(source)).name}"
    heads = {**preset.heads, kind: source}  # the preset's results are of its own drafters
    given = *preset.asked_heads, kind
    return replace(preset, name=name, title=title, heads=heads, asked_heads=given, defaults=usual, results=None)


def _quoted(text: str) -> str:
    """The name of a model or a head as a part of a preset's name: in quotes if it would be ambiguous."""
    between = any(words in f" {text} " for words in ('"', AND, WITH))
    return text if _is_models(text) and not between else json.dumps(text, ensure_ascii=False)


def _is_models(name: str) -> bool:
    """Whether a name cannot be that of a preset file."""
    return "/" in name or os.sep in name or name.endswith(GGUF)


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def read_preset(path: Path) -> Preset:
    """Read one preset file."""
    return file_as(Preset, path, name=path.stem, asked_heads=(), results=read_results(results_path(path)))


@dataclass(frozen=True, slots=True)
class _Prompts:
    __pydantic_config__ = NO_OTHERS
    prompts: Texts


def load_prompts(folder: Path = PRESETS / "prompts") -> dict[str, list[str]]:
    """Example prompts by category, in the order of display."""
    read = {category: file_as(_Prompts, folder / f"{category}.toml").prompts for category in CATEGORIES}
    return {category: [text.strip("\n") for text in texts] for category, texts in read.items()}


def _read_all(folder: Path) -> tuple[dict[str, Preset], dict[str, str]]:
    presets, broken = {}, {}
    for path in sorted(folder.glob("*.toml"), key=lambda path: ((*FIRST, path.stem).index(path.stem), path.stem)):
        try:
            presets[path.stem] = read_preset(path)
        except BadInput as error:
            broken[path.stem] = str(error)
    return presets, broken
