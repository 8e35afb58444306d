"""Heads of others: what the configuration of one says, and its files, which come from a folder or the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from ..drafters.heads.formats import CONFIG, Format, format_of, head_name, read_config
from ..drafters.heads.published import INDEX, PICKLES, WEIGHTS, WHOLE
from ..drafters.heads.published_shape import ShapeReader, TargetSizes
from ..types import BadInput
from .checkpoint import HUB_SECONDS, Checkpoint, commit_of, download_bar, file_of
from .errors import wrap_load_errors
from .presets import Preset
from .sources import Folder, HeadSource, Hub, head_source
from .store import LoadError, Progress


def head_format(text: str) -> Format:
    """The format of a head that a person names, and what it says of its target. Only its configuration is fetched.

    Raises:
        BadInput: it is no head, or of a format that cannot be read.
        LoadError: the hub does not have it, or cannot be reached.
    """
    source = head_source(text)
    return format_of(read_config(_folder_of(source)), f"The head {source}")


def fetch_heads(preset: Preset, target: Checkpoint, progress: Progress) -> dict[str, Path]:
    """The files of a preset's heads, and the folders of those of others. What is missing is downloaded.

    Raises:
        BadInput: a head was made for another target, or is none; before the target's weights are fetched.
        LoadError: the hub does not have it, or cannot be reached.
    """
    heads = {}
    for kind, head in preset.heads.items():
        heads[kind] = head if isinstance(head, Path) else _fetched(head, progress)
        if not isinstance(head, Path):
            _check(heads[kind], kind, target)
    return heads


def formats_of(files: Mapping[str, Path]) -> dict[str, str]:
    """The names of the formats of those heads that are folders of others, by their kinds."""
    return {kind: format_of(read_config(path), path.name).name for kind, path in files.items() if path.is_dir()}


def _fetched(source: HeadSource, progress: Progress) -> Path:
    """The folder with a head's configuration and weights."""
    if isinstance(source, Folder):
        return source.path
    progress(None, f"looking for the head {source} on the hub")
    folder, bar = _folder_of(source), download_bar(source, progress)
    if any(
        (folder / name).is_file() for name in (*WHOLE, *PICKLES)
    ):  # else the hub is asked for names it does not have
        return folder
    with wrap_load_errors(source):
        for name in (*WHOLE, INDEX, *PICKLES):
            found = file_of(source.repo, folder.name, name, tqdm_class=bar)
            if found is None:
                continue
            if name == INDEX:
                parts = set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values())
                for part in sorted(parts):
                    file_of(source.repo, folder.name, part, tqdm_class=bar)
            return found.parent
    raise LoadError(f"The head {source} has no weights: its repository has neither {WEIGHTS} nor {PICKLES[0]}.")


def _check(folder: Path, kind: str, target: Checkpoint) -> None:
    """Refuse a head that was made for another target, or is of another kind."""
    name, config = head_name(folder), read_config(folder)
    found, text = format_of(config, name), target.config.get_text_config()
    if found.kind != kind:
        raise BadInput(f"{name} is {found.name}, which drafts as {found.kind} and not as {kind}.")
    sizes = TargetSizes(text.vocab_size, text.hidden_size, text.num_hidden_layers)
    if found.method != "medusa":  # its configuration states no sizes
        ShapeReader(name, found, config, sizes).shape(())


@dataclass(frozen=True, slots=True)
class HeadReport:
    """A head before its weights are fetched. `size` are the bytes of its file, None where nobody tells."""

    name: str
    format: Format
    size: int | None
    on_hub: bool

    def sentence(self) -> str:
        """Everything on one line."""
        size = "an unknown size" if self.size is None else f"{self.size / 1e6:.1f} MB"
        made_for = f", made for {self.format.target}" if self.format.target else ""
        where = f"downloads up to {size}" if self.on_hub else f"nothing to download, {size}"
        return f"The head {self.name}: {where}; {self.format.name}, drafts as {self.format.kind}{made_for}."


def report_on_head(source: HeadSource) -> HeadReport:
    """Look at a head. Its configuration is fetched, its weights are not.

    Raises:
        BadInput: it is no head, or of a format that cannot be read.
        LoadError: the hub does not have it, or cannot be reached.
    """
    found = format_of(read_config(_folder_of(source)), f"The head {source}")
    if isinstance(source, Folder):
        sizes = {file.name: file.stat().st_size for file in source.path.iterdir()}
    else:
        with wrap_load_errors(source):
            info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=HUB_SECONDS)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    stated = [size for name, size in sizes.items() if name.endswith(".safetensors")]
    size = sum(stated) or sum(sizes.get(name, 0) for name in PICKLES) or None
    return HeadReport(str(source), found, size, isinstance(source, Hub))


def _folder_of(source: HeadSource) -> Path:
    """The folder with the configuration of a head; one of the hub has the name of its commit."""
    if isinstance(source, Folder):
        return source.path
    with wrap_load_errors(source):
        commit, unreached = commit_of(source)
        config = file_of(source.repo, commit, CONFIG, local_files_only=unreached)
    assert config is not None, "commit_of has fetched it"
    return config.parent
