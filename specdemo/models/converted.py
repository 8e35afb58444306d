"""GGUF files: fetched once, checked, converted, and kept in a cache without partial entries."""

from __future__ import annotations

import json
import shutil
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from functools import cache, partial
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from ..system.folders import cache_folder
from ..system.weight_map import weights_file
from .gguf import ARRAY, EXPERTS, SCALARS, STRING, WHOLE, check_complete, check_header, read_header
from .gguf_tokenizer import build_tokenizer, check_tokenizer, end_ids
from .source import GGUF, Source
from .store import (
    CHECKED,
    Progress,
    check_room,
    crc32_of,
    disk_errors_in_words,
    has_sum,
    ignore,
    kept,
    size_of,
    state_of,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from .checkpoint import Checkpoint

LAYOUT = 3  # version of a cache entry; a new number has all entries made again
IDENTITY = "identity.json"
HEAD_OF_ARRAY, SIZE = struct.Struct("<IQ"), struct.Struct("<Q")  # in a GGUF file: kind and count; bytes of a string
# What transformers would parse with the configuration. It counts the tokens, though.
UNREAD = {f"tokenizer.ggml.{name}" for name in ("scores", "token_type", "merges")}
CONVERTING = "converting the weights (only this once)"
Copies = Mapping[str, str | None]  # from number types to the `variant` of `from_pretrained`
COPIES: Copies = {"float32": None, "bfloat16": "bf16"}  # stored as they are loaded: casting takes a second
# A large model is kept once. Its weights have a few bits each, so the rounding to bfloat16 matters little.
ONE_COPY: Copies = {"bfloat16": None}
STORED: Copies = {"stored": None}  # quantized weights as the file has them, the others as `narrowed`
EXACT: Copies = {"float32": None}  # the file's own numbers, for whoever asks for them
READING = Lock()  # one conversion at a time, since `_read_quickly` changes what all of this process read by


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
        kind = "-stored" if copies == STORED else "-float32" if copies == EXACT else ""
        return cache_folder() / f"{self.label}-{self.identity()['gguf_sha256'][:12]}{kind}-v{LAYOUT}"

    @property
    def is_made(self) -> bool:
        """Whether the cache has the converted model."""
        return any((self.entry(copies) / IDENTITY).is_file() for copies in (self.copies, STORED))

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

    from ..system.hardware import AS_STORED, dtype_name

    exact = source.own_float32 and dtype == torch.float32
    copies = STORED if dtype == AS_STORED else EXACT if exact else source.copies
    variant = copies.get(dtype_name(dtype)) if dtype else None  # other types are cast from the first copy
    with disk_errors_in_words(cache_folder()):
        progress(None, "checking the weights")
        source.check()
        entry = source.entry(copies)

        def is_whole() -> bool:
            return _is_intact(entry, variant, copies)

        def make(folder: Path) -> Path:
            return _make(entry, source, copies, folder, progress)

        return kept(entry, is_whole, make, progress), variant


def _make(entry: Path, source: Converted, copies: Copies, folder: Path, progress: Progress) -> Path:
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
    identity = {**source.identity(), "crc32": {file.name: crc32_of(file) for file in sorted(folder.iterdir())}}
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
    from .gguf_config import config_of
    from .gguf_weights import check_taken, joint_name, names_of_weights, read_weights
    from .sizes import check_files

    def read(done: float) -> None:
        progress(done, CONVERTING)

    name = gguf.name
    with gguf.open("rb") as file:
        header = read_header(file)
    check_header(name, header)
    check_complete(name, header, gguf.stat().st_size)
    check_tokenizer(name, header.fields)
    tokenizer = build_tokenizer(name, header.fields)
    with READING, _read_quickly():
        config = config_of(header, partial(_numbers, gguf))
        config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        config.eos_token_id = end_ids(header.fields) or None
        as_stored = copies == STORED
        dtype = torch.bfloat16 if as_stored else getattr(torch, next(iter(copies)))
        check_files(name, config, [gguf])
        experts = any(half in tensor for half in EXPERTS for tensor in header.shapes)
        if header.architecture in WHOLE or (experts and not (as_stored and knows(config))):
            model, copies = _opened_whole(gguf, config, dtype), ONE_COPY if as_stored else copies
            taken = names_of_weights(model, header.architecture)
            check_taken(name, (tensor for tensor in header.shapes if tensor not in taken and not joint_name(tensor)))
        elif as_stored and knows(config):
            model = empty_model(config)
            weights = read_weights(gguf, header.architecture, model, None, read)
            save_file(weights, folder / weights_file(None), {"format": "pt"})
            weights.clear()
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
            copies = {}
        else:
            model = empty_model(config)
            weights = read_weights(gguf, header.architecture, model, dtype, read)
            model.load_state_dict(weights, strict=False, assign=True)
            weights.clear()
            model.tie_weights()
            copies = ONE_COPY if as_stored else copies
        for copy, variant in copies.items():
            model.to(getattr(torch, copy)).save_pretrained(folder, variant=variant)
    tokenizer.save_pretrained(folder)


@contextmanager
def _read_quickly() -> Iterator[None]:
    """Have a GGUF file read once by all who read it by the package gguf, and many times as fast.

    gguf makes several numpy arrays for each item of an array, which takes 10 seconds for 262,144 tokens. And
    transformers makes a map of the names of all tensors for each module of the model.
    """
    import gguf

    class QuickReader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            kind, count = HEAD_OF_ARRAY.unpack_from(self.data, orig_offs) if raw_type == ARRAY else (ARRAY, 0)
            if kind == ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            place, parts = orig_offs + HEAD_OF_ARRAY.size, list[Any]()
            if kind == STRING:
                content = memoryview(self.data)
                for _ in range(count):
                    (size,) = SIZE.unpack_from(content, place)
                    place += SIZE.size + size
                    parts.append(content[place - size : place])
            else:
                numbers = struct.Struct(f"<{count}{SCALARS[kind]}")
                parts += zip(numbers.unpack_from(self.data, place))
                place += numbers.size
            types = [gguf.GGUFValueType(one) for one in (raw_type, kind)]
            return place - orig_offs, parts, [*range(count)], types

        def _push_field(self, field: gguf.ReaderField, skip_sum: bool = False) -> int:
            if field.name in UNREAD:
                field.data.clear()
            return super()._push_field(field, skip_sum)

    plain = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(QuickReader), cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = plain


def _opened_whole(gguf: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import GgufConfig

    from .opened import open_whole

    options = {"gguf_file": gguf.name, "dtype": dtype, "quantization_config": GgufConfig(dequantize=True)}
    with redirect_stderr(StringIO()):  # hides a progress bar that cannot be switched off
        return open_whole(gguf.name, str(gguf.parent), config=config, **options)


def _numbers(gguf: Path, tensor: str) -> list[float]:
    from gguf import GGUFReader, dequantize

    found = next(one for one in GGUFReader(str(gguf)).tensors if one.name == tensor)
    numbers: list[float] = dequantize(found.data, found.tensor_type).tolist()
    return numbers


def _is_intact(entry: Path, variant: str | None, copies: Copies) -> bool:
    """Whether the files of an entry that will be read are still as written.

    The checksum of a file is computed when its size or its time of writing is not that of the last check.
    """
    try:
        sums = json.loads((entry / IDENTITY).read_text(encoding="utf-8"))["crc32"]
        others = {weights_file(copy) for copy in copies.values()} - {weights_file(variant)}
        names = {*sums, weights_file(variant)} - others
        states, known = {name: [*state_of(entry / name)] for name in names}, _checked(entry)
        if whole := all(known.get(name) == states[name] or crc32_of(entry / name) == sums[name] for name in names):
            _note_checked(entry, {**known, **states})
        return whole
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _checked(entry: Path) -> dict[str, list[Any]]:
    """The states of the files of an entry when their checksums were right, by their names."""
    try:
        found = json.loads(entry.with_name(entry.name + CHECKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note_checked(entry: Path, states: Mapping[str, list[Any]]) -> None:
    if states != _checked(entry):
        with suppress(OSError):  # a cache that cannot be written is checked at every start
            entry.with_name(entry.name + CHECKED).write_text(json.dumps(states), encoding="utf-8")
