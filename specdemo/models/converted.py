"""GGUF files: fetched once, checked, converted, and kept in a cache without partial entries."""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..system.folders import cache_folder
from ..system.weight_map import weights_file
from .gguf import WHOLE, check_complete, check_header, config_of, read_header
from .gguf_tokenizer import build_tokenizer, check_tokenizer, end_ids
from .source import GGUF, Source
from .store import (
    Progress,
    check_room,
    has_sum,
    ignore,
    kept,
    size_of,
    sum_of,
)

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint

LAYOUT = 4  # version of a cache entry; a new number has all entries made again
IDENTITY = "identity.json"
CONVERTING = "converting the weights (only this once)"
Copies = Mapping[str, str | None]  # from number types to the `variant` of `from_pretrained`
COPIES: Copies = {"float32": None, "bfloat16": "bf16"}  # stored as they are loaded: casting takes a second
# A large model is kept once. Its weights have a few bits each, so the rounding to bfloat16 matters little.
ONE_COPY: Copies = {"bfloat16": None}
# Quantized weights as the file has them, the others as `narrowed`.
STORED_COPY: Copies = {"stored": None, "stored16": None}
EXACT: Copies = {"float32": None}  # the file's own numbers, for whoever asks for them


class Converted(Source):
    """A source of a GGUF file, whose weights are converted at the first call and then kept."""

    __slots__ = ()
    copies: ClassVar[Copies] = ONE_COPY  # the number types that the weights are kept in
    own_float32: ClassVar[bool] = False  # whether float32 that was asked for is an entry of its own
    room: ClassVar[int] = 5  # disk space for making an entry of the cache, in sizes of the file

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes to fetch, or of the local file."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The beginning of the names of its files in the cache."""

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """The names of its weights in a trace, with the `gguf_sha256`."""

    @abstractmethod
    def fetch(self, folder: Path, kept: Path, progress: Progress) -> Path:
        """The GGUF file, which is deleted afterwards if it is in `folder`.

        Args:
            kept: a folder that stays if this is interrupted, so that the next call can go on.
        Raises:
            LoadError: no network, wrong checksum: one sentence each.
        """

    def check(self) -> None:
        """Refuse what can be seen not to be a GGUF file before it is fetched.

        Raises:
            LoadError: naming the file.
        """

    def entry(self, copies: Copies) -> Path:
        """The path of the model in the cache with these number types, whether or not it exists."""
        kind = "-stored" if copies == STORED_COPY else "-float32" if copies == EXACT else ""
        return cache_folder() / f"{self.label}-{self.identity()['gguf_sha256'][:12]}{kind}-v{LAYOUT}"

    @property
    def is_made(self) -> bool:
        """Whether the cache has the converted model."""
        return any((self.entry(copies) / IDENTITY).is_file() for copies in (self.copies, STORED_COPY))

    def gguf_path(self, progress: Progress) -> Path:
        sha256 = self.identity()["gguf_sha256"]
        file = cache_folder() / f"{self.label}-{sha256[:12]}{GGUF}"

        def make(folder: Path) -> Path:
            check_room(file.parent, 3 * self.size)
            return self.fetch(folder, folder, progress)

        return kept(file, partial(has_sum, file, sha256), make, progress)

    def location(self, dtype: torch.dtype | None, progress: Progress) -> Checkpoint:
        from .checkpoint import Checkpoint
        from .errors import wrap_load_errors

        with wrap_load_errors(self):
            folder, variant = converted(self, dtype, progress)
        return Checkpoint(self, str(folder), {**self.identity()}, variant=variant, of_ours=True)


