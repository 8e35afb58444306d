"""Models in the package index: wheels with weights, and source archives. pip fetches them, pinned by their SHA-256."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from ..system.folders import cache_folder
from .converted import COPIES, Converted
from .source import GGUF, Hub, Source
from .store import LoadError, Progress, check_sum, has_sum, kept, size_of
from .tables import NO_OTHERS, Sha256, Text, Whole, table_as, table_of

log = logging.getLogger(__name__)
DOWNLOADED = "downloaded.json"


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


@dataclass(frozen=True, slots=True)
class PartWheel(Pinned):
    """A wheel with a part of a larger file."""

    file: Text  # the part's path inside the wheel


@dataclass(frozen=True, slots=True)
class LabelledPart(PartWheel):
    """A `PartWheel` with a `label` that says which part of what it is."""

    label: str

    def __str__(self) -> str:
        return f"{self.label} ({self.package} {self.version})"


@dataclass(frozen=True, slots=True)
class Wheel(Pinned, Converted):
    """A wheel with a GGUF file; both are pinned."""

    keys = ("wheel",)
    copies = COPIES
    room = 10  # two copies of 4-bit weights are written
    gguf: Text  # the file's path inside the wheel
    gguf_sha256: Sha256

    @property
    def label(self) -> str:
        return f"{self.package}-{self.version}"

    def identity(self) -> dict[str, str]:
        named = {"source": "wheel", "package": self.package, "version": self.version}
        return {**named, "gguf": Path(self.gguf).name, "gguf_sha256": self.gguf_sha256}

    def fetch(self, folder: Path, kept: Path, progress: Progress) -> Path:
        """Keep only the GGUF file of the wheel; both are checked."""
        file = folder / f"model{GGUF}"
        with file.open("wb") as unpacked:
            append_file(self, self.gguf, unpacked, folder, progress)
        check_sum(file, self.gguf_sha256, f"The file {Path(self.gguf).name} in the wheel of {self}")
        return file


@dataclass(frozen=True, slots=True)
class Parts(Converted):
    """The hub is asked first, but for weights as stored, since it has no GGUF file. `gguf_sha256` is the SHA-256 of the
    joined file."""

    keys = ("hub",)
    hub: Hub
    parts: Annotated[tuple[PartWheel, ...], Field(min_length=1)]
    gguf_sha256: Sha256

    def __str__(self) -> str:
        return self.hub.repo.rpartition("/")[2]

    @classmethod
    def of_table(cls, table: Mapping[str, Any], folder: Path) -> Parts | None:
        if "parts" not in table or "file" in table:
            return None
        hub = Hub.of_table({name: table[name] for name in ("hub", "revision") if name in table}, folder)
        rest = {name: value for name, value in table.items() if name not in ("hub", "revision")}
        return table_as(cls, {"hub": hub, **rest}, folder)

    def table(self) -> dict[str, Any]:
        table = table_of(self)
        return {**table.pop("hub"), **table}

    def found(self, progress: Progress, as_stored: bool = False) -> Source:
        if not (as_stored or self.is_made):
            progress(None, f"looking for {self} on the hub")
            try:
                self.hub.commit()
            except LoadError as error:
                log.info("%s The package index is asked instead.", error)
            else:
                return self.hub
        return self

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(part.size for part in self.parts)

    @property
    def label(self) -> str:
        return str(self)

    def identity(self) -> dict[str, str]:
        return {"source": "parts", "name": str(self), "gguf_sha256": self.gguf_sha256}

    def fetch(self, folder: Path, kept: Path, progress: Progress) -> Path:
        """Download the parts and join them, going on after those that are already in `kept`.

        Of each part only its piece of the joined file is kept. That file is checked at the end, and deleted if it is
        not the pinned one.
        """
        kept.mkdir(exist_ok=True)
        gguf, record, arriving = kept / f"model{GGUF}", kept / DOWNLOADED, kept / "arriving"
        done, length = _downloaded(record)
        with gguf.open("r+b" if gguf.is_file() and done else "w+b") as joined:
            joined.truncate(length)  # cut off an incomplete part
            joined.seek(length)
            for number, part in enumerate(self.parts[done:], start=done + 1):
                named = LabelledPart(**asdict(part), label=f"Part {number} of {len(self.parts)} of {self}")
                shutil.rmtree(arriving, ignore_errors=True)
                arriving.mkdir()
                try:
                    append_file(named, part.file, joined, arriving, self._of_all(progress, number))
                finally:
                    shutil.rmtree(arriving, ignore_errors=True)
                joined.flush()
                os.fsync(joined.fileno())
                record.write_text(json.dumps({"parts": number, "bytes": joined.tell()}), encoding="utf-8")
        progress(None, f"checking the download of {self}")
        try:
            check_sum(gguf, self.gguf_sha256, f"The file of {self}, joined from {len(self.parts)} parts,")
        except LoadError:
            shutil.rmtree(kept)
            raise
        return gguf

    def _of_all(self, progress: Progress, number: int) -> Progress:
        """The progress of one part as progress of all."""
        part, before = self.parts[number - 1], sum(earlier.size for earlier in self.parts[: number - 1])
        where = f"part {number} of {len(self.parts)}, {before / 1e6:.0f} of {self.size / 1e6:.0f} MB"

        def tell(fraction: float | None, _: str) -> None:
            if fraction is not None:
                progress((before + fraction * part.size) / self.size, f"downloading {self}: {where}")

        return tell


def _downloaded(record: Path) -> tuple[int, int]:
    """How many parts of a file are complete and their bytes in it, according to `DOWNLOADED`."""
    try:
        stated = json.loads(record.read_text(encoding="utf-8"))
        done, length = int(stated["parts"]), int(stated["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    gguf = record.with_name(f"model{GGUF}")
    return (done, length) if gguf.is_file() and gguf.stat().st_size >= length else (0, 0)


# By pip ----------------------------------------------------------------------------------------


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
