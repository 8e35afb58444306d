"""The presets: which target, which drafters' parts and which defaults, one TOML file each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..drafters.names import DRAFTERS
from ..types import AUTO, BadInput, Settings
from .results import read_results, results_path
from .sources import GGUF, Folder, Gguf, HeadSource, Hub, Parts, PartWheel, Source, Wheel, head_source, source_named
from .tables import Table, read_toml

PRESETS = Path(__file__).resolve().parents[2] / "presets"
DEFAULT_PRESET = "smollm2-135m"
FIRST = (DEFAULT_PRESET, "qwen2.5-coder")  # of the menu, in this order; the others follow by name
AND = " + "  # between the names of a target and a draft model that were given by name
WITH = " with the head "  # between the name of a preset and a head that was given by name, which follows its kind
HEADS = ("eagle", "block", "medusa")  # the kinds of trained heads
NAME = r'("(?:[^"\\]|\\.)*"|[^"]+?)'  # of a model or a head; in quotes where it holds what stands between two
PAIR = re.compile(f"{NAME}(?:{re.escape(AND)}{NAME})?", re.DOTALL)
HEADED = re.compile(f"(.+){WITH}({'|'.join(HEADS)}) {NAME}", re.DOTALL)
CATEGORIES = ("code", "quoting", "lists", "poem", "plays", "facts", "dialogue", "story")  # easy to guess first
HARD = ("facts", "dialogue", "story")  # of these: fewer guesses are right
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the form and the command line start with."""

    drafter: str = "prompt-lookup"
    k: int | str = AUTO
    temperature: float = 0.0
    max_new_tokens: int = 128
    raw: bool = False  # continue the prompt as it is, without a chat template
    tree: bool = False  # draft trees; with auto, where they pay

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
    memory: int | None = None  # GB that it takes with 16-bit weights, the program included; None is hardly any
    skip_layers: int | None = None  # how many of the target's first layers draft in layer-skip
    heads: dict[str, Path | HeadSource] = field(default_factory=dict)  # by kind; a path is a file of `train head`
    asked_heads: tuple[str, ...] = ()  # kinds of heads that a person named, without which it is not loaded
    defaults: Defaults = Defaults()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # passed on to the chat template
    results: Mapping[str, Any] | None = None  # what its drafters were measured to reach, see results.py


def load_presets(folder: Path = PRESETS) -> tuple[dict[str, Preset], list[str]]:
    """The presets that read well, the default one first, and a sentence for every file that does not."""
    presets, broken = _read_all(folder)
    return presets, list(broken.values())


def fitting_first(presets: Mapping[str, Preset], memory: float) -> dict[str, Preset]:
    """Presets in the order of a menu: those that a machine with these bytes of memory holds, then the others, whose
    titles say what they need."""
    fits = {name: preset for name, preset in presets.items() if (preset.memory or 0) * 1e9 <= memory}
    others = {
        name: replace(preset, title=f"{preset.title} (needs more: {preset.memory} GB of memory)")
        for name, preset in presets.items()
        if name not in fits
    }
    return {**fits, **others}


def find_preset(name: str, folder: Path = PRESETS) -> Preset:
    """The preset of that name, or of models that are named as `preset_of` and `with_head` call them.

    Raises:
        BadInput: there is none (the message names those there are), or its file is broken.
    """
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
    file of the hub as `id:file.gguf`. Nothing is looked up but files.

    Raises:
        BadInput: a name can be none of these, or is not allowed on this Space.
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
    """A preset with a head of others of that kind, which it begins to draft with; see `head_source`."""
    source, usual = head_source(head), preset.defaults
    usual = replace(usual, drafter=kind, tree=kind == "eagle" and usual.k == AUTO)
    name, title = f"{preset.name}{WITH}{kind} {_quoted(head)}", f"{preset.title} + {Path(str(source)).name}"
    heads = {**preset.heads, kind: source}  # its results are those of its own drafters
    asked = *preset.asked_heads, kind
    return replace(preset, name=name, title=title, heads=heads, asked_heads=asked, defaults=usual, results=None)


def _quoted(text: str) -> str:
    """The name of a model or a head as a part of a preset's name: in quotes where it would be taken for another one."""
    between = any(words in f" {text} " for words in ('"', AND, WITH))
    return text if _is_models(text) and not between else json.dumps(text, ensure_ascii=False)


