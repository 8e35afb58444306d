"""Published heads: their configurations and files, which come from a folder or the hub."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from ..drafters.heads.files import load_published
from ..drafters.heads.published import INDEX, PICKLES, WEIGHTS, WHOLE, PublishedHead
from ..drafters.heads.published_shape import Format, TargetSizes, format_of, read_config
from ..drafters.names import drafter_class
from ..engines.families import final_norm_eps
from ..errors import BadInput
from ..formats import byte_size
from ..system.weight_map import files_in
from .checkpoint import Checkpoint
from .errors import wrap_load_errors
from .presets import Preset
from .source import Source
from .sources import head_source
from .store import LoadError, Progress

if TYPE_CHECKING:
    from ..drafters.heads.drafter import HeadDrafter

log = logging.getLogger(__name__)


def head_format(text: str) -> Format:
    """The format of a head that a person names. Only its configuration is fetched.

    Raises:
        LoadError: the hub does not have it, or cannot be reached.
    """
    source = head_source(text)
    return format_of(read_config(source.head_folder()), f"The head {source}")


def fetch_heads(preset: Preset, target: Checkpoint, progress: Progress) -> tuple[dict[str, Path], dict[str, str]]:
    """Fetch a preset's heads, before the target's weights are fetched.

    Returns:
        By drafter, the files of heads trained here and the folders of published ones; and sentences that say why some
        published heads are missing. A preset can do without those that no person asked for.
    Raises:
        LoadError: the hub does not have that head, or cannot be reached.
    """
    heads: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for drafter, head in preset.heads.items():
        try:
            heads[drafter] = head if isinstance(head, Path) else _checked(head, drafter, target, progress)
        except (BadInput, LoadError) as error:
            if drafter in preset.asked_heads:
                raise
            log.warning("The head %s of the preset %s is missing.", head, preset.name, exc_info=True)
            first, _, _ = str(error).rstrip(".").partition(". ")
            why = first[0].lower() + first[1:] if first.startswith("The") else first
            missing[drafter] = f"its {drafter} head {head} is missing: {why}"
    return heads, missing


def formats_of(files: Mapping[str, Path]) -> dict[str, str]:
    """The names of the formats of published heads, which are the folders among `files`, by drafter."""
    return {name: format_of(read_config(path), path.name).name for name, path in files.items() if path.is_dir()}


def _fetched(source: Source, progress: Progress) -> Path:
    """The folder with a head's configuration and weights."""
    if not source.on_hub:
        return source.head_folder()
    progress(None, f"looking for the head {source} on the hub")
    folder = source.head_folder()
    if any(
        (folder / name).is_file() for name in (*WHOLE, *PICKLES)
    ):  # else the hub would be asked for names that it lacks
        return folder
    with wrap_load_errors(source):
        for name in (*WHOLE, INDEX, *PICKLES):
            found = source.head_file(folder, name, progress)
            if found is None:
                continue
            if name == INDEX:
                for part in files_in(found):
                    source.head_file(folder, part, progress)
            return found.parent
    raise LoadError(f"The head {source} has no weights: its repository has neither {WEIGHTS} nor {PICKLES[0]}.")


def _checked(source: Source, drafter: str, target: Checkpoint, progress: Progress) -> Path:
    """The folder of a head, checked to fit this target. Its configuration is read before its weights are fetched."""
    text, eps = target.config.get_text_config(), final_norm_eps(target.config)
    norm = None if eps is None else (torch.ones(text.hidden_size), eps)  # its weights are not here yet
    sizes = TargetSizes(text.vocab_size, text.hidden_size, text.num_hidden_layers, norm)
    network = cast("type[HeadDrafter]", drafter_class(drafter)).network
    with wrap_load_errors(f"The head {source}"):
        PublishedHead(source.head_folder(), network.kind, sizes)  # checks the configuration
        folder = _fetched(source, progress)
        load_published(folder, network, sizes, weights=False)  # checks the tensors
    return folder


def head_facts(source: Source) -> tuple[str, int | None, str]:
    """The name of a head, the bytes of its file if known, and a sentence on it. Its configuration is fetched, its
    weights are not.

    Raises:
        LoadError: the hub does not have it, or cannot be reached.
    """
    found = format_of(read_config(source.head_folder()), f"The head {source}")
    sizes = source.head_sizes()
    stated = [size for name, size in sizes.items() if name.endswith(".safetensors")]
    size = sum(stated) or sum(sizes.get(name, 0) for name in PICKLES) or None
    known = "an unknown size" if size is None else f"{byte_size(size)}"
    where = f"downloads up to {known}" if source.on_hub else f"nothing to download, {known}"
    made_for = f", made for {found.target}" if found.target else ""
    return str(source), size, f"The head {source}: {where}; {found.name}, drafts as {found.kind}{made_for}."
