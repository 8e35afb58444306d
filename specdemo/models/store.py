"""Keeps the cache complete: checksums, disk space, one process at a time, and sentences for disk errors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

Progress = Callable[[float | None, str], None]
"""Called with how far the present stage is (0 to 1, None if unknown), and its name."""

State = tuple[str, int, int]
"""A file's path, its size, and its time of writing. Size and time are -1 if there is none."""

CHECKED = ".checked"  # the end of the name of the file beside an entry of the cache that says when it was checked


def state_of(file: Path) -> State:
    try:
        found = file.stat()
    except OSError:
        return str(file), -1, -1
    return str(file), found.st_size, found.st_mtime_ns


def ignore(fraction: float | None, words: str) -> None:
    """A progress callback that does nothing."""


class LoadError(RuntimeError):
    """A model could not be made ready. The message is shown to the person as it is."""


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model.

    Raises:
        LoadError: it holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LoadError(f"{file} is damaged: it holds no JSON object. Save or download the model again.")
    return found


def check_sum(file: Path, expected: str, what: str) -> None:
    actual = sha256_of(file)
    if actual != expected:
        raise LoadError(
            f"{what} is not the one this preset was made for and was thrown away: "
            f"its SHA-256 begins with {actual[:12]}, it should begin with {expected[:12]}."
        )


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def known_sum(file: Path) -> str:
    """`sha256_of`, which reads a large file for seconds, computed once as long as the file does not change."""
    return _sum_of(state_of(file))


@lru_cache(maxsize=64)
def _sum_of(state: State) -> str:
    return sha256_of(Path(state[0]))


def crc32_of(file: Path) -> int:
    """The CRC-32 of a file. It finds damage as well as a cryptographic hash, and is faster."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, which another process may be changing."""
    size = 0
    for place, _, names in os.walk(folder):  # unlike rglob, it does not mind a folder that pip has just removed
        for name in names:
            with suppress(OSError):  # or a file that it has just moved
                size += os.path.getsize(os.path.join(place, name))
    return size


def check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LoadError(
            f"The weights need {needed / 1e9:.1f} GB of disk space in {folder}, but {free / 1e9:.1f} GB are free. "
            "Free some, or set SPECDEMO_CACHE to a folder on another disk."
        )


@contextmanager
def locked(entry: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout  # it takes longer to import than all that reading presets needs

    lock = FileLock(entry.with_name(f"{entry.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(None, "waiting for another process that is preparing the same weights")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def kept(entry: Path, is_whole: Callable[[], bool], make: Callable[[Path], Path], progress: Progress) -> Path:
    """A file or a folder of the cache. If it is missing or damaged, `make` makes it in a temporary folder."""
    with disk_errors_in_words(entry.parent):
        if not is_whole():
            entry.parent.mkdir(parents=True, exist_ok=True)
            with locked(entry, progress):
                if not is_whole():  # else another process has just made it
                    partial = entry.with_name(f"{entry.name}.partial")
                    shutil.rmtree(partial, ignore_errors=True)  # we have the lock, so its process died
                    try:
                        partial.mkdir()
                        make(partial).replace(entry)
                    finally:
                        shutil.rmtree(partial, ignore_errors=True)
    return entry


def has_sum(file: Path, sha256: str) -> bool:
    return file.is_file() and sha256_of(file) == sha256


@contextmanager
def disk_errors_in_words(folder: Path) -> Iterator[None]:
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
    """Whether an error means that the disk is full. safetensors has its own class for it, so the text counts too."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
