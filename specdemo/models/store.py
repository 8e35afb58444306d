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
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from ..formats import byte_size
from ..system.folders import cache_folder

Progress = Callable[[float | None, str], None]
"""Called with how far the present stage is (0 to 1, None if unknown), and its name."""

LEDGER = "sums.checked"  # a file of the cache


def ignore(fraction: float | None, words: str) -> None:
    """A progress callback that does nothing."""


def report_bytes(progress: Progress, what: object, arrived: int | None, size: int) -> None:
    """Report how much of a download has arrived, in bytes; None if that is not known."""
    share = None if arrived is None else min(arrived / size, 1.0)
    progress(share, f"downloading {what} ({byte_size(size)})")


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


def version_of(file: Path) -> str:
    """A string that changes with the file: its inode, which stays if it is moved, its size and its time of writing.
    Empty if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return ""
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def sum_of(file: Path, kind: str = "sha256") -> str:
    """A file's checksum. It is taken once, and noted in the cache as long as the file does not change.

    Args:
        kind: sha256, or crc32, which finds damage as well and takes a third of the time.
    """
    return _sum_of(file, kind, version_of(file), cache_folder() / LEDGER)


@lru_cache(maxsize=256)
def _sum_of(file: Path, kind: str, version: str, ledger: Path) -> str:
    with suppress(OSError):
        for line in ledger.read_text(encoding="utf-8").splitlines():
            total, _, noted = line.partition(" ")
            if noted == f"{kind} {version}":
                return total
    with file.open("rb") as stream:
        blocks = iter(lambda: stream.read(1 << 20), b"")
        if kind == "sha256":
            digest = hashlib.sha256()
            for block in blocks:
                digest.update(block)
            total = digest.hexdigest()
        else:
            total = str(reduce(lambda crc, block: zlib.crc32(block, crc), blocks, 0))
    with suppress(OSError):  # else it is taken once in each process
        ledger.parent.mkdir(parents=True, exist_ok=True)
        with ledger.open("a", encoding="utf-8") as notes:
            notes.write(f"\n{total} {kind} {version}\n")  # a line of its own, even after one that was cut off
    return total


def has_sum(file: Path, sha256: str) -> bool:
    return file.is_file() and sum_of(file) == sha256


def check_sum(file: Path, expected: str, what: str) -> None:
    actual = sum_of(file)
    if actual != expected:
        raise LoadError(
            f"{what} has the wrong checksum and was deleted: "
            f"its SHA-256 begins with {actual[:12]}, it should begin with {expected[:12]}."
        )


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
            f"The weights need {byte_size(needed)} of disk space in {folder}, but {byte_size(free)} are free. "
            "Free some, or set SPECDEMO_CACHE to a folder on another disk."
        )


def kept(entry: Path, is_whole: Callable[[], bool], make: Callable[[Path], Path], progress: Progress) -> Path:
    """A file or a folder of the cache. If it is missing or damaged, `make` makes it in a temporary folder, in one
    process at a time."""
    with disk_errors_in_words(entry.parent):
        if is_whole():
            return entry
        from filelock import FileLock, Timeout  # it takes longer to import than all that reading presets needs

        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(entry.with_name(f"{entry.name}.lock"))
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            progress(None, "waiting for another process that is preparing the same weights")
            held = lock.acquire()
        with held:
            if not is_whole():  # else another process has just made it
                partial = entry.with_name(f"{entry.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # we have the lock, so its process died
                try:
                    partial.mkdir()
                    make(partial).replace(entry)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        return entry


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
