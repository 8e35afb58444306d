"""Compiles this project's C files on this machine when they are first needed, and caches the libraries.

It needs gcc. Without it torch's operations run instead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path
from tempfile import TemporaryDirectory

from .cpu_level import level
from .folders import cache_folder
from .hardware import cpu_flags, cpu_model
from .replaced import REPLACED

log = logging.getLogger(__name__)

OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-Wno-psabi", "-fopenmp", "-fPIC", "-shared")
SWITCH = "SPECDEMO_NATIVE"  # an environment variable; 0 turns the C libraries off
TIMEOUT = 120  # seconds for the compiler, which takes about one


def compiled(source: Path, *options: str) -> CDLL | None:
    """The functions of a C file; None without gcc, or if this is not Linux on x86."""
    if source.name in REPLACED or os.environ.get(SWITCH) == "0" or platform.system() != "Linux" or not cpu_flags():
        return None  # no flags: not an x86, or its generation is unknown
    compiler = shutil.which("gcc")  # other compilers use another OpenMP than torch
    if compiler is None:
        log.warning("There is no gcc here for %s: torch's own operations run instead, which are slower.", source.name)
        return None
    try:
        return CDLL(str(_built(compiler, source, options)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("%s cannot be built: torch's own operations run instead. %s", source.name, reason)
        return None


def _built(compiler: str, source: Path, options: Sequence[str]) -> Path:
    """The compiled library, from the cache if compiler, options, source, headers and CPU are the same.

    The file's name ends in its checksum, because loading a damaged library would end the process.

    Raises:
        OSError, SubprocessError: it cannot be compiled, or the cache cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT).stdout
    options, linked = [*OPTIONS, *level().options, *options], _openmp()
    facts = [*options, *linked, str(cpu_model()), *sorted(cpu_flags())]
    sources = [source, *sorted(source.parent.glob("*.h"))]
    made_of = [version, *(file.read_bytes() for file in sources), *map(str.encode, facts)]
    name = f"{source.stem}-{hashlib.sha256(bytes(1).join(made_of)).hexdigest()[:16]}"
    folder = cache_folder()
    for file in folder.glob(f"{name}-*.so"):
        if file.name == _named(name, file).name:
            return file
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        partial = Path(scratch) / "partial.so"
        command = [compiler, *options, str(source), "-o", str(partial), *linked, "-lm"]
        subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=TIMEOUT)
        return partial.replace(folder / _named(name, partial))  # atomic, since other processes may do the same


def _named(name: str, file: Path) -> Path:
    return Path(f"{name}-{zlib.crc32(file.read_bytes()):08x}.so")


def _openmp() -> Sequence[str]:
    """The OpenMP library that torch has loaded. A second one would bring its own threads, which compete for cores."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[-1] for line in maps if "/libgomp" in line}
    return sorted(files, key=lambda file: ("torch" not in file, file))[:1]