def converted(source: Converted, dtype: torch.dtype | None, progress: Progress) -> tuple[Path, str | None]:
    """A folder for `from_pretrained` with the weights of a GGUF file, and the `variant` to load from it for `dtype`.

    It is made at the first call, once even if two processes ask at the same time. Every file that will be read is
    checked against its checksum from the time of writing, unless it was and has not changed, and a damaged entry is
    made again.

    Raises:
        LoadError: no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    import torch

    from ..system.hardware import STORED, dtype_name

    exact = source.own_float32 and dtype == torch.float32
    copies = STORED_COPY if dtype in STORED else EXACT if exact else source.copies
    variant = copies.get(dtype_name(dtype)) if dtype else None  # other types are cast from the first copy
    progress(None, "checking the weights")
    source.check()
    entry = source.entry(copies)
    is_whole, make = partial(_is_intact, entry, variant, copies), partial(_make, entry, source, copies, progress)
    return kept(entry, is_whole, make, progress), variant


def _make(entry: Path, source: Converted, copies: Copies, progress: Progress, folder: Path) -> Path:
    """Fetch, check and convert in a folder beside the entry, which then becomes the entry."""
    if entry.exists():
        progress(None, "the stored weights are damaged: making them again")
        shutil.rmtree(entry)
    parts = entry.with_name(f"{entry.name}.parts")  # stays after an interrupted download
    room = source.room * (2 if copies == EXACT else 1)
    check_room(entry.parent, source.size * room - size_of(parts))
    gguf = source.fetch(folder, parts, progress)
    progress(None, CONVERTING)
    convert(gguf, folder, copies, progress)
    if gguf.parent == folder:
        gguf.unlink()
    identity = {
        **source.identity(),
        "crc32": {file.name: int(sum_of(file, "crc32")) for file in sorted(folder.iterdir())},
    }
    (folder / IDENTITY).write_text(json.dumps(identity, indent=1), encoding="utf-8")
    shutil.rmtree(parts, ignore_errors=True)
    for layout in range(1, LAYOUT):  # a program that has it open keeps it until it ends
        shutil.rmtree(entry.with_name(f"{entry.name.removesuffix(str(LAYOUT))}{layout}"), ignore_errors=True)
    return folder


def convert(gguf: Path, folder: Path, copies: Copies = COPIES, progress: Progress = ignore) -> None:
    """Write model and tokenizer of a GGUF file as `from_pretrained` reads them fastest.

    float32 holds exactly what the GGUF says, so results in float32 agree with anyone's.

    Raises:
        LoadError: naming what the file lacks, or a field of its header that is not known.
    """
    import torch
    from safetensors.torch import save_file

    from ..engines.families import knows
    from .configuration import empty_model
    from .gguf_weights import read_weights, tensors_of
    from .sizes import check_files

    name = gguf.name
    with gguf.open("rb") as file:
        header = read_header(file)
    check_header(name, header)
    check_complete(name, header, gguf.stat().st_size)
    check_tokenizer(name, header.fields)
    tokenizer, tensors = build_tokenizer(name, header.fields), tensors_of(gguf, header)
    config = config_of(header, lambda tensor: tensors[tensor].numbers.tolist())
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    config.eos_token_id = end_ids(header.fields) or None
    as_stored = copies == STORED_COPY and knows(config) and header.architecture not in WHOLE
    if copies == STORED_COPY:
        copies = ONE_COPY
    dtype = getattr(torch, next(iter(copies)))
    check_files(name, config, [gguf])
    model = empty_model(config)
    weights = read_weights(
        name,
        tensors,
        header.architecture,
        model,
        None if as_stored else dtype,
        lambda done: progress(done, CONVERTING),
    )
    if as_stored:
        save_file(weights, folder / weights_file(None), {"format": "pt"})
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    else:
        model.load_state_dict(weights, strict=False, assign=True)
        weights.clear()
        model.tie_weights()
        for copy, variant in copies.items():
            model.to(getattr(torch, copy)).save_pretrained(folder, variant=variant, save_original_format=False)
    tokenizer.save_pretrained(folder)


def _is_intact(entry: Path, variant: str | None, copies: Copies) -> bool:
    """Whether the files of an entry that will be read are still as written."""
    try:
        sums = json.loads((entry / IDENTITY).read_text(encoding="utf-8"))["crc32"]
        others = {weights_file(copy) for copy in copies.values()} - {weights_file(variant)}
        names = {*sums, weights_file(variant)} - others
        return all(sum_of(entry / name, "crc32") == str(sums[name]) for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False