def _is_models(name: str) -> bool:
    """Whether a name cannot be that of a preset file."""
    return "/" in name or os.sep in name or name.endswith(GGUF)


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def read_preset(path: Path) -> Preset:
    """Read one preset file.

    Raises:
        BadInput: one sentence naming the file and the field that is wrong.
    """
    table = Table(path.name, "", read_toml(path))
    preset = Preset(
        name=path.stem,
        title=table.text("title"),
        description=table.text("description"),
        target=_source(table.table("target"), path.parent),
        draft_model=_source(table.table("draft_model"), path.parent) if "draft_model" in table else None,
        ngram_table=table.file("ngram_table", path.parent) if "ngram_table" in table else None,
        dtype=table.choice("dtype", DTYPES) if "dtype" in table else None,
        memory=table.whole("memory", low=1) if "memory" in table else None,
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
        table = Table(path.name, "", read_toml(path))
        prompts[category] = table.texts("prompts")
        table.refuse_unknown()
    return prompts


def _read_all(folder: Path) -> tuple[dict[str, Preset], dict[str, str]]:
    presets, broken = {}, {}
    for path in sorted(folder.glob("*.toml"), key=lambda path: ((*FIRST, path.stem).index(path.stem), path.stem)):
        try:
            presets[path.stem] = read_preset(path)
        except BadInput as error:
            broken[path.stem] = str(error)
    return presets, broken


def _source(table: Table, folder: Path) -> Source:
    kinds = [kind for kind in ("wheel", "hub", "path") if kind in table]
    if len(kinds) != 1:
        raise table.wrong("", "must have exactly one of wheel, hub and path")
    source: Source
    if kinds == ["wheel"]:
        source = Wheel(**_pinned(table), gguf=table.text("gguf"), gguf_sha256=table.sha256("gguf_sha256"))
    elif kinds == ["hub"]:
        source = _on_hub(table)
    else:
        try:
            path = folder / Path(table.text("path")).expanduser()
        except RuntimeError as error:  # ~someone who does not exist
            raise table.wrong("path", "names the home of nobody here") from error
        source = Gguf(str(path)) if path.suffix == GGUF and not path.is_dir() else Folder(path)
    table.refuse_unknown()
    return source


def _pinned(table: Table) -> dict[str, Any]:
    """The fields of `Pinned`."""
    named = {"package": table.text("wheel"), "version": table.text("version")}
    return {**named, "size": table.whole("size", low=1), "sha256": table.sha256("sha256")}


def _on_hub(table: Table) -> Source:
    hub = Hub(table.text("hub"), table.text("revision") if "revision" in table else None)
    if "file" in table:
        return Gguf(table.text("file"), hub.repo, hub.revision)
    if "parts" not in table:
        return hub
    tables = table.tables("parts")
    parts = []
    for number, part in enumerate(tables, start=1):
        label = f"Part {number} of {len(tables)} of {Parts(hub, (), '')}"
        parts.append(PartWheel(**_pinned(part), file=part.text("file"), label=label))
        part.refuse_unknown()
    return Parts(hub, tuple(parts), table.sha256("gguf_sha256"))


def _heads(table: Table, folder: Path) -> dict[str, Path | HeadSource]:
    heads: dict[str, Path | HeadSource] = {}
    for kind in HEADS:
        if table.has_table(kind):
            source = _source(table.table(kind), folder)
            if not isinstance(source, Hub | Folder):
                raise table.wrong(kind, "must have a hub id or the path of a folder")
            heads[kind] = source
        elif kind in table:
            heads[kind] = table.file(kind, folder)
    table.refuse_unknown()
    return heads


def _defaults(table: Table) -> Defaults:
    usual = Defaults()
    drafter = table.choice("drafter", DRAFTERS) if "drafter" in table else usual.drafter
    tree = table.truth("tree") if "tree" in table else usual.tree
    if tree and not DRAFTERS[drafter].branches:
        raise table.wrong("tree", f"cannot be true: the drafter {drafter} drafts chains only")
    defaults = Defaults(
        drafter=drafter,
        k=_setting(table, "k", usual.k, tree=tree),
        temperature=_setting(table, "temperature", usual.temperature),
        max_new_tokens=_setting(table, "max_new_tokens", usual.max_new_tokens),
        raw=table.truth("raw") if "raw" in table else usual.raw,
        tree=tree,
    )
    table.refuse_unknown()
    return defaults


def _setting(table: Table, name: str, usual: Any, **beside: Any) -> Any:
    """A field of `Settings`, which knows what is allowed."""
    if name not in table:
        return usual
    value = table.take(name)
    try:
        Settings(**{name: value}, **beside)
    except BadInput as error:
        raise table.wrong(name, f"cannot be used: {str(error).rstrip('.')}") from error
    return value
